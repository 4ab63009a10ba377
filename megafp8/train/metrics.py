"""Where measurements go: metrics.jsonl first, then TensorBoard under Megatron's tags, then the console line."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.core.jsonio import resource_error, write_atomic

# metrics.jsonl field -> the tag that Megatron-LM users have on their dashboards
TAGS = {
    "loss": "lm loss",
    "lr": "learning-rate",
    "global_batch": "batch-size",
    "grad_norm": "grad-norm",
    "loss_scale": "loss-scale",
    "world_size": "world-size",
    "step_seconds": "iteration-time",
    "tflops_causal": "throughput",
    "tokens_per_second": "tokens-per-sec",
    "mfu_causal": "mfu-causal",
    "mfu_full": "mfu-full",
    "goodput": "goodput",
    "memory_bytes": "mem-max-allocated-bytes",
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a crash is left out."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


@dataclass(frozen=True)
class Totals:
    """What a run has done so far: seconds of all attempts, those of the steps kept, (step, loss) of the last taken."""

    run_seconds: float = 0.0
    productive_seconds: float = 0.0
    losses: tuple[tuple[int, float], ...] = ()


def rewind(path: Path, step: int, *, num_losses: int = 0) -> Totals:
    """Drop train, eval and fp8 records of steps after `step`, which a resumed run does again."""
    records = read_lines(path)
    train = [r for r in records if r.get("kind") == "train"]
    kept = [r for r in train if r["step"] <= step]
    taken = [
        (r["step"], r["loss"]) for r in kept if r.get("taken", True) and not r.get("spike") and math.isfinite(r["loss"])
    ]
    totals = Totals(
        max((r.get("run_seconds", 0.0) for r in train), default=0.0),
        max((r.get("productive_seconds", 0.0) for r in kept), default=0.0),
        tuple(taken[len(taken) - num_losses :] if num_losses else ()),
    )
    keep = [r for r in records if r.get("kind") == "event" or r.get("step", 0) <= step]
    write_atomic(path, b"".join(json.dumps(r).encode() + b"\n" for r in keep))
    return totals


class MetricsWriter:
    """Appends records to metrics.jsonl and mirrors them to TensorBoard; on ranks other than 0 it does nothing."""

    def __init__(self, folder: Path, *, enabled: bool, tensorboard: bool) -> None:
        self._path = folder / "metrics.jsonl"
        self._file = open(self._path, "ab", buffering=0) if enabled else None  # noqa: SIM115 - until close()
        self._board: Any = None
        if enabled and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # 1 s of imports, wanted on rank 0 only

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Write one record: one write call, so that a crash leaves whole lines and at most one cut short."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **fields}).encode() + b"\n")
        except OSError as error:
            raise resource_error(error, self._path) from error
        if self._board is not None:
            self._mirror(kind, step, fields)

    def _mirror(self, kind: str, step: int, fields: dict[str, Any]) -> None:
        if kind == "train":
            for name, tag in TAGS.items():
                if name in fields:
                    self._board.add_scalar(tag, fields[name], step)
            self._board.add_scalar("lm loss vs samples", fields["loss"], fields["consumed_samples"])
        elif kind == "eval":
            suffix = "" if fields["name"] == "valid" else f" {fields['name']}"
            self._board.add_scalar(f"lm loss validation{suffix}", fields["loss"], step)
            self._board.add_scalar(f"lm loss validation ppl{suffix}", fields["perplexity"], step)
        elif kind == "moe":
            self._board.add_scalar("load_balancing_loss", fields["aux_loss"], step)
            self._board.add_scalar("z_loss", fields["z_loss"], step)
            for layer in fields["layers"]:
                for name in ("aux_loss", "z_loss", "max_load", "dropped"):
                    self._board.add_scalar(f"moe/{name}_layer_{layer['layer']}", layer[name], step)
        elif kind == "event" and "origin" in fields:
            self._board.add_text(fields["event"], fields["origin"], step)
        elif kind in ("fp8", "gpu"):
            for name, value in fields.get("stats", {}).items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def rewind(self, step: int, *, num_losses: int) -> Totals:
        """Drop what belongs to steps after `step`, in a run that goes on from there; see `rewind`."""
        if self._file is None:
            return Totals()
        self.flush()
        self._file.close()
        totals = rewind(self._path, step, num_losses=num_losses)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - until close()
        return totals

    def flush(self) -> None:
        """Make everything written so far durable; called before a checkpoint commits."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def console_line(fields: dict[str, Any], *, steps: int, eta_seconds: float) -> str:
    """The line of one step in Megatron-LM's order, with ETA and goodput at its end."""
    hours, rest = divmod(int(eta_seconds), 3600)
    return " | ".join(
        [
            f"iteration {fields['step']:>8}/{steps:>8}",
            f"consumed samples: {fields['consumed_samples']:>12}",
            f"elapsed time per iteration (ms): {1000 * fields['step_seconds']:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {fields['tflops_causal']:.4g}",
            f"tokens/s: {fields['tokens_per_second']:.0f}",
            f"learning rate: {fields['lr']:.6E}",
            f"global batch size: {fields['global_batch']:>5}",
            f"lm loss: {fields['loss']:.6E}",
            f"loss scale: {fields['loss_scale']:.1f}",
            f"grad norm: {fields['grad_norm']:.3f}",
            f"number of skipped iterations: {fields['skipped']:>3}",
            f"number of nan iterations: {fields['nan']:>3}",
            f"eta: {hours}:{rest // 60:02}:{rest % 60:02}",
            f"goodput: {100 * fields['goodput']:.1f}%",
        ]
    )
