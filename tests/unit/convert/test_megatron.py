"""Megatron checkpoints without Megatron: pickles that do harm, chunks of any cut, arguments that we have not."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megafp8.cli.main import main
from megafp8.convert import megatron_in
from megafp8.convert.megatron_config import arguments_of, config_from_arguments, refuse
from megafp8.convert.megatron_in import MegatronFolder, read_metadata
from megafp8.convert.megatron_out import to_megatron
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.infer.weights import weight_shapes
from megafp8.models import ModelConfig
from tests.unit.infer.models import config_of, save_model


class Harm:
    """A pickle that does something when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    to_megatron(save_model(root / "run", config_of()), root / "out")
    return root / "out/release"


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("where", [".metadata", "common.pt"])
@pytest.mark.parametrize("call", [(os.system, "touch OWNED"), (eval, "1"), (socket.socket,), (open, "OWNED", "w")])
def test_a_planted_pickle_is_refused_by_name(tmp_path: Path, folder: Path, where: str, call: Any) -> None:
    there = copy(folder, tmp_path / "f")
    harm = Harm(call[0], *(str(a).replace("OWNED", str(tmp_path / "owned")) for a in call[1:]))
    if where == "common.pt":
        torch.save({"args": harm}, there / where)
    else:
        (there / where).write_bytes(pickle.dumps(harm))
    with pytest.raises(CheckpointError, match="it was not run"):
        read_metadata(there, arguments=True)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "harm", ["import sqlite3", "open('OWNED', 'w')", "import os; os.system('touch OWNED')", "open('/etc/hostname')"]
)
def test_the_process_that_reads_pickles_can_do_nothing_else(tmp_path: Path, folder: Path, harm: str) -> None:
    """Even what got past the list of names ends with the process."""
    code = f"""import runpy, socket
runpy.run_path({megatron_in._PICKLES.as_posix()!r})["confine"]({str(folder)!r})
{harm.replace("OWNED", str(tmp_path / "owned"))}
raise SystemExit(0)"""
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, "which no checkpoint needs" in run.stderr) == (3, True)
    assert not (tmp_path / "owned").exists()


def test_a_name_that_leads_out_of_the_folder(tmp_path: Path, folder: Path) -> None:
    there = copy(folder, tmp_path / "f")
    (tmp_path / "ab.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    there.joinpath(".metadata").write_bytes(
        there.joinpath(".metadata").read_bytes().replace(b"__0_0.distcp", b"../ab.distcp")
    )
    with pytest.raises(CheckpointError, match=r"'\.\./ab\.distcp', which is no data file of the folder"):
        MegatronFolder(there)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_damaged_metadata_is_one_line(tmp_path: Path, folder: Path, cut: int) -> None:
    there = copy(folder, tmp_path / "f")
    (there / ".metadata").write_bytes((there / ".metadata").read_bytes()[:cut])
    with pytest.raises(CheckpointError) as error:
        MegatronFolder(there)
    assert "\n" not in str(error.value)


def test_a_data_file_that_ends_early_is_damaged(tmp_path: Path, folder: Path) -> None:
    there = copy(folder, tmp_path / "f")
    data = next(there.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-2000])
    with pytest.raises(CheckpointError):
        MegatronFolder(there)


def test_chunks_of_any_cut(tmp_path: Path, folder: Path) -> None:
    """As other tools and other tp write it: all layers in one chunk, plain tensors."""
    with MegatronFolder(folder) as source:
        there = tmp_path / "f"
        layers, state = source.config.num_layers, {}
        for name, (_, shape, _) in source._stored.items():
            ours = [n for n, place in source._places.items() if place.names[0] == name]
            parts = torch.stack([source.read(n) for n in ours]) if len(ours) == layers else source.read(ours[0])
            padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            rows = shape[0] - parts.shape[0] if padded else 0
            state[name] = torch.cat((parts, parts.new_ones(rows, parts.shape[1]))) if rows else parts.reshape(shape)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(there), no_dist=True)
        for name in ("metadata.json", "common.pt"):
            (there / name).write_bytes((folder / name).read_bytes())
        with MegatronFolder(there) as other:
            assert all(torch.equal(other.read(name), source.read(name)) for name in source.shapes)


@pytest.mark.parametrize("family", ["llama", "gpt", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_arguments_there_and_back(family: str) -> None:
    config = ModelConfig(preset=f"tiny_{family}")
    refuse(config)
    found = config_from_arguments(arguments_of(config), 256, None)
    assert weight_shapes(found) == weight_shapes(config)
    for name in ("norm_eps", "rope_theta", "rope_scaling", "tied_embeddings", "vocab_size", "family"):
        assert getattr(found, name) == getattr(config, name)
    assert found.moe.normalize_top_k == config.moe.normalize_top_k


def test_what_we_have_not_is_refused_at_once() -> None:
    args = arguments_of(ModelConfig(preset="tiny_llama"))
    args |= {"multi_latent_attention": True, "rotary_percent": 0.5, "swiglu": False, "position_embedding_type": "none"}
    with pytest.raises(ConfigError) as error:
        config_from_arguments(args | {"openai_gelu": False}, 256, None)
    for name in ("multi_latent_attention", "rotary_percent", "GELU", "position_embedding_type"):
        assert name in str(error.value)
    del args["vocab_size"]
    with pytest.raises(ConfigError, match="--vocab-size"):
        config_from_arguments(args, 256, None)
    with pytest.raises(ConfigError, match="latent attention.*sigmoid"):
        refuse(ModelConfig(preset="tiny_deepseek"))


def test_a_model_described_by_a_file(tmp_path: Path, folder: Path) -> None:
    there = copy(folder, tmp_path / "f")
    (there / "common.pt").write_bytes(b"not read")
    config = config_of()
    section = {n: getattr(config, n) for n in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                                               "num_kv_heads", "vocab_size", "tied_embeddings")}  # fmt: skip
    lines = [f"{name} = {json.dumps(value)}" for name, value in section.items()]
    (tmp_path / "run.toml").write_text("[model]\n" + "\n".join(lines))
    words = ["convert", "--from", "megatron", str(there), str(tmp_path / "out")]
    assert main([*words, "--model-config", str(tmp_path / "run.toml")]) == 0
    assert main([*words[:-1], str(tmp_path / "other")]) == 4


def test_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "megatron", str(tmp_path), str(tmp_path / "o")]) == 4
    assert "no torch_dist checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_states_are_what_megatron_writes(folder: Path) -> None:
    state = io.BytesIO()
    torch.save([None], state)
    assert any(state.getvalue()[:100] in path.read_bytes() for path in folder.glob("*.distcp"))


def test_arguments_kept_in_a_data_file(tmp_path: Path, folder: Path) -> None:
    """As newer megatron-core has it: no common.pt, its content among the chunks."""
    there = copy(folder, tmp_path / "f")
    common = torch.load(there / "common.pt", weights_only=False)  # our own
    (there / "common.pt").unlink()
    metadata = pickle.loads((there / ".metadata").read_bytes())
    data = io.BytesIO()
    torch.save([common], data)
    file = there / "__0_0.distcp"
    place = _StorageInfo(file.name, file.stat().st_size, len(data.getvalue()))
    file.write_bytes(file.read_bytes() + data.getvalue())
    metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = place
    (there / ".metadata").write_bytes(pickle.dumps(metadata))
    with MegatronFolder(there) as moved, MegatronFolder(folder) as source:
        assert moved.config == source.config
