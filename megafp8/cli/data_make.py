"""`megafp8 data merge|split|blend`: datasets out of datasets, and how much each source of a blend will serve."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafp8.core.errors import ConfigError


def add_arguments(actions: Any) -> None:
    """The arguments of the three."""
    text = "several datasets as one, one after the other; the sources are verified first"
    merge = actions.add_parser("merge", help=text, description=text, allow_abbrev=False)
    merge.add_argument("out", help="path of the output without .bin or .idx")
    merge.add_argument("sources", nargs="+", help="paths without .bin or .idx, in the order in which they are written")
    merge.add_argument("--tokenizer", help="what wrote the sources that have no side file")
    merge.add_argument("--dtype", choices=("uint16", "int32"), default="", help="of the ids (default: the sources')")
    text = "documents of a dataset into several, by a hash of each document, so that equal ones go together"
    split = actions.add_parser("split", help=text, description=text, allow_abbrev=False)
    split.add_argument("source", help="path without .bin or .idx")
    split.add_argument("parts", nargs="+", metavar="OUT=AMOUNT", help="AMOUNT: 2%%, 5000docs, 1e9tokens or rest")
    split.add_argument("--seed", type=int, default=1234, help="of the hash (default 1234)")
    for action in (merge, split):
        action.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    text = "what each source serves for a token budget, and the [data] section for it"
    blend = actions.add_parser("blend", help=text, description=text, allow_abbrev=False)
    blend.add_argument("sources", nargs="+", metavar="PATH[=WEIGHT]", help="weights: for all or for none")
    blend.add_argument("--tokens", default="0", metavar="N", help="budget, as 1e9 (default: as many as all hold)")
    blend.add_argument("--sequence-length", type=int, required=True, metavar="S", help="tokens in a sample")
    blend.add_argument("--temperature", type=float, metavar="T", help="shares go by tokens^(1/T) (default 1: by size)")
    blend.add_argument("--seed", type=int, default=1234, help="train.seed of the run (default 1234)")
    blend.add_argument("--max-epochs", type=float, default=100.0, metavar="E", help="more are refused (default 100)")


def _merge(args: argparse.Namespace) -> int:
    from megafp8.data.merge import merge
    from megafp8.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    made = merge(args.sources, args.out, tokenizer=tokenizer, dtype=args.dtype, overwrite=args.overwrite)
    counts = f"{made.num_documents:,} documents, {made.num_tokens:,} tokens"
    print(f"{args.out}: {counts} of {len(args.sources)} datasets")
    return 0


def _split(args: argparse.Namespace) -> int:
    from megafp8.data.split import parse_amount, split

    parts = {}
    for word in args.parts:
        name, _, amount = word.rpartition("=")
        if not name:
            raise ConfigError(f"{word!r}: write OUT=AMOUNT, as out/valid=2%")
        if name in parts:
            raise ConfigError(f"{name}: named twice; name each part once")
        parts[name] = parse_amount(amount)
    made, missing = split(args.source, parts, seed=args.seed, overwrite=args.overwrite)
    for name, dataset in made.items():
        print(f"{name}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens ({parts[name]})")
    if missing:
        print(f"{missing:,} documents are in none of these; OUT=rest would take them")
    return 0


def _blend(args: argparse.Namespace) -> int:
    from megafp8.data.blend_plan import data_section, plan_blend

    named = [_weighted(word) for word in args.sources]
    weights = [weight for _, weight in named if weight is not None]
    if weights and len(weights) < len(named):
        missing = next(name for name, weight in named if weight is None)
        raise ConfigError(f"{missing}: has no weight, others have; give one to each, or none")
    if weights and args.temperature is not None:
        raise ConfigError("--temperature makes the weights; leave it out, or the weights")
    folders = {name: Path(name) for name, _ in named if Path(name).is_dir() and Path(f"{name}/train.idx").is_file()}
    paths = [str(Path(name) / "train") if name in folders else name for name, _ in named]
    plan = plan_blend(
        paths,
        sequence_length=args.sequence_length,
        num_tokens=_whole(args.tokens),
        weights=weights,
        temperature=1.0 if args.temperature is None else args.temperature,
        seed=args.seed,
        max_epochs=args.max_epochs,
    )
    _table(plan)
    for line in plan.warnings:
        print(f"megafp8 data blend: warning: {line}", file=sys.stderr)
    valid = [(str(folder / "valid"), name) for name, folder in _names(folders).items() if _holds_valid(folder)]
    print()
    print(data_section(plan, tokenizer=_tokenizer_of(paths), valid=valid))
    return 0


def _weighted(word: str) -> tuple[str, float | None]:
    name, equals, weight = word.rpartition("=")
    if not equals or Path(f"{word}.idx").is_file():
        return word, None
    try:
        return name, float(weight)
    except ValueError:
        raise ConfigError(f"{word!r}: {weight!r} is no number; write PATH=WEIGHT, as out/en=0.5") from None


def _whole(text: str) -> int:
    try:
        value = float(text.replace("_", ""))
        if 0 <= value < 1e18 and value == int(value):
            return int(value)
    except ValueError:
        pass
    raise ConfigError(f"--tokens {text}: has to be a whole number, as 1e9 or 250_000_000")


def _names(folders: dict[str, Path]) -> dict[str, Path]:
    """A name of its own for each folder: its last part, or all of it where that is not enough."""
    last = [folder.resolve().name for folder in folders.values()]
    return {
        name if last.count(folder.resolve().name) > 1 else folder.resolve().name: folder
        for name, folder in folders.items()
    }


def _holds_valid(folder: Path) -> bool:
    from megafp8.data.indexed import IndexedDataset

    return (folder / "valid.idx").is_file() and IndexedDataset(folder / "valid").num_tokens > 0


def _tokenizer_of(paths: list[str]) -> str:
    """What `data.tokenizer` may name; "" if the tokenizer of none of the datasets is found."""
    from megafp8.data.indexed import IndexedDataset
    from megafp8.data.sources import find_tokenizer

    return next((found for path in paths if (found := find_tokenizer(IndexedDataset(path)))), "")


def _table(plan: Any) -> None:
    rows = [("source", "documents", "tokens", "share", "tokens served", "epochs", "a sample at most")]
    for source in plan.sources:
        rows.append(
            (source.path, f"{source.documents:,}", f"{source.tokens:,}", f"{100 * source.share:.2f}%",
             f"{source.served_tokens:,}", f"{source.epochs:.3f}", f"{source.repeats:,} times")
        )  # fmt: skip
    total = [sum(getattr(source, name) for source in plan.sources) for name in ("documents", "tokens")]
    epochs = plan.num_samples / sum(source.samples_an_epoch for source in plan.sources)
    rows.append(("all", f"{total[0]:,}", f"{total[1]:,}", "100.00%", f"{plan.num_tokens:,}", f"{epochs:.3f}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:])]
        print("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    print(f"{plan.num_samples:,} samples of {plan.sequence_length:,} tokens")


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {"merge": _merge, "split": _split, "blend": _blend}
