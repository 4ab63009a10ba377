"""A checkpoint of one FP8 recipe into a run of another: converted, warmed up anew, dropped, or refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import latest, tensor_names
from megafp8.core.errors import CheckpointError
from megafp8.fp8.recipes.delayed import carried_over
from megafp8.train.setup import Parts
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.small_run import make_parts, run_config


def parts_in(folder: Path, **precision: Any) -> Parts:
    config = run_config(
        run={"dir": str(folder)},
        model={"hidden_size": 64, "ffn_hidden_size": 64, "head_dim": 16, "init_std": 0.1, "num_layers": 1},
        train={"global_batch": 2},
        precision={"dtype": "fp32", "emulation": "exact", **precision},
    )
    parts = make_parts(config, 1)
    parts.corpus = {"fingerprint": "0" * 64}
    return parts


def trained(folder: Path, steps: int = 2, **precision: Any) -> Parts:
    parts = parts_in(folder, **precision)
    for step in range(1, steps + 1):
        train_step(parts, step, 1e-2)
    save_run(parts, steps, {})
    return parts


def loaded(folder: Path, caplog: pytest.LogCaptureFixture, **precision: Any) -> tuple[Parts, str]:
    parts = parts_in(folder, **precision)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        load_newest_run(parts)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return parts, "\n".join(said).replace('"', "")


def test_other_options_of_delayed_scaling_convert_its_state(tmp_path: Path, caplog: Any) -> None:
    before = trained(tmp_path, recipe="delayed", options={"amax_history_len": 4})
    other = {"amax_history_len": 7, "margin": 1, "amax_compute_algo": "most_recent"}
    after, said = loaded(tmp_path, caplog, recipe="delayed", options=other)
    assert "FP8 histories are converted to the run's options" in said and "tensors=12" in said
    for name, state in after.fp8_states.items():
        was = before.fp8_states[name]
        for role in state.roles:
            old, new = was.roles[role].tensors, state.roles[role].tensors
            history, scale = carried_over(old["amax_history"], old["scale"], role, was.recipe, state.recipe)
            assert torch.equal(new["amax_history"], history) and history[-1] != 0, (name, role)
            assert torch.equal(new["scale"], scale) and scale != 1, (name, role)
    assert train_step(after, 3, 1e-2).finite


def test_a_weight_that_was_quantized_before_a_load_is_quantized_again(tmp_path: Path, caplog: Any) -> None:
    before = trained(tmp_path, recipe="delayed", warmup_steps=1)
    after = parts_in(tmp_path, recipe="delayed", warmup_steps=1)
    looked_at(after)  # an evaluation of the weights as they were built
    load_newest_run(after)
    assert looked_at(after) == looked_at(before)
    assert [train_step(after, step, 1e-2).loss for step in (3, 4)] == [
        train_step(before, step, 1e-2).loss for step in (3, 4)
    ]


def looked_at(parts: Parts) -> float:
    """The loss of an evaluation of fixed tokens."""
    (model,) = parts.stages
    tokens = torch.arange(32).view(2, 16) % 64
    with torch.no_grad():
        return float(model(tokens, tokens.roll(-1, 1))[0])


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "nvfp4"])
def test_evaluations_between_steps_leave_no_trace(tmp_path: Path, recipe: str) -> None:
    """Two steps of the warm-up, its edge, and two more; with Smooth-SwiGLU, whose scales are each pass's own."""

    def run(*, evaluate: bool) -> list[Any]:
        parts = parts_in(tmp_path, recipe=recipe, warmup_steps=2, smooth_swiglu=True)
        losses = []
        for step in range(1, 5):
            losses.append(train_step(parts, step, 1e-2).loss)
            if evaluate:
                looked_at(parts)
        return [losses, *(t.clone() for t in tensors_of(parts)[0].values())]

    (with_it, *after), (without, *expected) = run(evaluate=True), run(evaluate=False)
    assert with_it == without
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


def test_what_does_not_change_the_state_leaves_every_bit(tmp_path: Path, caplog: Any) -> None:
    before = trained(tmp_path, recipe="delayed", options={"amax_history_len": 4})
    after, said = loaded(tmp_path, caplog, recipe="delayed", options={"amax_history_len": 4}, amax_group="tp")
    assert "amax_group=all -> tp" in said and "converted" not in said and "afresh" not in said
    for name, state in after.fp8_states.items():
        for key, tensor in state.tensors().items():
            assert torch.equal(tensor, before.fp8_states[name].tensors()[key])


def test_into_delayed_scaling_a_warm_up_begins_anew_and_is_remembered(tmp_path: Path, caplog: Any) -> None:
    trained(tmp_path, 3, recipe="current", warmup_steps=2)
    after, said = loaded(tmp_path, caplog, recipe="delayed", warmup_steps=2)
    assert "FP8 state starts afresh" in said and "warm-up until step 5" in said
    assert all(state.warming for state in after.fp8_states.values())
    losses = [train_step(after, 4, 1e-2).loss]
    save_run(after, 4, {})
    losses += [train_step(after, step, 1e-2).loss for step in (5, 6)]
    assert not any(state.warming for state in after.fp8_states.values())
    again, said = loaded(tmp_path, caplog, recipe="delayed", warmup_steps=2)
    assert not said and all(state.warming for state in again.fp8_states.values())
    assert [train_step(again, step, 1e-2).loss for step in (5, 6)] == losses[1:]


def test_without_a_warm_up_it_is_said_that_scales_begin_at_1(tmp_path: Path, caplog: Any) -> None:
    trained(tmp_path, recipe="none")
    after, said = loaded(tmp_path, caplog, recipe="delayed", warmup_steps=0)
    assert "no warm-up: scales begin at 1" in said and not any(s.warming for s in after.fp8_states.values())


def test_past_its_warm_up_a_run_resumes_without_one(tmp_path: Path, caplog: Any) -> None:
    trained(tmp_path, 3, recipe="delayed", warmup_steps=2)
    after, said = loaded(tmp_path, caplog, recipe="delayed", warmup_steps=2)
    assert not said and after.fp8_states and not any(state.warming for state in after.fp8_states.values())


def test_one_more_linear_in_delayed_scaling_warms_up_and_others_keep_their_state(tmp_path: Path, caplog: Any) -> None:
    before = trained(tmp_path, 3, recipe="delayed", warmup_steps=1, patterns={"down": "none"})
    after, said = loaded(tmp_path, caplog, recipe="delayed", warmup_steps=1)
    assert "FP8 state starts afresh" in said and "tensors=6" in said
    name = "layers.0.attention.qkv"
    for key, tensor in after.fp8_states[name].tensors().items():
        assert torch.equal(tensor, before.fp8_states[name].tensors()[key])
    assert after.fp8_states["layers.0.mlp.down"].warming


def test_out_of_delayed_scaling_its_state_is_dropped_by_name(tmp_path: Path, caplog: Any) -> None:
    trained(tmp_path, recipe="delayed")
    after, said = loaded(tmp_path, caplog, recipe="current")
    assert "FP8 state is dropped: no linear is in delayed scaling now" in said and "recipe=delayed -> current" in said
    save_run(after, 3, {})
    assert tensor_names(latest(tmp_path / "checkpoints"), "fp8.") == set()


@pytest.mark.parametrize("wanted", ["delayed", "current"])
def test_a_recipe_that_this_version_has_not(tmp_path: Path, caplog: Any, wanted: str) -> None:
    before = parts_in(tmp_path, recipe="delayed")
    object.__setattr__(before.config.precision, "recipe", "delayed2")
    save_run(before, 1, {})
    if wanted == "delayed":
        with pytest.raises(CheckpointError, match="none of this version's .*'delayed2'.* cannot be converted"):
            loaded(tmp_path, caplog, recipe=wanted)
    else:
        _, said = loaded(tmp_path, caplog, recipe=wanted)
        assert "FP8 state is dropped" in said


def test_state_that_this_version_does_not_know_is_refused_by_name(tmp_path: Path, caplog: Any) -> None:
    before = parts_in(tmp_path, recipe="delayed")
    role = before.fp8_states["layers.0.mlp.down"].roles["input"]
    role.tensors["momentum"] = torch.zeros(1)
    save_run(before, 1, {})
    with pytest.raises(CheckpointError, match=r"does not know .*fp8\.layers\.0\.mlp\.down\.input\.momentum"):
        loaded(tmp_path, caplog, recipe="delayed")
