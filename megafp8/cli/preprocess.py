"""`megafp8 preprocess`: text to `.bin/.idx`."""

from __future__ import annotations

import argparse

HELP = "turn text into .bin/.idx token files (trains a tokenizer if none is named)"
EPILOG = """examples:
  megafp8 preprocess examples/tiny_cpu/corpus.toml
  megafp8 preprocess corpus.toml --output.folder /data/tokens --output.workers 32
  megafp8 preprocess corpus.toml --source.files '["/data/part-*.jsonl.zst"]' --tokenizer.path /data/tokenizer.model

Called again it does nothing if all is done, and goes on where it was stopped. Bad records are listed in
quarantine.jsonl in the output folder. All keys with their meaning: docs/corpus.md.
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", help="corpus.toml: [source], [split], [tokenizer], [output]")


def run(args: argparse.Namespace) -> int:
    """Make the corpus and say in a few lines what it holds."""
    from megafp8.core.config import apply_overrides, build, load_toml
    from megafp8.core.log import set_up
    from megafp8.corpus.config import CorpusConfig
    from megafp8.corpus.run import preprocess

    set_up()
    config = build(CorpusConfig, apply_overrides(load_toml(args.config), args.overrides))
    result = preprocess(config)
    counts = result.manifest["counts"]
    if result.was_done:
        print(f"{result.folder}: already done, nothing to do")
    for name in ("train", "valid"):
        split = counts["splits"][name]
        print(
            f"{result.folder / name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
            f"{split['bytes_per_token']:.2f} bytes/token, "
            f"unigram entropy {split['unigram_entropy_nats']:.3f} nats/token"
        )
    if other := counts.get("num_other_language"):
        print(f"{other:,} documents are not in {', '.join(config.source.languages)} and were left out")
    if counts["num_bad"]:
        print(f"{counts['num_bad']:,} bad records are listed in {result.folder / 'quarantine.jsonl'}")
    return 0
