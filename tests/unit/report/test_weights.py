"""Weights on the FP8 grid, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.fp8.formats import E4M3, E5M2
from megafp8.report.weights import LOG2_EDGES, magnitudes, read_spread, spread
from tests.unit.report.made_run import make_run

NAME = "optimizer.master.layers.0.mlp.down.weight"


def test_magnitudes_are_the_formats_positive_values() -> None:
    # E4M3: 15 exponents x 8 less the NaN at the top of the last, 7 subnormals, without zero: 126 values
    assert len(magnitudes(E4M3)) == 126
    # E5M2: 30 exponents x 4, and 3 subnormals
    assert len(magnitudes(E5M2)) == 123
    for fmt in (E4M3, E5M2):
        values = magnitudes(fmt)
        assert values[-1] == 1.0
        assert values[0] * fmt.max == fmt.smallest
        assert (np.diff(values) > 0).all()


def test_rounding_by_hand() -> None:
    # amax 448: scale 1, so E4M3 keeps 448 and 1.125 and rounds 1.06 to 1.0; 2**-11 is below half of its smallest
    x = torch.tensor([[448.0, 1.125], [1.06, 2.0**-11]])
    found = spread([(NAME, x), ("optimizer.master.final_norm.weight", torch.ones(2))], Path("x"))
    assert found is not None
    assert (found.num_tensors, found.num_weights) == (1, 4)
    e4m3, e5m2, bf16 = found.table()
    assert e4m3["zeroed_percent"] == 25.0
    assert e5m2["zeroed_percent"] == bf16["zeroed_percent"] == 0.0
    # relative errors: 0.06 / 1.06 and 1 for what vanished; fp32 inputs are right to 2**-24
    assert e4m3["relative_percent"] == pytest.approx(100 * (0.06 / 1.06 + 1.0) / 4, rel=1e-5)
    assert float(bf16["snr_db"]) > float(e4m3["snr_db"])


def test_each_tensor_has_a_scale_of_its_own() -> None:
    # 2**-17 is zero in E4M3 at scale 1, and 448 * 2**-17 = 7 * 2**-11 is above half of the smallest value, 2**-10
    x = torch.tensor([1.0, 2.0**-17])
    tables = []
    for factor in (1.0, 2.0**-9):  # a power of two changes no rounding
        found = spread([(NAME, x * factor), (NAME.replace("0", "1"), x)], Path("x"))
        assert found is not None
        tables.append([(row["zeroed_percent"], row["relative_percent"]) for row in found.table()])
    assert tables[0] == tables[1]
    assert tables[0][0][0] == 0.0


def test_histograms_count_every_weight() -> None:
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    found = spread([(NAME, x)], Path("x"))
    assert found is not None
    assert found.linear_counts.sum() == x.numel()
    assert found.log2_counts.sum() == x.numel() - 1
    assert found.num_zero == 1
    assert found.log2_counts[-1] >= 1  # the largest itself, at 2**0
    assert LOG2_EDGES[-1] == 0.0


def test_reads_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, layers=2)
    found = read_spread(folder)
    assert found is not None
    assert found.num_tensors == 2 * 4
    assert found.checkpoint.name == "step_00000020"


def test_nothing_to_read_is_none(tmp_path: Path) -> None:
    assert read_spread(make_run(tmp_path / "run", steps=5, checkpoint=False)) is None
    assert spread([(NAME, torch.zeros(4, 4))], Path("x")) is None
