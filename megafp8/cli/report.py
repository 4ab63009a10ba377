"""`megafp8 report`: one HTML page out of run folders."""

from __future__ import annotations

import argparse
import sys

HELP = "make one self-contained HTML page out of run folders"
EPILOG = """examples:
  megafp8 report runs/tiny-bf16 runs/tiny-fp8 --out runs/report
  megafp8 report runs/tiny-fp8 --out runs/report --title "Tiny model, delayed scaling"

  megafp8 report runs/bf16 runs/fp8 runs/mxfp8 --out runs/report --compare

The first run is the baseline that the others are compared with. A run may still be training. The page opens offline;
each figure lies beside it as a PNG. --compare adds compare.md, compare.json and compare.png: training losses and their
smoothed differences against the step-to-step noise, and losses on held-out text (`megafp8 eval --save`) with bootstrap
intervals."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is the baseline")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for report.html and the PNG files")
    parser.add_argument("--title", default="", help="title of the page (default: the runs' names)")
    parser.add_argument("--compare", action="store_true", help="also the comparison alone: Markdown, JSON and a PNG")


def run(args: argparse.Namespace) -> int:
    """Build the page; print its verdict, its headline table and where it is."""
    from megafp8.report import build, summary

    page = build(args.runs, args.out, args.title, compare=args.compare)
    sys.stdout.write(f"{summary(args.runs)}\n\n{page}\n")
    return 0
