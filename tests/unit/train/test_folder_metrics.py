"""train/folder, metrics, guard: one run a folder, one record a step, however often it was stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.core.config import to_dict
from megafp8.core.errors import ConfigError, NumericsError, ResourceError
from megafp8.train import folder, metrics
from megafp8.train.config import load_run_config
from megafp8.train.guard import NonFiniteGuard
from megafp8.train.nonfinite import Finding

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/tiny_cpu/pretrain.toml"


def _config(tmp_path: Path, *overrides: str):
    return load_run_config(TINY, ["--run.dir", str(tmp_path / "run"), *overrides])


def _begun(tmp_path: Path) -> None:
    """A run that has saved."""
    folder.prepare(_config(tmp_path))
    (tmp_path / "run/checkpoints/step_00000004").mkdir(parents=True)


def test_what_a_run_left_that_never_saved_is_no_run(tmp_path):
    folder.prepare(_config(tmp_path))
    other = _config(tmp_path, "--optimizer.lr", "0.5", "--data.train", '[{path = "elsewhere"}]')
    folder.prepare(other)
    assert "elsewhere" in (tmp_path / "run/config.toml").read_text()
    (tmp_path / "run/checkpoints/step_00000004.damaged-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"optimizer\.lr was 0\.5"):
        folder.prepare(_config(tmp_path))


def test_a_folder_of_another_run_is_refused_and_untouched(tmp_path):
    _begun(tmp_path)
    before = (tmp_path / "run/config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"optimizer\.lr was 0\.002, is 0\.5"):
        folder.prepare(_config(tmp_path, "--optimizer.lr", "0.5"))
    assert (tmp_path / "run/config.toml").read_bytes() == before


def test_length_logging_and_ranks_may_change(tmp_path):
    _begun(tmp_path)
    free = ["--train.steps", "900", "--parallel.tp", "2", "--log.interval", "1", "--precision.fp8_param_gather", "true"]
    folder.prepare(_config(tmp_path, *free))
    assert folder.changes(to_dict(_config(tmp_path)), to_dict(_config(tmp_path, "--run.seed", "7"))) == {
        "run.seed": (1234, 7)
    }


def test_other_training_files_are_refused_unless_they_are_meant(tmp_path):
    _begun(tmp_path)
    other = ["--data.train", '[{path = "elsewhere"}]']
    with pytest.raises(ConfigError, match=r"data\.train was .*elsewhere.*; .*data\.allow_changed_corpus = true"):
        folder.prepare(_config(tmp_path, *other))
    meant = [*other, "--data.allow_changed_corpus", "true"]
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        folder.prepare(_config(tmp_path, *meant, "--optimizer.lr", "0.5"))
    folder.prepare(_config(tmp_path, *meant))
    folder.prepare(_config(tmp_path, *other))


def test_another_precision_is_refused_unless_it_is_meant(tmp_path):
    _begun(tmp_path)
    other = ["--precision.recipe", "delayed", "--precision.warmup_steps", "3"]
    with pytest.raises(ConfigError, match=r"precision\.recipe was 'none', is .*checkpoint\.change_precision = true"):
        folder.prepare(_config(tmp_path, *other))
    meant = [*other, "--checkpoint.change_precision", "true"]
    for also in (["--optimizer.lr", "0.5"], ["--precision.dtype", "fp32"]):
        with pytest.raises(ConfigError, match=r"choose another run\.dir or delete it"):
            folder.prepare(_config(tmp_path, *meant, *also))
    folder.prepare(_config(tmp_path, *meant))
    folder.prepare(_config(tmp_path, *other))  # it is a run in this precision now
    moments = [*other, "--optimizer.exp_avg_sq_dtype", "fp8"]
    with pytest.raises(ConfigError, match=r"exp_avg_sq_dtype was 'fp32', is 'fp8'.*change_precision = true"):
        folder.prepare(_config(tmp_path, *moments))
    folder.prepare(_config(tmp_path, *moments, "--checkpoint.change_precision", "true"))


def test_a_folder_of_an_older_version_lacks_keys_that_stand_at_their_default(tmp_path):
    folder.prepare(_config(tmp_path))
    path = tmp_path / "run/config.toml"
    text = path.read_text()
    assert "warmup_steps = 5" in text
    path.write_text(text.replace("warmup_steps = 5\n", ""))
    folder.prepare(_config(tmp_path))


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ResourceError, match=r"choose another run\.dir"):
        folder.prepare(_config(tmp_path))


def test_rewind_keeps_one_record_a_step_and_all_seconds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "train", "step": s, "loss": 1.0, "run_seconds": 2.0 * s, "productive_seconds": 1.0 * s}
        for s in (1, 2, 3, 4)
    ]
    lines.insert(2, {"kind": "event", "step": 9, "event": "saved"})
    path.write_bytes(b"\n".join(json.dumps(x).encode() for x in lines) + b'\n{"kind": "train", "st')
    totals = metrics.rewind(path, 2, num_losses=1)
    assert totals == metrics.Totals(8.0, 2.0, ((2, 1.0),))
    kept = metrics.read_lines(path)
    assert [r["step"] for r in kept if r["kind"] == "train"] == [1, 2]
    assert [r["step"] for r in kept if r["kind"] == "event"] == [9]
    assert metrics.rewind(tmp_path / "none.jsonl", 0) == metrics.Totals()


def test_the_console_line_keeps_megatrons_order():
    fields = {
        "step": 3, "consumed_samples": 24, "step_seconds": 0.5, "tflops_causal": 1.5, "tokens_per_second": 4096.0,
        "lr": 1e-3, "global_batch": 8, "loss": 2.5, "loss_scale": 1.0, "grad_norm": 0.7, "skipped": 0, "nan": 0,
        "goodput": 0.9,
    }  # fmt: skip
    line = metrics.console_line(fields, steps=10, eta_seconds=3700)
    order = ["iteration", "consumed samples", "elapsed time", "throughput", "learning rate", "global batch size",
             "lm loss", "loss scale", "grad norm", "skipped", "nan", "eta: 1:01:40", "goodput: 90.0%"]  # fmt: skip
    places = [line.index(word) for word in order]
    assert places == sorted(places)


def test_too_many_nonfinite_steps_in_a_row_end_the_run():
    guard = NonFiniteGuard(2)
    for step in (1, 2):
        guard.observe(step, finite=False, loss=math.nan, grad_norm=1.0)
    guard.observe(3, finite=True, loss=1.0, grad_norm=1.0)
    guard.observe(4, finite=False, loss=math.inf, grad_norm=1.0)
    guard.observe(5, finite=False, loss=math.inf, grad_norm=1.0)
    origin = str(Finding("layers.1.mlp", "output", "forward", 2, (2, 5), 3, 0, 64, 1))
    with pytest.raises(NumericsError, match="step 6: loss inf") as caught:
        guard.observe(6, finite=False, loss=math.inf, grad_norm=1.0, origin=origin)
    assert (
        "first not finite: output of layers.1.mlp, forward, micro-batch 1, rank 2 (and 5): 3 NaN and 0 infinite of 64 "
        "values; lower optimizer.lr" in str(caught.value)
    )
    assert guard.total == 5


def test_tensorboard_has_fp8_statistics_and_where_a_step_broke(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, enabled=True, tensorboard=True)
    writer.write("fp8", 3, stats={"layers.0.mlp.down.input.mxfp8_underflows%": 0.5}, gemms=24, fp8_gemms=12)
    writer.write("event", 4, event="skipped", origin="first not finite: output of layers.1.mlp")
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (point,) = events.Scalars("fp8/layers.0.mlp.down.input.mxfp8_underflows%")
    assert (point.step, point.value) == (3, 0.5)
    (text,) = events.Tensors("skipped/text_summary")
    assert text.step == 4 and text.tensor_proto.string_val[0] == b"first not finite: output of layers.1.mlp"
