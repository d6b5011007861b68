"""Run megatron-core 0.19 on a CPU: an explicit device shim for trainer processes without a GPU.

megatron-core asks for CUDA by name: ``torch.zeros(..., device="cuda")``, ``torch.cuda.current_stream()``,
``param.type() == "torch.cuda.FloatTensor"``. `install()` answers each such request with the CPU. It changes torch for
the whole process, so it is called by CPU trainer processes alone and refuses to stand beside vLLM, which decides by the
same functions.

The redirections are plain wrappers and not a TorchFunctionMode: a mode is inactive inside autograd's backward, where
activation recompute runs megatron's forward again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn "
    "randn_like tensor zeros zeros_like"
).split()
_installed = False


def install() -> None:
    """Redirect this process's CUDA requests to the CPU and mend what megatron-core then does wrongly. Idempotent.

    Raises:
        RuntimeError: vLLM is imported in this process.
    """
    global _installed
    if _installed:
        return
    if "vllm" in sys.modules:
        raise RuntimeError(
            "moe_patches.cpu.install() was called in a process that has imported vLLM; the shim makes CUDA requests "
            "look answered, which would mislead vLLM. Run the CPU trainer and vLLM in processes of their own."
        )
    _hide_gpu_libraries()
    _disable_compilation()
    _redirect_factories()
    _redirect_tensor_methods()
    _stub_cuda_module()
    _patch_rng()
    _patch_dispatcher()
    _patch_adamw_resume()
    _patch_hybrid_optimizer()
    _installed = True


def is_installed() -> bool:
    """Whether `install()` has run in this process."""
    return _installed


def _asks_for_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _hide_gpu_libraries() -> None:
    """Where Transformer Engine or Apex are installed, megatron-core would hand their kernels CPU tensors: a crash."""
    for name in ("transformer_engine", "apex"):
        if name in sys.modules and sys.modules[name] is not None:
            raise RuntimeError(
                f"moe_patches.cpu.install() was called in a process that has imported {name}, whose kernels megatron-core "
                "then uses. Call it before megatron-core is imported."
            )
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails, and megatron-core does without


# ---------------------------------------------------------------------------------------------------- torch
def _disable_compilation() -> None:
    """megatron's fused helpers are compiled on first use, which on a CPU would start a C++ compiler: run them eagerly."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported, which may be later
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True


def _redirect_factories() -> None:
    """``torch.zeros(device="cuda")`` and its kin, `pin_memory=True` included, allocate on the CPU."""
    # ``with torch.device(...)`` recognises factories by identity: let torch note the originals before they are wrapped
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _asks_for_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return redirected


def _redirect_tensor_methods() -> None:
    """Moves to CUDA stay where they are; `Tensor.type()` names the CUDA type to megatron, which compares strings."""
    tensor, move, type_name = torch.Tensor, torch.Tensor.to, torch.Tensor.type

    @functools.wraps(move)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _asks_for_cuda(args[0]):
            args = (CPU, *args[1:])
        if _asks_for_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    @functools.wraps(type_name)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_name(self, *args, **kwargs)
        if args or kwargs:
            return answer
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return answer.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core") else answer

    tensor.to, tensor.type = to, type_  # type: ignore[assignment]
    tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    tensor.record_stream = lambda self, *args, **kwargs: None  # type: ignore[assignment]


class _Stream:
    """The one stream of a CPU: everything on it has happened already."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _stub_cuda_module() -> None:
    """The functions of torch.cuda that megatron calls; `torch.cuda.is_available()` keeps telling the truth."""
    stream = _Stream()
    stubs: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "current_device": lambda: CPU,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "synchronize": lambda device=None: None,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.cuda.random.get_rng_state = stubs["get_rng_state"]  # type: ignore[assignment]
    torch.cuda.random.set_rng_state = stubs["set_rng_state"]  # type: ignore[assignment]
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)


# ----------------------------------------------------------------------------------------------- megatron-core
def _patch_rng() -> None:
    """megatron reads and writes the CUDA generator by torch's private handles; the CPU's takes its place."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _patch_dispatcher() -> None:
    """The all-to-all token dispatcher needs its split sizes as numpy; megatron converts CUDA tensors only."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_adamw_resume() -> None:
    """Let DistributedOptimizer save and load torch's AdamW, which keeps a tensor ``step`` in each parameter's state.

    Without Transformer Engine megatron falls back to torch's AdamW, but its own state initialiser makes no ``step``,
    its loader looks one up among the checkpoint's tensors, and all parameters then share one step tensor, which each
    of them advances.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    init, load, set_states = (
        DistributedOptimizer.__init__,
        DistributedOptimizer.load_state_dict,
        DistributedOptimizer._set_main_param_and_optimizer_states,
    )

    def is_torch_adam(optimizer: Any) -> bool:
        return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)  # which the offloading one is not

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        init_states = getattr(self, "init_state_fn", None)
        if init_states is None:
            return

        def init_states_with_step(optimizer: Any, config: Any = None) -> None:
            init_states(optimizer, config)
            if is_torch_adam(optimizer):
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        optimizer.state[param].setdefault("step", torch.tensor(0.0))

        self.init_state_fn = init_states_with_step

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: dict) -> None:
        load(self, state_dict)
        if is_torch_adam(getattr(self, "optimizer", None)):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @functools.wraps(set_states)
    def set_main_param_and_states(self: Any, model_param: Any, tensors: dict) -> None:
        tensors.setdefault("step", None)  # the step travels in the parameter groups
        set_states(self, model_param, tensors)

    DistributedOptimizer.__init__ = __init__
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_main_param_and_states


class _TwoDevices(torch.overrides.TorchFunctionMode):
    """Within, tensors are on the GPU by their own account (`is_cuda`), until `cpu()` copies them; what is made of a copy
    is on the CPU as well."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, torch.Tensor] = {}  # by id, and held so that no id is given out again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = bool(args) and id(args[0]) in self.host
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not on_host
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (on_host or func == torch.Tensor.cpu):
            self.host[id(result)] = result
        return result


def _patch_hybrid_optimizer() -> None:
    """The CPU-offloading optimizer asks each parameter whether it is on the GPU: here all are, but for its copies.

    Its checkpoints take the way that they take on a GPU, where Transformer Engine is present: without it megatron-core
    looks for the step where only torch's own optimizers keep it.
    """
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    @functools.wraps(divide)
    def divide_over_two_devices(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _TwoDevices():
            return divide(self, *args, **kwargs)

    def as_on_gpu(method: Callable) -> Callable:
        @functools.wraps(method)
        def with_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(getattr(self, "optimizer", None), HybridDeviceOptimizer):
                return method(self, *args, **kwargs)
            present, distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.HAVE_APEX_OR_TE, True
            try:
                return method(self, *args, **kwargs)
            finally:
                distrib_optimizer.HAVE_APEX_OR_TE = present

        return with_engine

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divide_over_two_devices
    for name in ("state_dict", "load_state_dict"):
        method = getattr(distrib_optimizer.DistributedOptimizer, name)
        setattr(distrib_optimizer.DistributedOptimizer, name, as_on_gpu(method))
