"""P1, P2, P4: pickles in every place that a file can be put are not run; paths that lead out are not followed."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint.compare import compare
from megafp8.checkpoint.copies import copy
from megafp8.cli.main import main
from megafp8.convert.source import open_source
from megafp8.core.config import load_toml
from megafp8.core.errors import MegaError
from megafp8.core.jsonio import read_json
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.verify import problems
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def planted(marker: Path, as_torch: bool = False) -> bytes:
    bomb = pickle.dumps(Bomb(marker))
    return b"PK\x03\x04" + bomb if as_torch else bomb


def run_folder(folder: Path) -> Path:
    state = {"optimizer.master.w": torch.ones(4, 4), "b": torch.zeros(3)}
    return checkpoint.save(folder / "checkpoints", 1, state, {}, MESH, {"step": 1})


def dataset(folder: Path) -> Path:
    with IndexedDatasetWriter(folder / "d", "u2") as writer:
        writer.add_document([5, 6, 2])
    return folder / "d"


def hf_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_checkpoint(folder: Path) -> None:
    path = folder / "checkpoints" / "step_00000001"
    for act in (checkpoint.verify, checkpoint.load_tensors, lambda p: copy(p, folder / "out"), lambda p: compare(p, p)):
        refused(lambda act=act: act(path))
    refused(lambda: checkpoint.load_newest(path.parent, {"b": torch.zeros(3)}, {}, MESH))
    if path.with_name("step_00000001.damaged-1").exists():
        path.with_name("step_00000001.damaged-1").rename(path)


def read_dataset(folder: Path) -> None:
    refused(lambda: problems(IndexedDataset(folder / "d")))


def read_tokenizer(folder: Path) -> None:
    for name in ("t.model", "tokenizer.json", ""):
        refused(lambda name=name: load_tokenizer(folder / name))


def read_hf(folder: Path) -> None:
    with open_source(folder):
        raise AssertionError("a folder of pickles was opened")


def refused(act: Callable[[], object]) -> None:
    try:
        act()
    except MegaError as error:
        assert "\n" not in str(error)


def make_checkpoint(folder: Path) -> None:
    run_folder(folder)


def make_dataset(folder: Path) -> None:
    dataset(folder)


def make_hf(folder: Path) -> None:
    hf_folder(folder)


def make_nothing(folder: Path) -> None:
    """Only what is planted."""


PLACES: dict[str, tuple[Callable[[Path], None], str, Callable[[Path], None]]] = {
    "piece": (make_checkpoint, "checkpoints/step_00000001/piece_00000_00.safetensors", read_checkpoint),
    "manifest": (make_checkpoint, "checkpoints/step_00000001/manifest.json", read_checkpoint),
    "DCP metadata": (make_checkpoint, "checkpoints/step_00000001/.metadata", read_checkpoint),
    "DCP data": (make_checkpoint, "checkpoints/step_00000001/__0_0.distcp", read_checkpoint),
    "Megatron common": (make_checkpoint, "checkpoints/step_00000001/common.pt", read_checkpoint),
    "random state": (make_checkpoint, "checkpoints/step_00000001/rng.pkl", read_checkpoint),
    "optimizer": (make_checkpoint, "checkpoints/step_00000001/optimizer.pt", read_checkpoint),
    "tracker": (make_checkpoint, "checkpoints/latest_checkpointed_iteration.txt", read_checkpoint),
    "token ids": (make_dataset, "d.bin", read_dataset),
    "index": (make_dataset, "d.idx", read_dataset),
    "side file": (make_dataset, "d.json", read_dataset),
    "index cache": (make_dataset, "d_shuffle_idx.npy", read_dataset),
    "SentencePiece": (make_nothing, "t.model", read_tokenizer),
    "tokenizer.json": (make_nothing, "tokenizer.json", read_tokenizer),
    "tokenizer pickle": (make_nothing, "tokenizer.pkl", read_tokenizer),
    "safetensors": (make_hf, "model.safetensors", lambda f: refused(lambda: read_hf(f))),
    "pytorch_model.bin": (make_hf, "pytorch_model.bin", lambda f: refused(lambda: read_hf(f))),
    "shard index": (make_hf, "model.safetensors.index.json", lambda f: refused(lambda: read_hf(f))),
    "config.json": (make_nothing, "config.json", lambda f: refused(lambda: read_hf(f))),
    "TOML": (make_nothing, "run.toml", lambda f: refused(lambda: load_toml(f / "run.toml"))),
    "metrics": (make_checkpoint, "metrics.jsonl", lambda f: refused(lambda: read_json(f / "metrics.jsonl"))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("as_torch", [False, True], ids=["plain", "zip"])
def test_planted_pickles_are_not_run(tmp_path, place, as_torch):
    make, name, read = PLACES[place]
    marker = tmp_path / "owned"
    work = tmp_path / "work"
    work.mkdir()
    make(work)
    (work / name).write_bytes(planted(marker, as_torch))
    read(work)
    assert not marker.exists()
    if not as_torch:  # and it is armed
        pickle.loads((work / name).read_bytes())
        assert marker.exists()


def test_foreign_checkpoints_are_not_taken_for_ours(tmp_path, capsys):
    """P2: a folder of torch's, or Megatron's, is refused by name; nothing falls back to unpickling it."""
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json"):
        (folder / name).write_bytes(planted(tmp_path / "owned"))
    for words in (["show"], ["verify"], ["ls"], ["copy", str(tmp_path / "out")]):
        assert main(["checkpoint", words[0], str(folder), *words[1:]]) == 4
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "owned").exists()


ESCAPES = ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", "sub/x.safetensors", "x.bin"]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_shard_index_cannot_lead_out_of_its_folder(tmp_path, name):
    """P4."""
    folder = hf_folder(tmp_path / "hf")
    (tmp_path / "outside.safetensors").write_bytes(b"secret")
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MegaError) as caught:
        read_hf(folder)
    assert "shard" in str(caught.value) and "secret" not in str(caught.value)
