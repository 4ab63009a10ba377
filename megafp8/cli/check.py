"""`megafp8 check`: the dry run of a TOML."""

from __future__ import annotations

import argparse

HELP = "dry run of a TOML on this machine's CPU: ranks, parameters, memory, tokens, what would be refused"
TAKES_OVERRIDES = True
EPILOG = """examples:
  megafp8 check examples/tiny_cpu/pretrain.toml --ranks 2
  megafp8 check examples/llama3_8b/pretrain.toml --ranks 128 --parallel.tp 4

Exit code 0 if the run would start, 2 if a rule is broken; all broken rules are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("config", help="the run's TOML")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="processes; default: one replica of the mesh")
    parser.add_argument("--config", action="store_true", dest="show_config", help="also print the configuration")


def run(args: argparse.Namespace) -> int:
    """Print the table, then every broken rule."""
    from rich.console import Console
    from rich.table import Table

    from megafp8.core.config import dump_toml
    from megafp8.core.errors import ConfigError
    from megafp8.train.check import dry_run, smallest_world
    from megafp8.train.config import load_run_config

    config = load_run_config(args.config, args.overrides)
    report = dry_run(config, args.ranks or smallest_world(config))
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in report.rows:
        table.add_row(f"[bold]{name}[/bold]", value)
    Console().print(table)
    if args.show_config:
        print(dump_toml(config, comments=True))
    if report.problems:
        raise ConfigError("\n".join(report.problems))
    print("nothing would be refused")
    return 0
