"""The parts of run.sh one by one, small, for pytest on a machine with a CUDA device."""

import argparse
import json

import pytest
import torch

from megafp8.fp8.recipe import recipe_names
from tests.gpu.correctness import check_recipe
from tests.gpu.report import Clock, Figures
from tests.gpu.training import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("name", recipe_names())
def test_recipe_against_the_definition(name, backend):
    found = check_recipe(name, backend, tiny=True)
    if found["status"] == "skipped":
        pytest.skip(found["reason"])
    assert found["status"] == "passed", [check for check in found["checks"] if not check["passed"]]


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_a_tiny_model_trains(name, tmp_path):
    args = argparse.Namespace(recipe=name, backend="native", micro_batch=2, steps=20, tiny=True)
    train(args, Figures(tmp_path / "figures.json"), Clock(120))
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["status"] == "passed" and len(found["losses"]) == 20, found.get("reason")
