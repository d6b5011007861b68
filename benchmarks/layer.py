"""One Pro-sized DeepSeek-V4 layer, and log-probs from hidden states, on a GPU: time, peak memory, floor, parts.

    python3 benchmarks/layer.py --out results.json     # on a GPU
    python3 benchmarks/layer.py --device cpu           # the same program, tiny

The layer is complete: hyper-connections, attention, router, 48 of 384 experts, the shared expert; bf16, 10,240 tokens of one
sequence, recompute off. Its floor: 6 FLOPs a weight and token (2 for the frozen indexer, routed experts by the tokens they
get), 14 a channel, head and (query, key) pair, at the rate of a large bf16 product measured in the same run. Peak memory is
what forward and backward allocate beyond weights, gradients and the layer's input.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.attention import KINDS, Bench, pairs_of, released_arch  # noqa: E402


def start_world(device: str) -> None:
    """A process group of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if device == "cpu":
        from moe_patches import cpu

        cpu.install()
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build_layer(bench: Bench, arch, kind: str, backend: str):
    """A decoder layer of this kind, routed by score, with random weights and gradients that exist."""
    from moe_rl.models.deepseek_v4.build import make_transformer_config
    from moe_rl.models.deepseek_v4.model import DecoderLayer
    from moe_rl.models.deepseek_v4.moe import Router

    torch = bench.torch
    layer = max(i for i, ratio in enumerate(arch.compress_ratios) if ratio == KINDS[kind][0])
    from megatron.core.process_groups_config import ProcessGroupCollection

    dtype = "bf16" if bench.gpu else "fp32"
    config = make_transformer_config(arch, dtype=dtype, device=bench.device, attention_backend=backend)
    with torch.device(bench.device):
        block = DecoderLayer(config, layer, ProcessGroupCollection.use_mpu_process_groups()).to(bench.device)
    for p in block.parameters():
        torch.nn.init.normal_(p.data, 0.0, 0.02)
    for module in block.modules():
        if isinstance(module, Router) and not module.is_hash:
            module.expert_bias.zero_()
    return block


def layer_flops(block, arch, kind: str, tokens: int) -> float:
    ratio = KINDS[kind][0]
    pairs = pairs_of(tokens, arch.sliding_window, ratio, arch.index_top_k if kind == "sparse" else 0)
    flops = 14.0 * pairs * arch.num_heads * arch.head_dim
    for name, p in block.named_parameters():
        if p.ndim == 2 and "position_bias" not in name:
            share = arch.top_k / arch.num_experts if "local_experts" in name else 1.0
            flops += (2 if ".indexer." in name else 6) * p.numel() * tokens * share
    if kind == "sparse":
        scored = sum((i + 1) // ratio for i in range(tokens))
        flops += 2.0 * scored * arch.index_num_heads * arch.index_head_dim
    return flops


def layer(bench: Bench, arch, kind: str, tokens: int, backend: str) -> dict[str, Any]:
    from moe_rl.models.packed import PackedSequences

    torch = bench.torch
    block, packed = build_layer(bench, arch, kind, backend), PackedSequences.from_lengths([tokens], bench.device)
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    x = torch.randn(tokens, arch.hc_mult, arch.hidden_size, device=bench.device).to(dtype).requires_grad_()
    ids, grad = torch.zeros(tokens, dtype=torch.int64, device=bench.device), torch.randn_like(x)

    def both() -> None:
        block(x, ids, packed).backward(grad)

    ms, flops = bench.ms(both, 3), layer_flops(block, arch, kind, tokens)
    result = {"ms": ms, "peak_gib": bench.peak_gib(both), "tflop": round(flops / 1e12, 2)}
    result |= {"floor_ms": round(bench.floor_ms(flops), 2), "of_floor": round(bench.floor_ms(flops) / ms, 3)}
    result["parts, forward and backward ms"] = parts(bench, block, x, ids, packed)
    if bench.gpu:
        result["kernels"] = busiest(bench, both)
    return {backend: result}


def parts(bench: Bench, block, x, ids, packed) -> dict[str, float]:
    """Milliseconds of forward and backward of each part by itself, by the kernels and by plain PyTorch."""
    from moe_rl.trainer.speed import set_backend

    torch = bench.torch
    narrow = x.detach()[:, 0].contiguous().requires_grad_()

    def run(call, *inputs) -> float:
        def both() -> None:
            outs = call(*inputs)
            outs = outs if isinstance(outs, tuple) else (outs,)
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])

        return bench.ms(both, 2)

    with torch.no_grad():
        _, post, comb = block.attn_hc(x)
    mixes = [post.requires_grad_(), comb.requires_grad_()]
    found, built = {}, block.self_attn.backend
    for backend in ("triton", "plain") if bench.gpu else ("plain",):
        set_backend(block, backend)
        found |= {
            f"{backend} hyper-connection, collapse": run(block.attn_hc, x),
            f"{backend} hyper-connection, rejoin": run(block.attn_hc.rejoin, x, narrow, *mixes),
            f"{backend} attention": run(lambda t: block.self_attn(t, packed), narrow),
            f"{backend} experts": run(lambda t: block.mlp(t.unsqueeze(1), ids), narrow),
            f"{backend} norm": run(block.input_layernorm, narrow),
        }
    set_backend(block, built)
    return found


def busiest(bench: Bench, call, most: int = 14) -> dict[str, float]:
    """The kernels that take the most time in one call: name -> ms."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        bench.torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:most]
    return {row.key[:90]: round(row.self_device_time_total / 1e3, 3) for row in rows}


def logprobs(bench: Bench, tokens: int, vocabulary: int, width: int, chunk: int, fused: bool) -> dict[str, Any]:
    """Forward and backward of log-probs; the floor has no recomputed logits: 6 FLOPs a weight and token."""
    from moe_rl.models.logprobs import label_logprobs

    torch = bench.torch
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    hidden, weight = (torch.randn(n, width, device=bench.device).to(dtype) for n in (tokens, vocabulary))
    weight = (weight * width**-0.5).requires_grad_()
    hidden.requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=bench.device)

    def both() -> None:
        label_logprobs(hidden, weight, labels, 1.0, chunk, True, fused=fused)[0].sum().backward()

    with torch.no_grad():
        forward = bench.ms(lambda: label_logprobs(hidden, weight, labels, 1.0, chunk, True, fused=fused), 3)
    ms, floor = bench.ms(both, 3), bench.floor_ms(6.0 * tokens * vocabulary * width)
    result = {"ms": ms, "forward_ms": forward, "peak_gib": bench.peak_gib(both), "of_floor": round(floor / ms, 3)}
    return {"fused" if fused else "plain": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=300.0, help="no case starts after this many seconds")
    parser.add_argument("--only", default="", help="cases whose names hold one of these words, divided by commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "layer.json")
    args = parser.parse_args()
    import torch

    torch.manual_seed(0)
    bench = Bench(args)
    bench.case("ceilings", bench.ceilings)
    start_world(args.device)
    pro = replace(released_arch("dsv4-pro"), num_experts=48)
    tokens, head, backends = 10240, (8192, 129280, 7168), ("triton", "plain")
    if not bench.gpu:
        from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
        from tests.tiny_v4 import tiny_config

        tiny = DeepseekV4Arch.from_dict(
            tiny_config(layer_types=None, compress_rates=None, compress_ratios=[0, 0, 128, 4])
        )
        pro, tokens, head, backends = tiny, 140, (40, 61, 16), ("plain",)
    for kind in ("sparse", "heavy"):
        bench.case(f"layer {kind}", lambda k=kind: layer(bench, pro, k, tokens, backends[0]))
    for chunk in (1024, 4096):
        for fused in (False, True) if bench.gpu else (False,):
            name = f"log-probs by {chunk} {'fused' if fused else 'plain'}"
            bench.case(name, lambda c=chunk, f=fused: logprobs(bench, *head, c, f))
    if len(backends) > 1:
        bench.case("layer sparse plain", lambda: layer(bench, pro, "sparse", tokens, "plain"))
    bench.table()


if __name__ == "__main__":
    main()
