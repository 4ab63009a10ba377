"""Counts the lines of a range of a large file and finds its first line end: what is needed to cut the file at lines."""

from __future__ import annotations

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.shards import check_unchanged
from megafp8.corpus.tasks import Work

VERSION = 1
_CHUNK = 1 << 20


def run(work: Work) -> dict[str, int]:
    """`lines`: newlines in the range; `first_end`: the byte of the file behind the first of them, 0 if none."""
    one = work.inputs[0]
    lines = first_end = done = 0
    with InputStream(one.path, start=one.start, stop=one.stop) as stream:
        while chunk := stream.reader.read(_CHUNK):
            if not first_end and (at := chunk.find(b"\n")) >= 0:
                first_end = one.start + done + at + 1
            lines += chunk.count(b"\n")
            done += len(chunk)
            work.report(done_bytes=done)
        work.set_checksum(0, stream.checksum())
    check_unchanged(one)
    return {"lines": lines, "first_end": first_end}
