"""Kept documents -> those that the tokenizer may be trained on: train split, smallest hashes of each language group.

Output: `texts.zst`, rows as those of a part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megafp8.core.config import build
from megafp8.corpus.config import SplitConfig
from megafp8.corpus.documents import split_of
from megafp8.corpus.figures import name_in
from megafp8.corpus.language_groups import group_of
from megafp8.corpus.parts import DocumentsWriter, read_view
from megafp8.corpus.tasks import Work
from megafp8.corpus.train_tokenizer import sample_hash

VERSION = 2
TEXTS = "texts.zst"
_GROUPED = ("train_documents", "train_bytes", "sample_documents", "sample_bytes")


def run(work: Work) -> dict[str, Any]:
    """Documents and bytes of the train split, and of those below the hash `limits`; `groups`: the same by group."""
    split, limits = build(SplitConfig, work.values["split"]), work.values["limits"]
    groups: dict[str, Counter[str]] = {name: Counter() for name in (*_GROUPED, "left_out")}
    out = DocumentsWriter(work.output(TEXTS))
    documents = done = 0
    for _, document, held_out in read_view(work):
        if held_out or split_of(document.utf8, split) != "train":
            continue
        size = document.num_bytes
        documents, done = documents + 1, done + size
        group = group_of(document.language, limits)
        if group is None:
            groups["left_out"][name_in(groups["left_out"], document.language)] += 1
            continue
        groups["train_documents"][group] += 1
        groups["train_bytes"][group] += size
        if sample_hash(document.utf8, split.seed) < limits[group]:
            groups["sample_documents"][group] += 1
            groups["sample_bytes"][group] += size
            out.add(document)
        if documents % 256 == 0:
            work.report(done_bytes=done, documents=documents, text_bytes=done)
    out.close()
    sums = {name: sum(groups[name].values()) for name in _GROUPED}
    return {**sums, "groups": {name: dict(counts) for name, counts in groups.items()}}
