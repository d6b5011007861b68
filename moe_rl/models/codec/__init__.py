"""The two weight formats of a released DeepSeek-V4 checkpoint: MXFP4 and FP8 in blocks, to and from bf16 or fp32.

MXFP4 (OCP Microscaling Formats v1.0): values of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two to a byte, the first
in the low nibble, under one E8M0 scale 2**(byte - 127) for every 32 along the last axis. FP8: values of E4M3 (OCP OFP8 v1.0,
finite up to 448) under one scale for each block of 128x128, E8M0 or float32; blocks at the far edges may be smaller.

What an encoder chooses, bit for bit the same on every device:
- E8M0 scale: the smallest power of two that no value of the block overflows, 2**ceil(log2(amax / 6)), with 448 for FP8. DeepSeek's
  inference code (kernel.py: fast_round_scale) and nvidia-modelopt choose so. MX v1.0, section 6.3, takes
  2**floor(log2(amax)) / 4 instead and clamps what is then above 6: the largest weight of a block would lose up to a quarter.
- float32 scale: amax / 448, as in DeepSeek-V3's weights.
- No scale is below 2**-127 (E8M0's smallest) or 2**-126 (the smallest normal float32): blocks of zeros get that one, and values
  far below it become zeros. None exceeds 2**126: nothing finite leaves E8M0's range upwards.
- Values round to the nearest, ties to even, and keep their sign: -0.0 and what rounds to it are code 8 (0x80 in FP8).

Decode, encode, decode returns the same values, for every byte under every E8M0 scale. The bytes are the same, too, where a block
is in normal form, its largest value being 4 or 6 (FP8: above 224), or its scale is byte 0. Otherwise, and for blocks of zeros, the
same values come back under a smaller scale. With float32 scales through bf16 the FP8 codes come back, and the scale to 2**-8;
from there on nothing changes any more. E4M3 values under E8M0 bytes 0 to 2 can be too small for bf16, and are rounded.

Values that are not finite are refused by name, in a weight and as what a decoder would return (a NaN byte, an E8M0 scale of
255, an overflow). On a GPU the question costs a wait for the device: `NonFinite` puts it once for many tensors.
"""

from __future__ import annotations

from types import ModuleType

import torch

from moe_rl.errors import UserError

from . import plain

MX = 32  # values under one scale of MXFP4
BLOCK = 128  # rows and columns under one scale of FP8
FLOATS = (torch.bfloat16, torch.float32)


class NonFinite:
    """Collects, for many tensors, whether values that are not finite were met, and asks their devices once.

    Hand one to a run of encode or decode calls as `checks`, and call `raise_if_any` before any of the results is used.
    """

    def __init__(self) -> None:
        self._flags: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, flag: torch.Tensor) -> None:
        """Note a tensor's flag: a scalar, not zero if it is bad, of any dtype and device."""
        self._flags.append((name, flag))

    def raise_if_any(self) -> None:
        """UserError `codec.non_finite` naming every bad tensor since the last call; one transfer per device."""
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, flag in self._flags:
            by_device.setdefault(flag.device, []).append((name, flag))
        self._flags = []
        bad = []
        for flags in by_device.values():
            values = torch.stack([flag.to(torch.int32).reshape(()) for _, flag in flags]).tolist()
            bad += [name or "(unnamed)" for (name, _), value in zip(flags, values, strict=True) if value]
        bad = list(dict.fromkeys(bad))  # one that was encoded and decoded is named once
        if bad:
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            raise UserError(
                "codec.non_finite",
                f"values that are not finite in {', '.join(bad[:8])}{more}",
                "NaN, infinity, a NaN scale, or a scale whose values overflow: no such block has an encoding or a use",
                "a checkpoint: fetch the file again; a run: resume from the last checkpoint before the weights diverged",
            )


def _settle(name: str, flag: torch.Tensor, checks: NonFinite | None) -> None:
    """Note the flag for later, or raise now."""
    now = checks is None
    checks = checks or NonFinite()
    checks.add(name, flag)
    if now:
        checks.raise_if_any()


def _require(ok: bool, name: str, what: str) -> None:
    if not ok:
        raise UserError(
            "codec.geometry",
            f"{name or '(unnamed)'}: {what}",
            "weight and scales do not belong together, or are not of this format",
            "check the checkpoint's files, and that its config.json names the format they hold",
        )


def _kernels(tensor: torch.Tensor) -> ModuleType:
    """What computes for a tensor: `fused` on a GPU, else `plain`; the same functions, the same bits."""
    if not tensor.is_cuda:
        return plain
    from . import fused  # needs Triton, which PyTorch for a CPU comes without

    return fused


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def mxfp4_decode(
    packed: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "",
    checks: NonFinite | None = None,
) -> torch.Tensor:
    """Packed MXFP4 as numbers, exactly.

    packed: uint8 or int8 [..., K/2]; scales: E8M0, uint8 or float8_e8m0fnu [..., K/32]; returns bf16 or fp32 [..., K].
    UserError `codec.geometry` for shapes or dtypes that do not fit, `codec.non_finite` for a scale of 255 or an overflow.
    """
    _require(packed.dtype in (torch.uint8, torch.int8), name, f"MXFP4 bytes are uint8 or int8, not {packed.dtype}")
    _require(
        scales.dtype in (torch.uint8, torch.float8_e8m0fnu), name, f"MXFP4 scales are E8M0 bytes, not {scales.dtype}"
    )
    _require(dtype in FLOATS, name, f"decoding gives bfloat16 or float32, not {dtype}")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1]) if packed.ndim else ()
    _require(
        bool(shape) and shape[-1] % MX == 0 and scales.shape == (*shape[:-1], shape[-1] // MX),
        name,
        f"bytes {list(packed.shape)} do not go with scales {list(scales.shape)}: a scale is for {MX // 2} bytes",
    )
    packed, scales = packed.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)
    out, flag = _kernels(packed).mxfp4_decode(packed.view(-1, MX // 2), scales.view(-1), dtype)
    _settle(name, flag, checks)
    return out.view(shape)


def mxfp4_encode(
    weight: torch.Tensor, *, name: str = "", checks: NonFinite | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., K], bf16 or fp32, K a multiple of 32, as (packed uint8 [..., K/2], E8M0 bytes uint8 [..., K/32]).

    UserError `codec.geometry` for another shape or dtype, `codec.non_finite` for NaN or infinity.
    """
    _require(weight.dtype in FLOATS, name, f"MXFP4 encodes bfloat16 and float32, not {weight.dtype}")
    _require(
        weight.ndim > 0 and weight.shape[-1] % MX == 0,
        name,
        f"shape {list(weight.shape)}: MXFP4 needs a last axis that {MX} divides",
    )
    blocks = weight.detach().contiguous().view(-1, MX)
    packed, scales, flag = _kernels(blocks).mxfp4_encode(blocks)
    _settle(name, flag, checks)
    lead, k = weight.shape[:-1], weight.shape[-1]
    return packed.view(*lead, k // 2), scales.view(*lead, k // MX)


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8_decode(
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "",
    checks: NonFinite | None = None,
) -> torch.Tensor:
    """FP8 in blocks of 128x128 as numbers, each value times its scale rounded once.

    weight: float8_e4m3fn [M, K]; scales: float32, float8_e8m0fnu or its bytes as uint8 [ceil(M/128), ceil(K/128)]; returns bf16 or
    fp32 [M, K]. UserError `codec.geometry` for shapes or dtypes that do not fit, `codec.non_finite` for NaN or an overflow.
    """
    kinds = (torch.float32, torch.float8_e8m0fnu, torch.uint8)
    _require(weight.dtype == torch.float8_e4m3fn, name, f"FP8 weights are float8_e4m3fn, not {weight.dtype}")
    _require(scales.dtype in kinds, name, f"FP8 scales are float32 or E8M0, not {scales.dtype}")
    _require(dtype in FLOATS, name, f"decoding gives bfloat16 or float32, not {dtype}")
    _require(
        weight.ndim == 2 and scales.shape == _grid(weight),
        name,
        f"weight {list(weight.shape)} does not go with scales {list(scales.shape)}: a scale is for {BLOCK}x{BLOCK}",
    )
    if scales.dtype != torch.float32:
        scales = plain.powers(scales.contiguous(), torch.float32)  # exact
    out, flag = _kernels(weight).fp8_decode(weight.contiguous(), scales.contiguous(), dtype)
    _settle(name, flag, checks)
    return out


def fp8_encode(
    weight: torch.Tensor, *, scale_dtype: str = "e8m0", name: str = "", checks: NonFinite | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [M, K], bf16 or fp32, as (float8_e4m3fn [M, K], scales [ceil(M/128), ceil(K/128)]).

    scale_dtype: "e8m0" (float8_e8m0fnu scales) or "fp32". UserError `codec.geometry` for another shape or dtype,
    `codec.non_finite` for NaN or infinity.
    """
    _require(weight.dtype in FLOATS, name, f"FP8 encodes bfloat16 and float32, not {weight.dtype}")
    _require(weight.ndim == 2, name, f"shape {list(weight.shape)}: FP8 blocks need a matrix")
    if scale_dtype not in ("e8m0", "fp32"):
        raise ValueError(f"scale_dtype is 'e8m0' or 'fp32', not {scale_dtype!r}")
    values, scales, flag = _kernels(weight).fp8_encode(weight.detach().contiguous(), scale_dtype == "e8m0")
    _settle(name, flag, checks)
    return values, scales


def _grid(weight: torch.Tensor) -> tuple[int, int]:
    """Number of FP8 blocks along rows and columns."""
    return -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
