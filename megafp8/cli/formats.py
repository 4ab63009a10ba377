"""`megafp8 formats`: the small number formats as tables, a value in each of them, and a picture of their values."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

    from megafp8.fp8.formats import Format

HELP = "show FP8, FP4 and BF16: limits, every value, what a number becomes in each"
EPILOG = """examples:
  megafp8 formats                        limits, and every value of E4M3, E5M2 and E2M1
  megafp8 formats --format E8M0          every value of one format
  megafp8 formats --value 4.543          in BF16, E4M3, E5M2 and E2M1, with bits and error
  megafp8 formats --value 4.543 -0.001 1000
  megafp8 formats --plot formats.png     where the values lie, and how far apart (.png, .svg or .pdf)"""

_TABLES = ("E4M3", "E5M2", "E2M1")
_IN_WORDS = {  # as tables if asked for
    "UE4M3": "the 127 values of E4M3 from zero up, without a sign; code 127 is NaN",
    "E8M0": "255 values, every power of two from 2^-127 (code 0) to 2^127 (code 254); no zero; code 255 is NaN",
}
_NAMES = (*_TABLES, *_IN_WORDS)
_PICTURES = (".png", ".svg", ".pdf")
_USES = {
    "BF16": "what FP8 replaces in GEMMs",
    "E4M3": "activations and weights",
    "E5M2": "gradients: more range",
    "E2M1": "values of NVFP4",
    "UE4M3": "block scales of NVFP4",
    "E8M0": "block scales of MXFP8",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--format", choices=_NAMES, help="show the values of this format only")
    parser.add_argument("--value", type=float, nargs="+", metavar="X", help="show what X becomes in each format")
    parser.add_argument("--plot", metavar="FILE", help="draw the representable values")


def run(args: argparse.Namespace) -> int:
    """Print the tables asked for, or draw."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a pipe has no width: nothing is cut
    if args.plot is not None:
        _write_plot(args.plot)
        console.print(f"wrote {args.plot}", soft_wrap=True)
    for index, value in enumerate(args.value or ()):
        _print_value(console, value, first=index == 0)
    if args.plot is None and args.value is None:
        _print_tables(console, args.format)
    return 0


def _print_tables(console: Console, only: str | None) -> None:
    from megafp8.fp8.formats import FORMATS

    if only is None:
        console.print("Formats; bits are sign + exponent + mantissa", style="bold")
        console.print(_limits_table())
    for name in (only,) if only else _TABLES:
        if only is None:
            console.print()
        _print_values(console, FORMATS[name])
    if only is None:
        for name, words in _IN_WORDS.items():
            console.print(f"\n[bold]{name}:[/bold] {words}")


def _number(value: float, digits: int = 6) -> str:
    return f"{value:.{digits}g}"


def _table(*headings: str, left: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def _limits_table() -> Table:
    from megafp8.fp8.formats import FORMATS

    headings = ("format", "bits", "bias", "largest", "smallest normal", "subnormal", " used for")
    table = _table(*headings, left=("format", " used for"))
    for name in ("BF16", *_NAMES):
        fmt = FORMATS[name]
        fields = f"{int(fmt.signed)}+{fmt.exponent_bits}+{fmt.mantissa_bits}"
        subnormal = _number(fmt.smallest) if fmt.mantissa_bits else "-"
        numbers = (str(fmt.bias), _number(fmt.max), _number(fmt.smallest_normal), subnormal)
        table.add_row(name, fields, *numbers, f" {_USES[name]}")
    return table


def _print_values(console: Console, fmt: Format) -> None:
    """Positive values, a row for each exponent field, a column for each mantissa field."""
    import math

    from megafp8.fp8.formats import table as values_of

    if fmt.mantissa_bits == 0:
        _print_powers(console, fmt)
        return
    columns, rows = 2**fmt.mantissa_bits, 2**fmt.exponent_bits
    values = values_of(fmt)[: rows * columns].tolist()
    digits = 6 if console.width >= 100 else 4
    table = _table("exponent", *(f"{c:0{fmt.mantissa_bits}b}" for c in range(columns)), left=("exponent",))
    for row in range(rows):
        cells = (_number(v, digits) for v in values[row * columns : (row + 1) * columns])
        table.add_row(f"{row:0{fmt.exponent_bits}b}", *cells)
    shown = sum(math.isfinite(v) for v in values)
    console.print(f"{fmt.name}: the {shown} values from zero up, by exponent and mantissa bits", style="bold")
    console.print(table)


def _print_powers(console: Console, fmt: Format) -> None:
    """A format without mantissa: the power of two of every code, eight to a row."""
    last = 2**fmt.exponent_bits - 1
    table = _table("code", *(f"+{n}" for n in range(8)), left=("code",))
    for first in range(0, last + 1, 8):
        cells = ("NaN" if code == last else f"2^{code - fmt.bias}" for code in range(first, first + 8))
        table.add_row(str(first), *cells)
    console.print(f"{fmt.name}: the {last} values, a power of two for each code", style="bold")
    console.print(table)


def _print_value(console: Console, value: float, *, first: bool) -> None:
    from megafp8.fp8.formats import BF16, E2M1, E4M3, E5M2, nearest_value

    table = _table("format", "becomes", "relative error", " bits", "", left=("format", " bits", ""))
    for fmt in (BF16, E4M3, E5M2, E2M1):
        stored = nearest_value(value, fmt)
        bits, remark = f" {_bits(value, fmt)}", _remark(value, stored, fmt)
        table.add_row(fmt.name, _number(stored, 9), _error(value, stored), bits, remark)
    console.print("" if first else "\n", f"{value:.10g}", sep="", style="bold")
    console.print(table)


def _error(value: float, stored: float) -> str:
    import math

    if value == stored:
        return "0 %"
    if not math.isfinite(value) or value == 0:
        return "-"
    return f"{abs(stored - value) / abs(value) * 100:.3g} %"


def _remark(value: float, stored: float, fmt: Format) -> str:
    if abs(value) > fmt.max:
        return "saturated"
    if stored == 0 and value != 0:
        return "underflow"
    return "subnormal" if 0 < abs(stored) < fmt.smallest_normal else ""


def _bits(value: float, fmt: Format) -> str:
    import torch

    from megafp8.fp8.formats import cast, encode_e2m1

    x = torch.tensor([value], dtype=torch.float32)
    if fmt.dtype is None:
        code = int(encode_e2m1(x))
    else:
        code = int(cast(x, fmt).view(torch.uint16 if fmt.bits == 16 else torch.uint8))
    digits = f"{code:0{fmt.bits}b}"
    return f"{digits[0]} {digits[1 : 1 + fmt.exponent_bits]} {digits[1 + fmt.exponent_bits :]}"


def _write_plot(name: str) -> None:
    import io
    from pathlib import Path

    import matplotlib

    from megafp8.core.errors import ConfigError
    from megafp8.core.jsonio import write_atomic
    from megafp8.report.style import RC, new_figure

    path = Path(name)
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--plot {name}: {path.suffix or 'no ending'} is not one of {', '.join(_PICTURES)}")
    with matplotlib.rc_context(RC):
        figure = new_figure(9.0, 9.8)
        linear, powers, errors = figure.subplots(3, 1, height_ratios=[1.0, 1.75, 1.7])
        _draw_linear(linear)
        _draw_powers(powers)
        _draw_errors(errors)
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:].lower(), facecolor="white")
    write_atomic(path, picture.getvalue())


def _drawn() -> list[tuple[Format, str]]:
    """The formats of a tensor's values with their colours, from the narrowest."""
    from megafp8.fp8.formats import E2M1, E4M3, E5M2
    from megafp8.report.style import COLOURS

    return [(E2M1, COLOURS["run3"]), (E4M3, COLOURS["run0"]), (E5M2, COLOURS["run1"])]


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _draw_linear(axes: Axes) -> None:
    """Every value on a linear axis up to E4M3's largest: they crowd around zero."""
    from megafp8.fp8.formats import E4M3, E5M2, finite_values

    edge = E4M3.max * 1.07
    drawn = _drawn()
    for row, (fmt, colour) in enumerate(drawn):
        values = finite_values(fmt).numpy()
        inside = values[abs(values) <= edge]
        axes.vlines(inside, row - 0.34, row + 0.34, color=colour, linewidth=0.9)
        if fmt == E5M2:
            axes.annotate(f"\u2192 {E5M2.max:,.0f}", (1.0, row), (4, -3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", fontsize=8.5, color=colour)  # fmt: skip
    axes.set_xlim(-edge, edge)
    axes.set_title("Every value, on a linear axis: dense around zero, E4M3 ends at 448")
    _rows(axes, [fmt.name for fmt, _ in drawn])


def _draw_powers(axes: Axes) -> None:
    """Positive values by magnitude; BF16 fills the width and E8M0 runs through it, both out on both sides."""
    import numpy as np

    from megafp8.fp8.formats import FORMATS, finite_values
    from megafp8.report.style import COLOURS

    scales = [(FORMATS[name], COLOURS["muted"]) for name in ("UE4M3", "E8M0")]
    drawn = [*scales, *_drawn()]
    left, right = -18.0, 17.5
    for row, (fmt, colour) in enumerate(drawn):
        values = finite_values(fmt).numpy()
        positive = values[(values > 2.0**left) & (values < 2.0**right)]
        subnormal = positive < fmt.smallest_normal
        axes.vlines(np.log2(positive[~subnormal]), row - 0.34, row + 0.34, color=colour, linewidth=0.9)
        axes.vlines(np.log2(positive[subnormal]), row - 0.34, row + 0.06, color=colour, linewidth=0.9)
        largest = f"{fmt.max:,.0f}" if fmt.max < 2.0**right else f"\u2192 2$^{{{np.log2(fmt.max):.0f}}}$"
        place = min(float(np.log2(fmt.max)), right - 0.4)
        axes.annotate(largest, (place, row), (5, -3), textcoords="offset points", fontsize=8.5, color=colour)
    row = len(drawn)
    axes.fill_between([left, right], row - 0.34, row + 0.34, color=COLOURS["soft"], linewidth=0)
    words = "128 values between any two neighbouring powers of two, from 2$^{-126}$ to 2$^{127}$"
    axes.text((left + right) / 2, row, words, ha="center", va="center", fontsize=8.5)
    axes.set_xlim(left, right)
    ticks = range(-16, 17, 4)
    axes.set_xticks(ticks, [f"2$^{{{t}}}$" for t in ticks])
    axes.set_title("The positive ones by magnitude (short strokes: subnormal); grey: formats of block scales")
    _rows(axes, [*(fmt.name for fmt, _ in drawn), "BF16"])


def _draw_errors(axes: Axes) -> None:
    """Worst relative rounding error around a magnitude: flat within each format's range, 100 % beyond both ends."""
    from megafp8.fp8.formats import BF16
    from megafp8.report.style import COLOURS

    labels = {"BF16": (0.0, -13), "E2M1": (1.3, -11), "E4M3": (1.3, -13), "E5M2": (12.0, -13)}  # log2 place, points
    for fmt, colour in [(BF16, COLOURS["muted"]), *_drawn()]:
        places, worst = _worst_errors(fmt)
        axes.plot(places, worst, color=colour)
        # rounding to nearest errs most just above a power of two, by half a step
        floor = 100 / (2 ** (fmt.mantissa_bits + 1) + 1)
        place, shift = labels[fmt.name]
        axes.annotate(f"{fmt.name}  {floor:.2g} %", (place, floor), (0, shift), textcoords="offset points",
                      ha="center", fontsize=8.5, color=colour)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.15, 150)
    axes.set_yticks([1, 10, 100], ["1 %", "10 %", "100 %"])
    ticks = range(-16, 17, 4)
    axes.set_xticks(ticks, [f"2$^{{{t}}}$" for t in ticks])
    axes.set_xlim(-18.0, 17.5)
    axes.set_xlabel("magnitude of the value, times its scale")
    axes.set_title("Worst relative rounding error: a scale moves a tensor to where its format is good")


def _worst_errors(fmt: Format) -> tuple[list[float], list[float]]:
    """log2 of magnitudes, and the worst error in percent within the power of two around each.

    The error itself falls to zero at every value of the format and would fill the picture with teeth.
    """
    import torch

    from megafp8.fp8.formats import E2M1, cast, encode_e2m1, table

    steps = 512  # samples in a power of two
    log2 = torch.arange(-19 * steps, 19 * steps, dtype=torch.float64) / steps
    x = torch.exp2(log2).float()
    rounded = table(E2M1)[encode_e2m1(x).long()] if fmt == E2M1 else cast(x, fmt).float()
    error = (rounded - x).abs() / x * 100
    worst = error.unfold(0, steps, steps // 32).amax(dim=1)
    places = log2.unfold(0, steps, steps // 32)[:, steps // 2]
    return places.tolist(), worst.tolist()
