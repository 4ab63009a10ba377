"""Peers that make `.bin` and `.idx` out of JSON lines, each a program: `python -m benchmarks.corpus_programs NAME ...`.

They are megatron-core's own tokenizers and index builder in the loop that Megatron-LM's tools put around them, since
its wheel has no tools: `preprocess_data` maps an encoder over lines with a pool of processes (chunks of 32), the parent
writes; `preprocess_data_fast` lets gigatoken read the file and holds all ids. What is missing is a part of the tools'
start-up: they import the training stack, 8 to 9 CPU-seconds in all, so that the peers here do better than they.

    megatron-sentencepiece | megatron-huggingface | megatron-gigatoken   INPUT.jsonl OUTPUT TOKENIZER [WORKERS]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

_encoder: Any = None


class _Encoder:
    """A line to the ids of its text, by a tokenizer of megatron-core."""

    def __init__(self, kind: str, path: str) -> None:
        if kind == "sentencepiece":
            from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import SentencePieceTokenizer

            self._tokenizer: Any = SentencePieceTokenizer(path)
            self.eod = self._tokenizer.tokenizer.eos_id()
        else:
            from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

            self._tokenizer = HuggingFaceTokenizer(str(Path(path).parent))
            self.eod = self._tokenizer.tokenizer.eos_token_id
        self.vocab_size = self._tokenizer.vocab_size

    def __call__(self, line: str) -> list[int]:
        ids = self._tokenizer.text_to_ids(json.loads(line)["text"])
        return [*ids, self.eod] if ids else []


def _begin(kind: str, path: str) -> None:
    global _encoder
    _encoder = _Encoder(kind, path)


def _encode(line: str) -> list[int]:
    return _encoder(line)


def pooled(kind: str, source: str, output: str, tokenizer: str, workers: int) -> None:
    """As `preprocess_data`."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = _Encoder(kind, tokenizer).vocab_size
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=DType.optimal_dtype(vocab_size))
    with (
        open(source, encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(workers, _begin, (kind, tokenizer)) as pool,
    ):
        for ids in pool.imap(_encode, lines, 32):
            builder.add_document(ids, [len(ids)] if ids else [])
        builder.finalize(f"{output}.idx")
        pool.close()
        pool.join()


def at_once(source: str, output: str, tokenizer: str) -> None:
    """As `preprocess_data_fast`: all ids in memory, then one document after the other."""
    import gigatoken
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    kind = "sentencepiece" if tokenizer.endswith(".model") else "huggingface"
    facts = _Encoder(kind, tokenizer)
    engine = gigatoken.Tokenizer.from_json(Path(tokenizer).read_text(encoding="utf-8"))
    encoded = engine.encode_files(gigatoken.JsonlFileSource([source], field="text")).layout
    ids, offsets = np.asarray(encoded.content.data), np.asarray(encoded.offsets.data)
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=DType.optimal_dtype(facts.vocab_size))
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        builder.add_document(np.append(ids[begin:end], facts.eod), [end - begin + 1])
    builder.finalize(f"{output}.idx")


def main(words: list[str]) -> int:
    """Run one of them."""
    name, source, output, tokenizer, *workers = words
    if name == "megatron-gigatoken":
        at_once(source, output, tokenizer)
    else:
        pooled(name.removeprefix("megatron-"), source, output, tokenizer, int((workers or ["2"])[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
