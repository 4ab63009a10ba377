"""Conversions against a plain copy of the same bytes by safetensors, and their memory against the largest tensors.

The copy is `save_file(load_file(...))` of the BF16 folder, file by file, as the library does it, and then made durable,
which a conversion always is. Bars: BF16 at 0.7 of the copy's rate, FP8 at 0.35. Every row is a process of its own that
waits for its turns; turns alternate, and medians count. Rates are of the model's bytes in bf16; a checkpoint of ours
has twice as many. Verification is off in all rows but its own.

    python -m benchmarks.convert [--gigabytes 2] [--rounds 3] [--folder /tmp] [--workers 0]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from megafp8.convert import fp8_folder, trtllm
from megafp8.convert.checkpoint_out import write_checkpoint
from megafp8.convert.fp8_folder import Options, to_quantized
from megafp8.convert.hf import from_hf, to_hf
from megafp8.convert.scales import Amaxes
from megafp8.convert.source import Source, open_source
from megafp8.convert.trtllm import to_trtllm
from megafp8.convert.trtllm_config import Target
from megafp8.core.config import to_dict
from megafp8.infer.weights import weight_shapes
from megafp8.models import ModelConfig
from megafp8.models.config import quantizable_shapes

# (title, what, from the BF16 folder or from our checkpoint, bar)
ROWS = (
    ("safetensors copy, durable", "copy", "hf", None),
    ("BF16: HF folder -> HF folder", "to_hf", "hf", 0.7),
    ("BF16: fp32 checkpoint -> HF", "to_hf", "run", 0.7),
    ("FP8: checkpoint -> ModelOpt", "modelopt", "run", 0.35),
    ("FP8: checkpoint -> TRT-LLM, tp 2", "trtllm", "run", 0.35),
    ("HF folder -> fp32 checkpoint", "from_hf", "hf", None),
    ("safetensors copy, not durable", "copy_only", "hf", None),
)


class Synthetic(Source):
    """A Llama of about so many bytes in bf16, every tensor the same noise again."""

    def __init__(self, size: float) -> None:
        layers = max(1, round((size / 2 - 2 * 8192 * 4096) / (4096 * 4096 * 2.5 + 3 * 4096 * 14336)))
        sizes = {"num_layers": layers, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
        self.path = Path("synthetic")
        self.config = ModelConfig(**sizes, num_kv_heads=8, vocab_size=8192)
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="also a conversion with its verification, once")
    parser.add_argument("--run", nargs=3, metavar=("WHAT", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        return _serve(given.run[0], Path(given.run[1]), Path(given.run[2]), given.workers)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _table(Path(folder), given)
    return 0


def _table(root: Path, given: argparse.Namespace) -> None:
    with Synthetic(given.gigabytes * 1e9) as source:
        meta = {"step": 0, "config": {"model": to_dict(source.config), "data": {"tokenizer": "bytes"}}}
        checkpoint = write_checkpoint(source, root / "run", meta)
    with open_source(checkpoint) as opened:
        largest = max(torch.Size(shape).numel() * 2 for shape in opened.shapes.values())
        size = sum(torch.Size(shape).numel() * 2 for shape in opened.shapes.values())
    to_hf(checkpoint, root / "hf", verify=False)
    print(f"a Llama of {size / 1e9:.1f} GB in bf16, largest group {largest / 1e6:.0f} MB; {os.cpu_count()} cores")
    print(f"{'':34}{'s':>8}{'CPU-s':>8}{'MB/s':>8}{'of copy':>9}{'bar':>6}{'peak MB':>9}{'/ largest':>11}")
    rows = [_Row(what, root / source, root / f"out{n}", given.workers) for n, (_, what, source, _) in enumerate(ROWS)]
    for _ in range(given.rounds):
        for row in rows:
            os.sync()
            row.turn()
            shutil.rmtree(row.out)
    if given.verify:
        rows.append(_Row("to_hf_verified", root / "hf", root / "verified", given.workers))
        rows[-1].turn()
    copy = rows[0].median("seconds")
    titles = [(title, bar) for title, _, _, bar in ROWS] + [("BF16: HF -> HF, verified, once", None)]
    for (title, bar), row in zip(titles, rows, strict=False):
        row.close()
        seconds, peak = row.median("seconds"), max(turn["peak"] for turn in row.turns)
        rate = f"{size / 1e6 / seconds:8.0f}{copy / seconds:9.2f}{bar or '':>6}"
        print(f"{title:34}{seconds:8.2f}{row.median('cpu'):8.2f}{rate}{peak / 1e6:9.0f}{peak / largest:11.2f}")


class _Row:
    """A process that converts once a turn."""

    def __init__(self, what: str, source: Path, out: Path, workers: int) -> None:
        words = ["-m", "benchmarks.convert", "--workers", str(workers), "--run", what, str(source), str(out)]
        environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # as the command line sets it
        self.out, self.turns = out, list[dict[str, float]]()
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def turn(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} failed")  # type: ignore[arg-type]
        self.turns.append(json.loads(line))

    def median(self, what: str) -> float:
        return statistics.median(turn[what] for turn in self.turns)

    def close(self) -> None:
        self._process.communicate()


def _serve(what: str, source: Path, out: Path, workers: int) -> int:
    """A row's process: a line of input is a turn, answered by its seconds and the growth of resident memory."""
    more: dict[str, Any] = {"verify": False, "workers": workers}
    jobs: dict[str, Callable[[], object]] = {
        "to_hf": lambda: to_hf(source, out, **more),
        "to_hf_verified": lambda: to_hf(source, out, workers=workers),
        "from_hf": lambda: from_hf(source, out, **more),
        "modelopt": lambda: to_quantized(source, out, Options("modelopt"), **more),
        "trtllm": lambda: to_trtllm(source, out, Target(2, 1), fp8=True, **more),
        "copy": lambda: _copy(source, out, durable=True),
        "copy_only": lambda: _copy(source, out, durable=False),
    }
    torch.zeros(8).float().bfloat16()  # what torch loads when first used is no part of a conversion
    before = _resident("VmRSS")
    # a calibration is a run of the model, whose time is not the conversion's
    with mock.patch.object(fp8_folder, "find_amaxes", _amaxes), mock.patch.object(trtllm, "find_amaxes", _amaxes):
        for _ in sys.stdin:
            begin, work = time.perf_counter(), time.process_time()
            jobs[what]()
            found = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - work}
            print(json.dumps(found | {"peak": _resident("VmHWM") - before}), flush=True)
    return 0


def _amaxes(source: Source, *_: object, **__: object) -> Amaxes:
    return Amaxes("of the benchmark", dict.fromkeys(quantizable_shapes(source.config), 4.0))


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
