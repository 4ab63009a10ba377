"""datatrove's pipelines over JSON lines; run by a Python that has it, and nothing of this package.

    pip install datatrove tokenizers orjson zstandard spacy nltk regex fasteners fasttext-numpy2 tldextract "xxhash<4"

    PYTHON benchmarks/datatrove_peer.py tokenize FOLDER OUTPUT TOKENIZER.json WORKERS
    PYTHON benchmarks/datatrove_peer.py pipeline FOLDER OUTPUT TOKENIZER.json WORKERS LID.ftz

`pipeline` is language identification (en, de, ja), Gopher quality and repetition, C4 and FineWeb rules, MinHash with
14 bands of 8 in its four stages, tokenization: all by its own classes with their defaults. Its language model is
downloaded by itself; the one that comes with a wheel is put in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def run(steps: list[Any], folder: Path, name: str, tasks: int, workers: int) -> None:
    """One of its executors to the end."""
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(
        pipeline=steps, tasks=tasks, workers=workers, logging_dir=str(folder / "logs" / name), start_method="fork"
    ).run()


def reader(folder: Path) -> Any:
    """Documents of all files of a folder."""
    from datatrove.pipeline.readers import JsonlReader

    return JsonlReader(str(folder), glob_pattern="*.jsonl.zst")


def tokenizer(folder: Path, path: str, *, shuffle: bool = False) -> Any:
    """Its tokenizing writer."""
    from datatrove.pipeline.tokens import DocumentTokenizer

    return DocumentTokenizer(str(folder / "tokens"), path, eos_token="<|endoftext|>", shuffle_documents=shuffle)


def language_filter(model: str) -> Any:
    """Its language step, with a model that is there."""
    from datatrove.pipeline.filters import LanguageFilter
    from datatrove.utils import lid

    changed: Any = lid
    changed.cached_asset_path_or_download = lambda *args, **kwargs: model
    # it asks for one distribution of fasttext by its name; any does
    changed.check_required_dependencies = lambda *args: None
    LanguageFilter._requires_dependencies = []
    return LanguageFilter(["en", "de", "ja"])


def pipeline(source: Path, folder: Path, path: str, tasks: int, workers: int, model: str) -> None:
    """The whole of it: five passes, as its MinHash needs them."""
    from datatrove.pipeline import dedup, filters
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    kept, signed = str(folder / "kept"), str(folder / "signatures")
    buckets, removed = str(folder / "buckets"), str(folder / "removed")
    steps = [
        reader(source), language_filter(model), filters.GopherQualityFilter(), filters.GopherRepetitionFilter(),
        filters.C4QualityFilter(), filters.FineWebQualityFilter(), JsonlWriter(kept, compression="zstd"),
    ]  # fmt: skip
    run(steps, folder, "filter", tasks, workers)
    again = JsonlReader(kept, glob_pattern="*.jsonl.zst")
    config = dedup.MinhashConfig()
    run([again, dedup.MinhashDedupSignature(signed, config)], folder, "signatures", tasks, workers)
    run([dedup.MinhashDedupBuckets(signed, buckets, config=config)], folder, "buckets", config.num_buckets, workers)
    run([dedup.MinhashDedupCluster(buckets, removed, config=config)], folder, "cluster", 1, 1)
    run([again, dedup.MinhashDedupFilter(removed), tokenizer(folder, path)], folder, "tokenize", tasks, workers)


def main(words: list[str]) -> int:
    """Run one of them."""
    what, source, output, path, workers = words[:5]
    folder = Path(source)
    tasks = len(list(folder.glob("*.jsonl.zst")))
    if what == "tokenize":
        run([reader(folder), tokenizer(Path(output), path)], Path(output), "tokenize", tasks, int(workers))
    else:
        pipeline(folder, Path(output), path, tasks, int(workers), words[5])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
