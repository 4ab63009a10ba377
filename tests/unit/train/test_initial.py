"""checkpoint.load_from: what a new run takes over, what stays as it would have been, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.models import BPE

from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.train.check import dry_run
from megafp8.train.config import RunConfig, schedule_of
from megafp8.train.initial import begin_from, same_ids
from megafp8.train.load_check import refuse_unfit
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.small_run import MODEL, Tokens, run_config

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "score": "sigmoid", "bias_update_rate": 0.01}


def config_of(folder: Path, **sections: Any) -> RunConfig:
    defaults: dict[str, Any] = {"run": {"dir": str(folder)}, "precision": {"dtype": "fp32"}}
    return run_config(**{**defaults, **sections})


def parts_of(folder: Path, tokenizer: str = "made", **sections: Any) -> Parts:
    """A run of one process in `folder`, in fp32."""
    config = config_of(folder, **sections)
    mesh = make_mesh(config, 1)
    return assemble(config, mesh, torch.device("cpu"), Tokens(config, mesh), corpus={"fingerprint": tokenizer})


def copies(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(parts)[0].items()}


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run's folder after three steps, and its state."""
    parts = parts_of(tmp_path / "other", model={**MODEL, "moe": MOE})
    for step in (1, 2, 3):
        train_step(parts, step, 1e-2)
    save_run(parts, 3, {})
    return tmp_path / "other", copies(parts)


def begun(folder: Path, model: dict[str, Any] | None = None, **checkpoint: Any) -> tuple[Parts, Any, dict]:
    """New parts, what `begin_from` says, and what they were before."""
    parts = parts_of(folder, model=model or {**MODEL, "moe": MOE}, run={"dir": str(folder), "seed": 5},
                     checkpoint=checkpoint)  # fmt: skip
    before = copies(parts)
    refuse_unfit(parts.config)
    return parts, begin_from(parts), before


def is_weight(name: str) -> bool:
    return name.startswith(("optimizer.master.", "moe."))


def test_weights_only_leave_everything_else_new(tmp_path, other):
    folder, theirs = other
    parts, found, before = begun(tmp_path / "new", load_from=str(folder))
    assert found is None and parts.optimizer.step_count == 0 and parts.loader.consumed_samples == 0
    now = copies(parts)
    assert any(name.startswith("moe.") for name in now)
    for name, tensor in now.items():
        assert torch.equal(tensor, (theirs if is_weight(name) else before)[name]), name
    for name, parameter in parts.named_parameters:  # and what computes is what was loaded
        assert torch.equal(parameter, theirs[f"optimizer.master.{name}"].to(parameter.dtype))
    assert train_step(parts, 1, 1e-2).finite


def test_with_the_optimizer_or_all_of_a_run(tmp_path, other):
    folder, theirs = other
    parts, found, _ = begun(tmp_path / "new", load_from=str(folder), load_what="optimizer")
    assert found is None and parts.optimizer.step_count == 3 and parts.loader.consumed_samples == 0
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in copies(parts).items())
    parts, found, _ = begun(tmp_path / "new", load_from=str(folder), load_what="run")
    assert found[1]["step"] == 3 and parts.loader.consumed_samples == 24 and parts.optimizer.step_count == 3
    # a new run, so that what a resume refuses may differ here, the rate for one
    optimizer = {"lr": 5e-3, "min_lr": 0.0}
    from_there = {"load_from": str(folder), "load_what": "run"}
    other_rate = parts_of(tmp_path / "rate", model={**MODEL, "moe": MOE}, optimizer=optimizer, checkpoint=from_there)
    assert begin_from(other_rate)[1]["step"] == 3
    assert schedule_of(other_rate.config)(step=4, consumed_samples=32) == 5e-3
    through = parts_of(folder, model={**MODEL, "moe": MOE})
    load_newest_run(through)
    assert train_step(parts, 4, 1e-2).loss == train_step(through, 4, 1e-2).loss


def test_parts_by_pattern(tmp_path, other):
    folder, theirs = other
    taken = ["layers.0.*", "*.attention.*", "embedding.weight"]
    parts, _, before = begun(tmp_path / "new", load_from=str(folder), load_only=taken)
    now = copies(parts)
    for name, tensor in now.items():
        chosen = is_weight(name) and (
            ".layers.0." in name or ".attention." in name or name.endswith("embedding.weight")
        )
        assert torch.equal(tensor, (theirs if chosen else before)[name]), name
    # another depth, another vocabulary: what is named fits
    larger = {**MODEL, "moe": MOE, "num_layers": 3, "vocab_size": 80}
    parts, _, before = begun(tmp_path / "new", larger, load_from=str(folder), load_only=["layers.[01].*"])
    assert torch.equal(copies(parts)["optimizer.master.embedding.weight"], before["optimizer.master.embedding.weight"])
    with pytest.raises(CheckpointError, match=r"embedding\.weight has shape \(80, 32\) here, \(64, 32\) there"):
        begun(tmp_path / "new", larger, load_from=str(folder), load_only=["embedding.*", "layers.0.*"])
    with pytest.raises(CheckpointError, match=r"layers\.2\..*is not in the checkpoint"):
        begun(tmp_path / "new", larger, load_from=str(folder), load_only=["layers.*"])
    with pytest.raises(ConfigError, match=r"'layer\.0\.\*': matches no parameter; nearest: layers"):
        begun(tmp_path / "new", load_from=str(folder), load_only=["layer.0.*"])


def test_another_model_is_refused_with_every_key(tmp_path, other):
    folder, _ = other
    sizes = {**MODEL, "moe": {**MOE, "num_experts": 8, "score": "softmax"}, "hidden_size": 64, "rope_theta": 5e5}
    wrong = config_of(tmp_path / "new", model=sizes, checkpoint={"load_from": str(folder)})
    with pytest.raises(CheckpointError) as caught:
        refuse_unfit(wrong)
    said = str(caught.value)
    differing = (
        "hidden_size is 64 here, 32 there",
        "moe.num_experts is 8 here, 4 there",
        "head_dim is 8 here, 4 there",
        "rope_theta is 500000.0 here, 10000.0 there",
        "moe.score is 'softmax' here, 'sigmoid' there",
    )
    for key in differing:
        assert f"model.{key}" in said
    assert "\n" not in said and "checkpoint.load_only" in said
    longer = {**MODEL, "moe": MOE, "rope_theta": 5e5}
    with pytest.raises(CheckpointError, match=r"rope_theta is 500000.*checkpoint\.change_model = true"):
        begun(tmp_path / "new", longer, load_from=str(folder))
    begun(tmp_path / "new", longer, load_from=str(folder), change_model=True)
    free = {**MODEL, "moe": {**MOE, "capacity_factor": 2.0}, "max_sequence_length": 99, "init_std": 0.7}
    begun(tmp_path / "new", free, load_from=str(folder))


def test_another_tokenizer_is_refused_unless_no_table_is_taken(tmp_path, other):
    folder, _ = other

    def start(**checkpoint: Any) -> None:
        model = {**MODEL, "moe": MOE}
        begin_from(
            parts_of(tmp_path / "new", "another", model=model, checkpoint={"load_from": str(folder), **checkpoint})
        )

    with pytest.raises(CheckpointError, match=r"its tokenizer is made, the data has another; .*load_only"):
        start()
    start(load_only=["layers.*"])
    start(change_model=True)


def test_a_translated_tokenizer_is_the_same_one(tmp_path):
    """As an export holds it: another file, the same ids."""
    letters = {chr(i): i for i in range(32, 127)}
    vocab = {**letters, "ab": 127, "</s>": 128}
    files = []
    for name, merges in (("a", [("a", "b")]), ("b", [("a", "b")]), ("c", [])):
        made = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges))
        made.add_special_tokens(["</s>"])
        if name == "b":
            made.enable_truncation(9)  # a file of other bytes
        made.save(str(tmp_path / f"{name}.json"))
        files.append(load_tokenizer(tmp_path / f"{name}.json"))
    a, b, c = files
    assert a.fingerprint != b.fingerprint and same_ids(a, b)
    assert not same_ids(a, c) and not same_ids(a, load_tokenizer("bytes"))


def test_what_is_not_there_or_makes_no_sense(tmp_path, other):
    folder, _ = other
    newest = folder / "checkpoints" / "step_00000003"

    def judge(error: type[Exception], match: str, *, steps: int = 5, **checkpoint: Any) -> None:
        train = {"steps": steps, "global_batch": 8, "micro_batch": 2}
        model = {**MODEL, "moe": MOE}
        with pytest.raises(error, match=match) as caught:
            refuse_unfit(config_of(tmp_path / "new", model=model, train=train, checkpoint=checkpoint))
        assert len(str(caught.value).splitlines()) == 1

    judge(CheckpointError, "no such folder", load_from=str(tmp_path / "nowhere"))
    judge(CheckpointError, "holds no complete checkpoint", load_from=str(tmp_path))
    judge(ConfigError, "has taken 3 steps already", steps=3, load_from=str(folder), load_what="run")
    judge(ConfigError, "load_from, which is empty", load_only=["x"])
    judge(ConfigError, "load_from, which is empty", load_what="run")
    judge(ConfigError, 'nearest: load_what = "weights"', load_from=str(folder), load_only=["x"], load_what="run")
    judge(ConfigError, "load_what", load_from=str(folder), load_what="everything")
    (newest / "manifest.json").rename(newest / "m")
    judge(CheckpointError, "has no manifest.json: incomplete", load_from=str(newest))  # half of one, named explicitly
    assert newest.is_dir(), "and left as it is"


def test_a_run_that_has_a_checkpoint_does_not_look(tmp_path, other):
    folder, _ = other
    gone = {"load_from": str(tmp_path / "gone")}
    refuse_unfit(config_of(folder, model={**MODEL, "moe": MOE}, checkpoint=gone))


def test_the_dry_run_says_it(tmp_path, other):
    folder, _ = other
    right = config_of(tmp_path / "new", model={**MODEL, "moe": MOE}, checkpoint={"load_from": str(folder)})
    report = dry_run(right, 1)
    assert ("begins from", f"{folder} (weights)") in report.rows and not report.problems
    wrong = config_of(tmp_path / "new", model={**MODEL, "vocab_size": 99}, checkpoint={"load_from": str(folder)})
    assert "model.vocab_size is 99 here, 64 there" in dry_run(wrong, 1).problems[0]
