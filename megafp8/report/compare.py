"""Several runs against the first: all numbers of the comparison as plain values, as tables, as Markdown. No drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megafp8.report.curves import Difference, steady_median, tail_mean, validation_gap
from megafp8.report.headline import UNKNOWN, compact, exp, fixed, signed
from megafp8.report.heldout import (
    LEVEL,
    RESAMPLES,
    SEED,
    HeldOut,
    Interval,
    difference_interval,
    loss_interval,
    read_heldout,
)
from megafp8.report.runs import Run

Numbers = dict[str, Any]


def numbers(runs: Sequence[Run], others: Sequence[Difference | None]) -> Numbers:
    """All that the comparison says, for compare.json; a value that does not exist is None.

    Args:
        others: the difference of each run after the first from the first.

    Raises:
        DataError: a damaged file of held-out losses.
    """
    judged = [read_heldout(run.folder) for run in runs]
    return {
        "kind": "megafp8-comparison",
        "baseline": runs[0].name,
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED, "level": LEVEL, "paired_over": "documents"},
        "runs": [
            {
                **_identity(run),
                "training": _training(run, diff),
                "validation": _validation(run, runs[0]),
                "heldout": _heldout(mine, judged[0], is_baseline=run is runs[0]),
            }
            for run, diff, mine in zip(runs, [None, *others], judged)
        ],
    }


def _identity(run: Run) -> Numbers:
    return {
        "name": run.name,
        "precision": run.precision,
        "seed": run.config.get("run", {}).get("seed"),
        "parameters": run.facts.get("num_parameters"),
        "steps": int(run.steps[-1]),
        "tokens": _plain(run.series("consumed_tokens")[-1]),
        "tokens_per_second": _plain(steady_median(run.series("tokens_per_second"))),
    }


def _training(run: Run, diff: Difference | None) -> Numbers:
    found: Numbers = {"final_loss": _plain(tail_mean(run.series("loss")))}
    if diff is None:
        return found
    late = np.abs(diff.smoothed[len(diff.smoothed) // 4 :])
    largest = float(np.nanmax(late)) if np.isfinite(late).any() else math.nan
    return found | {
        "difference": _plain(diff.final),
        "step_noise": _plain(diff.noise),
        "difference_over_noise": _plain(diff.final / diff.noise if diff.noise else math.nan),
        "largest_smoothed_difference": _plain(largest),
        "own_noise": _plain(diff.own_noise),
        "same_samples": diff.same_data,
    }


def _validation(run: Run, baseline: Run) -> Numbers:
    """The run's own last evaluation of each set."""
    return {
        name: {
            "step": records[-1]["step"],
            "loss": _plain(records[-1]["loss"]),
            "perplexity": _plain(exp(float(records[-1]["loss"]))),
            "difference": None if run is baseline else _plain(validation_gap(run, baseline, name)),
        }
        for name, records in run.evals.items()
        if records
    }


def _heldout(mine: dict[str, HeldOut], theirs: dict[str, HeldOut], *, is_baseline: bool) -> Numbers:
    found: Numbers = {}
    for name, judged in mine.items():
        apart = None if is_baseline or name not in theirs else difference_interval(judged, theirs[name])
        found[name] = {
            "arithmetic": judged.arithmetic,
            "step": judged.step,
            "documents": len(judged.tokens),
            "tokens": int(judged.tokens.sum()),
            "loss": _spread(loss_interval(judged)),
            "perplexity": _plain(judged.perplexity),
            "bits_per_byte": _plain(judged.facts.get("bits_per_byte")),
            "difference": None if apart is None else _spread(apart),
        }
    return found


def _spread(interval: Interval) -> Numbers:
    return {"value": _plain(interval.value), "low": _plain(interval.low), "high": _plain(interval.high)}


def _plain(value: Any) -> float | None:
    """A number for JSON; None for what is none."""
    return float(value) if isinstance(value, (int, float, np.floating)) and math.isfinite(value) else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def set_names(found: Numbers) -> list[str]:
    """Held-out sets that some run was judged on, by name."""
    return sorted({name for run in found["runs"] for name in run["heldout"]})


def training_rows(found: Numbers) -> list[list[str]]:
    """A header and a row a run: how training ended, and how far from the baseline against the step-to-step noise."""
    rows = [["run", "precision", "tokens", "final training loss", "− baseline", "in σ", "largest smoothed"]]
    for run in found["runs"]:
        training = run["training"]
        noise = _float(training.get("step_noise"))
        rows.append(
            [
                run["name"],
                run["precision"],
                compact(_float(run["tokens"])),
                fixed(_float(training["final_loss"]), 4),
                signed(_float(training.get("difference")), 4),
                signed(_float(training.get("difference_over_noise")), 2),
                _over(_float(training.get("largest_smoothed_difference")), noise),
            ]
        )
    return rows


def _over(value: float, noise: float) -> str:
    return f"{fixed(value, 4)} ({fixed(value / noise, 2)} σ)" if math.isfinite(value) and noise > 0 else UNKNOWN


def heldout_rows(found: Numbers, name: str) -> list[list[str]]:
    """A header and a row a run on one set: loss, perplexity, and the difference with its interval."""
    level = f"{100 * LEVEL:g} %"
    intervals = (f"{level} interval", f"{level} interval, paired")
    rows = [["run", "loss", intervals[0], "perplexity", "bits a byte", "− baseline", intervals[1]]]
    for run in found["runs"]:
        judged = run["heldout"].get(name)
        if judged is None:
            rows.append([run["name"], *[UNKNOWN] * 6])
            continue
        loss, apart = judged["loss"], judged["difference"] or {}
        rows.append(
            [
                run["name"],
                fixed(_float(loss["value"]), 4),
                _bounds(loss, fixed),
                fixed(_float(judged["perplexity"]), 2),
                fixed(_float(judged["bits_per_byte"]), 4),
                signed(_float(apart.get("value")), 4),
                _bounds(apart, signed),
            ]
        )
    return rows


def _bounds(interval: Numbers, shown: Any) -> str:
    low, high = _float(interval.get("low")), _float(interval.get("high"))
    return f"{shown(low, 4)} to {shown(high, 4)}" if math.isfinite(low) and math.isfinite(high) else UNKNOWN


def set_caption(found: Numbers, name: str) -> str:
    """What a set is: how many documents and tokens, judged in what, after which step."""
    judged = [run["heldout"][name] for run in found["runs"] if name in run["heldout"]]
    counts = {(j["documents"], j["tokens"]) for j in judged}
    size = "; ".join(f"{documents:,} documents, {tokens:,} tokens" for documents, tokens in sorted(counts))
    ways = {j["arithmetic"] for j in judged}
    how = "each run as it was trained" if any(way.startswith("as trained") for way in ways) else ", ".join(sorted(ways))
    steps = sorted({j["step"] for j in judged})
    return f"{name}: {size}; computed in: {how}; after step {', '.join(f'{step:,}' for step in steps)}."


def sentence(found: Numbers) -> str:
    """How the numbers are made, for below the tables."""
    noise = next((r["training"]["step_noise"] for r in found["runs"] if r["training"].get("step_noise")), None)
    text = f"Baseline: {found['baseline']}. Losses in nats a token. "
    if noise is not None:
        text += f"σ is the baseline's step-to-step standard deviation, {noise:.4f}; the largest smoothed difference is "
        text += "that of the last three quarters of the run. "
    how = found["bootstrap"]
    return text + (
        f"Intervals hold {100 * how['level']:g} % of {how['resamples']:,} bootstrap resamples of the documents, the "
        "same documents for both runs of a difference: what other held-out text would change, not what another seed."
    )


def markdown(found: Numbers, title: str) -> str:
    """The comparison as a Markdown document: the tables and how they are made."""
    parts = [f"# {title}", _table(training_rows(found))]
    for name in set_names(found):
        parts += [f"**{set_caption(found, name)}**", _table(heldout_rows(found, name))]
    return "\n\n".join([*parts, sentence(found)]) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([header, "|---|" + "--:|" * (len(rows[0]) - 1), *body])
