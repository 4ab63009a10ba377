"""Conversions against a plain copy of the same bytes by safetensors, and their memory against the largest tensors.

Every row is a process of its own. The copy is `save_file(load_file(...))`, file by file, as the library does it, and
then made durable, which a conversion always is. Rates count the bytes in bf16; a checkpoint has twice as many.

    python -m benchmarks.convert [--gigabytes 2] [--folder /tmp] [--workers 0]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megafp8.convert.checkpoint_out import write_checkpoint
from megafp8.convert.hf import from_hf, to_hf
from megafp8.convert.source import Source, open_source
from megafp8.core.config import to_dict
from megafp8.infer.weights import weight_shapes
from megafp8.models import ModelConfig


class Synthetic(Source):
    """A Llama of about so many bytes in bf16, every tensor the same noise again."""

    def __init__(self, size: float) -> None:
        layers = max(1, round((size / 2 - 2 * 32000 * 4096) / (4096 * 4096 * 2.5 + 3 * 4096 * 14336)))
        sizes = {"num_layers": layers, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
        self.path = Path("synthetic")
        self.config = ModelConfig(**sizes, num_kv_heads=8, vocab_size=32000)
        self.fingerprint = f"synthetic {layers}"
        self.shapes = weight_shapes(self.config)
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        self._noise = torch.randn(1 << 24)

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Noise of the right shape."""
        count = torch.Size(self.shapes[name]).numel()
        whole = self._noise.repeat(-(-count // self._noise.numel()))[:count]
        return whole.reshape(self.shapes[name]).to(dtype or torch.float32)

    def tokenizer(self, given: str | Path | None = None) -> str:
        """Bytes."""
        return "bytes"


def main(arguments: list[str]) -> int:
    """Print the table; 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the model in bf16")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--run", nargs=3, metavar=("WHAT", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        return _run(given.run[0], Path(given.run[1]), Path(given.run[2]), given.workers)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _table(Path(folder), given.gigabytes, given.workers)
    return 0


def _table(root: Path, gigabytes: float, workers: int) -> None:
    with Synthetic(gigabytes * 1e9) as source:
        meta = {"step": 0, "config": {"model": to_dict(source.config), "data": {"tokenizer": "bytes"}}}
        checkpoint = write_checkpoint(source, root / "run", meta)
    with open_source(checkpoint) as opened:
        largest = max(torch.Size(shape).numel() * 2 for shape in opened.shapes.values())
        size = sum(torch.Size(shape).numel() * 2 for shape in opened.shapes.values())
    print(f"a Llama of {size / 1e9:.1f} GB in bf16, largest group {largest / 1e6:.0f} MB; {os.cpu_count()} cores")
    print(f"{'':34}{'s':>8}{'CPU-s':>8}{'MB/s':>8}{'of copy':>9}{'peak MB':>9}{'/ largest':>11}")
    hf = root / "hf"
    rows = {
        "to_hf (checkpoint -> bf16)": ("to_hf", checkpoint, hf),
        "safetensors copy, durable": ("copy", hf, root / "copy"),
        "safetensors copy, not durable": ("copy_only", hf, root / "copy"),
        "from_hf (bf16 -> checkpoint)": ("from_hf", hf, root / "back"),
    }
    found = {}
    for what, source_folder, out in rows.values():
        os.sync()
        found[what] = _measure(what, source_folder, out, workers)
        if out != hf:
            shutil.rmtree(out)
    for title, (what, *_) in rows.items():
        seconds, cpu, peak = found[what]
        ratio = found["copy"][0] / seconds
        rate = f"{size / 1e6 / seconds:8.0f}{ratio:9.2f}"
        print(f"{title:34}{seconds:8.2f}{cpu:8.2f}{rate}{peak / 1e6:9.0f}{peak / largest:11.2f}")


def _measure(what: str, source: Path, out: Path, workers: int) -> tuple[float, float, float]:
    words = ["-m", "benchmarks.convert", "--workers", str(workers), "--run", what, str(source), str(out)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line sets it
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["cpu"], found["peak"]


def _run(what: str, source: Path, out: Path, workers: int) -> int:
    """One row: seconds and the growth of resident memory beyond what the imports take."""
    torch.zeros(8).float().bfloat16()  # what torch loads when first used is no part of a conversion
    before, begin, work = _resident("VmRSS"), time.perf_counter(), time.process_time()
    jobs: dict[str, Callable[[], object]] = {
        "to_hf": lambda: to_hf(source, out, verify=False, workers=workers),
        "from_hf": lambda: from_hf(source, out, verify=False, workers=workers),
        "copy": lambda: _copy(source, out, durable=True),
        "copy_only": lambda: _copy(source, out, durable=False),
    }
    jobs[what]()
    found = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - work}
    print(json.dumps(found | {"peak": _resident("VmHWM") - before}))
    return 0


def _copy(source: Path, out: Path, *, durable: bool) -> None:
    out.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), out / path.name, metadata={"format": "pt"})
        if durable:
            fd = os.open(out / path.name, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
