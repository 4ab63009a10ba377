"""Elementwise work of a layer as pairs of pure functions, forward and backward, compiled where a compiler exists.

Each function is one pass over its inputs when torch.compile fuses it; hand-written backward functions keep what is
saved small. Only fused elementwise work lives here; GEMMs, attention and collectives do not. All arithmetic is in
fp32 (fp64 for fp64 inputs), whatever the inputs' dtype; outputs have the inputs' dtype.

Shapes: S sequence, B micro-batch, H hidden, F ffn, V vocabulary (local shard), g kv heads, r query heads for each kv
head, d head dim, N = S * B.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from megafp8.core.log import event, get_logger

Tensor = torch.Tensor
_logger = get_logger(__name__)


def wide(x: Tensor) -> Tensor:
    """x in the dtype of the arithmetic: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- normalisation -----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., H] -> its norm [..., H] and 1 / rms [..., 1] in fp32. Zhang and Sennrich 2019."""
    xw = wide(x)
    rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
    return (xw * rstd * wide(weight)).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, dx: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (plus `dx`, the residual stream's own, if given) and of weight."""
    xhat, g = wide(x) * rstd, wide(dy)
    dweight = (g * xhat).flatten(0, -2).sum(0)
    g = g * wide(weight)
    out = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if dx is not None:
        out = out + wide(dx)
    return out.to(x.dtype), dweight.to(weight.dtype)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch, its norm, and 1 / rms: the norm is of the sum as rounded to x's dtype."""
    total = (wide(x) + wide(branch)).to(x.dtype)
    return total, *rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., H] -> its norm, mean [..., 1] and 1 / std [..., 1] in fp32. Ba, Kiros and Hinton 2016."""
    xw = wide(x)
    mean = xw.mean(-1, keepdim=True)
    rstd = torch.rsqrt((xw - mean).square().mean(-1, keepdim=True) + eps)
    return ((xw - mean) * rstd * wide(weight) + wide(bias)).to(x.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, dx: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (plus `dx`, if given), weight and bias."""
    xhat, g = (wide(x) - mean) * rstd, wide(dy)
    dweight, dbias = (g * xhat).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)
    g = g * wide(weight)
    out = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    if dx is not None:
        out = out + wide(dx)
    return out.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def add_layer_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + branch, its norm, mean and 1 / std."""
    total = (wide(x) + wide(branch)).to(x.dtype)
    return total, *layer_norm(total, weight, bias, eps)


# --- rotary positions --------------------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + d/2) of the last dim by the angles; cos, sin broadcast over heads."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def split_rotate(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    scale: float,
    q_order: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused qkv to q, k, v as attention wants them, in one pass.

    Args:
        qkv: [S, B, g, r + 2, d].
        cos, sin: [S, 1 or B, d / 2] in fp32 (scaled by yarn's attention factor), or None for no rotation.
        q_weight, k_weight: [d], RMSNorm of each head before the rotation, or None for none.
        scale: of q, so that attention need not: exact in fp32, before q is rounded.
        q_order: how q's dims (S, B, g, r, d) are ordered in the result.

    Returns:
        q in `q_order`; k, v [B, g, S, d]; all contiguous.
    """
    r = qkv.shape[3] - 2
    q, k, v = wide(qkv[:, :, :, :r]), wide(qkv[:, :, :, r]), qkv[:, :, :, r + 1]
    if q_weight is not None and k_weight is not None:
        q, k = _unit(q, eps)[0] * wide(q_weight), _unit(k, eps)[0] * wide(k_weight)
    if cos is not None and sin is not None:
        q = _rotate(q, cos[:, :, None, None], sin[:, :, None, None])
        k = _rotate(k, cos[:, :, None], sin[:, :, None])
    q = (q * scale).to(qkv.dtype).permute(q_order).contiguous()
    k = k.to(qkv.dtype).permute(1, 2, 0, 3).contiguous()
    return q, k, v.permute(1, 2, 0, 3).contiguous()


def split_rotate_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    q_order: tuple[int, ...],
) -> Tensor:
    """Gradient of qkv [S, B, g, r + 2, d], without head norms; dk, dv may be wider than dq."""
    back = tuple(q_order.index(dim) for dim in range(5))
    gq = wide(dq).permute(back) * scale
    gk, gv = wide(dk).permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
    if cos is not None and sin is not None:
        gq = _rotate(gq, cos[:, :, None, None], -sin[:, :, None, None])
        gk = _rotate(gk, cos[:, :, None], -sin[:, :, None])
    parts = (gq, gk.unsqueeze(3), gv.unsqueeze(3))
    return torch.cat([part.to(dq.dtype) for part in parts], 3)


def head_norm_backward(
    grad: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the head norms: gradient of the normed qkv -> gradients of qkv, q_weight [d], k_weight [d]."""
    r = qkv.shape[3] - 2
    parts, weights = [], []
    for rows, weight in ((slice(0, r), q_weight), (slice(r, r + 1), k_weight)):
        xhat, rstd = _unit(wide(qkv[:, :, :, rows]), eps)
        g = wide(grad[:, :, :, rows])
        weights.append((g * xhat).flatten(0, -2).sum(0).to(weight.dtype))
        g = g * wide(weight)
        parts.append((rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(qkv.dtype))
    return torch.cat((*parts, grad[:, :, :, r + 1 :]), 3), weights[0], weights[1]


# --- activations -------------------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2, F] -> silu(gate) * up [..., F]. Shazeer 2020."""
    gate, up = wide(gate_up).unbind(-2)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up [..., 2, F]."""
    gate, up = wide(gate_up).unbind(-2)
    sigmoid = torch.sigmoid(gate)
    g = wide(dy) * sigmoid
    dgate = g * up * (1 + gate * (1 - sigmoid))
    # cast before joining: half the memory traffic of joining in fp32 (measured, 1.6 times as fast)
    return torch.cat((dgate.to(gate_up.dtype), (g * gate).to(gate_up.dtype)), -1).view(gate_up.shape)


_GELU_A, _GELU_B = 0.7978845608028654, 0.044715  # sqrt(2 / pi); Hendrycks and Gimpel 2016


def gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU, [..., F]."""
    xw = wide(x)
    return (0.5 * xw * (1 + torch.tanh(_GELU_A * (xw + _GELU_B * xw * xw * xw)))).to(x.dtype)


def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [..., F]."""
    xw = wide(x)
    tanh = torch.tanh(_GELU_A * (xw + _GELU_B * xw * xw * xw))
    slope = 0.5 * (1 + tanh) + 0.5 * xw * (1 - tanh * tanh) * _GELU_A * (1 + 3 * _GELU_B * xw * xw)
    return (wide(dy) * slope).to(x.dtype)


# --- cross entropy -----------------------------------------------------------------------------------------------


def softmax_parts(logits: Tensor, peak: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A shard's part of the log-sum-exp and of the target's logit.

    Args:
        logits: [N, V]; peak: [N, 1] fp32, the largest logit over all shards; targets: [N], local index, outside
            [0, V) if the target is another shard's.

    Returns:
        sum of exp(logit - peak) and the target's logit - peak (0 if it is not here), each [N, 1] in fp32.
    """
    shifted = wide(logits) - peak
    mine = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return shifted.exp().sum(-1, keepdim=True), torch.where(mine, shifted, 0.0).sum(-1, keepdim=True)


def softmax_gradient_(logits: Tensor, log_sum: Tensor, targets: Tensor, scale: Tensor) -> None:
    """Overwrite logits [N, V] by the gradient of the summed loss in them; fresh memory would cost more than the work.

    Args:
        log_sum: [N, 1] fp32, log-sum-exp over all shards; scale: [N, 1] fp32, 0 where the target is ignored.
    """
    mine = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    logits.copy_(((wide(logits) - log_sum).exp() - mine.to(log_sum.dtype)) * scale)


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    rms_norm, rms_norm_backward, add_rms_norm, layer_norm, layer_norm_backward, add_layer_norm, split_rotate,
    split_rotate_backward, head_norm_backward, swiglu, swiglu_backward, gelu, gelu_backward, softmax_parts,
    softmax_gradient_,
)  # fmt: skip


class Kernels:
    """The functions above by name, as they are or compiled.

    Compilation happens at a kernel's first call; if it fails (no C++ compiler, say), one event is logged and all
    kernels run uncompiled from then on. `more`: functions of other files.
    """

    def __init__(self, *, compiled: bool = False, more: tuple[Callable[..., Any], ...] = ()) -> None:
        self.compiled, self._functions = compiled, _FUNCTIONS + more
        self._calls: dict[str, Callable[..., Any]] = {f.__name__: f for f in self._functions}
        if compiled:
            self._calls = {f.__name__: self._guarded(f) for f in self._functions}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_calls"][name]
        except KeyError:
            raise AttributeError(name) from None

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, fullgraph=True)

        def first_call(*args: Any) -> Any:
            try:
                result = compiled(*args)
            except Exception as error:  # whatever the compiler meets, the plain function is right
                self._give_up(error)
                return function(*args)
            if self.compiled:
                self._calls[function.__name__] = compiled
            return result

        return first_call

    def _give_up(self, error: Exception) -> None:
        if self.compiled:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            event(_logger, "torch.compile failed, layers run uncompiled", level=logging.WARNING, reason=reason)
        self.compiled = False
        self._calls = {f.__name__: f for f in self._functions}
