"""`megafp8 doctor`: what this machine has, as text to paste into a report."""

from __future__ import annotations

import argparse

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
    """Print one fact a line; 0 if a CPU run would work."""
    import os
    import platform
    import shutil
    from importlib import metadata

    from megafp8 import __version__, fp8
    from megafp8.core.errors import ConfigError

    print(f"megafp8             {__version__}")
    print(f"python              {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            print(f"{name:<19} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name:<19} not installed")
    import torch

    for index in range(torch.cuda.device_count()):
        print(f"GPU {index:<15} {torch.cuda.get_device_name(index)}")
    if not torch.cuda.is_available():
        print("GPU                 none: runs use the CPU, gloo and emulated FP8")
    print(f"cores               {os.cpu_count()}, torch uses {torch.get_num_threads()} threads")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    print(f"C++ compiler        {compiler or 'none: torch.compile is not used'}")
    for name in ("auto", "emulated", "native"):
        try:
            backend = fp8.backend(name)
            print(f"FP8 {name:<15} {backend.name}: {backend.reason}")
        except ConfigError as error:
            print(f"FP8 {name:<15} refused: {error}")
    free = shutil.disk_usage(".").free
    print(f"free disk here      {free / 2**30:.1f} GiB")
    return 0
