"""A reader of quantized Hugging Face folders that shares nothing with the writer: what a server would compute with.

It goes by the files alone: config.json, hf_quant_config.json, and tensors by their names' endings. Decoding is
written out from the formats' definitions, files are opened by the safetensors library. A tensor is decoded when it is
asked for, each time anew, so that no more of them are in memory than whoever asks holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.by_layer import Folder
from megafp8.core.errors import CheckpointError

Tensor = torch.Tensor
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, made when asked for."""

    def __init__(self) -> None:
        self.made: dict[str, Callable[[], Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


@dataclass
class Decoded:
    """A folder's content.

    Attributes:
        config: config.json without its quantization.
        algorithm: "FP8", "FP8_PB_WO", "NVFP4" or "FP8_CHANNEL".
        tensors: fp32 (codes times scales) or as stored, by the folder's names.
        shapes: of all of `tensors`.
        steps: {quantized weight: the scale of one code's unit at each element, broadcastable}.
        input_scales: by module; empty where activations are scaled as they come.
        kv_scales: {attention module: (k_scale, v_scale)}.
    """

    config: dict[str, Any]
    algorithm: str
    tensors: Lazy = field(default_factory=Lazy)
    steps: Lazy = field(default_factory=Lazy)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    input_scales: dict[str, float] = field(default_factory=dict)
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict)


def read_quantized(folder: Path) -> Decoded:
    """Read and decode a folder.

    Raises:
        CheckpointError: configuration and tensors disagree, a scale is missing, or is not finite and positive; lists
            what is wrong.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    section = config.pop("quantization_config", None) or {}
    method, problems = section.get("quant_method"), []
    if method == "compressed-tensors":
        algorithm, excluded = "FP8_CHANNEL", section.get("ignore", [])
    else:
        legacy = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
        algorithm, excluded = str(legacy.get("quant_algo")), legacy.get("exclude_modules", [])
        if method != "modelopt" or section.get("quant_algo") != algorithm or section.get("ignore") != excluded:
            problems.append("config.json and hf_quant_config.json disagree")
        if bool(section.get("kv_cache_scheme")) != (legacy.get("kv_cache_quant_algo") == "FP8"):
            problems.append("the two configurations disagree on the cache of keys and values")
    raw, found = Folder(folder), Decoded(config, algorithm)
    for name in raw:
        module, _, ending = name.rpartition(".")
        if ending in _SCALES:
            scale = raw[name].float()  # a block of zeros has the scale zero
            if not bool((scale.isfinite() & (scale >= 0)).all()) or not float(scale.max()) > 0:
                problems.append(f"{name} is not finite and positive")
            continue
        is_code = raw.dtype(name) in ("F8_E4M3", "U8")
        is_excluded = any(module == pattern or fnmatch(module, pattern) for pattern in excluded)
        if is_code == is_excluded and (is_code or len(raw.shape(name)) > 1):
            problems.append(f"{name} is {'' if is_code else 'not '}quantized, the configuration says otherwise")
        if is_code:
            problems += _decode(found, name, raw)
        else:
            found.tensors.made[name] = partial(raw.__getitem__, name)
            found.shapes[name] = raw.shape(name)
    attention = {name.rpartition(".")[0].rpartition(".")[0] for name in raw if name.endswith(".k_scale")}
    for module in sorted(attention):
        pair = raw.get(f"{module}.k_proj.k_scale"), raw.get(f"{module}.v_proj.v_scale")
        if pair[0] is None or pair[1] is None:
            problems.append(f"{module} has one of k_scale and v_scale")
        else:
            found.kv_scales[module] = float(pair[0]), float(pair[1])
    if section.get("kv_cache_scheme") and not found.kv_scales:
        problems.append("an FP8 cache is declared and no k_scale is there")
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems[:10])}")
    return found


def _decode(found: Decoded, name: str, raw: Folder) -> list[str]:
    """Decode one weight, later; what is missing of it."""
    module = name.rpartition(".")[0]
    if f"{module}.weight_scale" not in raw:
        return [f"{module}.weight_scale is missing"]
    if found.algorithm in ("FP8", "NVFP4"):
        if f"{module}.input_scale" not in raw:
            return [f"{module}.input_scale is missing"]
        found.input_scales[module] = float(raw[f"{module}.input_scale"])
    if found.algorithm == "NVFP4" and f"{module}.weight_scale_2" not in raw:
        return [f"{module}.weight_scale_2 is missing"]
    found.steps.made[name] = partial(_step, found.algorithm, module, raw)
    found.tensors.made[name] = partial(_values, found, name, raw)
    rows, columns = raw.shape(name)
    found.shapes[name] = rows, columns * (2 if found.algorithm == "NVFP4" else 1)
    return []


def _step(algorithm: str, module: str, raw: Folder) -> Tensor:
    scale = raw[f"{module}.weight_scale"].float()
    if algorithm == "NVFP4":
        return scale.repeat_interleave(16, 1) * raw[f"{module}.weight_scale_2"].float()
    if algorithm == "FP8_PB_WO":
        rows, columns = raw.shape(f"{module}.weight")
        step = scale.reshape(scale.shape[0], -1).repeat_interleave(128, 0).repeat_interleave(128, 1)
        return step[:rows, :columns]
    return scale


def _values(found: Decoded, name: str, raw: Folder) -> Tensor:
    codes = raw[name]
    if found.algorithm == "NVFP4":
        return _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()] * found.steps[name]
    return codes.float() * found.steps[name]
