"""What a device multiplies by itself: which recipe on which GPU, CUDA and torch, as a table and as one question.

Sources: cuBLAS 12.8 and 12.9 release notes and its table of scaling modes; torch's own checks before `scaled_mm`
(ScaledBlas.cpp): 128-element blocks on SM 9.0 only and for E4M3 only, E5M2 never times E5M2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megafp8.fp8.formats import E4M3, E5M2, E8M0, UE4M3
from megafp8.fp8.recipe import Recipe, TensorSpec

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
HOPPER = (9, 0)
BLACKWELL = (10, 0)
_GEMMS = {"forward": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
# a kind of scaling -> its name in a message, and the CUDA version whose cuBLAS first had it
_KINDS = {
    "tensor": ("FP8 with one scale", (12, 1)), "rows": ("FP8 with a scale a row", (12, 1)),
    "128": ("blocks of 128", (12, 9)), "32": ("MXFP8's blocks of 32", (12, 8)), "16": ("NVFP4's blocks of 16", (12, 8)),
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """A device as FP8 GEMMs see it.

    Attributes:
        name: for messages.
        capability: of a CUDA device; None is a CPU.
        cuda: the version that torch was built for.
        lacks_gemm: why torch has no FP8 GEMM for the device at all; empty if it has one.
    """

    name: str = "a CPU"
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] = (0, 0)
    lacks_gemm: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.capability is None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether there are tensor cores for FP8."""
        return self.capability is not None and self.capability >= FP8_CAPABILITY


@functools.cache
def _of(kind: str) -> Hardware:
    if kind != "cuda" or not torch.cuda.is_available():
        has = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
        why = "" if has else f"torch {torch.__version__} has no FP8 GEMM for a CPU, as later ones have"
        return Hardware(lacks_gemm=why)
    major, minor = (int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return Hardware(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), (major, minor))


def hardware_of(device: torch.device | str | None) -> Hardware:
    """That of this process's device; None means CUDA if there is one."""
    return _of("cuda" if device is None else torch.device(device).type)


def scaling_kind(spec: TensorSpec) -> str:
    """A key of the table: how the hardware would scale an operand quantized so."""
    if spec.block is None:
        return "tensor"
    if spec.scale_format in (E8M0, UE4M3):
        return "32" if spec.scale_format == E8M0 else "16"
    return "128" if spec.block[1] == 128 else "rows"


def refusal(recipe: Recipe, device: Hardware) -> str | None:
    """Why this device cannot multiply in this recipe by itself, or None."""
    if device.lacks_gemm:
        return device.lacks_gemm
    if not device.is_cpu and not device.multiplies_fp8:
        return f"{device.name} is SM {_dotted(device.capability)}, FP8 needs SM {_dotted(FP8_CAPABILITY)}"
    for gemm, roles in _GEMMS.items():
        left, right = (recipe.spec(role) for role in roles)
        reason = _pair_refusal(left, right, device)
        if reason:
            return f"{gemm}: {reason}" if reason.startswith("E5M2") else reason
    return None


def _pair_refusal(left: TensorSpec, right: TensorSpec, device: Hardware) -> str | None:
    kinds = {scaling_kind(left), scaling_kind(right)}
    if len(kinds) > 1:
        return f"no GEMM mixes {' with '.join(sorted(_KINDS[kind][0] for kind in kinds))}"
    (kind,) = kinds
    what, least_cuda = _KINDS[kind]
    if device.is_cpu:
        return None if kind in ("tensor", "rows") else f"torch does not multiply {what} on a CPU"
    if device.cuda < least_cuda:
        return f"{what} need CUDA {_dotted(least_cuda)}, torch was built for {_dotted(device.cuda)}"
    if kind == "128" and device.capability != HOPPER:
        return f"{what} are multiplied on Hopper (SM 9.0) only, {device.name} is SM {_dotted(device.capability)}"
    if kind in ("32", "16") and device.capability is not None and device.capability < BLACKWELL:
        return f"{what} need Blackwell (SM 10.0), {device.name} is SM {_dotted(device.capability)}"
    if left.format == right.format == E5M2:
        return "E5M2 times E5M2 is no product of the tensor cores"
    if kind in ("128", "32") and (left.format, right.format) != (E4M3, E4M3):
        return f"E5M2 is not taken by torch's GEMM with {what}; nearest: fp8_format = 'E4M3'"
    return None


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
