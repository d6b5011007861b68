"""DeepSeek-V4 in vLLM on a GPU: after updates every live parameter has the bits of an engine that loaded the checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moe_rl.models.weights import dtype_name, whole_parts
from moe_rl.models.wire import is_integer
from moe_rl.reshard.transport import pack
from moe_rl.rollout.engine import Request
from tests.released_v4 import dequantised, released_config, write_released
from tests.vllm_process import EngineProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
SIZES = dict(hidden_size=1024, moe_intermediate_size=512, vocab_size=4096, num_hidden_layers=4, num_attention_heads=64)
SIZES |= dict(head_dim=512, qk_rope_head_dim=64, q_lora_rank=512, o_groups=8, o_lora_rank=256, n_routed_experts=16)
SIZES |= dict(num_experts_per_tok=4, index_n_heads=64, index_head_dim=128, index_topk=512, sliding_window=128)
SIZES |= dict(max_position_embeddings=65536, num_nextn_predict_layers=0)
LAYERS = {"compress_ratios": [0, 4, 128, 4]}
OPTIONS = {
    "max_tokens": 512,
    "batch_size": 16,
    "dtype": "bf16",
    "device": "cuda",
    "options": {
        "moe_backend": "marlin",
        "kv_cache_dtype": "fp8",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
    },
}


def packets(path: Path, held: list, version: int) -> list:
    """The checkpoint's decoded values as a trainer sends them."""
    dtypes = {h.name: h.dtype for h in held}
    values = {
        n: torch.from_numpy(v)
        if is_integer(dtypes[n])
        else torch.from_numpy(v).to(torch.float32 if dtypes[n] == "fp32" else torch.bfloat16)
        for n, v in dequantised(path).items()
    }
    parts = whole_parts(values)
    assert parts.keys() == dtypes.keys() and all(dtype_name(v) for v in values.values())
    boxes = [part.box(name) for name, (part,) in parts.items()]
    return list(pack(parts, boxes, dtypes, version=version, source=0))


def _holdings(engine):
    return engine.holdings(0)


def _receive(engine, sent, version):
    engine.receive(sent, version, [item.name for packet in sent for item in packet.items])


def _live_digests(engine):
    return {name: digest for name, digest in engine.digests().items() if name.startswith("rank 0: ")}


def _generate(engine, requests):
    return engine.generate(requests)


@pytest.mark.timeout(900)
def test_live_parameters_after_two_updates_are_those_of_a_fresh_load(tmp_path):
    """Attention sinks, hash tables, hyper-connections, routers' biases and Marlin's layout among them."""
    from moe_rl.convert.job import convert
    from moe_rl.convert.plan import Request as Conversion

    assert released_config(**SIZES, **LAYERS)["expert_dtype"] == "fp4"
    checkpoints = [
        write_released(tmp_path / f"drawn{i}", seed=i, shard_bytes=1 << 30, **SIZES, **LAYERS) for i in (1, 2)
    ]
    for i, path in enumerate(checkpoints):  # drawn codes lie under scales that an encoder would not choose
        convert(Conversion(path, tmp_path / f"bf16{i}", "bf16"), workers=1)
        convert(Conversion(tmp_path / f"bf16{i}", tmp_path / f"encoded{i}", "released"), workers=1)
    engine = EngineProcess(checkpoints[0], **OPTIONS)
    held = engine.call(_holdings)
    for version, path in enumerate(checkpoints, 1):
        engine.call(_receive, packets(path, held, version), version)
        done = engine.call(_generate, [Request(0, tuple(range(5, 200)), 1, 16)])
        assert len(done[0].tokens) and done[0].weight_version == version
    updated = engine.call(_live_digests)
    engine.close()
    options = {**OPTIONS["options"], "load_format": "auto", "model": str(tmp_path / "encoded1")}
    fresh = EngineProcess(tmp_path / "encoded1", **{**OPTIONS, "options": options})
    expected = fresh.call(_live_digests)
    fresh.close()
    assert len(updated) > 100 and updated.keys() == expected.keys()
    assert [name for name in updated if updated[name] != expected[name]] == []
