"""`megafp8 eval`: judge a checkpoint's model on text it has not seen, or on tasks."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "perplexity of a checkpoint's model on a tokenized dataset or a text file, or tasks of lm-evaluation-harness"
EPILOG = """examples:
  megafp8 eval --perplexity runs/tiny-fp8 --data data/tiny/valid       a .bin/.idx prefix
  megafp8 eval --perplexity runs/tiny-fp8 --text README.md             also gives bits per byte
  megafp8 eval --perplexity runs/tiny-fp8 --data data/de/valid --save de --as-trained
  megafp8 eval --tasks hellaswag,arc_easy runs/tiny-fp8 --fewshot 5 --limit 200      pip install lm-eval

Every token is a target once, in windows of the training's sequence length. With --save documents are scored one by one
and their losses kept in RUN/heldout/NAME.json, from which `megafp8 report` makes intervals; called again for the same
checkpoint and data it does nothing. --as-trained computes in the run's FP8 recipe with the checkpoint's scales; without
it the weights are judged in --dtype."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from megafp8.cli.judging import add_model_arguments

    measure = parser.add_mutually_exclusive_group(required=True)
    measure.add_argument("--perplexity", action="store_true", help="loss, perplexity, bits per byte")
    measure.add_argument("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="PREFIX", help="path prefix of a .bin/.idx dataset")
    source.add_argument("--text", metavar="FILE", help="a UTF-8 text file, scored as one document")
    parser.add_argument("--save", metavar="NAME", help="score each document of --data, into RUN/heldout/NAME.json")
    parser.add_argument("--fewshot", type=int, metavar="N", help="solved examples before each question of --tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="of each task the first N questions only")
    parser.add_argument("--include", metavar="FOLDER", help="task files of your own for --tasks")
    parser.add_argument("--as-trained", action="store_true", help="short for --recipe as-trained")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="stop after about this many; 0 = all")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="windows at once (default 8)")
    add_model_arguments(parser, dtype="bf16")


def run(args: argparse.Namespace) -> int:
    """Print measures."""
    from megafp8.core.errors import ConfigError

    if args.as_trained:
        args.recipe = "as-trained"
    if args.tasks:
        return _tasks(args)
    if not args.data and not args.text:
        raise ConfigError("--perplexity of what? give --data PREFIX or --text FILE")
    if args.save is not None and not args.data:
        raise ConfigError(f"--save {args.save}: documents are those of a dataset; give --data instead of --text")
    return _documents(args) if args.save is not None else _perplexity(args)


def _perplexity(args: argparse.Namespace) -> int:
    from megafp8.cli.judging import load
    from megafp8.infer.score import Windows, score
    from megafp8.infer.sources import dataset_tokens, text_tokens

    loaded, rank = load(args)
    tokens, num_bytes = (
        (dataset_tokens(args.data, loaded.tokenizer, args.max_tokens), 0)
        if args.data
        else text_tokens(args.text, loaded.tokenizer, args.max_tokens, loaded.marks)
    )
    result = score(loaded.model, _shown(Windows(tokens, length=loaded.sequence_length, batch=args.batch)))
    if rank == 0:
        _say(result, f"bits/byte {result.bits_per_byte(num_bytes):.4f}" if num_bytes else "")
    return 0


def _tasks(args: argparse.Namespace) -> int:
    """Run lm-eval's tasks and print a table; as JSON beside it where --save names it."""
    from megafp8.cli.judging import load
    from megafp8.core.errors import ConfigError

    if args.data or args.text:
        raise ConfigError("--tasks bring their own texts; leave out --data and --text")
    try:
        from megafp8.infer.harness import run_tasks
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm-evaluation-harness ({error}); pip install lm-eval") from error
    loaded, rank = load(args)
    found = run_tasks(
        loaded, args.tasks.split(","), num_fewshot=args.fewshot, limit=args.limit, include=args.include,
        batch=args.batch, quiet=rank > 0,
    )  # fmt: skip
    if rank > 0:
        return 0
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "_stderr" not in name:
                deviation = metrics.get(name.replace(",", "_stderr,", 1), "")
                spread = f" ± {deviation:.4f}" if isinstance(deviation, float) else ""
                print(f"{task:30} {name.split(',')[0]:20} {value:.4f}{spread}")
    if args.save is not None:
        _keep_tasks(loaded.path, args.save, {**found, "recipe": args.recipe, "dtype": args.dtype})
    return 0


def _keep_tasks(path: Any, name: str, record: dict[str, Any]) -> None:
    from megafp8.core.jsonio import write_json

    folder = path.parent.parent / "tasks"
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{name}.json", {"checkpoint": path.name, **record})
    print(folder / f"{name}.json")


def _documents(args: argparse.Namespace) -> int:
    """Score document by document and keep it in the run's folder, unless it is there already."""
    from megafp8.checkpoint import find, read_meta
    from megafp8.cli.judging import load
    from megafp8.core.jsonio import read_json, write_json
    from megafp8.data.indexed import IndexedDataset
    from megafp8.data.sources import check_tokenizer
    from megafp8.infer.documents import DocumentWindows, open_documents, place_of, score_documents
    from megafp8.infer.score import Score

    path, dataset = find(args.path), IndexedDataset(args.data)
    text_bytes = open_documents(args.data, dataset)
    config = read_meta(path).get("config", {})
    recipe = config.get("precision", {}).get("recipe", "none")
    length = config.get("data", {}).get("sequence_length", 0)
    trained = f"as trained ({config.get('precision', {}).get('dtype', 'bf16') if recipe == 'none' else recipe})"
    arithmetic = trained if args.recipe == "as-trained" else f"{args.dtype}{_and(args.recipe)}"
    place = place_of(path, args.save, dataset, arithmetic=arithmetic, length=length, max_tokens=args.max_tokens)
    if place.is_done:
        kept = read_json(place.file)
        _say(Score(sum(kept["document_loss_sums"]), kept["tokens"]), f"{place.file}: already done")
        return 0
    loaded, rank = load(args)
    check_tokenizer(dataset, loaded.tokenizer)
    windows = DocumentWindows(
        dataset, loaded.tokenizer.eod_id, length=loaded.sequence_length, batch=args.batch, max_tokens=args.max_tokens
    )
    scores = score_documents(loaded.model, _shown(windows), len(windows.sizes))
    if rank > 0:
        return 0
    write_json(place.file, place.record(scores, 0 if len(scores.tokens) < dataset.num_documents else text_bytes))
    _say(scores.total, f"documents {len(scores.tokens)}  {place.file}")
    return 0


def _and(recipe: str) -> str:
    return "" if recipe == "none" else f", {recipe}"


def _shown(batches: Any) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(batches, "scoring", console=Console(stderr=True), transient=True)


def _say(result: Any, more: str) -> None:
    line = f"loss {result.loss:.4f} nats/token  perplexity {result.perplexity:.4f}  tokens {result.tokens}"
    print(line + (f"  {more}" if more else ""))
