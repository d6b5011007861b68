"""Run by tests/test_vllm_judge.py in a process of its own: one vLLM version's verdict on arguments and on kernels, as JSON.

argv: a directory that holds that version's Python files, or "" for the installed one; "kernels" to be told of them, too.
stdin: a list of argument lists.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from types import ModuleType

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "VLLM_HOST_IP": "127.0.0.1"}
GPUS = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3), "sm120": (12, 0)}


def verdict(argv: list[str]) -> dict[str, object]:
    """What vLLM makes of one node's arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    current_platform.device_count = lambda: 8  # a CPU has one
    headless = "--headless" in argv  # of `vllm serve`, not of the engine
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    try:
        arguments = parser.parse_args([a for a in argv if a != "--headless"])
        found = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(headless=headless)
    except (ValueError, AssertionError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    p = found.parallel_config
    form = "hybrid" if p.data_parallel_hybrid_lb else "external" if p.data_parallel_external_lb else "internal"
    return {
        "form": form,
        "tp": p.tensor_parallel_size,
        "dp": p.data_parallel_size,
        "local": p.data_parallel_size_local,
        "first": p.data_parallel_rank,
        "experts": p.enable_expert_parallel,
        "meet": f"{p.data_parallel_master_ip}:{p.data_parallel_rpc_port}",
        "nodes": [p.nnodes, p.node_rank, f"{p.master_addr}:{p.master_port}"],
    }


def kernels() -> dict[str, dict[str, list[str]]]:
    """Format and use -> backend -> GPUs that vLLM's own classes say they run on, packages they need taken as there."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    class Pretended(CpuPlatform):
        """A GPU of capability `now`, as the kernels' classes ask for it."""

        now = (0, 0)
        is_cuda = is_cuda_alike = lambda self: True
        is_cpu = is_xpu = is_rocm = lambda self: False

        def get_device_capability(self, device_id=0):
            return DeviceCapability(*self.now)

        def has_device_capability(self, capability, device_id=0):
            return self._number(self.now) >= self._number(capability)

        def is_device_capability(self, capability, device_id=0):
            return self._number(self.now) == self._number(capability)

        def is_device_capability_family(self, capability, device_id=0):
            return self._number(self.now) // 10 == capability // 10

        def supports_fp8(self):
            return self.has_device_capability(89)

        def support_deep_gemm(self):
            return cuda.CudaPlatformBase.support_deep_gemm.__func__(self)

        @staticmethod
        def _number(capability):
            return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]

    for extension in (
        "vllm._C",
        "vllm._C_stable_libtorch",
    ):  # compiled, of the wheel or of a GPU: nothing here calls it
        sys.modules.setdefault(extension, ModuleType(extension))
    cuda = import_module("vllm.platforms.cuda")
    mxfp4, fp8 = (import_module(f"vllm.model_executor.layers.fused_moe.oracle.{name}") for name in ("mxfp4", "fp8"))
    linear = import_module("vllm.model_executor.kernels.linear")
    gpu = Pretended()

    def pretend() -> None:  # again after each import: modules keep the names they took
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm."):
                if hasattr(module, "current_platform"):
                    module.current_platform = gpu
                for there in [
                    n for n in vars(module) if n.startswith("has_") or n.endswith("blockscale_gemm_supported")
                ]:
                    setattr(module, there, lambda *a, **k: True)
                if hasattr(module, "is_deep_gemm_supported"):
                    module.is_deep_gemm_supported = gpu.support_deep_gemm

    def experts(oracle, backends, weights, activation) -> bool:
        classes = [(b, k) for b in backends for k in oracle.backend_to_kernel_cls(b)]
        pretend()
        return any(
            k._supports_current_device() and k._supports_quant_scheme(weights, activation(b)) for b, k in classes
        )

    def run(form: str, backend: str) -> bool:
        if form == "mxfp4":
            return experts(mxfp4, mxfp4.map_mxfp4_backend(backend), mxfp4.kMxfp4Static, mxfp4._backend_activation_key)
        if form == "fp8":
            found = fp8.map_fp8_backend(backend)
            found = found if isinstance(found, list) else [found]
            return experts(fp8, found, fp8.kFp8Static128BlockSym, lambda b: fp8.kFp8Dynamic128Sym)
        classes = linear._filter_kernels_by_backend(backend, linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA])
        pretend()
        return any(k.is_supported(gpu._number(gpu.now))[0] for k in classes)

    from moe_rl.config.kernels import EXPERTS, LINEARS

    out: dict[str, dict[str, list[str]]] = {}
    for use, backends in (*EXPERTS.items(), ("fp8 linears", LINEARS["fp8"])):
        for backend in backends:
            where = out.setdefault(use, {}).setdefault(backend, [])
            for name, Pretended.now in GPUS.items():
                if run(use, backend):
                    where.append(name)
    return out


if __name__ == "__main__":
    if sys.argv[1]:
        sys.path.insert(0, sys.argv[1])
    import vllm

    asked = json.load(sys.stdin)
    found = {"version": vllm.__version__, "verdicts": [verdict(a) for a in asked]}
    print(json.dumps(found | ({"kernels": kernels()} if sys.argv[2:] else {})))
