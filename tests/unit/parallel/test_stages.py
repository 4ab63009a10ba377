"""Layers of each stage, ranks of stages, and the rules that a split must keep."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.stages import num_stages, schedule_problems, spans_of, stage_spans


def config(**values: Any) -> ParallelConfig:
    return ParallelConfig(**values)


def test_spans_cover_all_layers_in_order() -> None:
    assert stage_spans(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert stage_spans(7, 4, layers_per_stage=(1, 2, 3, 1)) == [(0, 1), (1, 3), (3, 6), (6, 7)]
    both = {"count_embedding_as_layer": True, "count_loss_as_layer": True}
    assert stage_spans(6, 4, **both) == [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert stage_spans(7, 4, count_loss_as_layer=True) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    # Llama 3's 126 layers: stages of the embedding and of the loss alone (arXiv 2407.21783, section 3.3.2)
    assert stage_spans(126, 128, **both) == [(0, 0), *((i, i + 1) for i in range(126)), (126, 126)]
    assert stage_spans(3, 1, count_embedding_as_layer=True) == [(0, 3)]
    assert spans_of(config(pp=2, schedule="zb_v"), 8) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert stage_spans(2, 3, count_embedding_as_layer=True) == [(0, 0), (0, 1), (1, 2)]


def test_stages_of_each_schedule() -> None:
    for schedule, stages in {"1f1b": 4, "gpipe": 4, "zb_h1": 4, "zb_v": 8, "dualpipe_v": 8}.items():
        assert num_stages(config(pp=4, schedule=schedule)) == stages
    assert num_stages(config(pp=4, schedule="interleaved", virtual_stages=3)) == 12
    assert num_stages(config(pp=1, schedule="zb_v")) == 1


CASES: list[tuple[dict[str, Any], int, list[str]]] = [
    # what is written, layers, words of each line; none: it may run
    ({}, 5, []),
    ({"pp": 4}, 8, []),
    ({"pp": 4, "virtual_stages": 2, "schedule": "interleaved"}, 8, []),
    ({"pp": 2, "schedule": "zb_v", "virtual_stages": 2}, 8, []),
    ({"pp": 1, "schedule": "zb_v"}, 3, []),
    ({"pp": 4, "layers_per_stage": (2, 3, 3, 2)}, 10, []),
    ({"pp": 4, "layers_per_stage": (0, 3, 3, 0)}, 6, []),
    ({"pp": 4, "count_embedding_as_layer": True, "count_loss_as_layer": True}, 10, []),
    ({"pp": 4}, 10, ["num_layers 10 is not divisible by parallel.pp 4; nearest: num_layers = 8 or 12, pp = 2 or 5"]),
    ({"pp": 4}, 2, ["nearest: num_layers = 4, pp = 2"]),
    ({"pp": 4, "count_loss_as_layer": True}, 8, [r"8 \+ loss = 9 is not .* num_layers = 7 or 11, pp = 3 or 9"]),
    ({"pp": 2, "schedule": "zb_v"}, 6, ["divisible by parallel.pp 2 x 2 stages a rank; nearest: num_layers = 4"]),
    ({"virtual_stages": 2}, 6, ["one pipeline rank has one stage; nearest: 1, or pp = 2"]),
    ({"pp": 2, "virtual_stages": 2}, 6, ['"1f1b" has one stage a rank; nearest: 1, or "interleaved"']),
    ({"pp": 2, "schedule": "interleaved"}, 6, ["virtual_stages > 1; nearest: 2"]),
    ({"pp": 2, "schedule": "zb_v", "virtual_stages": 3}, 8, ["has 2 stages a rank; nearest: 2"]),
    ({"pp": 2, "layers_per_stage": (2, 2, 2)}, 6, ["3 stages, but pp 2 = 2; nearest: .3, 3."]),
    ({"pp": 4, "layers_per_stage": (2, 2, 2, 3)}, 8, ["9 layers, but model.num_layers is 8; nearest: .2, 2, 2, 2."]),
    ({"pp": 4, "layers_per_stage": (2, 0, 3, 3)}, 8, ["only the first and the last stage can be without layers"]),
    ({"pp": 2, "layers_per_stage": (-1, 9)}, 8, ["give the others 1 or more"]),
    ({"pp": 2, "layers_per_stage": (4, 4), "count_loss_as_layer": True}, 8, ["count_loss_as_layer = true is for"]),
    ({"pp": 3, "virtual_stages": 2, "schedule": "gpipe"}, 8, ["has one stage a rank", "8 is not divisible"]),
]


@pytest.mark.parametrize(("values", "layers", "lines"), CASES)
def test_rules(values: dict[str, Any], layers: int, lines: list[str]) -> None:
    found = schedule_problems(config(**values), layers)
    assert len(found) == len(lines), found
    for line, words in zip(found, lines):
        assert re.search(words, line), line
    if not found:
        spans = spans_of(config(**values), layers)
        assert [spans[0][0], spans[-1][1]] == [0, layers]


def test_the_nearest_values_that_are_named_may_run() -> None:
    for pp in range(2, 9):
        for layers in range(1, 30):
            for line in schedule_problems(config(pp=pp), layers):
                numbers = re.search(r"num_layers = ([\d or]+), pp = ([\d or]+),", line)
                assert numbers, line
                for near in numbers[1].split(" or "):
                    assert not schedule_problems(config(pp=pp), int(near))
                for near in numbers[2].split(" or "):
                    assert not schedule_problems(config(pp=int(near)), layers)
