"""`make bench`: every benchmark, peers in the same run, with few rounds; more by each one's own command."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import (
    checkpoint_speed,
    convert,
    corpus_memory,
    corpus_peers,
    corpus_pipeline,
    fp8_quantizers,
    fp8_step,
    parallel_step,
    scaling,
    train_step,
)

Run = tuple[str, Callable[[list[str]], int], list[str]]
RUNS: tuple[Run, ...] = (
    ("training step: 8 layers, hidden 512, sequence 512, micro-batch 4, BF16 and FP8 (docs/performance.md)",
     train_step.main, ["--fp8", "--steps", "6"]),
    ("the step in every FP8 recipe, and with statistics on", fp8_step.main, ["--steps", "4"]),
    ("FP8 quantizers, compiled against as written", fp8_quantizers.main, ["--rounds", "5"]),
    ("the same model on two processes, 8 sequences a step", parallel_step.main,
     ["--only", "tp 2", "dp 2", "--steps", "3"]),
    ("saving and loading 1 GB, and saving beside steps", checkpoint_speed.main, ["--rounds", "1"]),
    ("conversions against a plain copy of the same bytes, and their memory", convert.main,
     ["--gigabytes", "0.6", "--rounds", "2"]),
    ("jsonl to .bin and .idx, Megatron's loops beside (docs/corpus.md: with more text, and datatrove)",
     corpus_peers.main, ["--megabytes", "20"]),
    ("a whole corpus with language id, filters and MinHash, stage by stage", corpus_pipeline.main, []),
    ("memory of the corpus tools", corpus_memory.main, ["--largest", "40", "--documents", "1e6"]),
    ("how the cost of a step grows", scaling.main, []),
)  # fmt: skip


def main() -> int:
    """Run them one after the other; 0 if all ran and kept their bounds."""
    failed = []
    for title, run, words in RUNS:
        print(f"\n{title}", flush=True)
        if run(words):
            failed.append(title)
    for title in failed:
        print(f"out of bounds, which a busy machine does too: {title}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
