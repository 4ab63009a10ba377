"""Compiled kernels: bit-equal to their definition, one compilation for all sizes, plain where there is no compiler."""

import logging

import pytest
import torch

from megafp8.fp8 import LinearState, backend, kernels, quantized_linear, recipe, update_states


def odd_tensor(size: int) -> torch.Tensor:
    """Every bf16 pattern that fits, then normals: NaN, infinities, subnormals, both zeros."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    normals = torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16()
    return torch.cat([patterns, normals])[-size:] if size < 65536 else torch.cat([patterns, normals])


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    nan = b.isnan()
    assert torch.equal(a.isnan(), nan)
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(a[~nan].view(bits), b[~nan].view(bits))


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_compiled_equals_the_definition(name, role):
    spec = recipe(name).spec(role)
    for size in (70_001, 1, 31, 4096):
        for scale in (1.0, 37.3, 2.0**-13, 3e38):
            x, given = odd_tensor(size), torch.tensor([scale]) if name == "delayed" else None
            if name == "current":
                x = x[x.isfinite()] * scale if size > 65536 else x
            compiled = kernels.compiled_kernels().quantize(x, spec, given)
            plain = kernels.eager_kernels().quantize(x, spec, given)
            for a, b in zip(compiled, plain, strict=True):
                assert_same(a, b)


def test_compiled_rescale_equals_the_definition():
    generator = torch.Generator().manual_seed(2)
    acc = torch.randn(33, 48, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    a, b = torch.tensor([0.0371]), torch.tensor([1.7e-3])
    for extra in ((), (bias,)):
        compiled, plain = acc.clone(), acc.clone()
        kernels.compiled_kernels().rescale_(compiled, a, b, *extra)
        kernels.eager_kernels().rescale_(plain, a, b, *extra)
        assert_same(compiled, plain)
        assert not torch.equal(plain, acc)


def test_training_is_bit_equal_compiled_or_not():
    def run(compiled: bool):
        state = LinearState("layer", recipe("delayed"), backend("emulated", "fast", compiled=compiled))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
        weight = torch.randn(48, 32, generator=generator).bfloat16().requires_grad_()
        bias = torch.randn(48, generator=generator).bfloat16().requires_grad_()
        for _ in range(3):
            y = quantized_linear(x, weight, bias, state)
            y.backward(y.detach() * 1e-3)
            update_states([state])
        return [y, x.grad, weight.grad, bias.grad, *state.tensors().values()]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_other_sizes_and_evaluation_compile_nothing_anew():
    """A recompilation costs seconds in the middle of a run; grad mode, views and sizes must not cause one."""

    def run(tokens: int, inputs: int, outputs: int, grad: bool):
        state = LinearState("layer", recipe("delayed"), backend("emulated", "fast"))
        x = torch.randn(2, tokens // 2, inputs).bfloat16()
        weight = torch.nn.Parameter(torch.randn(2, outputs // 2, inputs).bfloat16())
        with torch.set_grad_enabled(grad):
            y = quantized_linear(x.requires_grad_(grad), weight.flatten(0, 1), None, state)
            if grad:
                y.sum().backward()

    run(32, 48, 64, True)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(32, 48, 64, False)
        run(64, 64, 64, True)
        run(2, 128, 16, True)
        run(2048, 512, 1408, False)


def test_inside_a_compiled_layer():
    state = LinearState("layer", recipe("delayed"), backend("emulated", "fast"))
    weight = torch.randn(48, 32).bfloat16().requires_grad_()
    layer = lambda t: torch.relu(quantized_linear(t * 2, weight, None, state))  # noqa: E731
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    y = torch.compile(layer)(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert x.grad is not None and state.tensors()["grad_output.amax_history"][0] > 0


def test_without_a_compiler_it_runs_plain_and_says_so_once(monkeypatch, caplog):
    import torch._inductor.config as inductor

    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    torch._dynamo.reset()
    kernels.compiled_kernels.cache_clear()
    # not by monkeypatch: undoing it leaves inductor's configuration without the entry
    broken = inductor.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True})
    with broken, caplog.at_level(logging.WARNING, logger="megafp8"):
        assert kernels.compiled_kernels() is kernels.eager_kernels()
        kernels.compiled_kernels()
    said = [r.message.split(" reason=")[0] for r in caplog.records if r.name.startswith("megafp8")]
    assert said == ["fp8 kernels run uncompiled, slower"]
    kernels.compiled_kernels.cache_clear()
