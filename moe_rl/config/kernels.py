"""Which of vLLM's kernels runs quantised weights on which GPU, and the rule that says so before a node is taken.

Read from vLLM 0.25.1 (`_supports_current_device` of the experts' classes, `is_supported` of the linears'), which
tests/test_vllm_judge.py asks again; asked once, 0.29.0 said the same, but for Marlin's linears, which it runs on every GPU.
A kernel may need a package of its own beside the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from . import host
from .facts import ModelFacts
from .replicas import shape_fault
from .schema import Config

GPUS = {
    "sm80": "A100",
    "sm90": "H100, H200",
    "sm100": "B200, GB200",
    "sm103": "B300, GB300",
    "sm120": "RTX 6000 Blackwell",
}
_ALL = frozenset(GPUS)
_HOPPER_ON, _BLACKWELL, _TO_100 = _ALL - {"sm80"}, _ALL & {"sm100", "sm103"}, _ALL - {"sm80", "sm120"}

EXPERTS: dict[str, dict[str, frozenset[str]]] = {  # format of the weights -> --moe-backend -> GPUs
    "mxfp4": {
        "marlin": _ALL,
        "deep_gemm": _HOPPER_ON - {"sm90"},
        "triton": _TO_100,
        "triton_unfused": _TO_100,
        "flashinfer_trtllm": _BLACKWELL,
        "flashinfer_cutlass": _HOPPER_ON,
        "humming": _ALL,
        "emulation": _ALL,
    },
    "fp8": {  # blocks of 128 x 128
        "marlin": _ALL,
        "deep_gemm": _HOPPER_ON,
        "triton": _HOPPER_ON,
        "flashinfer_trtllm": _BLACKWELL,
        "flashinfer_cutlass": frozenset({"sm90"}),
        "humming": _ALL,
    },
}
LINEARS: dict[str, dict[str, frozenset[str]]] = {  # likewise, --linear-backend
    "fp8": {
        "deep_gemm": _HOPPER_ON,
        "triton": _ALL,
        "marlin": frozenset({"sm80"}),
        "humming": _ALL,
    }
}
Found = tuple[str, str, str, str, str]
"""Rule, keys divided by spaces, what, why, fix."""


def kernel_problems(config: Config, facts: ModelFacts) -> Iterator[Found]:
    """What vLLM cannot be given: a layout, a machine, or kernels that it lacks for the model's quantised weights."""
    rollout = config.rollout
    if rollout.engine != "vllm":
        for name in ("rollout.tp", "rollout.dp", "rollout.ep"):
            if config.get(name) > 1:
                what = f"{name} is {config.get(name)} with rollout.engine {rollout.engine}"
                why, fix = (
                    "That engine has the whole model in one process.",
                    "Set rollout.engine=vllm, or rollout.replicas.",
                )
                yield "rollout.layout", name, what, why, fix
        return
    if find_spec("vllm") is None:
        what, why = "rollout.engine is vllm, and no vLLM is installed here", "Its rollouts run in it."
        yield "rollout.vllm", "rollout.engine", what, why, "Run `make setup`; on GPUs install the extra `gpu`."
    yield from _replica_problems(config, facts)
    if host.resolve_device(config.engine.device) == "cpu":
        if facts.experts_format and not host.has_cpu_flag("amx_tile"):
            yield (
                "rollout.kernels",
                "rollout.engine engine.device",
                f"vLLM runs {facts.experts_format.upper()} experts on no CPU without AMX, and this one has none",
                "Its operators for them exist in the AMX build alone: loading the model fails.",
                "Use rollout.engine=transformers on this machine.",
            )
        return
    for key, form, table, thing in (
        ("rollout.moe_backend", facts.experts_format, EXPERTS, "experts"),
        ("rollout.linear_backend", facts.linears_format, LINEARS, "linears"),
    ):
        backend, arch = config.get(key), config.cluster.gpu_arch
        if not form or backend == "auto":
            continue
        runs = {name: where for name, where in table[form].items() if not arch or arch in where}
        fix = f"Set {key} to one of {', '.join(runs)}."
        if backend not in table[form]:
            what = f"{key} {backend} has no kernel for {form.upper()} {thing}"
            yield "rollout.kernels", key, what, "vLLM would fail while it loads the model.", fix
        elif backend not in runs:
            yield (
                "rollout.kernels",
                f"{key} cluster.gpu_arch",
                f"{key} {backend} runs {form.upper()} {thing} on {', '.join(sorted(table[form][backend]))},"
                f" not on {arch} ({GPUS[arch]})",
                "vLLM would fail on every GPU while it loads the model.",
                fix,
            )


def _replica_problems(config: Config, facts: ModelFacts) -> Iterator[Found]:
    """What is wrong with a replica's shape on these nodes; on one CPU machine its ranks are as many as one likes."""
    rollout, cluster = config.rollout, config.cluster
    size, on_gpu = rollout.tp * rollout.dp, host.resolve_device(config.engine.device) == "cuda"
    per_node = cluster.gpus_per_node if on_gpu or cluster.nodes > 1 else size
    keys = "rollout.tp rollout.dp rollout.ep cluster.gpus_per_node"
    if fault := shape_fault(rollout.tp, rollout.dp, rollout.ep, facts.num_experts, per_node):
        yield "rollout.layout", keys, *fault
    elif on_gpu and rollout.replicas * size > config.world:
        yield (
            "rollout.gpus",
            "rollout.replicas rollout.tp rollout.dp cluster.nodes cluster.gpus_per_node",
            f"{rollout.replicas} replicas of tp {rollout.tp} * dp {rollout.dp} take {rollout.replicas * size} GPUs,"
            f" {cluster.nodes} nodes have {config.world}",
            "A replica's GPUs are its own.",
            "Lower rollout.replicas, rollout.tp or rollout.dp, or take more nodes.",
        )
