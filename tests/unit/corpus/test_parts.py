"""Parts: every text comes back as it was, whatever it holds, and a cut part is no shorter part."""

from __future__ import annotations

import pytest

from megafp8.corpus.compressed import DamagedError
from megafp8.corpus.documents import Document
from megafp8.corpus.parts import DocumentsWriter, read_part

TEXTS = ("", "\n", "a\n{}\nb", '{"bytes": 3}\n', "e\u0301 é 日本\u2028\u0085\r\n\0", "x" * 3_000_000, "\n\n", "last")


def test_texts_and_all_that_goes_with_them_come_back(tmp_path):
    metadata = ({"n": 1}, {})
    documents = [Document(f"\u2028{i}", text, "de", "quelle\n", metadata[i % 2]) for i, text in enumerate(TEXTS)]
    out = DocumentsWriter(tmp_path / "part")
    for number, document in enumerate(documents):
        out.add(document, number == 3)
    out.close()
    found = list(read_part(tmp_path / "part"))
    assert [document for document, _ in found] == documents
    assert [document.metadata for document, _ in found] == [document.metadata for document in documents]
    assert [document.utf8 for document, _ in found] == [text.encode() for text in TEXTS]
    assert [held_out for _, held_out in found] == [number == 3 for number in range(len(TEXTS))]
    data = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes(data[:-3])
    with pytest.raises(DamagedError):
        list(read_part(tmp_path / "part"))
