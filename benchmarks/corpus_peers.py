"""JSON lines -> `.bin` and `.idx`: `megafp8 preprocess` against Megatron's tools and datatrove, as whole processes.

    python -m benchmarks.corpus_peers FILE.jsonl[.zst] ... [--megabytes 57] [--datatrove PYTHON] [--rounds 1]

Everybody gets the same documents and the same tokenizer (32,000 pieces, trained here on a part of them): SentencePiece
BPE, and byte-level BPE split as Llama 3 does. Start-up is what one document costs; "steady" has it taken off. In
CPU-seconds of the process tree; files are compared byte for byte. Megatron's tools read plain files, the others zstd.
Without files: this Python's documentation. The peers are in `corpus_programs` and `datatrove_peer`.
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zstandard

from benchmarks.corpus_encode import texts_of
from benchmarks.processes import Usage, python, run
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.train_tokenizer import train
from megafp8.data.indexed_writer import checksum_file

QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
_PARTS = 48  # files
_PIECES = 32_000
# the split of Llama 3's tokenizer, as its tokenizer.json has it
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass
class Inputs:
    """The sample in the shapes that tools ask for, below one folder."""

    folder: Path
    num_bytes: int = 0
    documents: int = 0

    @property
    def plain(self) -> Path:
        return self.folder / "sample.jsonl"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    def write(self, lines: list[bytes]) -> None:
        """All shapes: `sample.jsonl`, `parts/N.jsonl.zst`, and the same of one document below `one/`."""
        self.documents = len(lines)
        self.num_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
        for folder, some, count in ((self.folder, lines, _PARTS), (self.folder / "one", lines[:1], 1)):
            (folder / "parts").mkdir(parents=True)
            (folder / "sample.jsonl").write_bytes(b"".join(some))
            ends, size = list(itertools.accumulate(map(len, some))), sum(map(len, some))
            cuts = [0, *(bisect.bisect_left(ends, size * part // count) + 1 for part in range(1, count + 1))]
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                packed = zstandard.ZstdCompressor(level=3).compress(b"".join(some[begin:end]))
                (folder / "parts" / f"{number:02d}.jsonl.zst").write_bytes(packed)

    @property
    def one(self) -> Inputs:
        """The same of one document."""
        return Inputs(self.folder / "one")


def lines_of(files: list[str], megabytes: float) -> list[bytes]:
    """Lines from all over the files, of about so many MB together."""
    if not files:
        texts = list(texts_of([]))
        return [json.dumps({"text": text}).encode() + b"\n" for text in texts if text.strip()]
    sizes = [sum(map(len, _lines(file))) for file in files]
    share = min(1.0, megabytes * 1e6 / sum(sizes))
    return list(_every(share, (line for file in files for line in _lines(file))))


def _lines(file: str) -> Iterator[bytes]:
    with InputStream(file) as stream:
        yield from stream.reader


def _every(share: float, lines: Iterable[bytes]) -> Iterator[bytes]:
    taken = 0
    for number, line in enumerate(lines, 1):
        if taken < int(number * share):
            taken += 1
            yield line


def make_tokenizers(texts: list[str], folder: Path) -> dict[str, Path]:
    """SentencePiece BPE and byte-level BPE, trained on a third of the texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    model = folder / "sp.model"
    model.write_bytes(train(texts[::3], TokenizerConfig(vocab_size=_PIECES if len(texts) > 4000 else 8192)))
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_PIECES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts[::6], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"sentencepiece": model, "byte-level": folder / "tokenizer.json"}


@dataclass
class Contender:
    """A tool: `command(inputs, output)` gives its words; `result` where its .bin lies, if it writes our format."""

    name: str
    tokenizer: str
    command: Callable[[Inputs, Path], list[str]]
    result: str = ""
    runs: list[Usage] = field(default_factory=list)
    startups: list[Usage] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)

    def take(self, inputs: Inputs, folder: Path) -> None:
        """One run of everything, one of one document."""
        for what, runs in ((inputs, self.runs), (inputs.one, self.startups)):
            with TemporaryDirectory(dir=folder) as out:
                runs.append(run(self.command(what, Path(out, "x")), Path(out, "log"), environment=QUIET))
                if self.result and what is inputs:
                    files = [Path(out, f"{self.result}.{suffix}") for suffix in ("bin", "idx")]
                    self.checksums = [checksum_file(path) for path in files]


def ours(inputs: Inputs, output: Path, tokenizer: Path, workers: int, steps: str = "") -> list[str]:
    """`megafp8 preprocess`, in tasks of a few MB where two workers share them."""
    config = output.with_suffix(".toml")
    config.write_text(f"""
        [source]
        kind = "jsonl"
        files = ["{inputs.parts}/*.jsonl.zst"]
        [split]
        valid_share = 0.0
        [tokenizer]
        path = "{tokenizer}"
        [output]
        folder = "{output}"
        workers = {workers}
        keep_stages = {"true" if steps else "false"}
        [executor]
        shard_bytes = {1 << 22 if workers > 1 else 1 << 26}
        part_bytes = {1 << 22 if workers > 1 else 1 << 26}
        {steps}
        """)
    return python("-m", "megafp8", "preprocess", str(config))


def contenders(tokenizers: dict[str, Path], datatrove: str) -> list[Contender]:
    """All that are installed; says who is not."""
    found = []
    has_megatron = importlib.util.find_spec("megatron") is not None
    peers = {"sentencepiece": ("megatron-sentencepiece",), "byte-level": ("megatron-huggingface", "megatron-gigatoken")}
    for kind, path in tokenizers.items():
        for workers in (1, 2):
            command = _bound(ours, path, workers)
            found.append(Contender(f"megafp8, {_processes(workers)}", kind, command, "x/train"))
        for peer in peers[kind] if has_megatron else ():
            found.append(Contender(f"{peer}, {'1 process' if 'giga' in peer else '2 workers'}", kind,
                                   _bound(_program, path, peer), "x"))  # fmt: skip
    if not has_megatron:
        print("not measured: Megatron (pip install megatron-core)")
    if datatrove:
        found.append(Contender("datatrove DocumentTokenizer, 2 workers", "byte-level",
                               _bound(_datatrove, tokenizers["byte-level"], datatrove)))  # fmt: skip
    else:
        print("not measured: datatrove (--datatrove PYTHON, see benchmarks/datatrove_peer.py)")
    return found


def _bound(make: Callable[..., list[str]], *more: Any) -> Callable[[Inputs, Path], list[str]]:
    return lambda inputs, output: make(inputs, output, *more)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} workers"


def _program(inputs: Inputs, output: Path, tokenizer: Path, name: str) -> list[str]:
    return python("-m", "benchmarks.corpus_programs", name, str(inputs.plain), str(output), str(tokenizer), "2")


def _datatrove(inputs: Inputs, output: Path, tokenizer: Path, interpreter: str) -> list[str]:
    script = str(Path(__file__).with_name("datatrove_peer.py"))
    return [interpreter, script, "tokenize", str(inputs.parts), str(output), str(tokenizer), "2"]


def _steady(one: Contender) -> list[float]:
    """CPU-seconds without the start-up; nan where they are lost in its noise."""
    pairs = zip(one.runs, one.startups, strict=True)
    found = [(a.cpu_seconds - b.cpu_seconds, b.cpu_seconds) for a, b in pairs]
    return [left if left > startup / 10 else math.nan for left, startup in found]


def report(found: list[Contender], num_bytes: int) -> list[dict[str, Any]]:
    """Print a table; ratios are of our one process to each peer, medians over rounds."""
    rows = []
    heads = ("cpu-s", "start-up", "MB/cpu-s", "steady", "wall s", "peak MB", "ours x", "steady x")
    print(" " * 54 + "".join(f"{head:>9}" for head in heads))
    for one in found:
        base = next(c for c in found if c.tokenizer == one.tokenizer)
        steady, ours_steady = _steady(one), _steady(base)
        cpu = statistics.median(usage.cpu_seconds for usage in one.runs)
        row = {
            "name": one.name,
            "tokenizer": one.tokenizer,
            "cpu_seconds": cpu,
            "startup_cpu_seconds": statistics.median(usage.cpu_seconds for usage in one.startups),
            "startup_seconds": statistics.median(usage.seconds for usage in one.startups),
            "rate": num_bytes / 1e6 / cpu,
            "steady_rate": num_bytes / 1e6 / statistics.median(steady),
            "seconds": statistics.median(usage.seconds for usage in one.runs),
            "peak_bytes": max(usage.peak_bytes for usage in one.runs),
            "ours": statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in zip(one.runs, base.runs, strict=True)),
            "ours_steady": statistics.median(a / b for a, b in zip(steady, ours_steady, strict=True)),
            "same_bytes": one.checksums == base.checksums if one.checksums else None,
        }
        rows.append(row)
        same = {True: "same bytes", False: "OTHER BYTES", None: "own format"}[row["same_bytes"]]
        print(
            f"{one.tokenizer + ': ' + one.name:54}{cpu:9.2f}{row['startup_cpu_seconds']:9.2f}{row['rate']:9.1f}"
            f"{row['steady_rate']:9.1f}{row['seconds']:9.2f}{row['peak_bytes'] / 1e6:9.0f}"
            f"{row['ours']:9.1f}{row['ours_steady']:9.1f}  {same}"
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 if somebody's files differ from ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="JSON lines with a key `text`")
    parser.add_argument("--megabytes", type=float, default=57.4, help="of JSON lines, from all over the files")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--datatrove", default="", help="a Python that has datatrove")
    parser.add_argument("--only", default="", help="contenders with this in their names, and ours")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        inputs = Inputs(Path(name, "inputs"))
        lines = lines_of(options.files, options.megabytes)
        inputs.write(lines)
        texts = [json.loads(line)["text"] for line in lines]
        found = contenders(make_tokenizers(texts, Path(name, "tokenizers")), options.datatrove)
        del lines, texts
        found = [one for one in found if options.only in one.name or one.name.startswith("megafp8")]
        print(f"{inputs.documents:,} documents, {inputs.num_bytes / 1e6:.1f} MB of text")
        for _ in range(options.rounds):
            for one in found:
                one.take(inputs, Path(name))
                spent = f"{one.runs[-1].cpu_seconds:.2f} cpu-s"
                print(f"  {one.tokenizer}: {one.name}: {spent}", file=sys.stderr, flush=True)
        rows = report(found, inputs.num_bytes)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["same_bytes"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
