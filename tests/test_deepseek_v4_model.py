"""What our DeepSeek-V4 promises as a module: packs do not mix, memory is linear, every layout is one model."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_rl.models.deepseek_v4.arch import DeepseekV4Arch
from moe_rl.models.deepseek_v4.build import build_chunk, init_weights, make_transformer_config
from moe_rl.models.deepseek_v4.weights import expected, trainer_views
from moe_rl.models.packed import PackedSequences
from tests.distributed import run_ranks
from tests.tiny_v4 import tiny_config
from tests.v4_oracle import fill, parity_config, random_sequences

MIXED = (0, 4, 128, 4)


def build(config=None, seed=1, **options):
    """A model with random weights in everything."""
    arch = DeepseekV4Arch.from_dict(config or parity_config(MIXED))
    model = build_chunk(arch, make_transformer_config(arch, **options)).train()
    with torch.no_grad():
        fill(trainer_views(model, arch), seed, arch.num_experts)
    return model


def run(model, tokens, labels, **options):
    packed = PackedSequences.from_lengths([len(t) for t in tokens])
    return model(torch.cat(tokens)[None], packed, torch.cat(labels)[None], **options)


# --- packing
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_a_sequence_does_not_feel_its_neighbours(megatron_world, recompute):
    model = build(attention_chunk=24, logprob_chunk=32, recompute=recompute)
    lengths = [17, 150, 40, 133]
    tokens, labels, weights = random_sequences(lengths, 61, seed=0)
    found = []
    for change in (False, True):
        if change:
            tokens[1], labels[1] = torch.flip(tokens[1], (0,)), torch.flip(labels[1], (0,))
        embedded = []

        def keep(module, args, out, kept=embedded):
            out.retain_grad()
            kept.append(out)

        hook = model.embedding.register_forward_hook(keep)
        out = run(model, tokens, labels)
        (out[0] * torch.cat(weights)).sum().backward()
        hook.remove()
        found.append((out[0].detach().split(lengths), embedded[0].grad[:, 0].split(lengths)))
    for i in (0, 2, 3):
        assert torch.allclose(found[0][0][i], found[1][0][i], atol=1e-6)
        before, after = found[0][1][i], found[1][1][i]
        deviation = float((before - after).abs().max() / before.abs().max())
        print(f"sequence {i}: gradients differ by {deviation:.1e} of the largest")
        assert deviation < 1e-6
    assert not torch.allclose(found[0][0][1], found[1][0][1], atol=1e-2)


def test_chunk_sizes_and_recompute_change_nothing(megatron_world):
    tokens, labels, weights = random_sequences([37, 150, 5], 61, seed=0)
    found = []
    for options in (
        dict(attention_chunk=1000, logprob_chunk=1000),
        dict(attention_chunk=7, logprob_chunk=5, recompute="full"),
    ):
        model = build(**options)
        out = run(model, tokens, labels)
        (out[0] * torch.cat(weights)).sum().backward()
        found.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    for name, grad in found[0][1].items():
        other = found[1][1][name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            assert float((grad - other).norm()) <= 1e-4 * float(grad.norm()) + 1e-6, name


def test_entropy_temperature_and_logits_agree(megatron_world):
    model = build()
    tokens, labels, _ = random_sequences([20, 9], 61, seed=0)
    with torch.no_grad():
        logits = model(torch.cat(tokens)[None], PackedSequences.from_lengths([20, 9]))
        out = run(model, tokens, labels, temperature=0.5, entropy=True)
    every = (logits[0] / 0.5).log_softmax(-1)
    assert logits.shape == (1, 29, 61) and out.shape == (2, 29) and out.dtype == torch.float32
    assert torch.allclose(out[0], every[range(29), torch.cat(labels)], atol=1e-5)
    assert torch.allclose(out[1], -(every.exp() * every).sum(-1), atol=1e-5)


# --- memory
class Largest(TorchDispatchMode):
    """The most elements that any tensor made under it had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def saved_and_largest(model, length: int) -> tuple[int, int]:
    """Bytes that the forward keeps for the backward (parameters aside), largest tensor of forward and backward."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    tokens, labels, _ = random_sequences([length], model.arch.vocab_size, seed=0)
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = run(model, tokens, labels)
        out.sum().backward()
    return sum(s.nbytes() for s in storages.values()), largest.elements


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_memory_is_linear_in_tokens(megatron_world, recompute):
    config = parity_config(MIXED, vocab_size=4000, index_n_heads=4, hidden_size=16, max_position_embeddings=4096)
    model = build(config, attention_chunk=32, logprob_chunk=32, recompute=recompute)
    (small, small_largest), (big, big_largest) = saved_and_largest(model, 512), saved_and_largest(model, 1024)
    print(f"recompute {recompute}: {small / 512:.0f} and {big / 1024:.0f} saved bytes a token")
    assert big <= 2.1 * small
    assert big_largest <= 2.1 * small_largest
    assert big_largest < 1024 * 4000 / 8, "nothing like [tokens, vocabulary]"


def test_one_chunk_would_be_quadratic(megatron_world):
    """The measure above does see what chunks avoid."""
    model = build(parity_config(MIXED, hidden_size=16), attention_chunk=4096, logprob_chunk=4096)
    assert saved_and_largest(model, 1024)[0] > 3 * saved_and_largest(model, 512)[0]


# --- dtypes
def test_bf16_keeps_what_the_release_keeps_in_fp32(megatron_world):
    model = build(dtype="bf16")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int64}
    views, specs = trainer_views(model, model.arch), expected(model.arch)
    assert {n: v.dtype for n, v in views.items()} == {n: dtypes[s.dtype] for n, s in specs.items()}
    kept = {n for n, p in model.named_parameters() if getattr(p, "keep_fp32", False)}
    assert kept == {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert {n.rsplit(".", 1)[-1] for n in kept} == {
        "sinks", "position_bias", "fn", "base", "scale", "hc_fn", "hc_base", "hc_scale"
    }  # fmt: skip


def test_bf16_is_near_fp32(megatron_world):
    tokens, labels, _ = random_sequences([60, 140], 61, seed=0)
    config = parity_config(MIXED, num_hash_layers=4, index_topk=64)  # no choice to be made, so rounding is all
    exact, rounded = build(config), build(config, dtype="bf16")
    out, reference = run(rounded, tokens, labels), run(exact, tokens, labels)
    out.sum().backward()
    reference.sum().backward()
    assert out.dtype == torch.float32 and float((out - reference).abs().mean()) < 0.05
    a, b = (m.layers["1"].self_attn.q_a_proj.weight.grad.float().flatten() for m in (exact, rounded))
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.98


# --- fresh weights
def test_fresh_weights_depend_on_seed_and_name(megatron_world):
    arch = DeepseekV4Arch.from_dict(tiny_config())
    models = [build_chunk(arch, make_transformer_config(arch)) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_weights(model, seed)
    views = [trainer_views(m, arch) for m in models]
    assert all(torch.equal(v, views[1][n]) for n, v in views[0].items())
    matrices = [n for n, v in views[0].items() if v.ndim == 2 and not n.endswith(".ape")]
    assert not any(torch.equal(views[0][n], views[2][n]) for n in matrices)
    weight = views[0]["layers.3.attn.wq_b.weight"]
    assert float(weight.std()) == pytest.approx(arch.initializer_range, rel=0.1)
    for n, v in views[0].items():
        if "norm" in n or n.endswith("scale"):
            assert bool((v == 1).all()), n
        if n.endswith(("attn_sink", ".ape", "gate.bias", "base")):
            assert bool((v == 0).all()), n


def test_marks_for_the_optimizer(megatron_world):
    model = build()
    for name, p in model.named_parameters():
        assert p.requires_grad != (".indexer." in name), name
        assert getattr(p, "allreduce", True) != (".local_experts." in name), name
    for index, layer in model.layers.items():
        router = layer.mlp.router
        assert hasattr(router, "tid2eid") == model.arch.is_hash(int(index)) != hasattr(router, "expert_bias")


def test_tensor_parallel_is_refused(megatron_world):
    from moe_rl.errors import UserError

    with pytest.raises(UserError, match="layout.tp"):
        make_transformer_config(DeepseekV4Arch.from_dict(tiny_config()), tp=2)


# --- layouts
LENGTHS = [19, 33, 8]


def _start(rank: int, world: int, port: int, **layout):
    """Process groups and this rank's chunk with fresh weights."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from moe_patches import cpu

    cpu.install()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    pp, ep = layout.get("pp", 1), layout.get("ep", 1)
    parallel_state.initialize_model_parallel(1, pp, expert_model_parallel_size=ep, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    arch = DeepseekV4Arch.from_dict(tiny_config(num_hash_layers=3))
    config = make_transformer_config(arch, attention_chunk=16, recompute="full", **layout)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = build_chunk(arch, config, stage == 0, stage == pp - 1).train()
    init_weights(model, 7)
    return model, ep, parallel_state.get_expert_model_parallel_rank()


def _layout(rank, world, port, layout, save=None, load=None):
    """Log-probs (last stage) and gradients by released name; optionally a checkpoint after or before."""
    import multiprocessing

    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    # The checkpoint writer starts a helper process, which a daemon (as the test's ranks are) may not.
    multiprocessing.current_process()._config["daemon"] = False
    model, ep, ep_rank = _start(rank, world, port, **layout)
    meta = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    if load:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(metadata=meta), load))
    if save:
        dist_checkpointing.save(model.sharded_state_dict(metadata=meta), save)
    tokens, labels, weights = random_sequences(LENGTHS, 61, seed=3)
    packed = PackedSequences.from_lengths(LENGTHS)
    if not model.pre_process:
        received = torch.empty(packed.total, 1, model.arch.hc_mult * model.arch.hidden_size)
        dist.recv(received, 0)
        model.set_input_tensor(received.requires_grad_())
    out = model(torch.cat(tokens)[None], packed, torch.cat(labels)[None] if model.post_process else None)
    if model.post_process:
        (out[0] * torch.cat(weights)).sum().backward()
        if not model.pre_process:
            dist.send(received.grad, 0)
    else:
        dist.send(out.detach(), 1)
        dist.recv(grad := torch.empty_like(out), 1)
        out.backward(grad)
    for p in model.parameters():  # views read the gradient in the parameter's place
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    grads = {n: v.numpy().copy() for n, v in trainer_views(model, model.arch, ep_rank=ep_rank, ep_size=ep).items()}
    dist.barrier()
    dist.destroy_process_group()
    return (out.detach().numpy() if model.post_process else None), grads


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(_layout, 1, {})[0]


def _compare(one_rank, ranks, share: float = 1.0):
    """`share`: how many times an expert sees the batch (every EP rank brings the same one)."""
    logprobs, grads = one_rank
    for out, _ in ranks:
        assert out is None or abs(out - logprobs).max() < 1e-5
    seen = set()
    for _, found in ranks:
        for name, grad in found.items():
            want = grads[name] * (share if ".experts." in name else 1.0)
            assert abs(grad - want).max() <= 1e-4 * abs(want).max() + 1e-7, name
        seen |= found.keys()
    assert seen == grads.keys()


def test_two_expert_ranks_and_two_stages_are_one_model(one_rank, tmp_path):
    """Experts over two ranks, whose checkpoint two pipeline stages then load."""
    _compare(one_rank, run_ranks(_layout, 2, {"ep": 2}, str(tmp_path)), share=2.0)
    _compare(one_rank, run_ranks(_layout, 2, {"pp": 2, "stages": "Et|tttL"}, None, str(tmp_path)))
