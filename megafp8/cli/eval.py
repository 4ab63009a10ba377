"""`megafp8 eval`: judge a checkpoint's model on text it has not seen."""

from __future__ import annotations

import argparse

HELP = "perplexity of a checkpoint's model on a tokenized dataset or a text file"
EPILOG = """examples:
  megafp8 eval --perplexity runs/tiny-fp8 --data data/tiny/valid       a .bin/.idx prefix
  megafp8 eval --perplexity runs/tiny-fp8 --text README.md             also gives bits per byte

Every token is a target once, in windows of the training's sequence length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or a run (its newest complete one)")
    parser.add_argument("--perplexity", action="store_true", required=True, help="the measure (the only one so far)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PREFIX", help="path prefix of a .bin/.idx dataset")
    source.add_argument("--text", metavar="FILE", help="a UTF-8 text file, scored as one document")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="stop after about this many; 0 = all")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="windows at once (default 8)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="to compute in (default bf16)")
    parser.add_argument("--tokenizer", metavar="PATH", help="its file, if it has moved since training")


def run(args: argparse.Namespace) -> int:
    """Print one line of measures."""
    from rich.console import Console
    from rich.progress import track

    from megafp8.infer.score import Windows, score
    from megafp8.infer.sources import dataset_tokens, text_tokens
    from megafp8.infer.weights import DTYPES, load_model

    loaded = load_model(args.path, dtype=DTYPES[args.dtype], tokenizer=args.tokenizer)
    length = loaded.sequence_length
    tokens, num_bytes = (
        (dataset_tokens(args.data, loaded.tokenizer, args.max_tokens), 0)
        if args.data
        else text_tokens(args.text, loaded.tokenizer, args.max_tokens)
    )
    batches = Windows(tokens, length=length, batch=args.batch)
    shown = track(batches, "scoring", console=Console(stderr=True), transient=True)
    result = score(loaded.model, shown)
    line = f"loss {result.loss:.4f} nats/token  perplexity {result.perplexity:.4f}  tokens {result.tokens}"
    print(line + (f"  bits/byte {result.bits_per_byte(num_bytes):.4f}" if num_bytes else ""))
    return 0
