"""`megafp8 pretrain`: run or resume a training run."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "train a model, or go on where the run folder stands"
TAKES_OVERRIDES = True
EPILOG = """examples:
  megafp8 pretrain examples/tiny_cpu/pretrain.toml --nproc 2
  torchrun --nproc-per-node 8 -m megafp8 pretrain examples/llama3_8b/pretrain.toml
  srun megafp8 pretrain run.toml --train.steps 200 --precision.recipe delayed
  megafp8 pretrain run.toml --print-config --optimizer.lr 1e-3

Any key of the configuration is an option: --section.key VALUE. The same command again resumes the run; SIGTERM,
SIGUSR1 and Ctrl-C save first and end with exit code 75."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("config", help="the run's TOML")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine (no torchrun)")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration, non-defaults marked, and stop"
    )


def run(args: argparse.Namespace) -> int:
    """Print, start ranks, or be one."""
    from megafp8.core.errors import ConfigError

    if args.print_config:
        from megafp8.core.config import dump_toml
        from megafp8.train.config import load_run_config

        sys.stdout.write(dump_toml(load_run_config(args.config, args.overrides), comments=True))
        return 0
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: at least one rank is needed; nearest: 1")
    if args.nproc and "RANK" not in os.environ:
        return _start_ranks(args)
    from megafp8.train.keeper import can_keep, keep

    def rank() -> int:
        from megafp8.cli.pretrain_rank import be_a_rank

        return be_a_rank(args.config, args.overrides, debug=args.debug)

    return keep(rank, os.environ) if can_keep() else rank()


def _start_ranks(args: argparse.Namespace) -> int:
    """Validate first, then start processes."""
    from megafp8.train.config import load_run_config, refuse_broken
    from megafp8.train.folder import is_finished, refuse_other, refuse_small_disk
    from megafp8.train.load_check import refuse_unfit
    from megafp8.train.local_ranks import run_ranks

    config = load_run_config(args.config, args.overrides)
    refuse_broken(config, args.nproc)
    refuse_other(config)
    refuse_unfit(config)
    if is_finished(config):
        print(f"{config.dir}: nothing to do, all {config.train.steps} steps are done")
        return 0
    refuse_small_disk(config)
    words = ["pretrain", args.config, *args.overrides, *(["--debug"] if args.debug else [])]
    return run_ranks(words, world=args.nproc)
