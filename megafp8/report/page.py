"""Assembles the page: reads, computes, draws, fills the template, writes the HTML file and a PNG a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megafp8 import __version__
from megafp8.core.errors import ConfigError
from megafp8.core.jsonio import write_atomic, write_json
from megafp8.report import compare as comparison
from megafp8.report import tables
from megafp8.report.compare_figures import compare_figure, heldout_figure
from megafp8.report.curve_figures import loss_figure, speed_figure, validation_figure
from megafp8.report.curves import Difference, difference
from megafp8.report.fp8_health import grids, recipes_not_in_use
from megafp8.report.headline import compact, fixed, peak_notes, rows, verdict
from megafp8.report.heat_figures import heat_figure, what_if_figure
from megafp8.report.number_figures import weight_figure
from megafp8.report.runs import Run, read_runs
from megafp8.report.style import Picture
from megafp8.report.weights import WeightSpread, read_spread

HERE = Path(__file__).parent
SECTIONS = (
    ("summary", "Summary"), ("loss", "Training loss"), ("validation", "Validation"), ("heldout", "Held-out"),
    ("speed", "Speed"), ("fp8", "FP8 health"), ("weights", "Weights"), ("timeline", "Timeline"),
    ("configuration", "Configuration"), ("environment", "Environment"),
)  # fmt: skip


def build(run_dirs: Sequence[Path | str], out_dir: Path | str, title: str = "", *, compare: bool = False) -> Path:
    """Write `report.html` and its figures as PNG into `out_dir`; returns the page's path.

    Args:
        run_dirs: run folders; the first is the baseline that the others are compared with.
        title: of the page; empty = the runs' names.
        compare: also write the comparison with the first run as `compare.md`, `compare.json` and `compare.png`.

    Raises:
        ConfigError: `compare` with a single run.
        DataError: a folder is missing, is no run folder, is empty or broken; nothing is written then.
        CheckpointError: a run's newest checkpoint is damaged.
        ResourceError: `out_dir` cannot be written.
    """
    runs = read_runs([Path(folder) for folder in run_dirs])
    if compare and len(runs) < 2:
        raise ConfigError(f"--compare: {runs[0].folder} alone; name the baseline first and one run more at least")
    out = Path(out_dir)
    others = [difference(run, runs[0]) for run in runs[1:]]
    found = comparison.numbers(runs, others)
    values, pictures = _contents(runs, others, found)
    title = title or " vs ".join(run.name for run in runs)
    html = _environment().get_template("page.html").render(**values, title=title, version=__version__)
    if compare:
        pictures.append(compare_figure(runs, others, found))
        write_json(out / "compare.json", found)
        write_atomic(out / "compare.md", comparison.markdown(found, title).encode())
    for picture in pictures:
        write_atomic(out / f"{picture.name}.png", picture.png)
    write_atomic(out / "report.html", html.encode())
    return out / "report.html"


def summary(run_dirs: Sequence[Path | str]) -> str:
    """The page's verdict and headline table as plain text, for a terminal.

    Raises:
        DataError: as `build`.
    """
    runs = read_runs([Path(folder) for folder in run_dirs])
    others = [difference(run, runs[0]) for run in runs[1:]]
    lines = [*verdict(runs, others), ""]
    table = [("", *(run.name for run in runs)), *((row.label, *row.values) for row in rows(runs, others))]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for label, *values in table:
        cells = [f"{value:>{width}}" for value, width in zip(values, widths[1:])]
        lines.append("  ".join([f"{label:<{widths[0]}}", *cells]))
    return "\n".join(lines)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.globals["figure"] = lambda picture: Markup(f"<figure>{picture.svg}</figure>")
    return environment


def _contents(
    runs: list[Run], others: list[Difference | None], found: comparison.Numbers
) -> tuple[dict[str, Any], list[Picture]]:
    """Everything that the template asks for, and all figures."""
    healths = _healths(runs)
    spread, spread_run = _spread(runs)
    pictures = {
        "loss": loss_figure(runs, others),
        "validation": validation_figure(runs),
        "heldout": heldout_figure(found),
        "speed": speed_figure(runs),
        "weights": weight_figure(spread, spread_run.name) if spread is not None else None,
    }
    values: dict[str, Any] = {
        "css": Markup((HERE / "page.css").read_text(encoding="utf-8")),
        "runs": runs,
        "sections": SECTIONS,
        "verdict": verdict(runs, others),
        "notes": [f"{run.name}: {note}." for run in runs for note in run.notes],
        "headline": rows(runs, others),
        "peaks": peak_notes(runs),
        "pictures": pictures,
        "loss_captions": _loss_captions(runs, others),
        "heldout": [
            {"name": n, "rows": comparison.heldout_rows(found, n), "caption": comparison.set_caption(found, n)}
            for n in comparison.set_names(found)
        ],
        "heldout_caption": comparison.sentence(found),
        "speed_captions": _speed_captions(runs),
        "healths": healths,
        "fp8_absent": _fp8_absent(runs),
        "rounding": tables.rounding_lines(spread) if spread is not None else [],
        "weights_caption": _weights_caption(spread, spread_run) if spread is not None else "",
        "weights_absent": "No run has a checkpoint with linear layers' weights to look at yet.",
        "timelines": (timelines := [tables.timeline(run) for run in runs]),
        "marked": sorted({mark["kind"] for line in timelines for mark in line["marks"]}, key=tables.KINDS.index),
        "settings": tables.settings(runs),
        "environment": tables.environment(runs),
    }
    maps = [health[kind] for health in healths for kind in ("picture", "what_if") if health[kind] is not None]
    return values, [*(p for p in pictures.values() if p is not None), *maps]


def _healths(runs: Sequence[Run]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run in runs:
        table = grids(run)
        if table:
            name, others = f"fp8-{len(found) + 1}", recipes_not_in_use(table)
            found.append(
                {
                    "run": run.name,
                    "share": tables.fp8_share(run),
                    "picture": heat_figure(table, name, run.name),
                    "lines": tables.health_lines(table),
                    "what_if": what_if_figure(table, others, f"{name}-what-if", run.name) if others else None,
                    "what_if_lines": tables.what_if_lines(table, others),
                }
            )
    return found


def _fp8_absent(runs: Sequence[Run]) -> str:
    if any(run.is_quantized for run in runs):
        return "No FP8 statistics were recorded; set log.fp8_interval to record them."
    return "No run computes in FP8; set precision.recipe to train in it."


def _spread(runs: Sequence[Run]) -> tuple[WeightSpread | None, Run]:
    """The weights of the first FP8 run that has a checkpoint, else of the first run that has one."""
    for run in sorted(runs, key=lambda run: not run.is_quantized):
        found = read_spread(run.folder)
        if found is not None:
            return found, run
    return None, runs[0]


def _weights_caption(spread: WeightSpread, run: Run) -> str:
    return (
        f"All {compact(spread.num_weights)} weights of the {spread.num_tensors} linear layers of {run.name}, from the "
        f"fp32 masters of {spread.checkpoint.name}. Each tensor is scaled so that its largest magnitude lies on the "
        "format's largest value, as current scaling does, and delayed scaling while the largest magnitude stands "
        "still. A mark is a value that the format has: evenly spaced within a power of two, so they crowd around zero."
    )


def _loss_captions(runs: Sequence[Run], others: Sequence[Difference | None]) -> list[str]:
    captions = [
        "Thin lines are single steps, bold lines a centred moving average over about 4 % of the run, at least 7 steps."
    ]
    shown = [diff for diff in others if diff is not None]
    if shown:
        captions.append(
            f"The noise is the standard deviation of the loss of single steps of {runs[0].name} around its trend, from "
            "the differences of neighbouring steps divided by the square root of two. A difference inside the band "
            "cannot be told from the luck of one batch."
        )
        if all(diff.same_data for diff in shown):
            own = ", ".join(fixed(diff.own_noise, 4) for diff in shown)
            captions.append(
                "The runs start from one seed and see the same samples in the same order, so the noise of the batches "
                f"is common to them and cancels; what is left in the difference is {own} nats from step to step."
            )
    return captions


def _speed_captions(runs: Sequence[Run]) -> list[str]:
    if not any(run.is_quantized and run.facts.get("device") == "cpu" for run in runs):
        return []
    return ["On a CPU, FP8 is emulated to give an FP8 GPU's numbers bit for bit: its speed here says nothing of one."]
