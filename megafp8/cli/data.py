"""`megafp8 data verify|peek|stats|merge|split|blend|report`: look into token files, and make others of them."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.cli import data_make

if TYPE_CHECKING:
    from megafp8.data.indexed import IndexedDataset
    from megafp8.data.tokenizer import Tokenizer

HELP = "verify, look into, count, merge, split and blend .bin/.idx token files; the page of a corpus"
EPILOG = """examples:
  megafp8 data verify runs/tiny/corpus                every byte against the checksums (exit code 3 if not)
  megafp8 data peek runs/tiny/corpus/train --documents 3
  megafp8 data peek runs/tiny/corpus/train --sample 5 --seed 7
  megafp8 data stats runs/tiny/corpus/train --json
  megafp8 data merge out/all out/en out/de             en, then de, as one dataset
  megafp8 data split out/all out/valid=1% out/small=1e9tokens out/rest=rest
  megafp8 data blend out/en out/de out/ja --tokens 1e9 --sequence-length 2048 --temperature 2
  megafp8 data blend out/en=0.5 out/de=0.3 out/ja=0.2 --tokens 1e9 --sequence-length 2048
  megafp8 data report runs/tiny/corpus                 report.html again, from what the folder holds

A dataset is named by its path without .bin or .idx, or by the folder of a corpus (verify, peek and stats: its splits;
blend: its train split). Datasets that Megatron wrote do as well.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("verify", "read every byte; exit code 3 and a line for each problem"),
        ("peek", "show documents as text"),
        ("stats", "counts, lengths, entropy, most frequent ids"),
    ):
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.add_argument("prefix", nargs="+", help="path without .bin or .idx, or a corpus folder")
        if name == "peek":
            action.add_argument("--documents", type=int, default=3, metavar="N", help="how many (default 3)")
            action.add_argument("--start", type=int, default=0, metavar="I", help="the first (default 0)")
            action.add_argument("--sample", type=int, default=0, metavar="N", help="N documents from all over instead")
            action.add_argument("--seed", type=int, default=0, help="of --sample (default 0)")
            action.add_argument("--characters", type=int, default=300, metavar="N", help="shown of each (default 300)")
            action.add_argument("--ids", action="store_true", help="ids, not text")
        if name != "verify":
            action.add_argument("--tokenizer", help="to show text (default: tokenizer.model beside the files)")
        if name == "stats":
            action.add_argument("--json", action="store_true", help="as JSON")
    data_make.add_arguments(actions)
    report = actions.add_parser("report", help="write a corpus's report.html again", allow_abbrev=False)
    report.add_argument("folder", help="output folder of `megafp8 preprocess`")


def run(args: argparse.Namespace) -> int:
    """Do one of them."""
    if args.action == "report":
        from megafp8.report import build_corpus

        print(build_corpus(args.folder))
        return 0
    if args.action in data_make.ACTIONS:
        return data_make.ACTIONS[args.action](args)
    if args.action == "verify":
        return _verify(args)
    datasets = _open(args.prefix)
    if args.action == "stats" and args.json:
        values = [_stats(dataset, args) for dataset in datasets]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1, ensure_ascii=False))
        return 0
    for dataset in datasets:
        if len(datasets) > 1:
            print(f"=== {dataset.path_prefix}")
        (_peek if args.action == "peek" else _show_stats)(dataset, args)
    return 0


def _prefixes(names: Sequence[str]) -> list[str]:
    """Path prefixes; a folder stands for the datasets in it."""
    from megafp8.core.errors import DataError

    found: list[str] = []
    for name in names:
        path = Path(name)
        inside = [str(one.with_suffix("")) for one in sorted(path.glob("*.idx"))] if path.is_dir() else []
        if path.is_dir() and not inside and not path.with_name(f"{path.name}.idx").is_file():
            raise DataError(f"{name}: no dataset in this folder (a pair NAME.bin, NAME.idx)")
        found += inside or [name]
    return found


def _open(names: Sequence[str]) -> list[IndexedDataset]:
    from megafp8.data.indexed import IndexedDataset

    return [IndexedDataset(prefix) for prefix in _prefixes(names)]


def _verify(args: argparse.Namespace) -> int:
    """Every dataset is looked at, also behind a bad one."""
    from megafp8.core.errors import DataError
    from megafp8.data.indexed import IndexedDataset
    from megafp8.data.verify import folder_problems, problems

    bad = [line for name in args.prefix if Path(name).is_dir() for line in folder_problems(Path(name))]
    for prefix in _prefixes(args.prefix):
        try:
            dataset = IndexedDataset(prefix)
            found = problems(dataset)
        except DataError as error:
            found = [str(error)]
        bad += found
        if not found:
            checked = "checksums and index" if dataset.side else "index (no side file: no checksums, no tokenizer)"
            print(f"{prefix}: {checked} hold; {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens")
    if bad:
        raise DataError("\n".join(bad))
    return 0


def _load_tokenizer(dataset: IndexedDataset, spec: str | None) -> Tokenizer | None:
    """The tokenizer of a dataset, or None if it is not at hand and was not asked for."""
    from megafp8.data.sources import check_tokenizer, find_tokenizer
    from megafp8.data.tokenizer import load_tokenizer

    spec = spec or find_tokenizer(dataset)
    if not spec:
        return None
    tokenizer = load_tokenizer(spec)
    check_tokenizer(dataset, tokenizer)
    return tokenizer


def _peek(dataset: IndexedDataset, args: argparse.Namespace) -> None:
    tokenizer = None if args.ids else _load_tokenizer(dataset, args.tokenizer)
    total = dataset.num_documents
    chosen: Sequence[int] = range(max(args.start, 0), min(args.start + args.documents, total))
    if args.sample:
        chosen = sorted(random.Random(args.seed).sample(range(total), min(args.sample, total)))
    for index in chosen:
        ids = dataset.document(index)
        shown = tokenizer.decode(ids.tolist()) if tokenizer else " ".join(map(str, ids[: args.characters].tolist()))
        more = " ..." if len(shown) > args.characters else ""
        print(f"--- document {index}: {len(ids):,} tokens\n{shown[: args.characters]}{more}")
    if not chosen:
        print(f"--- no document from {args.start} on; there are {total:,}")
    if tokenizer is None and not args.ids:
        print("--- no tokenizer beside the files; name one with --tokenizer to see text")


def _stats(dataset: IndexedDataset, args: argparse.Namespace) -> dict[str, Any]:
    from megafp8.data.verify import stats

    found = stats(dataset)
    top = [(int(i), int(found.counts[i])) for i in found.counts.argsort(kind="stable")[::-1][:10] if found.counts[i]]
    return {
        "path": str(dataset.path_prefix),
        "documents": found.num_documents,
        "sequences": found.num_sequences,
        "tokens": found.num_tokens,
        "dtype": str(dataset.dtype),
        "distinct_ids": int((found.counts > 0).sum()),
        "unigram_entropy_nats": round(found.unigram_entropy_nats, 6),
        "sequence_tokens": dict(zip(("min", "p10", "median", "p90", "max"), found.lengths, strict=True)),
        "languages": dataset.side.get("languages", {}),
        "sources": dataset.side.get("sources", {}),
        "top_ids": top,
    }


def _show_stats(dataset: IndexedDataset, args: argparse.Namespace) -> None:
    tokenizer = _load_tokenizer(dataset, args.tokenizer)
    values = _stats(dataset, args)
    top = values.pop("top_ids")
    for key, value in values.items():
        text = ", ".join(f"{k or '(none)'} {v:,}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key:<22}{text:,}" if isinstance(text, int) else f"{key:<22}{text}")
    for i, number in top:
        piece = f"  {tokenizer.decode([i])!r}" if tokenizer else ""
        print(f"  id {i:<8}{100 * number / values['tokens']:6.2f}%{piece}")
