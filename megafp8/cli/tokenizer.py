"""`megafp8 tokenizer train | report`: a SentencePiece model from a corpus; what tokenizers make of a text."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "train a tokenizer on the train split of a corpus; compare tokenizers on a text"
EPILOG = """examples:
  megafp8 tokenizer train examples/tiny_cpu/corpus.toml
  megafp8 tokenizer train --input 'data/*.jsonl.zst' --vocab-size 32000 --out runs/tokenizer
  megafp8 tokenizer train corpus.toml --tokenizer.language_weights '{en = 2, ja = 1}'
  megafp8 tokenizer report runs/tokenizer other/tokenizer.json --input 'data/*.jsonl.zst'

With a corpus.toml the tokenizer goes to its output.folder, where `megafp8 preprocess` finds it.
"""
TAKES_OVERRIDES = True
_COLUMNS = (
    ("documents", "docs", ",d"), ("text_bytes", "MB", "MB"), ("bytes_per_token", "bytes/token", ".3f"),
    ("tokens_per_word", "tokens/word", ".3f"), ("tokens_per_character", "tokens/char", ".4f"),
    ("byte_token_share", "byte ids", "%"), ("unknown_share", "unknown", "%"), ("covered_share", "covered", "%"),
    ("lossy_documents", "not back", ",d"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser(
        "train", help="train one", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    train.add_argument("config", nargs="?", help="corpus.toml; its [source], [split] and [tokenizer] are used")
    _add_input(train)
    train.add_argument("--vocab-size", type=int, help="ids in all (default 8192)")
    train.add_argument("--algorithm", choices=("bpe", "unigram"), help="SentencePiece's model type (default bpe)")
    train.add_argument("--out", help="folder for tokenizer.model (default: output.folder of the corpus.toml)")
    report = actions.add_parser(
        "report", help="tokens for each byte, word and character by language, bytes, unknowns, losses",
        description="Encodes and decodes the same sample of a text with each tokenizer.", allow_abbrev=False,
    )  # fmt: skip
    report.add_argument("tokenizer", nargs="+", help='.model, .tiktoken, tokenizer.json, its folder, or "bytes"')
    _add_input(report)
    report.add_argument("--config", metavar="FILE", help="corpus.toml, whose [source] is read, instead of --input")
    report.add_argument(
        "--sample-bytes", type=int, default=10_000_000, metavar="N", help="of each language (default 10 MB)"
    )
    report.add_argument("--json", action="store_true", help="all figures as JSON")


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", metavar="FILE", help="files or globs, instead of a corpus.toml")
    parser.add_argument("--format", choices=("jsonl", "text", "parquet"), help="of --input (default jsonl)")


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration as nested dicts: the file or --input, then options, then overrides."""
    from megafp8.core.config import apply_overrides, load_toml
    from megafp8.core.errors import ConfigError

    if bool(args.config) == bool(args.input):
        raise ConfigError("give either a corpus.toml or --input FILE ..., one of the two")
    values = load_toml(args.config) if args.config else {"source": {"kind": "jsonl", "files": args.input}}
    if args.input and not args.out:
        raise ConfigError("--input needs --out FOLDER, where tokenizer.model goes")
    given = {
        "source": {"kind": args.format},
        "tokenizer": {"vocab_size": args.vocab_size, "algorithm": args.algorithm},
        "output": {"folder": args.out},
    }
    for section, keys in given.items():
        values[section] = {**values.get(section, {}), **{key: v for key, v in keys.items() if v is not None}}
    return apply_overrides(values, args.overrides)


def run(args: argparse.Namespace) -> int:
    """Do one of them."""
    from megafp8.core.log import set_up

    set_up()
    return _report(args) if args.action == "report" else _train(args)


def _train(args: argparse.Namespace) -> int:
    """Train, or find that it has been done."""
    from pathlib import Path

    from megafp8.core.config import build
    from megafp8.core.errors import ConfigError
    from megafp8.corpus.config import CorpusConfig
    from megafp8.corpus.run import train_into
    from megafp8.data.tokenizer import load_tokenizer

    config = build(CorpusConfig, _values(args))
    if config.tokenizer.path:
        raise ConfigError(f"tokenizer.path is {config.tokenizer.path!r}: there is nothing to train, remove it")
    spec = train_into(config, Path(config.output.folder))
    tokenizer = load_tokenizer(spec)
    print(f"{spec}: {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]}")
    return 0


def _report(args: argparse.Namespace) -> int:
    """A table, a line for each tokenizer and language."""
    import json

    from megafp8.core.config import apply_overrides, build, load_toml
    from megafp8.core.errors import ConfigError
    from megafp8.corpus.config import SourceConfig
    from megafp8.corpus.tokenizer_report import draw, report

    if bool(args.config) == bool(args.input):
        raise ConfigError("give either --config corpus.toml or --input FILE ..., one of the two")
    if args.sample_bytes < 1:
        raise ConfigError(f"--sample-bytes {args.sample_bytes}: has to be above 0")
    given = {"source": {"kind": args.format or "jsonl", "files": args.input}}
    values = apply_overrides(load_toml(args.config) if args.config else given, args.overrides)
    config = build(SourceConfig, values.get("source", {}))
    sample = draw(config, sample_bytes=args.sample_bytes, seed=0)
    rows = report(args.tokenizer, sample)
    if args.json:
        print(json.dumps(rows, ensure_ascii=False, indent=1))
        return 0
    found = f"{len(sample.documents):,} of {sample.num_documents:,} documents"
    print(f"{found}, of each language up to {args.sample_bytes:,} bytes")
    if sample.num_bad:
        print(f"{sample.num_bad:,} bad records were passed over, first: {sample.first_bad}")
    for row in rows:
        kind, size = row["identity"]["kind"], row["identity"]["vocab_size"]
        print(f"\n{row['spec']}: {kind}, {size:,} ids, {row['vocabulary_used']:.1%} of them used")
        print(f"{'':10}" + "".join(f"{head:>13}" for _, head, _ in _COLUMNS))
        for name, figures in [*row["languages"].items(), ("all", row["all"])]:
            print(f"{name or '(none)':10}" + "".join(f"{_shown(figures[key], how):>13}" for key, _, how in _COLUMNS))
        if row["first_loss"]:
            print(f"first that does not come back: {row['first_loss']}")
        if row["lost_probes"]:
            print(f"does not give back: {', '.join(row['lost_probes'])}")
    return 0


def _shown(value: float, how: str) -> str:
    return f"{value / 1e6:.2f}" if how == "MB" else f"{value:.3%}" if how == "%" else format(value, how)
