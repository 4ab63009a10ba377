"""Text -> token ids: the encoder of the corpus tools against the reference (sentencepiece, tokenizers) on one core.

    python -m benchmarks.corpus_encode [--tokenizer FILE] [TEXTS.jsonl.zst ...]

Without texts: this Python's own documentation and source. Without a tokenizer: a SentencePiece BPE model trained on one
document in eight. Both encode each batch once, in turn, since an encoder is faster on what it has seen before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megafp8.corpus.config import SourceConfig, TokenizerConfig
from megafp8.corpus.documents import Document, parse
from megafp8.corpus.identity import open_source
from megafp8.corpus.train_tokenizer import train
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.data.tokenizer_engine import encode_documents, fast

_BATCH_CHARACTERS = 1 << 20


def texts_of(files: list[str]) -> Iterator[str]:
    """The texts of JSON lines files, or of this Python."""
    if files:
        config = SourceConfig(kind="jsonl", files=tuple(files))
    else:
        config = SourceConfig(kind="python_stdlib", source_bytes=1 << 24)
    for record in open_source(config).records():
        document = parse(record, config)
        if isinstance(document, Document):
            yield document.text


def batches(texts: list[str]) -> Iterator[list[str]]:
    """Texts in runs of about a million characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def timed(encode: Callable[[], tuple[np.ndarray, np.ndarray]]) -> tuple[float, np.ndarray]:
    """CPU seconds, and the ids."""
    start = time.process_time()
    ids, _ = encode()
    return time.process_time() - start, ids


def compare(reference: Tokenizer, texts: list[str]) -> dict[str, float | int | str]:
    """Rates of both, and how many batches have other ids."""
    start = time.process_time()
    encoder = fast(reference)
    startup, seconds, differing, tokens = time.process_time() - start, [0.0, 0.0], 0, 0
    for batch in batches(texts):
        found = []
        for number, one in enumerate((encoder, reference)):
            spent, ids = timed(lambda one=one, batch=batch: encode_documents(one, batch))
            seconds[number] += spent
            found.append(ids)
        differing += not np.array_equal(*found)
        tokens += len(found[1])
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "encoder": getattr(encoder, "engine_name", encoder.kind),
        "reference": reference.kind,
        "megabytes": round(megabytes, 1),
        "tokens": tokens,
        "differing_batches": differing,
        "startup_cpu_seconds": round(startup, 2),
        "megabytes_per_cpu_second": round(megabytes / seconds[0], 2),
        "reference_megabytes_per_cpu_second": round(megabytes / seconds[1], 2),
        "speedup": round(seconds[1] / seconds[0], 2),
    }


def main(arguments: list[str]) -> int:
    """Print the comparison; 1 if any ids differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tokenizer")
    args = parser.parse_args(arguments)
    texts = list(texts_of(args.files))
    with TemporaryDirectory() as folder:
        spec = args.tokenizer or str(Path(folder, "tokenizer.model"))
        if not args.tokenizer:
            Path(spec).write_bytes(train(texts[::8], TokenizerConfig(vocab_size=8192)))
        result = compare(load_tokenizer(spec), texts)
    print(json.dumps(result))
    return int(bool(result["differing_batches"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
