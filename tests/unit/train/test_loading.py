"""What a run loads and what it refuses: sizes that differ, values that are not finite, scales that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.data import IndexedDatasetWriter
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.data.tokenizer_engine import encode_documents
from megafp8.train.setup import Parts, assemble, check_corpus, make_mesh
from megafp8.train.state import load_newest_run, save_run
from megafp8.train.step import train_step
from tests.distributed.small_run import MODEL, Tokens, run_config


def parts_of(folder: Path, **sections: Any) -> Parts:
    """A run of one process in `folder`, in fp32."""
    defaults: dict[str, Any] = {"run": {"dir": str(folder)}, "precision": {"dtype": "fp32"}}
    config = run_config(**{**defaults, **sections})
    mesh = make_mesh(config, 1)
    feed = Tokens(config, mesh)
    return assemble(config, mesh, torch.device("cpu"), feed, corpus={"fingerprint": "made"})


DELAYED = {"precision": {"dtype": "fp32", "recipe": "delayed", "warmup_steps": 0}}


def test_another_architecture_is_refused_with_all_that_differs(tmp_path):
    save_run(parts_of(tmp_path), 1, {})
    other = parts_of(tmp_path, model={**MODEL, "hidden_size": 64, "ffn_hidden_size": 80, "num_layers": 3})
    with pytest.raises(CheckpointError) as caught:
        load_newest_run(other)
    said = str(caught.value)
    assert "\n" not in said and "step_00000001" in said
    for key, here, there in (("hidden_size", 64, 32), ("ffn_hidden_size", 80, 48), ("num_layers", 3, 2)):
        assert f"model.{key} is {here} here, {there} there" in said
    assert "final_norm.weight has shape (64,) here, (32,) there" in said
    assert "optimizer.exp_avg_sq.layers.2." in said and "is not in the checkpoint" in said


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    parts = parts_of(tmp_path)
    name = "optimizer.exp_avg.final_norm.weight"
    parts.optimizer.tensors()[name].fill_(float("nan"))
    save_run(parts, 1, {})
    with pytest.raises(CheckpointError, match=f"not finite in {name}; .*go on from an older one"):
        load_newest_run(parts_of(tmp_path))


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan"), -2.0])
def test_scales_that_cannot_be_are_made_from_their_history(tmp_path, bad):
    parts = parts_of(tmp_path, **DELAYED)
    for step in (1, 2):
        train_step(parts, step, 1e-2)
    module, state = next(iter(parts.fp8_states.items()))
    good = {name: tensor.clone() for name, tensor in state.tensors().items()}
    state.tensors()["input.scale"].fill_(bad)
    state.tensors()["weight.amax_history"][-1] = bad if bad != 0 and bad != -2.0 else float("nan")
    save_run(parts, 2, {})
    fresh = parts_of(tmp_path, **DELAYED)
    load_newest_run(fresh)
    mended = fresh.fp8_states[module].tensors()
    assert torch.equal(mended["input.scale"], good["input.scale"])
    assert mended["weight.amax_history"].isfinite().all() and mended["weight.scale"] > 0
    assert train_step(fresh, 3, 1e-2).finite


def corpus_of(*fingerprints: str) -> dict[str, Any]:
    sets = [{"path": f"data/{i}", "tokens": 9, "fingerprint": one} for i, one in enumerate(fingerprints)]
    return {"fingerprint": "made", "datasets": sets}


def test_a_changed_corpus_is_refused_unless_it_is_meant(tmp_path, caplog):
    parts = parts_of(tmp_path)
    parts.corpus = corpus_of("u2:x:aa", "u2:x:bb")
    save_run(parts, 1, {})
    same = parts_of(tmp_path)
    same.corpus = corpus_of("u2:x:aa", "u2:x:bb")
    same.corpus["datasets"][0]["path"] = "moved"
    load_newest_run(same)
    for changed in (("u2:x:aa", "u2:x:cc"), ("u2:x:bb", "u2:x:aa"), ("u2:x:aa",), ("u2:x:aa", "u2:x:bb", "u2:x:dd")):
        other = parts_of(tmp_path)
        other.corpus = corpus_of(*changed)
        with pytest.raises(DataError, match=r"not those that .*step_00000001 .*data\.allow_changed_corpus = true"):
            load_newest_run(other)
    data = {"tokenizer": "bytes", "train": [{"path": "unused"}], "sequence_length": 16, "allow_changed_corpus": True}
    meant = parts_of(tmp_path, data=data)
    meant.corpus = corpus_of("u2:x:aa", "u2:x:cc")
    load_newest_run(meant)
    save_run(meant, 2, {})
    later = parts_of(tmp_path)  # it is the run's corpus now
    later.corpus = corpus_of("u2:x:aa", "u2:x:cc")
    load_newest_run(later)


def test_a_run_goes_on_with_another_backend(tmp_path):
    """Codes and scales are the same numbers to both, so the state is too; only the GEMMs' sums have another order."""

    def fp8(backend: str) -> dict[str, Any]:
        sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 4}
        return {"model": {**MODEL, **sizes}, "precision": {**DELAYED["precision"], "dtype": "bf16", "backend": backend}}

    parts = parts_of(tmp_path, **fp8("emulated"))
    for step in (1, 2):
        train_step(parts, step, 1e-2)
    save_run(parts, 2, {})
    expected = train_step(parts, 3, 1e-2).loss
    stored, other = parts_of(tmp_path, **fp8("emulated")), parts_of(tmp_path, **fp8("native"))
    for fresh in (stored, other):
        load_newest_run(fresh)
    for module, state in other.fp8_states.items():
        for name, tensor in state.tensors().items():
            assert torch.equal(tensor, stored.fp8_states[module].tensors()[name])
    assert train_step(stored, 3, 1e-2).loss == expected
    # sums in another order send some activations to the neighbouring code, 2^-4 of each at most
    assert train_step(other, 3, 1e-2).loss == pytest.approx(expected, rel=2**-4)


def test_documents_marked_in_another_way_are_refused(tmp_path):
    """A model that saw a begin id before each document does not go on without one."""
    parts = parts_of(tmp_path)
    parts.corpus.update(add_bos=True, append_eos=True)
    save_run(parts, 1, {})
    with pytest.raises(CheckpointError, match="begin id, text, end id, those of the data are text, end id"):
        load_newest_run(parts_of(tmp_path))
    same = parts_of(tmp_path)
    same.corpus.update(add_bos=True, append_eos=True)
    assert load_newest_run(same) is not None


def test_documents_without_ends_cannot_be_told_apart(tmp_path):
    tokenizer = load_tokenizer("bytes")
    for name, marks in (("begun", Marks(True, False)), ("ended", ENDS_ONLY)):
        record = {"tokenizer": identity(tokenizer) | marks.to_json()}
        with IndexedDatasetWriter(tmp_path / name, np.dtype("<u2"), metadata=record) as writer:
            ids, lengths = encode_documents(tokenizer, ["some text"] * 9, marks)
            writer.add_documents(ids.astype("<u2"), lengths)

    def checked(*names: str, **data: Any) -> dict[str, Any]:
        sets = [{"path": str(tmp_path / name)} for name in names]
        values = {"train": sets[:1], "valid": sets[1:], "tokenizer": "bytes", "sequence_length": 8, **data}
        model = {**MODEL, "vocab_size": 384}
        return check_corpus(run_config(run={"dir": str(tmp_path)}, data=values, model=model), tokenizer)

    found = checked("begun")
    assert found["add_bos"] and not found["append_eos"]
    for key in ("document_mask", "mask_eod_loss"):
        with pytest.raises(ConfigError, match="by their end ids"):
            checked("begun", **{key: True})
        assert checked("ended", **{key: True})["append_eos"]
    with pytest.raises(DataError, match="written as text, end id, those of .*begun as begin id, text"):
        checked("begun", "ended")
