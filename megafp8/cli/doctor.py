"""`megafp8 doctor`: what this machine has, as text to paste into a report."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "what this machine has: versions, devices, compilers, FP8 backends, disk"
EPILOG = """examples:
  megafp8 doctor"""

_PACKAGES = (
    "torch", "numpy", "safetensors", "sentencepiece", "pydantic", "tensorboard", "nvidia-ml-py", "transformers",
    "tokenizers", "transformer-engine", "apex",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes: nothing."""


def run(args: argparse.Namespace) -> int:
    """Print one fact a line; 0 if a run would work here, on a CPU at least."""
    import os
    import platform
    import shutil

    from megafp8 import __version__

    print(f"megafp8             {__version__}")
    print(f"python              {platform.python_version()} on {platform.platform()}")
    _print_packages()
    try:
        import torch
    except (ImportError, OSError) as error:  # a wheel for another CUDA, a missing library
        print(f"torch               does not load: {_one_line(error)}; install a build for this machine")
        return 1
    cuda = torch.version.cuda or "none, a build for CPUs"
    print(f"torch's CUDA        {cuda}")
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        print(f"GPU {index:<15} {torch.cuda.get_device_name(index)}, SM {capability}")
    if not torch.cuda.is_available():
        print("GPU                 none: runs use the CPU, gloo and emulated FP8")
    print(f"cores               {os.cpu_count()}, torch uses {torch.get_num_threads()} threads")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    print(f"C++ compiler        {compiler or 'none: torch.compile is not used'}")
    _print_backends()
    print(f"free disk here      {shutil.disk_usage('.').free / 2**30:.1f} GiB")
    return 0


def _print_packages() -> None:
    from importlib import metadata

    for name in _PACKAGES:
        try:
            print(f"{name:<19} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name:<19} not installed")


def _print_backends() -> None:
    """Which recipe runs on which backend here, what auto would take, and why the others do not run."""
    from megafp8 import fp8
    from megafp8.fp8.backends.hardware import hardware_of, refusal
    from megafp8.fp8.recipe import recipe_names

    reasons: dict[tuple[str, str], list[str]] = {}
    print(f"{'FP8 recipe':<19} {'emulated':<9} {'native':<9} {'te':<9} auto takes")
    for name in recipe_names():
        recipe = fp8.recipe(name)
        refusals = {"native": refusal(recipe, hardware_of(None)), "te": _te_refusal(recipe)}
        cells = ["no" if reason else "yes" for reason in refusals.values()]
        chosen = fp8.backend("auto", recipe=recipe)
        print(f"  {name:<17} {'yes':<9} {cells[0]:<9} {cells[1]:<9} {chosen.name}")
        for backend, reason in refusals.items():
            if reason:
                reasons.setdefault((backend, reason), []).append(name)
    for (backend, reason), names in reasons.items():
        print(f"  {backend}, {', '.join(names)}: {reason}")


def _te_refusal(recipe: Any) -> str | None:
    from megafp8.core.errors import ConfigError
    from megafp8.nn.te_library import gpu_problem, hardware_problem, library

    try:
        te = library()
    except ConfigError as error:
        return str(error).removeprefix("precision.backend = 'te': ")
    except Exception as error:  # a broken installation raises what it likes
        return f"Transformer Engine does not load: {_one_line(error)}"
    reason = gpu_problem(_device_kind()) or hardware_problem(te, recipe)
    return reason and reason.split("; ")[0].removeprefix("precision.backend = 'te': ")


def _device_kind() -> str:
    """The kind of device that a run here uses."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
