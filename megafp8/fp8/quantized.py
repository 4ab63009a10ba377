"""QuantizedTensor: codes and their inverse scale. A cache of a high-precision tensor, never part of a state dict."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megafp8.fp8.formats import Format, table
from megafp8.fp8.kernels import amax_of, encode, scaler
from megafp8.fp8.recipe import TensorSpec, scale_inverse


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor with one scale.

    Attributes:
        data: the codes, in `format.dtype`; or their values in bf16 (both formats fit exactly), which is what the
            emulated backend's fast mode multiplies.
        scale_inv: fp32 [1]; the tensor is `data * scale_inv`.
        format: of the codes.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    format: Format

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor that the codes stand for, computed in fp32, same shape."""
        return (self.data.float() * self.scale_inv).to(dtype)

    def to_bytes(self) -> torch.Tensor:
        """The codes, uint8 of the same shape, as they go over the wire."""
        data = self.data if self.data.dtype == self.format.dtype else self.data.to(self.format.dtype)  # values: exact
        return data.view(torch.uint8)

    def with_bytes(self, codes: torch.Tensor) -> QuantizedTensor:
        """The tensor of these codes (uint8, any shape), with this one's scale, in the form of this one's data."""
        assert self.format.dtype is not None
        if self.data.dtype == self.format.dtype:
            return QuantizedTensor(codes.view(self.format.dtype), self.scale_inv, self.format)
        # looked up: 0.5 ns a value where torch's cast of E4M3 takes 3.4 (one thread, Zen 5)
        values = table(self.format).to(codes.device, self.data.dtype)
        data = values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        return QuantizedTensor(data, self.scale_inv, self.format)

    @functools.cached_property
    def columnwise(self) -> torch.Tensor:
        """The codes of the transpose, contiguous [K, N] for data [N, K]; with one scale they are the same bytes."""
        return self.data.t().contiguous()


def quantize(x: torch.Tensor, spec: TensorSpec, scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize to real bytes with `scale` fp32 [1], or with the scale of `x`'s own amax if None.

    Args:
        x: any floating dtype, any shape.
    """
    if scale is None:
        scale = scaler(spec)(amax_of(x))
    return QuantizedTensor(encode(x, scale, spec.format), scale_inverse(scale), spec.format)
