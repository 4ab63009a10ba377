"""The timeline of a schedule as a picture: a row for each rank, a box for each action, idle time in grey."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from megafp8.plan.step_plan import StepPlan

PICTURES = (".svg", ".png", ".pdf")

# Differ in lightness as well as in hue, so that they can be told apart in grey and by colour-blind readers.
KINDS = {
    "F": ("#2a6fbb", "F forward"),
    "B": ("#1d8a63", "B backward"),
    "I": ("#e39b1c", "I input gradient"),
    "W": ("#8a4f9e", "W weight gradients"),
}
IDLE, INK, MUTED = "#eceef1", "#1b1f24", "#5d6672"
LEFT, RIGHT = 0.75, 1.65  # inches for the ranks' names and for what stands behind each row
BOX, WIDEST, NARROWEST = 0.125, 44.0, 11.0  # inches: of the shortest box, and of the time axis at most and at least
DIGIT = 0.0095  # inches that a digit needs for each point of its size; boxes too small for it carry no number

RC: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": MUTED,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "svg.fonttype": "none",  # text stays text: a timeline is thousands of numbers
    "svg.hashsalt": "timeline",  # the same plan gives the same file
    "savefig.dpi": 130,
}


def draw(plans: Sequence[StepPlan], picture: str) -> bytes:
    """The timelines of `plans`, one below the other on the same scale of time.

    Args:
        picture: "svg", "png" or "pdf".
    """
    assert plans, "nothing to draw"
    with matplotlib.rc_context(RC):
        row = 0.30 if len(plans) == 1 else 0.21
        heights = [0.55 + row * plan.schedule.num_ranks for plan in plans]  # the title, and the gap to the next
        end = max(plan.report.makespan for plan in plans)
        width, total = _axis_inches(plans, end) + LEFT + RIGHT, sum(heights) + 0.95
        figure = Figure(figsize=(width, total))
        top = total
        for index, (plan, height) in enumerate(zip(plans, heights)):
            rows = row * plan.schedule.num_ranks
            top -= height
            box = (LEFT / width, top / total, 1 - (LEFT + RIGHT) / width, rows / total)
            axes = figure.add_axes(box)
            _draw_plan(axes, plan, end, width - LEFT - RIGHT, last=index == len(plans) - 1)
        _legend(figure, plans, total)
        out = io.BytesIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if picture == "svg" else {}
        figure.savefig(out, format=picture, facecolor="white", metadata=metadata)
        return out.getvalue()


def _axis_inches(plans: Sequence[StepPlan], end: float) -> float:
    """Width of the time axis: wide enough for numbers in the shortest boxes, as long as that is not absurd."""
    times = [timed for plan in plans for rank in plan.report.times for timed in rank]
    shortest = min((t.end - t.start for t in times if t.end > t.start), default=end)
    return min(max(NARROWEST, end / shortest * BOX), WIDEST)


def title(plan: StepPlan) -> str:
    """What the picture says in words."""
    schedule = plan.schedule
    each = schedule.num_stages // schedule.num_ranks
    shape = f"{schedule.num_ranks} ranks" + (f" x {each} stages" if each > 1 else "")
    closed = "" if plan.closed is None else f", closed form {plan.formula.replace('-', '−')} = {plan.closed:.1%}"
    return f"{plan.name}: bubble {plan.bubble:.1%}{closed}; {shape}, {schedule.micro_batches} micro-batches"


def _draw_plan(axes: Axes, plan: StepPlan, end: float, width: float, *, last: bool) -> None:
    ranks = range(plan.schedule.num_ranks)
    _fill(axes, [_box(0.0, plan.report.makespan, rank) for rank in ranks], to_rgb(IDLE))
    boxes: dict[tuple[float, float, float], list[Path]] = {}
    for rank in ranks:
        stages = plan.schedule.stages_of(rank)
        for action, start, stop in plan.report.times[rank]:
            colour = _shade(action.kind, stages.index(action.stage), len(stages))
            boxes.setdefault(colour, []).append(_box(start, stop, rank))
            number = str(action.micro_batch)
            size = min(7.0, (stop - start) / end * width / (len(number) + 0.3) / DIGIT)
            if size >= 4.0:
                dark = sum(share * part for share, part in zip((0.30, 0.59, 0.11), colour)) < 0.62
                axes.text((start + stop) / 2, rank, number, ha="center", va="center_baseline", fontsize=size,
                          color="white" if dark else INK)  # fmt: skip
        words = f"  idle {plan.idle(rank):.0%}, peak {plan.peaks[rank]:.3g}"
        axes.text(plan.report.makespan, rank, words, va="center_baseline", fontsize=7.5, color=MUTED)
    for colour, paths in boxes.items():
        _fill(axes, paths, colour)
    axes.set_xlim(0, end)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title(plan), pad=6)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    if last:
        axes.set_xlabel("time; 1 = forward pass of one micro-batch through a rank's share of the layers")
    else:
        axes.tick_params(axis="x", labelbottom=False)


def _box(start: float, stop: float, rank: int) -> Path:
    low, high = rank - 0.44, rank + 0.44
    return Path([(start, low), (stop, low), (stop, high), (start, high), (start, low)], closed=True)


def _fill(axes: Axes, boxes: Sequence[Path], colour: tuple[float, float, float]) -> None:
    """All boxes of a colour are one path: a file of thousands of them stays small."""
    path = Path.make_compound_path(*boxes)
    axes.add_patch(PathPatch(path, facecolor=colour, edgecolor="white", linewidth=0.4))


def _shade(kind: str, index: int, stages: int) -> tuple[float, float, float]:
    """The colour of a kind, the lighter the later the stage among those of its rank."""
    white = 0.0 if stages == 1 else 0.52 * index / (stages - 1)
    red, green, blue = (part + (1.0 - part) * white for part in to_rgb(KINDS[kind][0]))
    return red, green, blue


def _legend(figure: Figure, plans: Sequence[StepPlan], total: float) -> None:
    kinds = {action.kind for plan in plans for actions in plan.schedule.actions for action in actions}
    handles = [Patch(color=colour, label=label) for kind, (colour, label) in KINDS.items() if kind in kinds]
    handles.append(Patch(color=IDLE, label="idle"))
    note = "numbers: micro-batches"
    if any(plan.schedule.num_stages > plan.schedule.num_ranks for plan in plans):
        note += "; lighter: a rank's later stages"
    note += "; peak: micro-batches alive, of a rank's layers"
    left = (LEFT - 0.08) / figure.get_figwidth()
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left, 0.02), ncols=5, frameon=False, fontsize=8.5,
                  handlelength=1.2, handleheight=1.0, columnspacing=1.4)  # fmt: skip
    place = (LEFT + 6.1) / figure.get_figwidth()
    figure.text(place, 0.02 + 0.2 / total, note, va="center_baseline", fontsize=8, color=MUTED)
