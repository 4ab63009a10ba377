"""`megafp8 generate`: continue a prompt with a checkpoint's model."""

from __future__ import annotations

import argparse

HELP = "continue a prompt with the model of a checkpoint"
EPILOG = """examples:
  megafp8 generate runs/tiny-fp8 --prompt "Return the" --max-new-tokens 40
  megafp8 generate runs/tiny-bf16 --prompt "class" --temperature 0.8 --seed 7

The same seed gives the same text; --temperature 0 (the default) always takes the likeliest token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("path", metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or a run (its newest complete one)")
    parser.add_argument("--prompt", required=True, help="the text to continue; empty: the start of a document")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="at most this many (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32", help="to compute in (default fp32)")
    parser.add_argument("--tokenizer", metavar="PATH", help="its file, if it has moved since training")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    from megafp8.infer.generate import generate
    from megafp8.infer.weights import DTYPES, load_model

    loaded = load_model(args.path, dtype=DTYPES[args.dtype], tokenizer=args.tokenizer)
    ids = loaded.prompt_ids(args.prompt)
    (new,) = generate(
        loaded.model,
        [ids],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        eod_id=loaded.tokenizer.eod_id,
    )
    # Decoded together: the first new token may belong to the prompt's last word.
    print(loaded.tokenizer.decode([*ids, *new]) if args.prompt else loaded.tokenizer.decode(new))
    return 0
