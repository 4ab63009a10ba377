"""A training step as a GPU takes it, without one: meta tensors have no values, but torch checks them as CUDA's.

What it finds: a tensor that is made on the CPU and meets one of the device, a GEMM whose operands or scales torch
would refuse on the GPU, a shape of the real model that a recipe does not take.
"""

import argparse
import sys
from types import SimpleNamespace

import pytest
import torch

from megafp8.fp8.backends.hardware import Hardware
from megafp8.nn import loss
from megafp8.train import step
from megafp8.train.setup import assemble, make_mesh
from tests.gpu import training

HOPPER = Hardware("NVIDIA H100", (9, 0), (13, 0))
BLACKWELL = Hardware("NVIDIA B200", (10, 0), (13, 0))
MACHINES = {"none": HOPPER, "delayed": HOPPER, "current": HOPPER, "blockwise": HOPPER, "mxfp8": BLACKWELL,
            "nvfp4": BLACKWELL}  # fmt: skip


@pytest.mark.parametrize("recipe", MACHINES)
def test_two_layers_of_the_1b5_model_take_steps(recipe, monkeypatch):
    monkeypatch.setattr(sys.modules["megafp8.fp8.backend"], "hardware_of", lambda device: MACHINES[recipe])
    # what reads a value on the host
    monkeypatch.setattr(step, "count_targets", lambda parts, batches: 100)
    monkeypatch.setattr(step.Passes, "loss_sum", lambda self: torch.tensor(1.0, dtype=torch.float64))
    monkeypatch.setattr(step, "grad_norm", lambda *args: SimpleNamespace(value=1.0, finite=True))
    monkeypatch.setattr(loss, "refuse_unknown", lambda *args: None)
    calls = []
    real = training.load_run_config
    fewer = ["--model.num_layers=2", "--train.compile=off"]
    monkeypatch.setattr(training, "load_run_config", lambda path, words: real(path, [*words, *fewer]))
    native = sys.modules["megafp8.fp8.backends.native"]
    real_mm = native.scaled_mm
    monkeypatch.setattr(native, "scaled_mm", lambda *args, **kw: calls.append(args[3]) or real_mm(*args, **kw))
    args = argparse.Namespace(recipe=recipe, backend="native", micro_batch=1, steps=6, tiny=False)
    config = training.run_config(args, 1)
    parts = assemble(config, make_mesh(config, 1), torch.device("meta"), training.MarkovTokens(config, 2))
    for number in (1, 2):
        assert step.train_step(parts, number, 1e-4).finite
    linears, gemms_a_pass = 0 if recipe == "none" else 8, 3
    assert len(parts.fp8_states) == linears
    assert len(calls) == 2 * training.MICRO_BATCHES * linears * gemms_a_pass
