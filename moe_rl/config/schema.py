"""Every key of a run: its type, default, unit, allowed values and meaning. Imports no torch.

A key is a dataclass field made by :func:`key`; keys.py lists them for ``moe-rl explain KEY`` and for the loader, which
checks values against them. Values are reached as attributes (``config.layout.pp``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .key import key
from .machine import MachineConfig

CHECKPOINT_PARTS = ("model", "optimizer", "extra")
PATCHES = (  # of moe_patches, which this package does not import; a test holds the two together
    "no_grad_main_params",
    "dtype_safe_gradients",
    "hybrid_masters",
    "optimizer_states",
    "hybrid_reload",
    "hybrid_gradients",
    "hybrid_step",
    "hybrid_streams",
    "hybrid_staging",
    "fused_masters",
)

MOE_BACKENDS = (  # of kernels.py, which says what runs where
    "marlin",
    "deep_gemm",
    "triton",
    "triton_unfused",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "humming",
    "emulation",
)
LINEAR_BACKENDS = ("deep_gemm", "triton", "marlin", "humming")


@dataclass
class ModelConfig:
    """The model to train."""

    path: str = key(
        "", "Directory of the starting model: config.json, safetensors and tokenizer. `pkg:NAME` is a shipped one."
    )
    family: str = key("auto", "Model family; `auto` reads model_type from the model's config.json.")
    config: dict[str, Any] = key(
        {}, "Figures in place of those in the model's config.json, by name, as in model.config.o_groups=16."
    )


@dataclass
class LayoutConfig:
    """How the model is cut over processes. Data parallelism follows: dp = world / (tp * pp)."""

    tp: int = key(1, "Tensor-parallel size: every matrix of a layer is cut over this many ranks.", unit="ranks", low=1)
    pp: int = key(1, "Pipeline-parallel size: the layers are cut into this many stages.", unit="stages", low=1)
    ep: int = key(
        1, "Expert-parallel size: the experts of a layer are spread over this many ranks.", unit="ranks", low=1
    )
    etp: int = key(1, "Tensor-parallel size inside an expert.", unit="ranks", low=1)
    vpp: int = key(
        1, "Model chunks a pipeline rank holds (interleaved schedule); 1 is the plain schedule.", unit="chunks", low=1
    )
    stages: str = key(
        "",
        "Layers of each stage: E embedding, t layer, L loss, | boundary, as in `Et*3|t*2L`. Empty: balanced.",
    )
    pin_hash_layers: bool = key(
        True, "Keep every hash-routed layer in stage 0 beside the embedding; false lets them stand anywhere."
    )


@dataclass
class EngineConfig:
    """The training engine on each rank."""

    device: str = key(
        "auto",
        "Where the trainer runs; `auto` is cuda where a GPU is present, else cpu.",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = key(
        "bf16",
        "Type of the weights and activations; what the model keeps in fp32 stays fp32.",
        choices=("fp32", "bf16"),
    )
    fake_quant: str = key(
        "none",
        "Weights that the forward pass rounds as releases and rollouts store them (gradients pass straight through):"
        " none, the routed experts, or all that are quantised.",
        choices=("none", "experts", "all"),
    )
    recompute: str = key(
        "full",
        "`full` recomputes each layer in the backward pass: less memory, about a third more time.",
        choices=("off", "full"),
    )
    max_tokens_per_micro_batch: int = key(
        4096, "Token budget of one micro-batch; must hold the longest sequence.", unit="tokens", low=1
    )
    attention_backend: str = key(
        "auto",
        "DeepSeek-V4's attention, hyper-connections and experts: `triton` kernels (a GPU and bf16), `plain` PyTorch, or"
        " `auto`, which is triton where it runs; the trainer's log says which.",
        choices=("auto", "plain", "triton"),
    )
    attention_chunk: int = key(
        256, "Queries handled at once in DeepSeek-V4's attention; bounds its memory.", unit="tokens", low=1
    )
    logprob_chunk: int = key(
        1024, "Tokens whose logits exist at once; bounds the memory of log-probs.", unit="tokens", low=1
    )
    distributed_timeout_s: float = key(600.0, "A collective that waits longer ends the run.", unit="s", above=0)


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "Peak learning rate.", above=0)
    min_lr: float = key(0.0, "Learning rate at the end of a linear or cosine schedule.", low=0)
    schedule: str = key(
        "constant",
        "Shape of the learning rate after warm-up, over trainer.steps.",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(0, "Steps over which the learning rate rises from zero.", unit="steps", low=0)
    betas: list[float] = key([0.9, 0.95], "Decay rates of the first and second moment.", low=0, high=0.999999)
    eps: float = key(1e-8, "Added to the root of the second moment.", above=0)
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0)
    clip_grad: float = key(1.0, "Largest global gradient norm; 0 does not clip.", low=0)
    precision_aware: bool = key(
        False,
        "The optimizer alone holds the fp32 masters of bf16 weights and reads gradients in their own type: with"
        " offload no copy of the masters is left on the GPU, without it moments may be bf16.",
    )
    offload_fraction: float = key(
        0.0,
        "Share of the parameters whose masters and moments lie on the CPU and are updated there; 0 keeps all on the GPU.",
        low=0,
        high=1,
    )
    grad_dtype: str = key(
        "fp32",
        "Type of the gradient buffers of bf16 weights, in which micro-batches and ranks are summed.",
        choices=("fp32", "bf16"),
    )
    moment_dtype: str = key(
        "fp32",
        "Type of Adam's two moments; takes effect in the precision-aware optimizer on the GPU alone.",
        choices=("fp32", "bf16"),
    )


@dataclass
class RolloutConfig:
    """Sampling of completions."""

    engine: str = key(
        "transformers",
        "Rollout engine: `transformers` decodes in a process of its own, on any device; `vllm` is the one for real runs.",
        choices=("transformers", "vllm"),
    )
    replicas: int = key(
        1, "Rollout processes, each with the whole model; prompts are divided among them.", unit="processes", low=1
    )
    n: int = key(8, "Completions per prompt: the size of a group.", unit="samples", low=1)
    temperature: float = key(1.0, "Sampling temperature of training rollouts; log-probs are taken at it too.", above=0)
    validation_temperature: float = key(1.0, "Sampling temperature of validation; 0 takes the likeliest token.", low=0)
    max_response: int = key(
        16, "Longest completion; a longer one is cut and counted as truncated.", unit="tokens", low=1
    )
    router_replay: str = key(
        "none",
        "Experts that an update takes again: R2 those of the trainer's own log-probs, R3 those of the rollout (in the"
        " log-probs too).",
        choices=("none", "R2", "R3"),
    )
    top_p: float = key(1.0, "Nucleus sampling; only 1 (off) is accepted in training.", above=0, high=1)
    top_k: int = key(0, "Top-k sampling; only 0 (off) is accepted in training.", low=0)
    batch_size: int = key(256, "Sequences a replica decodes at once.", unit="sequences", low=1)
    timeout_s: float = key(600.0, "A replica that takes longer over its part of a step is given up.", unit="s", above=0)
    moe_backend: str = key(
        "auto",
        "vLLM's kernel for quantised experts; `auto` is vLLM's choice, as it always is for unquantised ones.",
        choices=("auto", *MOE_BACKENDS),
    )
    linear_backend: str = key(
        "auto", "vLLM's kernel for quantised linears; `auto` is vLLM's choice.", choices=("auto", *LINEAR_BACKENDS)
    )
    tp: int = key(1, "Tensor-parallel ranks of a vLLM replica.", unit="ranks", low=1)
    dp: int = key(1, "Data-parallel ranks of a vLLM replica, which share its requests.", unit="ranks", low=1)
    ep: int = key(1, "Ranks of a vLLM replica that its experts are spread over: 1, or tp * dp.", unit="ranks", low=1)
    kv_cache_dtype: str = key("auto", "vLLM's KV cache; `auto` is the model's dtype.", choices=("auto", "fp8"))
    gpu_memory_utilization: float = key(
        0.5, "Share of a GPU that vLLM's weights, activations and KV cache take together.", above=0, high=1
    )
    max_num_batched_tokens: int = key(0, "Tokens that vLLM computes at once; 0 is vLLM's choice.", unit="tokens", low=0)
    enforce_eager: bool = key(
        False, "vLLM without CUDA graphs and compilation: it starts minutes sooner and decodes slower."
    )
    hang_s: float = key(300.0, "A vLLM engine that answers nothing for so long is given up.", unit="s", above=0)
    max_restarts: int = key(
        2,
        "Times that a replica is started again after it or its vLLM died or hung; its requests are asked anew.",
        low=0,
    )


@dataclass
class AlgorithmConfig:
    """GRPO: advantages, loss and KL."""

    advantage: str = key(
        "group_std",
        "Reward minus its group's mean, divided by the group's standard deviation or not.",
        choices=("group_std", "group_mean"),
    )
    clip_low: float = key(0.2, "The probability ratio is clipped below at 1 - clip_low.", low=0, high=1)
    clip_high: float = key(0.2, "The probability ratio is clipped above at 1 + clip_high.", low=0)
    dual_clip: float = key(
        3.0, "With a negative advantage the loss is bounded at this multiple of it; 0 turns it off.", low=0
    )
    kl: str = key(
        "none",
        "KL to the starting model: k1 acts in the reward, k2 and k3 in the loss.",
        choices=("none", "k1", "k2", "k3"),
    )
    kl_coef: float = key(0.001, "Weight of the KL term.", low=0)
    aggregation: str = key(
        "token_mean",
        "Mean over all tokens of the minibatch, or over sequences of their means.",
        choices=("token_mean", "sequence_mean"),
    )
    correction: str = key(
        "none",
        "Importance weights for what rollout and trainer compute differently: the ratio of their probabilities of a token"
        " or of a whole response, truncated at correction_cap; or what lies outside [1/cap, cap] left out.",
        choices=("none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"),
    )
    correction_cap: float = key(2.0, "Ratio at which algorithm.correction truncates or leaves out.", above=1)
    old_logprobs: str = key(
        "recompute",
        "What the probability ratio is taken against: log-probs that the trainer computes before the update; the update's own"
        " (the same numbers a forward pass cheaper, where a batch has one optimizer step); or those of the rollout.",
        choices=("recompute", "update", "rollout"),
    )
    minibatches: int = key(1, "Optimizer steps a batch is cut into.", low=1)
    epochs: int = key(1, "Times a batch is gone through.", low=1)


@dataclass
class DataConfig:
    """Prompts and answers."""

    train: str = key("", "Training prompts: a .jsonl or .parquet file, or `reasoning_gym:NAME?size=N&seed=N`.")
    validation: str = key("", "Held-out prompts, same forms as data.train; empty: no validation.")
    prompts_per_step: int = key(
        16, "Prompts of one step; the batch has prompts_per_step * rollout.n samples.", unit="prompts", low=1
    )
    prompt_key: str = key(
        "auto", "Field of a record that holds the prompt; `auto` tries `question`, `prompt`, `messages`."
    )
    answer_key: str = key(
        "auto", "Field that holds the answer; `auto` tries `answer`, then `reward_model.ground_truth`."
    )
    template: str = key("{question}", "Text the model is given; {question} stands for the prompt.")
    shuffle: bool = key(True, "Shuffle the prompts anew each epoch, by (trainer.seed, epoch).")
    max_prompt: int = key(64, "Longest prompt; a longer one is refused before training.", unit="tokens", low=1)
    chat_template: str = key(
        "none",
        "How a prompt becomes a chat: by the `tokenizer`'s template, in `deepseek_v4`'s own encoding, or `auto`: the first"
        " where there is one, else the second. `none`: the text as it stands.",
        choices=("none", "auto", "tokenizer", "deepseek_v4"),
    )
    enable_thinking: bool = key(True, "Answers of a chat begin with reasoning, where its format knows it.")


@dataclass
class RewardConfig:
    """The verifier of completions."""

    name: str = key("last_number", "A shipped verifier, or `module:function` or `path/file.py:function` of your own.")
    on_error: str = key(
        "stop",
        "A verifier that raises, hangs or returns no number: `stop` the run or `exclude` the sample.",
        choices=("stop", "exclude"),
    )
    timeout_s: float = key(10.0, "Time one completion may take to verify.", unit="s", above=0)
    args: dict[str, Any] = key({}, "Further arguments of the verifier, by name.")


@dataclass
class CheckpointConfig:
    """Saves of the run's state."""

    every: int = key(10, "Steps between saves; the last step is always saved.", unit="steps", low=1)
    keep: int = key(2, "Newest checkpoints kept.", low=1)
    contents: list[str] = key(
        list(CHECKPOINT_PARTS),
        "What is saved; without `optimizer` a resumed run starts with fresh moments.",
        choices=CHECKPOINT_PARTS,
    )
    load_contents: list[str] = key(
        [],
        "What every resume loads of a checkpoint; empty: all that it holds. Without `optimizer` the moments start from"
        " zero, without `extra` the learning-rate schedule starts over; step and data position always go on.",
        choices=CHECKPOINT_PARTS,
    )
    async_save: bool = key(
        False,
        "Copy what is saved to host memory and train on while it is written; needs that memory on every rank.",
    )
    optimizer_format: str = key(
        "reshardable",
        "`reshardable` loads in any layout; `same_layout` stores buffers as they lie and loads in its own layout alone.",
        choices=("reshardable", "same_layout"),
    )


@dataclass
class PatchesConfig:
    """Runtime patches of megatron-core (patches/README.md lists them)."""

    disable: list[str] = key(
        [],
        "Patches to leave out, by name, or `all`. MOE_PATCHES_DISABLE=NAME,... adds to it where the run is started.",
        choices=(*PATCHES, "all"),
    )


@dataclass
class GatesConfig:
    """Bounds that end a run when they are crossed."""

    pearson_min: float = key(
        0.0, "Least correlation of the rollout's and the trainer's token probabilities; 0 never stops.", low=0, high=1
    )
    canary_pearson_min: float = key(
        0.95, "Least sync/canary_pearson_prob after a weight update; 0 never stops.", low=0, high=1
    )
    canary_k3_max: float = key(0.05, "Highest sync/canary_k3_kl; 0 never stops.", unit="nats", low=0)
    canary_logprob_max: float = key(0.0, "Highest sync/canary_logprob_abs_max; 0 never stops.", unit="nats", low=0)


@dataclass
class TrainerConfig:
    """The loop."""

    steps: int = key(50, "Steps of the run.", unit="steps", low=1)
    seed: int = key(1, "Seed of sampling, shuffling and initialisation.", low=0)
    validate_every: int = key(10, "Steps between validations; 0 never validates.", unit="steps", low=0)
    validation_prompts: int = key(128, "Held-out prompts of one validation.", unit="prompts", low=1)
    validation_n: int = key(1, "Completions per held-out prompt.", unit="samples", low=1)
    canary_sequences: int = key(
        4,
        "Sequences of prompt tokens that trainer and rollouts both score after each weight update; 0 does without.",
        unit="sequences",
        low=0,
    )
    router_bias: str = key("frozen", "The router's correction bias in training.", choices=("frozen",))
    gates: GatesConfig = field(default_factory=GatesConfig)


@dataclass
class ClusterConfig:
    """Machines and processes."""

    nodes: int = key(1, "Machines of the trainer.", low=1, high=10_000)
    gpus_per_node: int = key(
        1, "Trainer ranks per machine: GPUs, or processes where engine.device is cpu.", unit="ranks", low=1, high=128
    )
    gpu_arch: str = key(
        "",
        "Architecture of the rollouts' GPUs, for the rules on kernels; empty: not known, and not judged.",
        choices=("", "sm80", "sm90", "sm100", "sm103", "sm120"),
    )
    object_store_gib: float = key(
        1.0, "Shared memory for weights in flight between trainer and rollout.", unit="GiB", above=0
    )
    cpu_arch: str = key(
        "", "Processor that a node must have, as `uname -m` says; empty: any.", choices=("", "x86_64", "aarch64")
    )
    grace_s: float = key(
        60.0,
        "Time before a batch job's limit at which it is asked to save; a step and a save must fit into it.",
        unit="s",
        low=30,
    )
    port: int = key(0, "TCP port where trainer ranks meet; 0 picks a free one.", low=0, high=65535)


@dataclass
class ObserveConfig:
    """What a run records besides metrics.jsonl."""

    tensorboard: bool = key(True, "Write TensorBoard event files into the run directory.")
    samples_per_step: int = key(8, "Completions written to samples.jsonl each step.", unit="samples", low=0)


@dataclass
class Config:
    """A whole run. `origins` maps each key (``layout.pp``) to where its value came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    patches: PatchesConfig = field(default_factory=PatchesConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        self.origins: dict[str, str] = {}
        self.recipe = ""  # the recipe and profile this came from: names, not keys
        self.profile = ""

    @property
    def world(self) -> int:
        """Trainer ranks in all."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def dp(self) -> int:
        """Data-parallel size; exact once preflight has passed."""
        return self.world // (self.layout.tp * self.layout.pp)

    def get(self, name: str) -> Any:
        """The value of a dotted key such as ``layout.pp`` or ``reward.args.buffer``."""
        node: Any = self
        for part in name.split("."):
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        return node

    def origin(self, name: str) -> str:
        """Where a key's value came from: default, recipe NAME, profile NAME, file PATH:LINE, environment NAME or command line."""
        return self.origins.get(name, "default")

    def to_yaml(self, origins: bool = True) -> str:
        """The resolved configuration as YAML, one key a line, each with its origin as a comment."""
        from .load import dump_yaml

        return dump_yaml(self, origins)

    @classmethod
    def from_resolved(cls, path: str | Path) -> Config:
        """Read a configuration that :meth:`to_yaml` wrote, origins included. Raises UserError as load_config does."""
        from .load import load_resolved

        return load_resolved(path)
