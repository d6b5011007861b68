"""What runs inside vLLM's workers: declare the weights held, take new ones, prove that all were taken, record routing.

An instance of vLLM's worker class gets these methods by `worker_extension_cls`; the engine calls them by collective_rpc.
They answer in pickled bytes, which vLLM passes on as they are. Weights lie in a file of the worker's own node, beside the
model directory (`Scratch`).
"""

from __future__ import annotations

import itertools
import pickle
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.durable import write_atomic
from moe_rl.lifetime import end_with_parent
from moe_rl.models.digest import digest_all
from moe_rl.models.family import get_family, read_config, read_facts
from moe_rl.models.weights import WeightTable
from moe_rl.models.wire import BLOCKS, PLAIN, Stored, Wire
from moe_rl.reshard.receive import Place

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_MARK = 0xA5  # of bytes that no update has written yet


class WeightExtension:
    """Methods for vLLM's worker; `self` is that worker."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device

    def weights_prepare(self, record_routing: bool) -> bytes:
        """Cover vLLM's gaps; what the live model holds: {released name: (shape, form that it is loaded in)}."""
        end_with_parent()
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            from moe_patches import vllm_cpu

            vllm_cpu.install()
        _keep_live()
        table, local, config = (
            _table(self.model_config.model),
            _local_experts(model),
            read_config(self.model_config.model),
        )
        wire = Wire.released(config) if "quantization_config" in config else PLAIN
        own = "bf16" if self.model_config.dtype == torch.bfloat16 else "fp32"
        held = {}
        for entry in table.entries:
            name, spec = entry.name, entry.spec
            if spec.expert is None or spec.layer not in local or spec.expert in local[spec.layer]:
                held[name] = (spec.shape, wire.form(entry) or (own if spec.dtype == "bf16" else spec.dtype))
        self._held = held
        self._routing = _Routing(self.model_runner) if record_routing else None
        return pickle.dumps(held)

    def weights_update(self, version: int, patience_s: float) -> bytes:
        """Load every held tensor from the node's staging file, layer by layer; what is wrong afterwards, [] if nothing.

        `version` may still be on its way to this node: it is waited for, `patience_s` seconds.
        The live tensors are marked before and must all have been written after: a tensor that vLLM's reload passes over
        would otherwise keep its old value in silence.
        """
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        scratch = Scratch.of(self.model_config.model)
        if not scratch.wait(version, patience_s):
            return pickle.dumps([f"version {version} was not staged on {platform.node()} in {patience_s:.0f} s"])
        source = torch.from_numpy(np.memmap(scratch.staging, np.uint8, mode="c"))
        places = [place for place in pickle.loads(scratch.index.read_bytes()) if place.weight in self._held]
        problems = _named("are held and were not sent", self._held.keys() - {place.weight for place in places})
        if not problems:
            with torch.no_grad(), set_current_vllm_config(self.vllm_config), torch.device(self.device):
                mark(model)
                self._reload(model, source, places)
                problems = _named("of the live model were not written", unwritten(model))
        return pickle.dumps(problems)

    def _reload(self, model: Any, source: torch.Tensor, places: list[Place]) -> None:
        from vllm.model_executor.model_loader import reload

        if self.device.type == "cpu":
            from moe_patches import vllm_cpu

            vllm_cpu.forget_layout(model)
        reload.initialize_layerwise_reload(model)
        for names in _by_layer(_table(self.model_config.model), self._held):
            model.load_weights(
                (p.tensor.box.name, as_stored(p.within(source).to(self.device), p.tensor, self._held[p.weight][1]))
                for p in places
                if p.weight in names
            )
        reload.finalize_layerwise_reload(model, self.model_config)

    def routing_take(self, ids: list[str]) -> bytes:
        """Hand out, and forget, the experts of these requests: {id: int16 [tokens fed, layers, experts per token]}."""
        assert self._routing is not None
        return pickle.dumps({i: rows for i in ids if (rows := self._routing.take(i)) is not None})

    def weights_digest(self) -> bytes:
        """The digest of every live parameter and buffer, in the kernels' layout: {vLLM's name: 64-bit sum}."""
        model = self.model_runner.get_model()
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        return pickle.dumps(digest_all({name: tensor.data for name, tensor in named}))

    def alive(self) -> bytes:
        """Answer."""
        return pickle.dumps(None)


class Scratch:
    """What a node's workers and the process that takes their weights agree on: files of that node, in one directory."""

    def __init__(self, root: Path) -> None:
        self.model, self.staging, self.index = root / "model", root / "staging", root / "index"
        self._version = root / "version"

    @classmethod
    def of(cls, model: str) -> Scratch:
        return cls(Path(model).parent)

    def publish(self, version: int) -> None:
        """The staging file holds `version` now, proven whole."""
        write_atomic(self._version, str(version))

    def wait(self, version: int, patience_s: float) -> bool:
        """Whether `version` was published before `patience_s` seconds were over."""
        deadline = time.monotonic() + patience_s
        while not (self._version.is_file() and self._version.read_text() == str(version)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class _Routing:
    """Routed experts by request, from vLLM's router callbacks; valid where every position is computed (no prefix cache)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: dict[str, list[tuple[int, int, torch.Tensor]]] = {}  # first position, layer, experts
        self._layers = runner.model_config.get_total_num_hidden_layers()
        for name, module in runner.get_model().named_modules():
            router: Any = getattr(module, "router", None)
            layer = _LAYER.search(name + ".")
            if hasattr(router, "set_capture_fn") and layer:
                router.set_capture_fn(partial(self._take_in, int(layer[1])))

    def _take_in(self, layer: int, ids: torch.Tensor) -> None:
        batch = self._runner.input_batch
        ends = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        if len(ids) < ends[-1]:
            return  # a dummy batch that keeps data-parallel ranks in step
        for i, request in enumerate(batch.req_ids):
            rows = ids[ends[i] : ends[i + 1]].to(torch.int16, copy=True)
            self._rows.setdefault(request, []).append((int(batch.num_computed_tokens_cpu[i]), layer, rows))

    def take(self, request: str) -> np.ndarray | None:
        # vLLM puts a suffix of its own behind the id that it was given
        key = next((key for key in self._rows if key == request or key.startswith(request + "-")), None)
        if key is None:
            return None
        found = self._rows.pop(key)
        end = max(first + len(rows) for first, _, rows in found)
        out = np.zeros((end, self._layers, found[0][2].shape[1]), np.int16)
        for first, layer, rows in found:  # a request that was preempted comes again from its start
            out[first : first + len(rows), layer] = rows.numpy()
        return out


def _table(path: str) -> WeightTable:
    facts = read_facts(path)
    family = get_family(facts.family)
    return family.weight_table(family.read_arch(path))


def _local_experts(model: torch.nn.Module) -> dict[int, set[int]]:
    """Layer -> experts held here, for layers whose experts are spread over ranks."""
    found = {}
    for name, module in model.named_modules():
        held = getattr(module, "_expert_map", None)
        layer = _LAYER.search(name + ".")
        if isinstance(held, torch.Tensor) and layer:
            found[int(layer[1])] = set((held >= 0).nonzero()[:, 0].tolist())
    return found


def _by_layer(table: WeightTable, names: Iterable[str]) -> Iterator[set[str]]:
    """Names in the order of the layers; what is outside them comes last."""
    groups: dict[int, set[str]] = defaultdict(set)
    specs = table.expected()
    for name in names:
        layer = specs[name].layer
        groups[table.layers if layer is None else layer].add(name)
    for layer in sorted(groups):
        yield groups[layer]


def as_stored(value: torch.Tensor, tensor: Stored, form: str) -> torch.Tensor:
    """Codes and E8M0 scales, which travel as bytes, in the dtype that a checkpoint has them in."""
    if form not in BLOCKS or tensor.dtype != "u8":
        return value
    if tensor.box.name.endswith(".scale"):
        return value.view(torch.float8_e8m0fnu)
    return value.view(torch.int8 if form == "mxfp4" else torch.float8_e4m3fn)


def mark(model: torch.nn.Module) -> None:
    """Fill every parameter with NaN, or bytes of a mark where its dtype has none."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            parameter.data.fill_(torch.nan)
        elif parameter.numel():
            _bytes(parameter).fill_(_MARK)


def unwritten(model: torch.nn.Module) -> list[str]:
    """Parameters that still hold the mark in any element (of a byte format: in a whole row)."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
            still = parameter.isnan().any()
        else:
            rows = _bytes(parameter)
            still = (rows == _MARK).all(-1).any() if parameter.numel() else torch.tensor(False)
        if bool(still):
            found.append(name)
    return found


def _bytes(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's own bytes, uint8 [rows, bytes of a row]."""
    data = parameter.data if parameter.dim() else parameter.data[None]
    return data.view(torch.uint8).flatten(1) if data.dim() > 1 else data.view(torch.uint8)[None]


def _keep_live() -> None:
    """Have vLLM's reload leave attention sinks where they are: its DeepSeek-V4 copies them past the loader that it wraps,
    so that the copy went to a placeholder and the old sinks stayed (vLLM #57795)."""
    from vllm.model_executor.model_loader.reload import meta

    for names in (meta.SKIP_TENSORS, getattr(meta, "SKIP_LOAD_TENSORS", set[str]())):
        names.add("attn_sink")


def _named(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    return [f"{len(names)} tensors {what}: {', '.join(names)}"] if names else []
