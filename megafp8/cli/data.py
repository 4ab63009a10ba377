"""`megafp8 data verify|peek|stats PREFIX`, `report FOLDER`: look into token files, and into what became of a text."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafp8.data.indexed import IndexedDataset
    from megafp8.data.tokenizer import Tokenizer

HELP = "verify, look into, count .bin/.idx token files; the page of a corpus"
EPILOG = """examples:
  megafp8 data verify runs/tiny/corpus/train          every byte against the checksums (exit code 3 if not)
  megafp8 data peek runs/tiny/corpus/train --documents 3
  megafp8 data stats runs/tiny/corpus/train --json
  megafp8 data report runs/tiny/corpus                 report.html again, from what the folder holds
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
        action.add_argument("prefix", help="path without .bin or .idx")
        if name == "peek":
            action.add_argument("--documents", type=int, default=3, metavar="N", help="how many (default 3)")
            action.add_argument("--start", type=int, default=0, metavar="I", help="the first (default 0)")
            action.add_argument("--characters", type=int, default=300, metavar="N", help="shown of each (default 300)")
        if name != "verify":
            action.add_argument("--tokenizer", help="to show text (default: tokenizer.model beside the files)")
        if name == "stats":
            action.add_argument("--json", action="store_true", help="as JSON")

    report = actions.add_parser("report", help="write a corpus's report.html again", allow_abbrev=False)
    report.add_argument("folder", help="output folder of `megafp8 preprocess`")


def run(args: argparse.Namespace) -> int:
    """Do one of them."""
    if args.action == "report":
        from megafp8.report import build_corpus

        print(build_corpus(args.folder))
        return 0
    from megafp8.data.indexed import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    return {"verify": _verify, "peek": _peek, "stats": _stats}[args.action](dataset, args)


def _verify(dataset: IndexedDataset, args: argparse.Namespace) -> int:
    from megafp8.core.errors import DataError
    from megafp8.data.verify import problems

    if found := problems(dataset):
        raise DataError("\n".join(found))
    checked = "checksums and index" if dataset.side else "index (no side file: no checksums, no tokenizer)"
    print(f"{args.prefix}: {checked} hold; {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens")
    return 0


def _load_tokenizer(dataset: IndexedDataset, spec: str | None) -> Tokenizer | None:
    """The tokenizer of a dataset, or None if it is not at hand and was not asked for."""
    from megafp8.data.sources import check_tokenizer
    from megafp8.data.tokenizer import load_tokenizer

    if not spec:
        kind = dataset.side.get("tokenizer", {}).get("kind")
        beside = dataset.path_prefix.with_name("tokenizer.model")
        spec = "bytes" if kind == "bytes" else str(beside) if beside.is_file() else None
    if not spec:
        return None
    tokenizer = load_tokenizer(spec)
    check_tokenizer(dataset, tokenizer)
    return tokenizer


def _peek(dataset: IndexedDataset, args: argparse.Namespace) -> int:
    tokenizer = _load_tokenizer(dataset, args.tokenizer)
    for index in range(max(args.start, 0), min(args.start + args.documents, dataset.num_documents)):
        ids = dataset.document(index)
        shown = tokenizer.decode(ids.tolist()) if tokenizer else " ".join(map(str, ids[: args.characters].tolist()))
        more = " ..." if len(shown) > args.characters else ""
        print(f"--- document {index}: {len(ids):,} tokens\n{shown[: args.characters]}{more}")
    if tokenizer is None:
        print("--- no tokenizer beside the files; name one with --tokenizer to see text")
    return 0


def _stats(dataset: IndexedDataset, args: argparse.Namespace) -> int:
    from megafp8.data.verify import stats

    found, tokenizer = stats(dataset), _load_tokenizer(dataset, args.tokenizer)
    top = [(int(i), int(found.counts[i])) for i in found.counts.argsort(kind="stable")[::-1][:10] if found.counts[i]]
    values = {
        "documents": found.num_documents,
        "sequences": found.num_sequences,
        "tokens": found.num_tokens,
        "dtype": str(dataset.dtype),
        "distinct_ids": int((found.counts > 0).sum()),
        "unigram_entropy_nats": round(found.unigram_entropy_nats, 6),
        "sequence_tokens": dict(zip(("min", "p10", "median", "p90", "max"), found.lengths, strict=True)),
        "languages": dataset.side.get("languages", {}),
        "sources": dataset.side.get("sources", {}),
    }
    if args.json:
        print(json.dumps(values | {"top_ids": top}, indent=1, ensure_ascii=False))
        return 0
    for key, value in values.items():
        text = ", ".join(f"{k or '(none)'} {v:,}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key:<22}{text:,}" if isinstance(text, int) else f"{key:<22}{text}")
    for i, count in top:
        piece = f"  {tokenizer.decode([i])!r}" if tokenizer else ""
        print(f"  id {i:<8}{100 * count / found.num_tokens:6.2f}%{piece}")
    return 0
