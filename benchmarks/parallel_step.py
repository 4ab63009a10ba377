"""Tokens a second of a training step on two processes, tp, dp and pp = 2, against one process with both threads.

The peer is megatron-core on the same meshes (see megatron_peer), if it is installed. Tokens a CPU-second are what to
compare: they hold on a busy machine too. "MFU" is against this machine's own measured bf16 GEMM rate.

    python -m benchmarks.parallel_step --steps 6
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import megatron_peer
from benchmarks.contenders import Contender, serve, summary, take_turns
from megafp8.core.config import build
from megafp8.data.loader import Batch
from megafp8.models import ModelConfig
from megafp8.models.cost import flops_per_token
from megafp8.parallel.launch import init_distributed
from megafp8.parallel.mesh import build_mesh
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble
from megafp8.train.step import train_step
from megafp8.train.telemetry import peak_flops

LENGTH, VOCAB = 512, 8192
SHAPE = {"layers": 8, "hidden": 512, "ffn": 1408, "heads": 8, "groups": 4, "vocabulary": VOCAB, "length": LENGTH}


@dataclass(frozen=True)
class Setting:
    """A mesh, and how it serves the step's sequences."""

    axis: str
    ranks: int
    threads: int
    micro_batch: int
    micro_batches: int
    dp_shard: str = "none"

    @property
    def parallel(self) -> dict[str, Any]:
        """The configuration's section; empty for one process."""
        return {} if self.axis in ("none", "apart") else {self.axis: self.ranks, "dp_shard": self.dp_shard}

    @property
    def of_peer(self) -> bool:
        """Whether megatron-core is measured on it too."""
        return self.axis != "apart" and self.dp_shard == "none"

    @property
    def tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.micro_batch * self.micro_batches * LENGTH * (self.ranks if self.axis in ("dp", "apart") else 1)


SETTINGS = {
    "1 x 2 threads": Setting("none", 1, 2, 4, 2),
    "1 x 1 thread": Setting("none", 1, 1, 4, 1),
    "2 x 1 apart": Setting("apart", 2, 1, 4, 1),  # two runs that know nothing of each other, at the same time
    "tp 2": Setting("tp", 2, 1, 4, 2),
    "dp 2": Setting("dp", 2, 1, 4, 1),
    "dp 2 ZeRO-1": Setting("dp", 2, 1, 4, 1, dp_shard="optimizer"),
    "pp 2": Setting("pp", 2, 1, 1, 8),
}
BASE = "ours 1 x 2 threads"
AFTER_WARM_UP = 10_000  # a step in which no FP8 scale warms up any more


class _Repeat:
    """The same micro-batches in every step."""

    def __init__(self, tokens: torch.Tensor, micro_batches: int) -> None:
        batch = Batch(tokens, tokens.roll(-1, 1), torch.arange(len(tokens)))
        self._batches = [batch] * micro_batches
        self.consumed_samples = 0

    def next_step(self) -> list[Batch]:
        return self._batches


def made_parts(
    model: Mapping[str, object],
    tokens: torch.Tensor,
    *,
    micro_batches: int,
    parallel: Mapping[str, Any] | None = None,
    recipe: str = "none",
) -> Parts:
    """The trainer around `tokens` [B, S], every rank's micro-batch, one process, or those of `parallel`."""
    launch = init_distributed("cpu", os.environ if parallel else {})
    replicas = (parallel or {}).get("dp", 1)
    sections: dict[str, Any] = {
        "run": {"dir": "unused"},
        "model": model,
        "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": tokens.shape[1]},
        "train": {
            "steps": 1000, "global_batch": len(tokens) * micro_batches * replicas, "micro_batch": len(tokens),
            "compile": "on",
        },
        "precision": {"recipe": recipe},
        "parallel": parallel or {},
    }  # fmt: skip
    config = build(RunConfig, sections)
    mesh = build_mesh(config.parallel, launch.world, kv_heads=config.model.num_kv_heads)
    return assemble(config, mesh, torch.device("cpu"), _Repeat(tokens, micro_batches))


def ours(setting: Setting, precision: str) -> Callable[[], float]:
    """The trainer's own step."""
    tokens = torch.randint(0, VOCAB, (setting.micro_batch, LENGTH), generator=torch.Generator().manual_seed(0))
    parts = made_parts(
        {"preset": "bench"},
        tokens,
        micro_batches=setting.micro_batches,
        parallel=setting.parallel,
        recipe="delayed" if precision == "fp8" else "none",
    )
    return lambda: train_step(parts, AFTER_WARM_UP, 3e-4).loss


def contend(name: str, precision: str) -> None:
    """Child: serve steps of the named contender."""
    whose, _, mesh = name.partition(" ")
    setting = SETTINGS[mesh]
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    if whose == "ours":
        serve(partial(ours, setting, precision))
        return
    sizes = {axis: setting.ranks if setting.axis == axis else 1 for axis in ("tp", "pp")}
    batches = {"micro_batch": setting.micro_batch, "micro_batches": setting.micro_batches}
    serve(lambda: megatron_peer.build(SHAPE, **sizes, **batches))


def measure(names: list[str], *, steps: int, precision: str) -> dict[str, dict[str, Any]]:
    """Run the contenders in turn."""
    contenders = {}
    for name in names:
        setting = SETTINGS[name.partition(" ")[2]]
        words = ["benchmarks.parallel_step", "--precision", precision, "--contender", name]
        contenders[name] = Contender(words, ranks=setting.ranks, threads=setting.threads)
    take_turns(contenders, steps)
    return {
        name: summary(contender, None, tokens=SETTINGS[name.partition(" ")[2]].tokens)
        for name, contender in contenders.items()
    }


def add_ratios(result: dict[str, dict[str, Any]]) -> None:
    """Beside each contender: against our one process, against the peer on the same mesh, and its MFU."""
    peak = 0.0
    for threads in (1, 2):
        torch.set_num_threads(threads)
        peak = max(peak, peak_flops(torch.device("cpu"), torch.bfloat16)[0])
    flops = flops_per_token(ModelConfig(preset="bench"), LENGTH, causal=False)
    for name, row in result.items():
        whose, _, mesh = name.partition(" ")
        row["of_one_process"] = row["tokens_per_cpu_second"] / result[BASE]["tokens_per_cpu_second"]
        peer = result.get(f"megatron {mesh}")
        row["of_megatron"] = row["tokens_per_cpu_second"] / peer["tokens_per_cpu_second"] if peer else None
        row["mfu_full"] = row["tokens_per_second"] * flops / peak


def show(result: dict[str, dict[str, Any]]) -> None:
    """Print the table, and what data parallelism keeps of two ranks that would not disturb each other."""
    head = ("contender", "tokens/s", "per CPU s", "x one process", "x megatron", "MFU %", "peak MB", "first s")
    print(("{:<26}" + "{:>14}" * 7).format(*head))
    for name, row in result.items():
        ratio = "" if row["of_megatron"] is None else f"{row['of_megatron']:.2f}"
        print(
            f"{name:<26}{row['tokens_per_second']:>14.0f}{row['tokens_per_cpu_second']:>14.0f}"
            f"{row['of_one_process']:>14.2f}{ratio:>14}{row['mfu_full'] * 100:>14.0f}{row['peak_bytes'] / 1e6:>14.0f}"
            f"{row['first_step_seconds']:>14.1f}"
        )
    pairs = itertools.product(("dp 2", "dp 2 ZeRO-1"), (("ours 1 x 1 thread", 2), ("ours 2 x 1 apart", 1)))
    for mesh, (ideal, factor) in pairs:
        two, one = result.get(f"ours {mesh}"), result.get(ideal)
        if two and one:
            kept = two["tokens_per_second"] / one["tokens_per_second"] / factor
            kept_cpu = two["tokens_per_cpu_second"] / one["tokens_per_cpu_second"]
            what = "twice one process alone" if factor == 2 else "two processes apart, at the same time"
            print(f"{mesh} has {kept:.2f} of {what} (wall clock), {kept_cpu:.2f} in CPU seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="rounds after warm-up")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="of ours")
    parser.add_argument("--only", nargs="*", choices=tuple(SETTINGS), help="meshes to run")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender:
        contend(options.contender, options.precision)
        return 0
    meshes = list(dict.fromkeys(["1 x 2 threads", *(options.only or SETTINGS)]))
    names = [f"ours {mesh}" for mesh in meshes]
    if megatron_peer.version():
        names += [f"megatron {mesh}" for mesh in meshes if SETTINGS[mesh].of_peer]
        print(f"peer: megatron-core {megatron_peer.version()}, patched to run on a CPU")
    else:
        print("megatron-core is not installed: no peer (pip install --no-deps megatron-core)")
    result = measure(names, steps=options.steps, precision=options.precision)
    add_ratios(result)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
