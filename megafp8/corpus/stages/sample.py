"""Kept documents -> those that the tokenizer may be trained on: train split, smallest hashes.

Output: `texts.zst`, rows as those of a part.
"""

from __future__ import annotations

from megafp8.core.config import build
from megafp8.corpus.config import SplitConfig
from megafp8.corpus.documents import split_of
from megafp8.corpus.parts import DocumentsWriter, read_view
from megafp8.corpus.tasks import Work
from megafp8.corpus.train_tokenizer import sample_hash

VERSION = 2
TEXTS = "texts.zst"


def run(work: Work) -> dict[str, int]:
    """Documents and bytes of the train split, and of those below the hash `limit`."""
    split, limit = build(SplitConfig, work.values["split"]), work.values["limit"]
    counts = {"train_documents": 0, "train_bytes": 0, "sample_documents": 0, "sample_bytes": 0}
    out = DocumentsWriter(work.output(TEXTS))
    for _, document, held_out in read_view(work):
        if held_out or split_of(document.utf8, split) != "train":
            continue
        size = document.num_bytes
        counts["train_documents"] += 1
        counts["train_bytes"] += size
        if sample_hash(document.utf8, split.seed) < limit:
            counts["sample_documents"] += 1
            counts["sample_bytes"] += size
            out.add(document)
        if counts["train_documents"] % 256 == 0:
            done = counts["train_bytes"]
            work.report(done_bytes=done, documents=counts["train_documents"], text_bytes=done)
    out.close()
    return counts
