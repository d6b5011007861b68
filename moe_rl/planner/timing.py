"""Seconds of a step, by part, from a machine's rates. Imports no torch.

Passes take the longer of their arithmetic at the share of the peak that kernels reach and of reading their weights once;
what crosses ranks adds its bytes over the link. The pipeline is 1F1B: one micro-batch through all stages, and the slowest
stage once more for each further one. An offloaded optimizer step takes the longer of Adam on the CPUs and its copies,
which overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_rl.config import Config, ModelFacts

from .activations import keys_of
from .inventory import Inventory, Kind, Stage
from .optimizer_memory import OptimizerMode, split_offloaded
from .rollouts import Rollout

ADAM_BYTES = 28  # of a parameter that Adam updates on a CPU: master and moments read and written, gradient read
G = 10**9


@dataclass(frozen=True)
class Timing:
    """A step's times, in seconds, and its counts."""

    config: Config
    facts: ModelFacts
    inventory: Inventory
    rollout_shape: Rollout
    sync_bytes_total: int
    sync_bytes_gpu: int
    sync: float

    @cached_property
    def sequences(self) -> int:
        """Sequences of a data-parallel rank in one optimizer step."""
        c = self.config
        samples = c.data.prompts_per_step * c.rollout.n // c.algorithm.minibatches
        return max(1, -(-samples // max(1, c.dp)))

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt + self.config.rollout.max_response

    @cached_property
    def micro_batches(self) -> int:
        """Of one rank in one optimizer step, if every sequence is as long as it may be."""
        fit = max(1, self.config.engine.max_tokens_per_micro_batch // self.longest)
        count, layout = -(-self.sequences // fit), self.config.layout
        return -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count

    @cached_property
    def tokens(self) -> int:
        """Of the largest micro-batch."""
        fit = max(1, self.config.engine.max_tokens_per_micro_batch // self.longest)
        return min(fit, self.sequences) * self.longest

    @property
    def bubble(self) -> float:
        """Share of the update that the average stage waits."""
        layout = self.config.layout
        return (layout.pp - 1) / (self.micro_batches * layout.vpp + layout.pp - 1)

    # -------------------------------------------------------------------------------------------------------- passes
    def flops(self, stage: Stage, tokens: int) -> float:
        """Floating-point operations of one forward pass on a rank."""
        facts, c = self.facts, self.config
        total = 0.0
        for i in stage.layers:
            w = facts.layers[i]
            keys = keys_of(w, min(tokens, c.engine.attention_chunk), tokens) if w.chunked else self.longest / 2
            total += 2 * tokens * (w.dense + facts.top_k * w.expert + w.pair_work * keys)
        if stage.loss:
            total += 2 * tokens * facts.vocab_size * facts.hidden_size
        return total / c.layout.tp

    def forward(self, stage: Stage, tokens: int) -> float:
        """Seconds of one forward pass of one micro-batch on a rank, with what it sends."""
        m, c, facts = self.config.machine, self.config, self.facts
        b = 4 if c.engine.dtype == "fp32" else 2
        weights = sum(t.numel * n for t in self.inventory.tensors(stage) for n in [self.inventory.local(t)[0]]) * b
        compute = max(self.flops(stage, tokens) / (m.tflops * 1e12 * m.utilisation), weights / (m.hbm_gbps * G))
        return compute + self._sent(stage, tokens, b, facts)

    def _sent(self, stage: Stage, tokens: int, b: int, facts: ModelFacts) -> float:
        m, c = self.config.machine, self.config
        layout, per_node = c.layout, c.cluster.gpus_per_node
        copies = tokens * facts.top_k * facts.hidden_size * b * (layout.ep - 1) / layout.ep
        sparse = sum(1 for i in stage.layers if facts.layers[i].expert)
        link = m.nvlink_gbps if layout.ep * layout.etp <= per_node else m.nic_gbps
        boundary = 0 if stage.loss else tokens * facts.boundary * b
        return (2 * copies * sparse / link + boundary / m.nic_gbps) / G

    def _pipeline(self, passes: float) -> float:
        """Seconds of all micro-batches through the pipeline, each taking `passes` forward passes' time."""
        once = self._forward_by_kind
        each = [passes * once[self.inventory.kind(stage)] for stage in self.inventory.stages]
        return sum(each) / self.config.layout.vpp + (self.micro_batches - 1 / self.config.layout.vpp) * max(each)

    @cached_property
    def _forward_by_kind(self) -> dict[Kind, float]:
        stages = {self.inventory.kind(stage): stage for stage in self.inventory.stages}
        return {kind: self.forward(stage, self.tokens) for kind, stage in stages.items()}

    @cached_property
    def log_prob(self) -> float:
        a = self.config.algorithm
        return a.minibatches * ((a.old_logprobs == "recompute") + (a.kl != "none")) * self._pipeline(1)

    @cached_property
    def passes(self) -> float:
        a = self.config.algorithm
        return a.epochs * a.minibatches * self._pipeline(4 if self.config.engine.recompute == "full" else 3)

    @cached_property
    def optimizer(self) -> float:
        """Seconds of a batch's optimizer steps."""
        c, m, mode = self.config, self.config.machine, OptimizerMode.of(self.config)
        slowest = 0.0
        for stage in {self.inventory.kind(stage): stage for stage in self.inventory.stages}.values():
            offloaded, kept = split_offloaded(self.inventory.shards(stage), mode.offload_fraction)
            away, here = (sum(s.owned for s in part) for part in (offloaded, kept))
            cpu = max(away * ADAM_BYTES * c.cluster.gpus_per_node / (m.host_gbps * G), 4 * away / (m.pcie_gbps * G))
            slowest = max(slowest, cpu + here * ADAM_BYTES / (m.hbm_gbps * G))
        return c.algorithm.epochs * c.algorithm.minibatches * slowest

    @property
    def update(self) -> float:
        return self.passes + self.optimizer

    # ----------------------------------------------------------------------------------------------------- the others
    @cached_property
    def rollout(self) -> float:
        """Seconds until the longest completion of a step: its decoding steps, one after the other, in as many rounds as
        the engine's batch asks for. A step reads its weights, and takes at least its latency in each layer."""
        c, m, r = self.config, self.config.machine, self.rollout_shape
        sequences = -(-c.data.prompts_per_step * c.rollout.n // (r.replicas * r.dp))
        rounds = -(-sequences // c.rollout.batch_size)
        step = max(m.decode_layer_ms / 1000 * self.facts.num_layers, r.weights / (m.hbm_gbps * G))
        return rounds * c.rollout.max_response * step

    def save_bytes(self) -> dict[str, float]:
        """A checkpoint's bytes by what is in it."""
        b = 4 if self.config.engine.dtype == "fp32" else 2
        numel = trained = 0
        for t in self.facts.tensors:
            count = self.facts.num_experts if t.expert else 1
            numel += t.numel * count * (t.bytes if t.bytes != 2 else b)
            trained += t.numel * count if t.trained else 0
        return {"model": float(numel), "optimizer": 12.0 * trained, "extra": 16384.0 * self.config.world}

    @cached_property
    def save(self) -> float:
        wanted = self.save_bytes()
        size = sum(wanted[part] for part in self.config.checkpoint.contents)
        return size / self.config.cluster.nodes / (self.config.machine.disk_gbps * G)

    @property
    def step(self) -> float:
        return self.rollout + self.log_prob + self.update + self.sync
