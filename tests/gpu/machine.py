"""What the machine has: GPUs, driver, torch, Transformer Engine, and what is missing. Imports nothing of megafp8."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

NEEDED = ("numpy", "safetensors", "typing_extensions", "xxhash")  # beside torch; what training a model imports
STAND_INS = ("pydantic",)
TORCH_LEAST = (2, 11)


def describe() -> dict[str, Any]:
    """Facts by name; `missing` says why nothing can run, else empty."""
    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in ("torch", "triton", "numpy", "transformer-engine", "pydantic")},
        "stand_ins": [name for name in STAND_INS if importlib.util.find_spec(name) is None],
        "missing": _missing(),
        "gpus": [],
        "transformer_engine": "not looked for",
    }
    if not facts["missing"]:
        facts |= _torch_facts()
    return facts


def _missing() -> str:
    absent = [name for name in ("torch", *NEEDED) if importlib.util.find_spec(name) is None]
    if absent:
        return f"{sys.executable} lacks {', '.join(absent)}; install them, or name another: PYTHON=/path/to/python"
    version = metadata.version("torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH_LEAST:
        return f"torch {version} is older than {'.'.join(map(str, TORCH_LEAST))}, whose scaled_mm this needs"
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch_cuda": torch.version.cuda or "none: a CPU build"}
    if torch.cuda.is_available():
        facts["gpus"] = [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
        facts["driver"] = _driver()
        facts["compiler"] = _version("triton")
    else:
        facts["no_gpu"] = "torch was built without CUDA" if not torch.version.cuda else "torch sees no CUDA device"
    facts["transformer_engine"] = _transformer_engine()
    return facts


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def _transformer_engine() -> str:
    """Its version, or why it does not import."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken installation raises whatever it likes: OSError, AssertionError, ...
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"not importable: {type(error).__name__}: {first}"
    return _version("transformer-engine")


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts as text."""
    out = [f"python              {facts['python']}", f"platform            {facts['platform']}"]
    out += [f"{name:<19} {version}" for name, version in facts["packages"].items()]
    if facts["stand_ins"]:
        out.append(f"not installed       {', '.join(facts['stand_ins'])}: tests/gpu/stand_in takes their place")
    for gpu in facts["gpus"]:
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        out.append(f"GPU                 {gpu['name']}, SM {gpu['capability']}, {size}, CUDA {facts['torch_cuda']}")
    if not facts["gpus"] and not facts["missing"]:
        out.append(f"GPU                 none ({facts['no_gpu']}): a DRY RUN at tiny size, no GPU is measured")
    out.append(f"Transformer Engine  {facts['transformer_engine']}")
    return out
