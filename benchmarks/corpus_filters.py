"""How fast the steps of a corpus are, and what share of documents they keep, by language.

    python -m benchmarks.corpus_filters /data/*.jsonl.zst --megabytes 20 --steps gopher_quality,c4 [--json OUT]

Each document goes through all steps, also those behind one that drops it, so that each step's rate is of all the text;
the steps share the pass over words, which the first that needs it pays for. CPU-seconds of one process, reading and
parsing not counted. Peers, measured with their defaults (datatrove 0.10, MB of text per CPU-second): its Gopher quality
0.4 to 0.7, Gopher repetition 0.3 to 0.6, C4 0.3 to 1.0, FineWeb 0.5 to 1.2, each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.step_registry import make_step

FILTERS = "gopher_quality,gopher_repetition,c4,fineweb"
ALL = f"normalise,language,{FILTERS},boilerplate,pii"


def documents(path: str, limit: int) -> Iterator[Document]:
    """Documents of a file of JSON lines, up to `limit` bytes of text."""
    size = 0
    with InputStream(path) as stream:
        for line in stream.reader:
            one = json.loads(line)
            size += len(one["text"].encode())
            if size > limit:
                return
            yield Document(one["id"], one["text"], one["lang"], one["source"])


def measure(paths: list[str], kinds: list[str], limit: int) -> dict[str, Any]:
    """Rates, kept shares by language, and reasons, of steps on files."""
    steps = [make_step({"kind": kind}) for kind in kinds]
    for step in steps:  # tables and models
        step.apply(Document("", "The first text is not timed. Der erste Text auch nicht. 最初の文も。", "en", ""))
    seconds: Counter[str] = Counter()
    total, kept, dropped = Counter(), Counter(), defaultdict(Counter)  # type: ignore[var-annotated]
    size = 0
    for path in paths:
        for document in documents(path, limit):
            size += len(document.text.encode())
            language, why = document.language, None
            total[language] += 1
            for step in steps:
                start = time.process_time()
                result = step.apply(document)
                seconds[step.name] += time.process_time() - start  # type: ignore[assignment]
                if isinstance(result, Dropped):
                    why = why or f"{step.name}: {result.reason}"
                else:
                    document = result
            if why:
                dropped[language][why] += 1
            else:
                kept[language] += 1
    rates = {name: size / 1e6 / value for name, value in seconds.items()}
    rates["together"] = size / 1e6 / sum(seconds.values())
    filters = [seconds[name] for name in FILTERS.split(",") if name in seconds]
    if len(filters) == 4:
        rates["the four filters"] = size / 1e6 / sum(filters)
    return {
        "megabytes": size / 1e6,
        "megabytes_per_cpu_second": {name: round(rate, 1) for name, rate in rates.items()},
        "documents": dict(total),
        "kept_share": {language: round(kept[language] / count, 4) for language, count in total.items()},
        "dropped": {language: dict(reasons.most_common()) for language, reasons in dropped.items()},
    }


def main() -> None:
    """Measure, print, and write a JSON file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", help="JSON lines with id, text, lang, source; also .gz, .zst")
    parser.add_argument("--megabytes", type=float, default=20, help="of text, from each file")
    parser.add_argument("--steps", default=ALL, help="kinds, by commas")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    result = measure(options.files, options.steps.split(","), int(options.megabytes * 1e6))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for name, rate in result["megabytes_per_cpu_second"].items():
        print(f"{name:20} {rate:8.1f} MB/CPU-s")
    for language, share in result["kept_share"].items():
        print(f"{language}: {100 * share:.1f} % of {result['documents'][language]} documents kept", end="; ")
        print(", ".join(f"{why} {count}" for why, count in list(result["dropped"].get(language, {}).items())[:6]))


if __name__ == "__main__":
    main()
