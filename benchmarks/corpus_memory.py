"""Memory of the corpus tools against the size of the input, and with 10^8 documents; draws it.

    python -m benchmarks.corpus_memory [FILE.jsonl[.zst] ...] [--largest 2000] [--documents 1e8] [--out PICTURE]

Inputs of 10 MB and more, of random documents of real lines, go through `megafp8 preprocess`: tokens only, and (up to a
quarter of the largest) with language id, filters and MinHash. Then documents of one to five tokens through the writer,
the shuffle and `megafp8 data split`. Memory is of whole process trees: proportional set sizes, and the same without
pages of mapped files, which the system drops when it needs their memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.corpus_peers import QUIET, lines_of, make_tokenizers
from benchmarks.corpus_pipeline import STEPS
from benchmarks.processes import Usage, python, run
from megafp8.corpus.stages import write
from megafp8.corpus.tasks import Input, Task, Work
from megafp8.data.indexed_writer import IndexedDatasetWriter, checksum_file

_MEMORY = 64 << 20  # executor.memory_bytes of `preprocess`: what the shuffle and MinHash take besides
_SHUFFLE_MEMORY = 128 << 20  # and of the shuffle alone
_FEW = 1_000_000  # documents made at once
_IDS = 50_000


def pool_of(files: list[str], megabytes: float) -> list[str]:
    """Lines of texts of at least 40 characters, to make documents of."""
    texts = [json.loads(line)["text"] for line in lines_of(files, megabytes)]
    return [line for text in texts for line in text.split("\n") if len(line) > 40]


def write_input(pool: list[str], path: Path, megabytes: float) -> int:
    """JSON lines of documents of 5 to 60 lines that were drawn from a pool; how many."""
    rng, written, documents = np.random.default_rng(0), 0, 0
    with open(path, "w", encoding="utf-8") as out:
        while written < megabytes * 1e6:
            lines = [pool[i] for i in rng.integers(0, len(pool), rng.integers(5, 60)).tolist()]
            text = json.dumps({"id": f"d{documents}", "text": "\n".join(lines)}, ensure_ascii=False)
            out.write(text + "\n")
            written += len(text.encode())
            documents += 1
    return documents


def preprocess(source: Path, folder: Path, tokenizer: Path, workers: int, steps: str) -> Usage:
    """One run of the corpus tools, in a folder of its own."""
    config = folder / "corpus.toml"
    config.write_text(f"""
        [source]
        kind = "jsonl"
        files = ["{source}"]
        [tokenizer]
        path = "{tokenizer}"
        [output]
        folder = "{folder}/out"
        workers = {workers}
        shuffle = true
        [executor]
        memory_bytes = {_MEMORY}
        {steps}
        """)
    return run(python("-m", "megafp8", "preprocess", str(config)), folder / "log", environment=QUIET)


def measure_inputs(pool: list[str], tokenizer: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each size and each of the two pipelines."""
    sizes = [size for size in (10, 40, 160, 640) if size < options.largest] + [options.largest]
    rows = []
    for size in sizes:
        with TemporaryDirectory(dir=options.scratch) as name:
            source = Path(name, "in.jsonl")
            documents = write_input(pool, source, size)
            for what, steps in (("tokens only", ""), ("with filters and MinHash", STEPS)):
                if steps and size > options.largest / 4:
                    continue
                Path(name, what).mkdir()
                usage = preprocess(source, Path(name, what), tokenizer, options.workers, steps)
                rows.append({"pipeline": what, "megabytes": size, "documents": documents, **vars(usage)})
                show(f"{what}, {size:,.0f} MB, {documents:,} documents", usage)
    return rows


def show(name: str, usage: Usage) -> None:
    """Print a line."""
    print(
        f"{name:60}{usage.seconds:8.1f} s{usage.cpu_seconds:8.1f} cpu-s{usage.peak_bytes / 1e6:7.0f} MB"
        f"{usage.held_bytes / 1e6:7.0f} MB without files",
        flush=True,
    )


def tiny_documents(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, lengths) of documents of one to five tokens."""
    rng = np.random.default_rng(0)
    for start in range(0, count, _FEW):
        lengths = rng.integers(1, 6, min(_FEW, count - start))
        yield rng.integers(0, _IDS, int(lengths.sum()), np.uint16), lengths


def write_tiny(count: int, folder: Path) -> None:
    """The writer."""
    with IndexedDatasetWriter(folder / "all", np.uint16) as writer:
        for ids, lengths in tiny_documents(count):
            writer.add_documents(ids, lengths)


def shuffle_tiny(count: int, folder: Path) -> None:
    """The stage `write` with a shuffle, as `preprocess` runs it."""
    inputs = []
    for number, (ids, lengths) in enumerate(tiny_documents(count)):
        for what, values in (("ids", ids), ("lengths", lengths.astype("<i4"))):
            path = folder / f"{number}.{what}"
            values.tofile(path)
            inputs.append(Input(path.name, path.stat().st_size, checksum_file(path)))
    values = {"split": "shuffled", "dtype": "uint16", "vocab_size": _IDS, "metadata": {}, "shuffle_seed": 1}
    task = Task("write", "shuffled", values, tuple(inputs), {"memory_bytes": _SHUFFLE_MEMORY})
    write.run(Work(folder, task, folder))


def measure_documents(count: int, folder: Path) -> list[dict[str, Any]]:
    """Writer, shuffle and splitter on tiny documents, each a process."""
    rows = []
    words = {
        "writer": python("-m", "benchmarks.corpus_memory", "--do", "write", str(count), str(folder)),
        "write with shuffle": python("-m", "benchmarks.corpus_memory", "--do", "shuffle", str(count), str(folder)),
        "data split": python("-m", "megafp8", "data", "split", f"{folder}/all", f"{folder}/a=1%", f"{folder}/b=rest"),
    }
    for name, command in words.items():
        usage = run(command, folder / "log", environment=QUIET)
        rows.append({"pipeline": name, "documents": count, **vars(usage)})
        show(f"{name}, {count:,} documents", usage)
    return rows


def draw(rows: list[dict[str, Any]], workers: int, path: Path) -> None:
    """Peak memory over the input's size."""
    import matplotlib  # not in the processes whose memory is measured

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for pipeline, colour in (("tokens only", "#1f5fa8"), ("with filters and MinHash", "#c2571a")):
        mine = [row for row in rows if row["pipeline"] == pipeline]
        at = [row["megabytes"] for row in mine]
        axes.plot(at, [row["peak_bytes"] / 1e6 for row in mine], "o-", color=colour, label=pipeline)
    axes.set(xscale="log", xlabel="input, MB of JSON lines", ylabel="memory of all processes, MB", ylim=(0, None))
    axes.set_title(f"Memory of megafp8 preprocess, workers = {workers}", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="JSON lines with a key `text`, whose lines documents are made of")
    parser.add_argument("--largest", type=float, default=640, help="largest input, MB; 0: none")
    parser.add_argument("--documents", type=float, default=1e7, help="tiny documents; 0: none")
    parser.add_argument("--workers", type=int, default=1, help="each more brings a process of its own")
    parser.add_argument("--scratch", default=None, help="folder for inputs and outputs, four times the largest input")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/corpus_memory.png"), help="the picture")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--do", nargs=3, metavar=("WHAT", "COUNT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.do:
        what, count, folder = options.do
        {"write": write_tiny, "shuffle": shuffle_tiny}[what](int(count), Path(folder))
        return 0
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=options.scratch) as name:
        if options.largest:
            pool = pool_of(options.files, 40)
            tokenizers = make_tokenizers(
                ["\n".join(pool[i : i + 30]) for i in range(0, len(pool), 30)], Path(name, "t")
            )
            rows += measure_inputs(pool, tokenizers["byte-level"], options)
            draw(rows, options.workers, options.out)
        if options.documents:
            rows += measure_documents(int(options.documents), Path(name))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
