"""A reader of quantized Hugging Face folders that shares nothing with the writer: what a server would compute with.

It goes by the files alone: config.json, hf_quant_config.json, and tensors by their names' endings. Decoding is
written out from the formats' definitions, files are opened by the safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.optional import load
from megafp8.core.errors import CheckpointError

Tensor = torch.Tensor
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


@dataclass
class Decoded:
    """A folder's content.

    Attributes:
        config: config.json without its quantization.
        algorithm: "FP8", "FP8_PB_WO", "NVFP4" or "FP8_CHANNEL".
        tensors: fp32 (codes times scales) or as stored, by the folder's names.
        steps: {quantized weight: the scale of one code's unit at each element, broadcastable}.
        input_scales: by module; empty where activations are scaled as they come.
        kv_scales: {attention module: (k_scale, v_scale)}.
    """

    config: dict[str, Any]
    algorithm: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
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
    raw = dict(_tensors(folder))
    found = Decoded(config, algorithm)
    for name, tensor in raw.items():
        module, _, ending = name.rpartition(".")
        if ending in _SCALES:
            scale = tensor.float()  # a block of zeros has the scale zero
            if not bool((scale.isfinite() & (scale >= 0)).all()) or not float(scale.max()) > 0:
                problems.append(f"{name} is not finite and positive")
            continue
        is_code = tensor.dtype in (torch.float8_e4m3fn, torch.uint8)
        is_excluded = any(module == pattern or fnmatch(module, pattern) for pattern in excluded)
        if is_code == is_excluded and (is_code or tensor.dim() > 1):
            problems.append(f"{name} is {'' if is_code else 'not '}quantized, the configuration says otherwise")
        if is_code:
            problems += _decode(found, name, raw)
        else:
            found.tensors[name] = tensor
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


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    opened = load("safetensors")
    for path in sorted(folder.glob("*.safetensors")):
        with opened.safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)


def _decode(found: Decoded, name: str, raw: dict[str, Tensor]) -> list[str]:
    """Decode one weight; what is missing of it."""
    module = name.rpartition(".")[0]
    scale = raw.get(f"{module}.weight_scale")
    if scale is None:
        return [f"{module}.weight_scale is missing"]
    static = found.algorithm in ("FP8", "NVFP4")
    inputs = raw.get(f"{module}.input_scale")
    if static and inputs is None:
        return [f"{module}.input_scale is missing"]
    if inputs is not None:
        found.input_scales[module] = float(inputs)
    codes, scale = raw[name], scale.float()
    if found.algorithm == "NVFP4":
        overall = raw.get(f"{module}.weight_scale_2")
        if overall is None:
            return [f"{module}.weight_scale_2 is missing"]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        step = scale.repeat_interleave(16, 1) * overall.float()
        values = _E2M1[pairs.long()]
    else:
        values = codes.float()
        step = scale
        if found.algorithm == "FP8_PB_WO":
            step = scale.reshape(scale.shape[0], -1).repeat_interleave(128, 0).repeat_interleave(128, 1)
            step = step[: codes.shape[0], : codes.shape[1]]
    found.tensors[name], found.steps[name] = values * step, step
    return []
