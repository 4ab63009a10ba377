"""The page's smaller tables as plain values: FP8 extremes, rounding, timeline, configuration, environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megafp8.report.fp8_health import ROLES, STATISTICS, Grid
from megafp8.report.headline import UNKNOWN, compact, duration, rate
from megafp8.report.runs import Run
from megafp8.report.weights import WeightSpread

Line = dict[str, Any]
KINDS = ("saved", "resumed", "preempted", "other")


def percent(value: float) -> str:
    """A percentage from tiny to large; an exact zero is a plain 0."""
    if value >= 10.0:
        return f"{value:.1f} %"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-") + " %"


def health_lines(grids: Mapping[tuple[str, str], Grid]) -> list[Line]:
    """The last mean and the highest value of each statistic of each role."""
    lines = []
    for statistic in STATISTICS:
        for role in ROLES:
            grid = grids.get((statistic, role))
            if grid is None or np.isnan(grid.values).all():
                continue
            module, step, worst = grid.worst
            lines.append(
                {
                    "role": role.replace("_", " ").replace("grad output", "output gradient"),
                    "statistic": statistic.rstrip("s%"),
                    "mean": percent(grid.final_mean),
                    "worst": percent(worst),
                    "where": f"{module}, step {step:,}" if worst > 0 else UNKNOWN,
                }
            )
    return lines


def rounding_lines(spread: WeightSpread) -> list[Line]:
    """What each format does to the weights."""
    return [
        {
            "format": f"{row['format']}" + ("" if row["format"] == "BF16" else ", a scale a tensor"),
            "zeroed": percent(float(row["zeroed_percent"])),
            "relative": percent(float(row["relative_percent"])),
            "snr": f"{row['snr_db']:.1f} dB",
        }
        for row in spread.table()
    ]


def timeline(run: Run) -> Line:
    """One run as a track: how far it is, and where it was saved, resumed, stopped."""
    last = int(run.steps[-1])
    planned = run.config.get("train", {}).get("steps")
    total = max(last, planned if isinstance(planned, int) else 0)
    marks = [
        {
            "kind": event["event"] if event.get("event") in KINDS else "other",
            "at": round(100.0 * min(event["step"], total) / total, 2),
            "words": f"{event.get('event', 'event')} at step {event['step']:,}",
        }
        for event in run.events
    ]
    return {
        "run": run.name,
        "done": round(100.0 * last / total, 2),
        "end": f"step {last:,}" if last == total else f"step {last:,} of {total:,}",
        # saves are many: they are drawn first, so that what interrupts stands on top
        "marks": sorted(marks, key=lambda mark: mark["kind"] != "saved"),
        "words": _event_words(run),
    }


def _event_words(run: Run) -> str:
    counts = Counter(str(event.get("event", "event")) for event in run.events)
    parts = []
    if counts["saved"]:
        seconds = [float(e["seconds"]) for e in run.events if e.get("event") == "saved" and "seconds" in e]
        took = f", {duration(float(np.median(seconds)))} each" if seconds else ""
        parts.append(f"saved {counts['saved']} time{'s' if counts['saved'] > 1 else ''}{took}")
    for name in sorted(counts.keys() - {"saved"}):
        steps = [f"{event['step']:,}" for event in run.events if event.get("event", "event") == name]
        shown = ", ".join(steps[:8]) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
        parts.append(f"{name} at step {shown}")
    return "; ".join(parts).capitalize() + "." if parts else "No events."


def settings(runs: Sequence[Run]) -> list[Line]:
    """Keys that differ from their default in some run, or between runs."""
    lines = []
    flat = [_flat(run.config) for run in runs]
    changed: dict[str, str] = {}
    for run in runs:
        for key, (default, _) in run.changed.items():
            changed.setdefault(key, default)
    keys = dict.fromkeys([*(key for values in flat for key in values if key in changed), *changed])
    for key in dict.fromkeys([*keys, *(k for k in flat[0] if len({v.get(k) for v in flat}) > 1)]) if flat else ():
        values = [run.changed[key][1] if key in run.changed else v.get(key, "") for run, v in zip(runs, flat)]
        default = changed.get(key, "").replace('"(none)"', UNKNOWN)  # required: it has no default
        lines.append({"key": key, "default": default, "values": values, "differs": len(set(values)) > 1})
    return lines


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys, values as they would stand in TOML or nearly so."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = json.dumps(value, ensure_ascii=False)
    return found


ENVIRONMENT = {
    "started": "Started",
    "code_version": "Code version",
    "command": "Command",
    "device": "Device",
    "cpu": "Processor",
    "threads": "Threads a rank",
    "world_size": "Ranks",
    "mesh": "Mesh",
    "platform": "Platform",
    "python": "Python",
    "torch": "PyTorch",
    "peak_flops": "BF16 peak a rank",
    "peak_source": "Peak from",
    "flops_per_token_causal": "FLOPs a token, causal",
    "flops_per_token_full": "FLOPs a token, full",
    "train_tokens": "Tokens in the corpus",
    "unigram_entropy_nats": "Unigram entropy, nats",
    "tokenizer": "Tokenizer",
}


def environment(runs: Sequence[Run]) -> list[Line]:
    """What run.json says, a line a fact that some run has."""
    lines = []
    for key, label in ENVIRONMENT.items():
        values = [_fact_text(key, run.facts[key]) if run.facts.get(key) is not None else UNKNOWN for run in runs]
        if any(value != UNKNOWN for value in values):
            differs = len(set(values)) > 1 and key not in ("started", "command")
            lines.append({"key": label, "values": values, "differs": differs})
    return lines


def _fact_text(key: str, value: Any) -> str:
    if key == "mesh" and isinstance(value, Mapping):
        return " ".join(f"{axis} {size}" for axis, size in value.items())
    if key == "tokenizer" and isinstance(value, Mapping):
        size, fingerprint = value.get("vocab_size", "?"), str(value.get("fingerprint", ""))[:12]
        return ", ".join(part for part in (str(value.get("kind", "")), f"{size} pieces", fingerprint) if part)
    if key == "peak_flops" and isinstance(value, (int, float)):
        return rate(float(value))
    if key in ("train_tokens", "flops_per_token_causal", "flops_per_token_full"):
        return compact(float(value), 4)
    if isinstance(value, float):
        return f"{value:.4f}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
