"""`megafp8 pretrain`: run or resume a training run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time

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
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again after a fault; give up after K restarts in a row without a new checkpoint",
    )
    parser.add_argument(
        "--launcher", metavar="COMMAND", help='with --restarts: what starts the ranks, e.g. "srun --kill-on-bad-exit=1"'
    )
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
    if args.restarts < 0:
        raise ConfigError(f"--restarts {args.restarts}: is not negative; nearest: 0")
    if args.launcher and (args.nproc or not args.restarts):
        raise ConfigError("--launcher: goes with --restarts and without --nproc; drop it, or set --restarts 3")
    if "RANK" not in os.environ and (args.nproc or args.restarts):
        return _start_ranks(args)
    if args.restarts:
        raise ConfigError("--restarts: this process is a rank already; use torchrun --max-restarts, or --launcher")
    from megafp8.train.keeper import can_keep, keep

    def rank() -> int:
        from megafp8.cli.pretrain_rank import be_a_rank

        return be_a_rank(args.config, args.overrides, debug=args.debug)

    return keep(rank, os.environ) if can_keep() else rank()


def _start_ranks(args: argparse.Namespace) -> int:
    """Validate first, then start processes, and again where that is wanted."""
    from megafp8.core.errors import EXIT_STOP_FILE
    from megafp8.train.config import load_run_config, refuse_broken
    from megafp8.train.folder import STOP_FILE, is_finished, refuse_other, refuse_small_disk
    from megafp8.train.load_check import refuse_unfit
    from megafp8.train.local_ranks import run_ranks
    from megafp8.train.restarts import launch, restart_loop

    config = load_run_config(args.config, args.overrides)
    world = args.nproc or 1
    if not args.launcher:
        refuse_broken(config, world)
    refuse_other(config)
    refuse_unfit(config)
    if is_finished(config):
        print(f"{config.dir}: nothing to do, all {config.train.steps} steps are done")
        return 0
    if (config.dir / STOP_FILE).exists():
        print(f"megafp8 pretrain: {config.dir / STOP_FILE} is there; remove it to go on", file=sys.stderr)
        return EXIT_STOP_FILE
    refuse_small_disk(config)
    words = ["pretrain", args.config, *args.overrides, *(["--debug"] if args.debug else [])]
    began, limit = time.monotonic(), config.train.exit_after_seconds

    def attempt() -> int:
        left = max(1.0, limit - (time.monotonic() - began))
        all_words = [*words, *(["--train.exit_after_seconds", f"{left:.1f}"] if limit else [])]
        if args.launcher:
            command = ["megafp8"] if shutil.which("megafp8") else [sys.executable, "-m", "megafp8"]
            return launch([*shlex.split(args.launcher), *command, *all_words], config.dir)
        return run_ranks(all_words, world=world)

    return restart_loop(attempt, config.dir, args.restarts) if args.restarts else attempt()
