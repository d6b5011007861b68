"""The whole model with every kernel against the plain one: log-probs and all gradients, with full recompute.

TRITON_INTERPRET=1 python -m tests.model_cases     # the kernels, interpreted on a CPU
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from moe_rl.models.deepseek_v4 import build, widths
from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.weights import trainer_views
from moe_rl.models.family import get_family, read_facts
from moe_rl.models.packed import PackedSequences
from moe_rl.planner.activations import saved_bytes
from tests import small_v4
from tests.distributed import lone_rank
from tests.test_planner_widths import saved
from tests.v4_oracle import fill, parity_config, random_sequences


def results(backend: str, recompute: str) -> dict[str, torch.Tensor]:
    """Log-probs of a pack of three sequences and the gradient of every parameter."""
    arch = DeepseekV4Arch.from_dict(parity_config((0, 4, 8), num_hidden_layers=3, index_topk=1, sliding_window=4))
    options = {"attention_backend": backend, "recompute": recompute}
    with mock.patch.object(build, "_kernels_lack", lambda *_: ""):  # a CPU has what they need: an interpreter
        model = build.build_chunk(arch, build.make_transformer_config(arch, **options)).train()
    with torch.no_grad():
        fill(trainer_views(model, arch), 1, arch.num_experts)
    tokens, labels, weights = random_sequences((11, 1, 6), arch.vocab_size, seed=0)
    packed = PackedSequences.from_lengths([len(t) for t in tokens])
    out = model(torch.cat(tokens)[None], packed, torch.cat(labels)[None])
    (out[0] * torch.cat(weights)).sum().backward()
    return {"logprobs": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def saved_and_planned(path: Path, tokens: int = 64) -> list[tuple[int, int]]:
    """Bytes that each layer saves with the kernels in bf16, and those that the planner counts."""
    facts = read_facts(small_v4.write_model(path))
    arch = get_family(facts.family).read_arch(path)
    with mock.patch.object(build, "_kernels_lack", lambda *_: ""):
        options = {"attention_backend": "triton", "dtype": "bf16"}
        model = build.build_chunk(arch, build.make_transformer_config(arch, **options)).train()
    with torch.no_grad():
        fill(trainer_views(model, arch), 1, arch.num_experts)
    packed, ids, found = PackedSequences.from_lengths([tokens]), torch.arange(tokens) % arch.vocab_size, []
    for i, layer in enumerate(model.layers.values()):
        x = torch.randn(tokens, arch.hc_mult, arch.hidden_size).bfloat16().requires_grad_()
        own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
        planned = saved_bytes(widths._fused(arch, i, facts.layers[i]), tokens, 2, 256, arch.top_k)
        found.append((saved(own, layer, x, ids, packed), planned))
    return found


def main() -> None:
    lone_rank()
    wanted = results("plain", "off")
    found = results("triton", "full")
    assert found.keys() == wanted.keys()
    worst = max((float((found[n] - w).norm() / (w.norm() + 1e-6)), n) for n, w in wanted.items())
    print(f"off by {worst[0]:.1e} at most, {worst[1]}")
    assert worst[0] < 2e-4, worst
    with TemporaryDirectory() as directory:
        found = saved_and_planned(Path(directory) / "model")
    print("planned over saved: " + ", ".join(f"{p / s:.3f}" for s, p in found))
    assert len(found) == 5 and all(abs(p / s - 1) < 0.02 for s, p in found)


if __name__ == "__main__":
    main()
