"""`megafp8 generate`: continue prompts with a checkpoint's model."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "continue prompts with the model of a checkpoint"
EPILOG = """examples:
  megafp8 generate runs/tiny-fp8 --prompt "Return the" --max-new-tokens 40
  megafp8 generate runs/tiny-bf16 --prompt "class" --temperature 0.8 --top-p 0.95 --seed 7
  megafp8 generate runs/tiny-fp8 --prompt "def" --prompt "class" --recipe as-trained
  torchrun --nproc-per-node 2 -m megafp8 generate RUN --prompt "Return the"      tensor parallel

The same seed gives the same text; --temperature 0 (the default) always takes the likeliest token. Prompts are continued
together, each by itself; with several, or with --file (a prompt a line), each text is printed as a JSON string."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from megafp8.cli.judging import add_model_arguments

    parser.add_argument("--prompt", action="append", default=[], help="the text to continue; empty: a document's start")
    parser.add_argument("--file", metavar="FILE", help="prompts, one a line")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="at most this many (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only; 0 = all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest that together have P")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    add_model_arguments(parser, dtype="fp32")


def run(args: argparse.Namespace) -> int:
    """Print each prompt and its continuation."""
    from megafp8.cli.judging import load
    from megafp8.core.errors import ConfigError
    from megafp8.infer.generate import Sampling, generate

    prompts = [*args.prompt, *(_lines(args.file) if args.file else [])]
    if not prompts:
        raise ConfigError("nothing to continue; give --prompt TEXT or --file FILE")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    loaded, rank = load(args)
    ids = [loaded.prompt_ids(prompt) for prompt in prompts]
    made = generate(
        loaded.model, ids, max_new_tokens=args.max_new_tokens, sampling=sampling, eod_id=loaded.tokenizer.eod_id
    )
    for prompt, before, new in zip(prompts, ids, made, strict=True) if rank == 0 else ():
        # Decoded together: the first new token may belong to the prompt's last word.
        _say(loaded.tokenizer.decode([*before, *new] if prompt else new), as_json=len(prompts) > 1 or bool(args.file))
    return 0


def _say(text: str, *, as_json: bool) -> None:
    import json

    print(json.dumps(text, ensure_ascii=False) if as_json else text)
    sys.stdout.flush()


def _lines(path: str) -> list[str]:
    from megafp8.core.errors import DataError

    try:
        with open(os.fspath(path), encoding="utf-8") as lines:
            return [line.rstrip("\n") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
