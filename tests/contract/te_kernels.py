"""What Transformer Engine's compiled extension computes, in torch: per-tensor FP8, its GEMMs, norms and activations.

With `kernels(extension)` in the stub, the wheel's own Python runs delayed and current scaling from end to end: casts,
caches, amax updates, main gradients, delayed weight gradients, checkpoints. Formulas are those that the golden vectors
pin (fp8/recipe, fp8/recipes/delayed); sums are fp32, rounded once. Under delayed scaling norms and activations are
quantized from their unrounded values, as on a GPU, or, with `rounds_first`, from values in the compute dtype, as our
own layers do it: then both can be compared code by code.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.fp8.recipe import scale_from_amax, scale_inverse
from megafp8.fp8.recipes.delayed import updated

Tensor = torch.Tensor
rounds_first = False
_FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def _format(dtype: Any) -> torch.dtype:
    return _FORMATS[dtype.name]


def _is_float8(x: Any) -> bool:
    return hasattr(x, "_fp8_dtype")


def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """x by a Float8Quantizer (delayed) or Float8CurrentScalingQuantizer, into `output` if there is one."""
    assert noop is None or not bool(noop)
    wide, fmt = x.detach().float(), _format(quantizer.dtype)
    limit = torch.finfo(fmt).max
    amax = wide.abs().amax().reshape(1) if wide.numel() else wide.new_zeros(1)
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale.reshape(1)
        torch.maximum(quantizer.amax, amax, out=quantizer.amax)
    else:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        power_2, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        scale = scale_from_amax(amax, limit, power_2_scale=power_2, amax_epsilon=epsilon)
    codes = (wide * scale).clamp(-limit, limit).to(fmt).view(torch.uint8)
    if output is None:
        output = quantizer.create_tensor_from_data(codes, fake_dtype=x.dtype, internal=quantizer.internal)
    else:
        output._data = codes
    output._scale_inv = scale_inverse(scale)
    output._fp8_dtype = quantizer.dtype
    output._transpose = codes.flatten(0, -2).t().contiguous() if quantizer.columnwise_usage else None
    output._transpose_invalid = output._transpose is None
    return output


def create_empty(quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pinned: bool) -> Any:
    """Room for codes."""
    return quantize(torch.zeros(shape, dtype=dtype), _Bare(quantizer))


class _Bare:
    """A quantizer whose casts leave no amax and wait for nobody."""

    def __init__(self, quantizer: Any) -> None:
        self.__dict__.update(quantizer.__dict__)
        self.create_tensor_from_data = quantizer.create_tensor_from_data
        self.columnwise_usage, self.internal = quantizer.columnwise_usage, quantizer.internal
        self.with_amax_reduction = False
        if hasattr(self, "amax"):
            self.amax = torch.zeros(1)


def fp8_transpose(data: Tensor, dtype: Any, out: Any = None) -> Tensor:
    """Codes [..., K] as [K, ...]."""
    return data.flatten(0, -2).t().contiguous()


def decoded(x: Any) -> Tensor:
    """fp32 values of a tensor or of codes, as a matrix."""
    if not _is_float8(x):
        return x.detach().float().flatten(0, -2)
    data = x._data if x._data is not None else x._transpose.t()
    return data.view(_format(x._fp8_dtype)).float().flatten(0, -2)


def _scale(x: Any) -> Tensor | float:
    return x._scale_inv if _is_float8(x) else 1.0


def dequantize(x: Any, dtype: Any) -> Tensor:
    """Codes as values."""
    values: Tensor = (x._data.view(_format(x._fp8_dtype)).float() * x._scale_inv).to(x.dtype)
    return values


def generic_gemm(
    a: Any, trans_a: bool, b: Any, trans_b: bool, out: Any, quantizer: Any, dtype: Any, bias: Any, bias_dtype: Any,
    gelu: bool, gelu_in: Any, grad: bool, workspace: Any, size: int, accumulate: bool, precise: bool, **rest: Any,
) -> tuple[Tensor, Any, None, None]:  # fmt: skip
    """cuBLAS's view: b times a transposed (forward), b times a (input gradient), b transposed times a (weight's)."""
    assert quantizer is None and not gelu
    left, right = decoded(b), decoded(a)
    product = (left.t() if trans_b else left) @ (right.t() if trans_a else right)
    product = product * (_scale(a) * _scale(b))
    bias_grad = left.sum(0).to(bias.dtype) if grad and bias is not None else None
    if bias is not None and not grad:
        product = product + bias.float()
    if out is not None:
        out.copy_(out.float() + product if accumulate else product)
        return out, bias_grad, None, None
    torch_dtype = sys.modules["transformer_engine.pytorch.constants"].TE_DType_To_Torch[dtype]
    shape = b._data.shape if _is_float8(b) and b._data is not None else b.shape if not _is_float8(b) else None
    result = product.to(torch_dtype)
    if not trans_b and shape is not None and len(shape) > 2:
        result = result.view(*shape[:-1], -1)
    return result, bias_grad, None, None


def grouped_gemm(
    a: Any, trans_a: bool, b: Any, trans_b: bool, out: Any, dtype: Any, splits: Any, bias: Any, bias_dtype: Any,
    single: bool, pre_gelu: Any, grad: bool, workspaces: Any, size: int, accumulate: bool, precise: bool, count: int,
) -> Any:  # fmt: skip
    """generic_gemm for each expert, into pieces of out[0] (`single`) or into each of `out`."""
    pieces = list(out[0].split(list(splits))) if single else out
    for left, right, piece in zip(a, b, pieces, strict=True):
        if not piece.numel():
            continue
        nothing = (None, None, None, None, False, None)
        generic_gemm(left, trans_a, right, trans_b, piece, *nothing, grad, None, 0, accumulate, precise)
    return bias


def update(amax: Tensor, histories: list[Tensor], scales: list[Tensor], algo: str, dtype: Any, margin: int) -> None:
    """fused_amax_and_scale_update_after_reduction: histories [L, n] and scales [n] of several modules."""
    parts = amax.split([scale.numel() for scale in scales])
    for history, scale, reduced in zip(histories, scales, parts, strict=True):
        limits = torch.full_like(scale, torch.finfo(_format(dtype)).max)
        rolled, new = updated(
            history.t().contiguous(), scale, reduced, limits, margin=margin, most_recent=algo == "most_recent"
        )
        history.copy_(rolled.t())
        scale.copy_(new)


def _finished(value: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    """fp32 -> what a fused kernel gives: codes, from the unrounded values under delayed scaling."""
    if quantizer is None:
        return value.to(dtype)
    fused = hasattr(quantizer, "scale") and not rounds_first
    made = quantize(value if fused else value.to(dtype), quantizer)
    made._dtype = dtype
    return made


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    """(norm, None, 1 / rms)."""
    assert out is None and not zero_centered
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return _finished(wide * rstd[:, None] * weight.float(), quantizer, x.dtype), None, rstd


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    normed, scaled = x.float() * rstd[:, None], grad.float() * weight.float()
    dx = rstd[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero: bool
) -> tuple[Any, Tensor, Tensor]:
    """(norm, mean, 1 / deviation)."""
    assert out is None and not zero
    wide = x.float()
    mean = wide.mean(-1)
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    y = (wide - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    return _finished(y, quantizer, x.dtype), mean, rstd


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    normed, scaled = (x.float() - mean[:, None]) * rstd[:, None], grad.float() * weight.float()
    inner = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    wide = grad.float()
    return (
        (rstd[:, None] * inner).to(x.dtype), (wide * normed).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype),
    )  # fmt: skip


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def activation(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The forward kernel of `function`, quantizing if told to."""
    return lambda x, quantizer, **rest: _finished(function(x.float()), quantizer, x.dtype)


def activation_backward(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Its backward kernel."""

    def kernel(grad: Tensor, x: Tensor, quantizer: Any, **rest: Any) -> Any:
        with torch.enable_grad():
            leaf = x.detach().float().requires_grad_()
            [dx] = torch.autograd.grad(function(leaf), leaf, grad.float().reshape(function(leaf).shape))
        return _finished(dx, quantizer, x.dtype)

    return kernel


def bias_gradient_too(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """(gradient of the bias, what `kernel` gives)."""

    def both(grad: Tensor, x: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
        plain = kernel(grad, x, None)
        return plain.float().flatten(0, -2).sum(0).to(x.dtype), kernel(grad, x, quantizer)

    return both


def split_quantize(x: Tensor, splits: Any, quantizers: Any, **rest: Any) -> list[Any]:
    """Each run of rows by its own quantizer."""
    return [quantize(part, quantizer) for part, quantizer in zip(x.split(list(splits)), quantizers, strict=True)]


def padding(x: Tensor, out: Tensor, splits: Any, padded: Any) -> None:
    """Runs of rows into longer runs, zeros behind."""
    parts = zip(x.split(list(splits)), padded, strict=True)
    out.copy_(torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]))


def unpadding(x: Tensor, out: Tensor, padded: Any, splits: Any) -> None:
    """The inverse of `padding`."""
    parts = zip(x.split(list(padded)), splits, strict=True)
    out.copy_(torch.cat([part[:size] for part, size in parts]))


def masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """scaled_masked_softmax: scores [B, heads, S, S], where `mask` is true nothing is seen."""
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)  # finite: as the kernel does


def causal_softmax(x: Tensor, scale: float) -> Tensor:
    """scaled_aligned_causal_masked_softmax and scaled_upper_triang_masked_softmax."""
    return masked_softmax(x, torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), scale)


def softmax_backward(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    """Of it."""
    g, p = grad.float(), y.float()
    return (scale * p * (g - (g * p).sum(-1, keepdim=True))).to(grad.dtype)


def thd_to_bshd(x: Tensor, ends: Tensor, batch: int, longest: int) -> Tensor:
    """Documents one after the other [T, h, d] -> [documents, longest, h, d], zeros behind."""
    bounds = ends.tolist()
    parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
    return torch.stack([F.pad(part, (0, 0, 0, 0, 0, longest - len(part))) for part in parts])


def bshd_to_thd(x: Tensor, ends: Tensor, tokens: int) -> Tensor:
    """The inverse."""
    lengths = (ends[1:] - ends[:-1]).tolist()
    return torch.cat([part[:length] for part, length in zip(x, lengths, strict=True)])


KERNELS: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "create_empty_quantized_tensor": create_empty,
    "fp8_transpose": fp8_transpose,
    "dequantize": dequantize,
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": grouped_gemm,
    "fused_amax_and_scale_update_after_reduction": update,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "swiglu": activation(_swiglu),
    "dswiglu": activation_backward(_swiglu),
    "gelu": activation(_gelu),
    "dgelu": activation_backward(_gelu),
    "dbias_dgelu": bias_gradient_too(activation_backward(_gelu)),
    "bgrad_quantize": lambda grad, quantizer: (
        grad.float().flatten(0, -2).sum(0).to(grad.dtype),
        quantize(grad, quantizer),
    ),
    "split_quantize": split_quantize,
    "fused_multi_row_padding": padding,
    "fused_multi_row_unpadding": unpadding,
    "convert_thd_to_bshd": thd_to_bshd,
    "convert_bshd_to_thd": bshd_to_thd,
    "scaled_masked_softmax_forward": masked_softmax,
    "scaled_masked_softmax_backward": softmax_backward,
    "scaled_upper_triang_masked_softmax_forward": causal_softmax,
    "scaled_upper_triang_masked_softmax_backward": softmax_backward,
    "scaled_aligned_causal_masked_softmax_forward": causal_softmax,
    "scaled_aligned_causal_masked_softmax_backward": softmax_backward,
    "get_num_cublas_streams": lambda: 1,
}
