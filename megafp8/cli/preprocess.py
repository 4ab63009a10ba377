"""`megafp8 preprocess`: text to `.bin/.idx`."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "turn text into .bin/.idx token files (trains a tokenizer if none is named)"
EPILOG = """examples:
  megafp8 preprocess examples/tiny_cpu/corpus.toml
  megafp8 preprocess corpus.toml --plan
  megafp8 preprocess corpus.toml --output.folder /data/tokens --output.workers 32
  megafp8 preprocess corpus.toml --executor.kind slurm --output.workers 64 --executor.options '["--partition=cpu"]'
  megafp8 preprocess corpus.toml --source.files '["/data/part-*.jsonl.zst"]' --tokenizer.path /data/tokenizer.model

Called again it does nothing if all is done, and goes on where it was stopped. Bad records are listed in
quarantine.jsonl in the output folder; report.html there shows what became of everything. All keys with their meaning:
docs/corpus.md.
"""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", help="corpus.toml: [source], [split], [tokenizer], [[steps]], [output], [executor]")
    parser.add_argument("--plan", action="store_true", help="say what would run, how long and how large; run nothing")


def run(args: argparse.Namespace) -> int:
    """Make the corpus and say in a few lines what it holds."""
    from megafp8.core.config import apply_overrides, build, load_toml
    from megafp8.core.log import set_up
    from megafp8.corpus.config import CorpusConfig
    from megafp8.corpus.folder import REPORT
    from megafp8.corpus.plan import make_plan
    from megafp8.corpus.run import preprocess
    from megafp8.report import build_corpus

    set_up()
    config = build(CorpusConfig, apply_overrides(load_toml(args.config), args.overrides))
    if args.plan:
        return _show_plan(make_plan(config))
    result = preprocess(config)
    counts = result.manifest["counts"]
    if result.was_done:
        print(f"{result.folder}: already done, nothing to do")
    if not (result.was_done and (result.folder / REPORT).is_file()):
        build_corpus(result.folder, None if result.was_done else result.rates)
    for name in ("train", "valid"):
        split = counts["splits"][name]
        print(
            f"{result.folder / name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
            f"{split['bytes_per_token']:.2f} bytes/token, "
            f"unigram entropy {split['unigram_entropy_nats']:.3f} nats/token"
        )
    _show_tokenizer(result)
    if other := counts.get("num_other_language"):
        print(f"{other:,} documents are not in {', '.join(config.source.languages)} and were left out")
    for step, reasons in counts["dropped"].items():
        shown = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items(), key=lambda r: -r[1])[:5])
        print(f"step {step} dropped {sum(reasons.values()):,} documents: {shown}")
    if counts["num_bad"]:
        print(f"{counts['num_bad']:,} bad records are listed in {result.folder / 'quarantine.jsonl'}")
    print(f"report: {result.folder / REPORT}")
    return 0


def _show_tokenizer(result: Any) -> None:
    """How documents are marked, with the first one's ids, and what the tokenizer costs each language."""
    from megafp8.data.indexed import IndexedDataset

    known, report = result.manifest["tokenizer"], result.manifest["tokenizer_report"]
    ids = IndexedDataset(result.folder / "train").document(0).tolist()
    example = [*map(str, ids[:4]), *(["..."] if len(ids) > 6 else []), *map(str, ids[4:][-2:])]
    begin = f"begin id {known['bos_id']}, " if known["add_bos"] else ""
    end = f", end id {known['eod_id']}" if known["append_eos"] else ""
    print(f"each document: {begin}text{end}; the first of train: {' '.join(example)}")
    rates = [f"{name or '(none)'} {one['tokens_per_word']:.2f}" for name, one in report["languages"].items()]
    if rates:
        print(f"tokens a word, of a sample: {', '.join(rates[:8])}{' ...' if len(rates) > 8 else ''}")


def _show_plan(plan: Any) -> int:
    """A line a stage; what a later stage has to do is known when the one before has run."""
    print(f"{plan.input_bytes / 1e6:,.1f} MB of input, {plan.workers} workers")
    print(f"{'stage':<10} {'tasks':>8} {'done':>8} {'to do':>8} {'MB left':>12} {'process-s':>11} {'MB on disk':>11}")
    for row in plan.rows:
        about = "" if row.is_exact else "~"
        numbers = f"{about + format(row.tasks, ','):>8} {row.done:>8,} {about + format(row.tasks - row.done, ','):>8}"
        print(f"{row.stage:<10} {numbers} {row.num_bytes / 1e6:>12,.1f} {row.seconds:>11,.1f} {row.disk / 1e6:>11,.1f}")
    print(f"about {plan.seconds:,.0f} s and {plan.disk / 1e6:,.0f} MB in the output folder (~: estimates)")
    return 0
