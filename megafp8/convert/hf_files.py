"""The files of a Hugging Face folder: weights in shards with an index, config.json; and how they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import fsync_dir, resource_error, write_json

SHARD_BYTES = 5_000_000_000  # as transformers cuts, so that a shard fits the usual upload limits
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_READABLE = (torch.bfloat16, torch.float16, torch.float32)


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Write tensors (contiguous) as one file or as shards with an index, durably. Returns the files' names.

    Raises:
        ResourceError: no space, no permission.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    single = len(shards) == 1
    names = [
        SINGLE_NAME if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    if not single:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(INDEX_NAME)
    return names


def _write_shard(path: Path, shard: Mapping[str, torch.Tensor]) -> None:
    try:
        save_file(dict(shard), path, metadata={"format": "pt"})
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        fsync_dir(path.parent)
    except OSError as error:
        raise resource_error(error, path) from error
    except SafetensorError as error:  # its way to say that the disk is full
        raise resource_error(OSError(None, str(error)), path) from error


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
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    if config.get("quantization_config") or (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder}: its weights are quantized; give the unquantized model")
    return config


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as stored (bf16, fp16 or fp32), on the CPU.

    Raises:
        CheckpointError: no safetensors, an index that does not match its shards, a damaged file, another dtype.
    """
    tensors: dict[str, torch.Tensor] = {}
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
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_NAME}: names {missing[0]}, which {weight_map[missing[0]]} does not hold"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in _READABLE:
            raise CheckpointError(f"{folder}: {name} is {tensor.dtype}; only bf16, fp16 and fp32 weights are read")
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no index of shards: {error}") from error
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: names the shard {name!r}, which is no safetensors file of this folder")
    return weight_map
