"""The noise that FP8 adds to a layer is the noise that its formats must add, no more: nothing is lost on the way."""

import math

import pytest
import torch

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, update_states
from megafp8.fp8.formats import E4M3, E5M2, Format


def rounding_noise(fmt: Format) -> float:
    """Root mean square error over root mean square value, of values spread evenly in log within the normal range.

    In [2^e, 2^(e+1)) the step is 2^(e-m), its error's variance step^2 / 12; the mean of v^2 there is 4^e * 3 / ln 4.
    """
    return 2.0**-fmt.mantissa_bits / math.sqrt(12 * 3 / math.log(4))


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-7])
def test_noise_of_the_three_gemms(name, magnitude):
    """At 1e-7 gradients lie below E5M2's smallest value; only right scales keep the noise at its floor."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 512, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(256, 512, generator=generator) * 0.02).bfloat16().requires_grad_()
    grad = (torch.randn(512, 256, generator=generator) * magnitude).bfloat16()
    state = LinearState("layer", recipe(name), backend("emulated", "exact"))
    for _ in range(2):  # the first micro-batch of delayed scaling only fills the history
        x.grad = weight.grad = None
        y = quantized_linear(x, weight, None, state)
        y.backward(grad)
        update_states([state])
        state.drop_weight_cache()
    wide_x, wide_w, wide_g = (t.detach().double() for t in (x, weight, grad))
    e4m3, e5m2 = rounding_noise(E4M3), rounding_noise(E5M2)
    for got, want, parts in (
        (y.detach(), wide_x @ wide_w.T, (e4m3, e4m3)),
        (x.grad, wide_g @ wide_w, (e5m2, e4m3)),
        (weight.grad, wide_g.T @ wide_x, (e5m2, e4m3)),
    ):
        noise = ((got.double() - want).norm() / want.norm()).item()
        # independent errors of both factors add in squares; a Gaussian is not quite even in log, and its tail and the
        # final bf16 rounding (0.2 %) count too: a tenth either way
        assert noise == pytest.approx(math.hypot(*parts), rel=0.1)
