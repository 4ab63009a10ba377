"""Smooth-SwiGLU over ranks: channels and experts lie whole on a rank, so that codes are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_fp8_meshes import LOSS, NOISE, NOISE_NORM, STEPS, Setting, curve

# blocks of 32 make the codes of down's input and weight the same wherever its channels are cut
SMOOTH: dict[str, Any] = {"recipe": "mxfp8", "smooth": True}


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=["tp2", "ep2"])
def test_ranks_smooth_as_one_process(parallel: dict[str, int]) -> None:
    experts = "ep" in parallel
    (alone,) = run_ranks(curve, 1, Setting({}, experts=experts, **SMOOTH))
    (plain,) = run_ranks(curve, 1, Setting({}, experts=experts, recipe="mxfp8"))
    # powers of two change no mantissa: only what lies at the ends of a block's range is rounded otherwise
    assert alone.losses == pytest.approx(plain.losses, rel=2 * NOISE)
    for found in run_ranks(curve, 2, Setting(parallel, experts=experts, **SMOOTH)):
        # with experts a rank has its own tokens, hence other peaks: codes differ, the function does not
        first = NOISE if experts else LOSS
        assert found.losses[0] == pytest.approx(alone.losses[0], rel=first)
        assert found.losses == pytest.approx(alone.losses, rel=2 * NOISE)
        assert found.norms == pytest.approx(alone.norms, rel=2 * NOISE_NORM)
        assert len(found.losses) == STEPS
