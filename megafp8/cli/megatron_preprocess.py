"""Megatron-LM's `tools/preprocess_data.py` arguments, for scripts that have them: a pair PREFIX_text_document."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.core.errors import ConfigError

_WITH_MODEL = (
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "TikTokenizer",
)  # fmt: skip
_NOT_HERE = {
    "split_sentences": "sentences are not told apart; documents are written whole",
    "partitions": "not needed, files are cut by themselves; leave it out",
    "keep_sequential_samples": "the order of the input is kept anyway; leave it out",
    "vocab_file": "not read; give the same model's tokenizer.json as --tokenizer-model",
    "merge_file": "not read; give the same model's tokenizer.json as --tokenizer-model",
}


def is_meant(words: Sequence[str]) -> bool:
    """Whether a command line is in Megatron's words."""
    return any(word.partition("=")[0] in ("--input", "--output-prefix") for word in words)


def parser() -> argparse.ArgumentParser:
    """What of its arguments is known, and what is refused by name."""
    made = argparse.ArgumentParser(prog="preprocess_data.py", allow_abbrev=False)
    made.add_argument("--input", required=True)
    made.add_argument("--output-prefix", required=True)
    made.add_argument("--json-keys", nargs="+", default=["text"])
    made.add_argument("--tokenizer-type", choices=(*_WITH_MODEL, "GPT2BPETokenizer", "NullTokenizer"), required=True)
    made.add_argument("--tokenizer-model", default="")
    made.add_argument("--append-eod", action="store_true")
    made.add_argument("--workers", type=int, default=0)
    made.add_argument("--log-interval", type=int, help="the progress line is always there")
    made.add_argument("--dataset-impl", choices=("mmap",), help="what is written")
    for name in ("split-sentences", "keep-sequential-samples"):
        made.add_argument(f"--{name}", action="store_true", help=_NOT_HERE[name.replace("-", "_")])
    for name in ("partitions", "vocab-file", "merge-file"):
        made.add_argument(f"--{name}", help=_NOT_HERE[name.replace("-", "_")])
    return made


def values_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as a corpus.toml's values.

    Raises:
        ConfigError: what it asks for is not done here; all of it, a line each.
    """
    problems = [
        f"--{name.replace('_', '-')}: {why}"
        for name, why in _NOT_HERE.items()
        if getattr(args, name) and not (name == "partitions" and args.partitions == "1")
    ]
    if args.tokenizer_type not in _WITH_MODEL or not args.tokenizer_model:
        problems.append(
            f"--tokenizer-type {args.tokenizer_type}: needs --tokenizer-model, a .model, tokenizer.json, .tiktoken "
            f"file or folder, and one of {', '.join(_WITH_MODEL)}"
        )
    if len(args.json_keys) > 1:
        problems.append("--json-keys: one key; run it once for each")
    if not args.append_eod:
        problems.append("--append-eod is missing: documents would run together; add it")
    if problems:
        raise ConfigError("\n".join(problems))
    return {
        "source": {"kind": "jsonl", "files": [args.input], "text_key": args.json_keys[0]},
        "split": {"valid_share": 0.0},
        "tokenizer": {"path": args.tokenizer_model},
        "output": {"folder": f"{prefix(args)}.corpus", "workers": args.workers},
    }


def prefix(args: argparse.Namespace) -> Path:
    """Where Megatron's tool puts its pair."""
    return Path(f"{args.output_prefix}_{args.json_keys[0]}_document")


def run(words: Sequence[str]) -> int:
    """Make the corpus in PREFIX_text_document.corpus, and its train split known under Megatron's name."""
    from megafp8.core.config import build
    from megafp8.core.log import set_up
    from megafp8.corpus.config import CorpusConfig
    from megafp8.corpus.folder import give_name
    from megafp8.corpus.run import preprocess

    set_up()
    args = parser().parse_args(words)
    result = preprocess(build(CorpusConfig, values_of(args)))
    for suffix in ("bin", "json", "idx"):
        give_name(result.folder / f"train.{suffix}", Path(f"{prefix(args)}.{suffix}"))
    split = result.manifest["counts"]["splits"]["train"]
    print(f"{prefix(args)}: {split['documents']:,} documents, {split['tokens']:,} tokens")
    if bad := result.manifest["counts"]["num_bad"]:
        print(f"{bad:,} bad records are listed in {result.folder / 'quarantine.jsonl'}")
    return 0
