"""Every recipe on every backend trains: the loss goes where BF16's goes."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8.linear import begin_step, update_states
from megafp8.models import ModelConfig, build
from megafp8.nn.precision import RECIPES, PrecisionConfig
from megafp8.optim.adamw import AdamW
from megafp8.optim.config import OptimizerConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh

SMALL = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=128, num_attention_heads=4, num_kv_heads=2, vocab_size=128,
    max_sequence_length=32, init_std=0.1,
)  # fmt: skip
STEPS = 40


def curve(precision: PrecisionConfig) -> list[float]:
    """Losses of 40 steps on one repeated batch of a pattern that a bigram model can learn."""
    mesh = Mesh.single()
    model = build(SMALL, precision=precision, seed=3)
    named = list(model.named_parameters())
    buckets, optimizer = GradBuckets(named, mesh), AdamW(named, OptimizerConfig(lr=3e-3), mesh)
    start = torch.randint(0, 128, (8, 1), generator=torch.Generator().manual_seed(0))
    tokens = (start + 5 * torch.arange(33)) % 128
    losses = []
    for step in range(1, STEPS + 1):
        begin_step(model.fp8_states.values(), step, step)
        buckets.zero_()
        loss, count = model(tokens[:, :-1], tokens[:, 1:], loss_scale=1 / 256)
        (loss / 256).backward()
        update_states(model.fp8_states.values())
        buckets.finish()
        optimizer.step(3e-3)
        losses.append(float(loss.detach()) / int(count))
    return losses


@pytest.fixture(scope="module")
def bf16() -> list[float]:
    return curve(PrecisionConfig())


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [(f"emulated-{mode}", name) for mode in ("fast", "exact") for name in RECIPES]
    + [("native", "delayed"), ("native", "current")],
)
def test_a_recipe_on_a_backend_follows_bf16(bf16, recipe, backend):
    name, _, mode = backend.partition("-")
    fp8 = curve(PrecisionConfig(recipe=recipe, backend=name, emulation=mode or "fast"))
    assert bf16[0] > 4.5 and bf16[-1] < 0.1  # ln 128 = 4.85 at the start: BF16 has learned
    # E4M3 keeps 3 bits of mantissa: a product of two rounded operands errs by up to 2^-3 relative, independently over
    # 64 to 128 summands, so an activation errs by about 2^-4 / sqrt(3) and the loss of an early step by well under 2 %
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02)
    # later the curves part by what the noise of the gradients does: 0.02 to 0.05 where the loss falls fastest; three
    # times that is the band. E2M1 keeps 1 bit: four times the noise. A recipe that is off (a scale inverted, a tensor
    # clipped) stays above 4.
    assert max(abs(a - b) for a, b in zip(fp8, bf16, strict=True)) < (0.6 if recipe == "nvfp4" else 0.15)
    assert abs(fp8[-1] - bf16[-1]) < 0.01
