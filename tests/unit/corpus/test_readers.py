"""Readers: every file of the nasty set gives what its manifest says; lines, encodings and streams are taken whole."""

from __future__ import annotations

import gc
import gzip
import json
import random
import weakref
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from megafp8.core.errors import DataError
from megafp8.corpus.compressed import DamagedError, InputStream
from megafp8.corpus.config import SourceConfig, SplitConfig
from megafp8.corpus.documents import Bad, Document, Record, parse, split_of
from megafp8.corpus.readers import FileSource, find_files

NASTY = Path(__file__).parents[2] / "nasty"
MANIFEST = json.loads((NASTY / "MANIFEST.json").read_text(encoding="utf-8"))
JSON_FILES = sorted(name for name in MANIFEST if ".json" in name)


def read(*files: Path | str, **options: object) -> tuple[list[Document], list[Bad]]:
    config = SourceConfig(kind="jsonl", files=tuple(str(f) for f in files), **options)  # type: ignore[arg-type]
    return parsed(FileSource(config), config)


def parsed(source: FileSource, config: SourceConfig) -> tuple[list[Document], list[Bad]]:
    found = [parse(record, config) for record in source.records()]
    return [f for f in found if isinstance(f, Document)], [f for f in found if isinstance(f, Bad)]


def fits(found: int, expected: object) -> bool:
    """The manifest says a number, or in words: "some", "some or 0", "2 or error", "0 or 1"."""
    if isinstance(expected, int):
        return found == expected
    words = str(expected).split(" or ")
    return any({"some": found > 0, "error": found == 0}.get(word, word == str(found)) for word in words)


def test_the_set_is_there() -> None:
    assert len(JSON_FILES) >= 28


@pytest.mark.parametrize("name", JSON_FILES)
def test_nasty_files_give_what_their_manifest_says(name: str) -> None:
    documents, bad = read(NASTY / name)
    expected = MANIFEST[name]
    if name == "deep.jsonl":  # 3,000 brackets: this Python's json may take them or not, the rest must survive
        assert (len(documents), len(bad)) in ((2, 0), (1, 1))
        return
    assert fits(len(documents), expected["valid"]), documents
    if name.startswith("bitflip"):  # lines behind the flipped bit are garbled: bad records too, on top of the damage
        bad = [one for one in bad if one.damaged]
    assert fits(len(bad), expected["bad"]), bad
    assert sum(d.is_empty for d in documents) == expected.get("empty", 0)
    for one in bad:
        assert one.file.endswith(name) and one.line > 0 and one.reason


def test_good_records_around_bad_ones_survive() -> None:
    documents, bad = read(NASTY / "broken_utf8.jsonl")
    assert [b.line for b in bad] == [2, 4] and len(documents) == 3
    assert all("not UTF-8 at byte" in b.reason for b in bad)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("utf16.jsonl", "UTF-16"),
        ("pretty.json", "JSON array"),
        ("truncated.jsonl.gz", "cut short"),
        ("truncated.jsonl.zst", "cut short"),
        ("bitflip.jsonl.gz", "damaged"),
        ("bitflip.jsonl.zst", "damaged"),
    ],
)
def test_damage_of_a_file_is_told_as_such(name: str, words: str) -> None:
    _, bad = read(NASTY / name)
    assert words in bad[-1].reason and bad[-1].damaged


def test_text_files_decode_only_as_told() -> None:
    for name, encoding in (("cp932.txt", "cp932"), ("latin1.txt", "latin-1")):
        for told in ("utf-8", encoding):
            config = SourceConfig(kind="text", files=(str(NASTY / name),), encoding=told)
            documents, bad = parsed(FileSource(config), config)
            assert (len(documents), len(bad)) == ((1, 0) if told == encoding else (0, 1))
            assert not bad or "not utf-8 at byte" in bad[0].reason


def test_last_of_repeated_keys_counts() -> None:
    documents, _ = read(NASTY / "dup_keys.jsonl")
    assert documents[0].text == "second"


def test_only_newline_ends_a_line() -> None:
    documents, _ = read(NASTY / "crlf_in_text.jsonl")
    assert all(mark in documents[0].text for mark in "\r\x0b\x0c\x85\u2028\u2029")


def test_long_words_and_lines(tmp_path: Path) -> None:
    texts = ["x" * 1_000_000, "あ" * 300_000, "ok"]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    documents, bad = read(path)
    assert [d.text for d in documents] == texts and not bad
    documents, bad = read(path, max_record_bytes=1000)
    assert [d.text for d in documents] == ["ok"] and [b.line for b in bad] == [1, 2]
    assert "longer than 1000 bytes" in bad[0].reason


def test_a_line_of_exactly_the_limit(tmp_path: Path) -> None:
    line = b'{"text":"abc"}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + line + b" \n" + line)
    documents, bad = read(path, max_record_bytes=len(line))
    assert len(documents) == 2 and [b.line for b in bad] == [2]


def test_missing_key_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content":"x","id":1}\n')
    _, bad = read(tmp_path / "a.jsonl")
    assert bad[0].reason == "no key 'text' (it has: content, id); see source.text_key"
    documents, _ = read(tmp_path / "a.jsonl", text_key="content")
    assert documents[0].id == "1"


def test_fields_and_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"x"}\n{"text":"y","id":"i","lang":"de","source":"s"}\n{"text":"z","lang":3}\n')
    documents, _ = read(path, language="en")
    assert documents[0] == Document(f"{path}:1", "x", "en", str(path))
    assert documents[1] == Document("i", "y", "de", "s")
    assert documents[2].language == "en"


def test_globs_are_sorted_unique_and_must_match(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "we[i]rd.jsonl"):
        (tmp_path / name).write_text("{}\n")
    found = find_files((f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl", f"{tmp_path}/**/c.jsonl"))
    assert [Path(f.path).name for f in found] == ["a.jsonl", "b.jsonl", "c.jsonl", "we[i]rd.jsonl"]
    assert find_files((f"{tmp_path}/we[i]rd.jsonl",))[0].num_bytes == 3
    for pattern in (f"{tmp_path}/*.zst", f"{tmp_path}/absent.jsonl", f"{tmp_path}/sub"):
        with pytest.raises(DataError, match="matches no file"):
            find_files((f"{tmp_path}/a.jsonl", pattern))


def test_a_file_by_two_names_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its documents would be in the corpus twice, or in both splits."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    found = find_files(("*.jsonl", "./a.jsonl", f"{tmp_path}/b.jsonl", "../" + tmp_path.name + "/a.jsonl"))
    assert [file.path for file in found] == ["a.jsonl", "b.jsonl"]
    config = SourceConfig(kind="jsonl", files=("*.jsonl",), valid_files=(f"{tmp_path}//./b.jsonl",))
    source = FileSource(config)
    assert [file.path for file in source.files] == ["a.jsonl", "b.jsonl"] and source.held_out == {"b.jsonl"}


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bytes])
def test_every_cut_of_a_stream_is_noticed(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    """Plain bytes cannot tell a cut; both compressed forms can, wherever it is."""
    rng = random.Random(0)
    data = bytes(rng.randrange(256) for _ in range(300))
    packed = pack(data[:200]) + pack(data[200:])
    border = len(pack(data[:200]))
    path = tmp_path / "x"
    path.write_bytes(packed)
    assert InputStream(path).reader.read() == data
    if pack is bytes:
        return
    for size in range(4, len(packed)):
        path.write_bytes(packed[:size])
        if size == border:  # a whole member: nothing is missing that could be known
            assert InputStream(path).reader.read() == data[:200]
            continue
        with pytest.raises(DamagedError):
            InputStream(path).reader.read()


def test_a_closed_stream_is_gone_at_once(tmp_path: Path) -> None:
    """Not at the next collection of garbage: it has buffers of megabytes, and there may be a million files."""
    path = tmp_path / "x"
    for data in (b"a\nb\n", gzip.compress(b"a\n"), zstandard.compress(b"a\n")):
        path.write_bytes(data)
        gc.disable()
        try:
            with InputStream(path) as stream:
                assert stream.reader.readline() == b"a\n"
            gone = weakref.ref(stream)
            del stream
            assert gone() is None
        finally:
            gc.enable()


def test_checksum_is_of_the_file_on_disk(tmp_path: Path) -> None:
    from megafp8.data.indexed_writer import checksum_file

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"hello\n" * 1000) + b"\0" * 512)
    with InputStream(path) as stream:
        assert stream.reader.read() == b"hello\n" * 1000
        assert stream.checksum() == checksum_file(path)
        assert stream.position == path.stat().st_size


def test_split_is_by_text_stable_and_in_proportion() -> None:
    """20,000 documents at 2 %: 400 expected, sd sqrt(20000 * .02 * .98) = 19.8; five of them are 99."""
    config = SplitConfig(valid_share=0.02, seed=1)
    sides = [split_of(f"document {i}", config) for i in range(20_000)]
    counts = Counter(sides)
    assert abs(counts["valid"] - 400) < 99
    more = SplitConfig(valid_share=0.04, seed=1)
    assert all(split_of(f"document {i}", more) == "valid" for i, side in enumerate(sides) if side == "valid")
    other = SplitConfig(valid_share=0.02, seed=2)
    assert [split_of(f"document {i}", other) for i in range(2000)] != sides[:2000]
    assert split_of("x", SplitConfig(valid_share=0.0)) == "train"


def test_blank_line_is_nothing() -> None:
    config = SourceConfig(kind="jsonl", files=("x",))
    assert parse(Record("x", 1, b" \t\r\n"), config) is None
