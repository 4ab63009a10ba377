"""The files of a Hugging Face folder: weights in shards with an index, config.json; and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.tensor_files import Stored, read_header
from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import write_json

SHARD_BYTES = 5_000_000_000  # as transformers cuts, so that a shard fits the usual upload limits
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_READABLE = (torch.bfloat16, torch.float16, torch.float32)


def shard_names(sizes: Sequence[int]) -> list[str]:
    """The file of each of these tensor groups (bytes), which are not cut: one file, or shards of SHARD_BYTES."""
    numbers, size = [0] * len(sizes), 0
    for at, more in enumerate(sizes):
        size += more
        new = at > 0 and size > SHARD_BYTES
        numbers[at] = numbers[at - 1] + new if at else 0
        size = more if new else size
    count = numbers[-1] + 1
    if count == 1:
        return [SINGLE_NAME] * len(sizes)
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in numbers]


def write_index(folder: Path, files: Mapping[str, Mapping[str, Stored]]) -> None:
    """Write the index of `{file: {tensor: where}}`, if there is more than one file.

    Raises:
        ResourceError: no space, no permission.
    """
    if len(files) > 1:
        weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
        total = sum(stored.bytes for tensors in files.values() for stored in tensors.values())
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder with weights that we can read.

    Raises:
        CheckpointError: missing, not JSON, or its weights are quantized (codes without their scales).
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no config.json; give the folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    if config.get("quantization_config") or (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder}: its weights are quantized; give the unquantized model")
    return config


def list_weights(folder: Path) -> dict[str, tuple[str, Stored]]:
    """{tensor: (its file, where it lies there)} of a folder; bf16, fp16 or fp32. Reads headers only.

    Raises:
        CheckpointError: no safetensors, an index that does not match its shards, a damaged file, another dtype.
    """
    weight_map: dict[str, str] = {}
    names = [SINGLE_NAME]
    if (folder / INDEX_NAME).is_file():
        weight_map = _weight_map(folder / INDEX_NAME)
        names = sorted(set(weight_map.values()))
    elif not (folder / SINGLE_NAME).is_file():
        raise CheckpointError(
            f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}; pickled weights (.bin, .pt) are not read, "
            "save the model with safe_serialization"
        )
    found: dict[str, tuple[str, Stored]] = {}
    for file in names:
        for name, stored in read_header(folder / file).items():
            if name in found:
                raise CheckpointError(f"{folder}: {name} is in {found[name][0]} and in {file}")
            found[name] = (file, stored)
    lost = sorted(name for name, file in weight_map.items() if found.get(name, ("",))[0] != file)
    if lost:
        raise CheckpointError(f"{folder / INDEX_NAME}: names {lost[0]}, which {weight_map[lost[0]]} does not hold")
    for name, (_, stored) in found.items():
        if stored.dtype not in _READABLE:
            raise CheckpointError(f"{folder}: {name} is {stored.dtype}; only bf16, fp16 and fp32 weights are read")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no index of shards: {error}") from error
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: names the shard {name!r}, which is no safetensors file of this folder")
    return weight_map
