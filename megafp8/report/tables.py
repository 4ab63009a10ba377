"""The page's smaller tables as plain values: FP8 extremes, rounding, timeline, configuration, environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megafp8.report.fp8_health import RATIO, ROLE_WORDS, ROLES, SHARES, Grid, Key, error_ratio
from megafp8.report.headline import UNKNOWN, compact, duration, rate
from megafp8.report.runs import Run
from megafp8.report.weights import WeightSpread

Line = dict[str, Any]
KINDS = ("saved", "resumed", "preempted", "skipped", "other")
_MOST_ORIGINS = 5


def percent(value: float) -> str:
    """A percentage from tiny to large; an exact zero is a plain 0."""
    if value >= 10.0:
        return f"{value:.1f} %"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-") + " %"


def health_lines(grids: Mapping[Key, Grid]) -> list[Line]:
    """The last mean and the highest value of each statistic of each role."""
    words = {"underflows%": "underflow", "overflows%": "overflow", RATIO: "amax over history"}
    lines = []
    for statistic in (*SHARES, RATIO):
        for role in ROLES:
            grid = grids.get((statistic, role))
            if grid is None or np.isnan(grid.values).all():
                continue
            module, step, worst = grid.worst
            shown = times if statistic == RATIO else percent
            lines.append(
                {
                    "role": ROLE_WORDS[role],
                    "statistic": words[statistic],
                    "mean": shown(grid.final_mean),
                    "worst": shown(worst),
                    "where": f"{module}, step {step:,}" if worst > 0 else UNKNOWN,
                }
            )
    return lines


def what_if_lines(grids: Mapping[Key, Grid], recipes: Mapping[str, str]) -> list[Line]:
    """Recipes that are not in use, by role: underflow, and squared error against the one in use."""
    lines = []
    for prefix, recipe in recipes.items():
        for role in ROLES:
            grid = grids.get((f"{prefix}underflows%", role))
            if grid is None or np.isnan(grid.values).all():
                continue
            ratio = error_ratio(grids, prefix, role)
            lines.append(
                {
                    "recipe": recipe,
                    "role": ROLE_WORDS[role],
                    "mean": percent(grid.final_mean),
                    "worst": percent(grid.worst[2]),
                    "error": UNKNOWN if np.isnan(ratio) else times(ratio),
                }
            )
    return lines


def times(value: float) -> str:
    """A ratio with two digits that count."""
    return f"{np.format_float_positional(value, precision=2, fractional=False, trim='-')} \u00d7"


def fp8_share(run: Run) -> str:
    """How many matrix products run in FP8 and which linears do not, as a sentence; empty if the run does not say."""
    counts = run.facts.get("fp8")
    if not isinstance(counts, Mapping) or not counts.get("recipes"):
        return ""
    recipes = ", ".join(f"{number} in {name}" for name, number in counts["recipes"].items())
    done = f"{counts['fp8_gemms']} of the layers' {counts['gemms']} matrix products of a micro-batch run in FP8"
    layers: dict[str, list[int]] = {}
    for name in counts["not_fp8"]:
        _, layer, kind = name.split(".", 2)
        layers.setdefault(kind, []).append(int(layer))
    kinds: dict[tuple[int, ...], list[str]] = {}
    for kind, numbers in layers.items():
        kinds.setdefault(tuple(numbers), []).append(kind)
    left = "; ".join(f"{', '.join(names)} in layer{'s'[: len(n) > 1]} {_spans(n)}" for n, names in kinds.items())
    return f"{done} (linears: {recipes}); {f'not in FP8: {left}.' if left else 'no linear is left out.'}"


def _spans(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1 to 3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


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
        "origins": _origins(run),
    }


def _origins(run: Run) -> list[str]:
    """Where steps that were not finite broke, the first few of them."""
    found = [f"Step {e['step']:,}: {e['origin']}." for e in run.events if "origin" in e]
    more = len(found) - _MOST_ORIGINS
    return found[:_MOST_ORIGINS] + ([f"And {more} more; metrics.jsonl has them all."] if more > 0 else [])


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
