"""The door: finds the verb, parses, runs, and turns a house error into one line and its exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from megafp8 import __version__
from megafp8.core.config import nearest
from megafp8.core.errors import EXIT_CODES, EXIT_INTERRUPTED, ConfigError, MegaError

VERBS = (
    "preprocess", "tokenizer", "data", "check", "pretrain", "report", "generate", "eval",
    "bench-inference", "convert", "checkpoint", "plan", "formats", "doctor",
)  # fmt: skip

EPILOG = """examples:
  megafp8 preprocess examples/tiny_cpu/corpus.toml       text -> .bin/.idx
  megafp8 check examples/llama3_8b/pretrain.toml          dry run: ranks, memory, tokens
  torchrun --nproc-per-node 2 -m megafp8 pretrain examples/tiny_cpu/pretrain.toml
  megafp8 report runs/tiny/bf16 runs/tiny/fp8 --out runs/tiny/report

exit codes:
""" + "\n".join(f"  {code:<3} {text}" for code, text in EXIT_CODES.items())


def load(verb: str) -> ModuleType:
    """The module of a verb."""
    return importlib.import_module(f"megafp8.cli.{verb.replace('-', '_')}")


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megafp8",
        description="Pretrain large language models in FP8: raw text to tokens, tokens to a model, "
        "the model to a checkpoint that serves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megafp8 {__version__}")
    lines = "\n".join(f"  {verb:<15} {load(verb).HELP}" for verb in VERBS)
    parser.description = f"{parser.description}\n\nverbs (megafp8 VERB --help for each):\n{lines}"
    parser.usage = "megafp8 VERB [...]"
    return parser


def _parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    module = load(verb)
    parser = argparse.ArgumentParser(
        prog=f"megafp8 {verb}",
        description=module.HELP,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module.add_arguments(parser)
    overrides, rest = split_overrides(words)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].partition("=")[0]
        raise ConfigError(f"{name}: megafp8 {verb} does not know this argument{nearest(name, options)}; see --help")
    args.overrides = overrides
    if overrides and not getattr(module, "TAKES_OVERRIDES", False):
        raise ConfigError(f"{overrides[0]}: megafp8 {verb} takes no configuration overrides")
    return args


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Configuration overrides (`--section.key value`, `--section.key=value`, wherever they stand), and the rest.

    They are taken out before the verb's parser sees the words, since it could take a value for a positional argument.
    """
    overrides: list[str] = []
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and left and not left[0].startswith("--"):
            overrides.append(left.pop(0))
    return overrides, rest


def _say(verb: str, error: MegaError) -> int:
    for line in str(error).splitlines():
        print(f"megafp8 {verb}: error: {line}", file=sys.stderr)
    return error.exit_code


def _keep_to_the_group() -> None:
    """Whatever is written is not the world's: files 0640, folders 0750, or as MEGAFP8_UMASK (octal) says."""
    wanted = os.environ.get("MEGAFP8_UMASK", "")
    try:
        mask = int(wanted, 8) if wanted else os.umask(0o077) | 0o027
        os.umask(mask)
    except (ValueError, OverflowError):
        raise ConfigError(f"MEGAFP8_UMASK = {wanted!r}: no octal number; nearest: 027") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code (docs/exit-codes: `megafp8 --help`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        _top_parser().parse_args(words or ["--help"])
        return 0
    verb, debug = words[0], "--debug" in words
    if verb not in VERBS:
        return _say("", ConfigError(f"{verb!r} is no verb{nearest(verb, VERBS)}; see megafp8 --help"))
    return guarded(verb, lambda: int(load(verb).run(_parse(verb, words[1:]))), debug=debug)


def guarded(verb: str, work: Callable[[], int], *, debug: bool) -> int:
    """Do the work of a verb; an error is a line and its exit code, or with `debug` a traceback."""
    try:
        _keep_to_the_group()
        return work()
    except MegaError as error:
        if debug:
            raise
        return _say(verb, error)
    except KeyboardInterrupt:
        print(f"megafp8 {verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `megafp8 data peek ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        print(f"megafp8 {verb}: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"megafp8 {verb}: this is a bug; run again with --debug for the traceback", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
