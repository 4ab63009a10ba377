"""`megafp8 pretrain`: run or resume a training run."""

from __future__ import annotations

import argparse
import os
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
        "--print-config", action="store_true", help="print the resolved configuration, non-defaults marked, and stop"
    )


def run(args: argparse.Namespace) -> int:
    """Validate first, then start processes or be one."""
    from megafp8.core.errors import ConfigError
    from megafp8.train.config import load_run_config, refuse_broken

    config = load_run_config(args.config, args.overrides)
    if args.print_config:
        from megafp8.core.config import dump_toml

        sys.stdout.write(dump_toml(config, comments=True))
        return 0
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: at least one rank is needed; nearest: 1")
    if args.nproc and "RANK" not in os.environ:
        from megafp8.train.folder import is_finished, refuse_other
        from megafp8.train.load_check import refuse_unfit
        from megafp8.train.local_ranks import run_ranks

        refuse_broken(config, args.nproc)
        refuse_other(config)
        refuse_unfit(config)
        if is_finished(config):
            print(f"{config.dir}: nothing to do, all {config.train.steps} steps are done")
            return 0
        words = ["pretrain", args.config, *args.overrides, *(["--debug"] if args.debug else [])]
        return run_ranks(words, world=args.nproc)
    return _be_a_rank(config, args.debug)


def _opener(config: object) -> object:
    """How a foreign folder is read, if there is one to be read."""
    if not config.checkpoint.load_from:  # type: ignore[attr-defined]
        return None
    from megafp8.convert.hf_source import open_source

    return open_source


def _be_a_rank(config: object, debug: bool) -> int:
    from megafp8.core import log
    from megafp8.core.errors import MegaError
    from megafp8.train.loop import train

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    log.set_up(rank=rank)
    try:
        return train(config, _opener(config)).exit_code  # type: ignore[arg-type]
    except MegaError as error:
        if rank == 0:
            raise
        # Mostly all ranks fail alike; rank 0 then says it, and the launcher ends this one before it wakes.
        time.sleep(10)
        raise type(error)(f"rank {rank}: {error}") from error
    except RuntimeError as error:
        if "Timed out waiting" in str(error) and not debug:  # gloo's words
            silent = "a peer was silent for train.timeout_seconds, stopping"
            print(f"megafp8 pretrain: rank {rank}: {silent}", file=sys.stderr)
            return 1
        # a peer that died first has already said why; this rank only adds that its connection is gone
        if debug or not any(text in str(error) for text in ("closed by peer", "Connection reset")):
            raise
        print(f"megafp8 pretrain: rank {rank}: lost its peer, stopping", file=sys.stderr)
        return 1
