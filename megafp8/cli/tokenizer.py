"""`megafp8 tokenizer train`: a SentencePiece model from a corpus."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "train a tokenizer on the train split of a corpus"
EPILOG = """examples:
  megafp8 tokenizer train examples/tiny_cpu/corpus.toml
  megafp8 tokenizer train --input 'data/*.jsonl.zst' --vocab-size 32000 --out runs/tokenizer
  megafp8 tokenizer train --input 'books/*.txt' --format text --algorithm unigram --out runs/tokenizer

With a corpus.toml the tokenizer goes to its output.folder, where `megafp8 preprocess` finds it.
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    train = parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "train", help=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    train.add_argument("config", nargs="?", help="corpus.toml; its [source], [split] and [tokenizer] are used")
    train.add_argument("--input", nargs="+", metavar="FILE", help="files or globs, instead of a corpus.toml")
    train.add_argument("--format", choices=("jsonl", "text"), help="of --input (default jsonl)")
    train.add_argument("--vocab-size", type=int, help="ids in all (default 8192)")
    train.add_argument("--algorithm", choices=("bpe", "unigram"), help="SentencePiece's model type (default bpe)")
    train.add_argument("--out", help="folder for tokenizer.model (default: output.folder of the corpus.toml)")


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
    """Train, or find that it has been done."""
    from pathlib import Path

    from megafp8.core.config import build
    from megafp8.core.errors import ConfigError
    from megafp8.core.log import set_up
    from megafp8.corpus.config import CorpusConfig
    from megafp8.corpus.run import train_into
    from megafp8.data.tokenizer import load_tokenizer

    set_up()
    config = build(CorpusConfig, _values(args))
    if config.tokenizer.path:
        raise ConfigError(f"tokenizer.path is {config.tokenizer.path!r}: there is nothing to train, remove it")
    spec = train_into(config, Path(config.output.folder))
    tokenizer = load_tokenizer(spec)
    print(f"{spec}: {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]}")
    return 0
