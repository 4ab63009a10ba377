"""Kinds of input besides lines and texts: tables, web archives, source trees, object stores. Nothing is lost unseen."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import fsspec
import pytest

from megafp8.core.config import build
from megafp8.core.errors import DataError
from megafp8.corpus.config import CorpusConfig, SourceConfig
from megafp8.corpus.documents import Bad, Document, Skipped, parse
from megafp8.corpus.readers import FileSource, InputFile, find_files, stream_records
from megafp8.corpus.run import preprocess
from megafp8.corpus.shards import plan_shards

pyarrow = pytest.importorskip("pyarrow", reason="tables need pyarrow")
pytest.importorskip("fastwarc", reason="web archives need fastwarc")
parquet = pytest.importorskip("pyarrow.parquet")
Found = list[Document | Bad | Skipped]


def read(kind: str, *files: Path | str, **options: object) -> Found:
    config = SourceConfig(kind=kind, files=tuple(map(str, files)), **options)  # type: ignore[arg-type]
    found = [parse(record, config) for record in FileSource(config).records()]
    return [one for one in found if one is not None]


def texts(found: Found) -> list[str]:
    return [one.text for one in found if isinstance(one, Document)]


def bad(found: Found) -> list[Bad]:
    return [one for one in found if isinstance(one, Bad)]


def table(path: Path, rows: int = 100, group: int = 10, **columns: list) -> Path:
    values = {"text": [f"text {i}" for i in range(rows)], "id": list(range(rows)), "url": ["u"] * rows, **columns}
    parquet.write_table(pyarrow.table(values), path, row_group_size=group)
    return path


def test_parquet_rows(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", lang=["de"] * 100)
    found = read("parquet", path, metadata_keys=("url",))
    assert texts(found) == [f"text {i}" for i in range(100)]
    assert found[3] == Document("3", "text 3", "de", str(path), {"url": "u"})


def test_parquet_bad_rows_are_told_by_row(tmp_path: Path) -> None:
    values: list[str | None] = ["good", None, "fine", "x" * 50]
    path = table(tmp_path / "a.parquet", rows=4, text=values)
    found = read("parquet", path, max_record_bytes=20)
    assert texts(found) == ["good", "fine"]
    assert [(one.line, one.reason.split(";")[0]) for one in bad(found)] == [
        (2, "'text' is NoneType, not a string"),
        (4, "longer than 20 bytes"),
    ]
    path = table(tmp_path / "b.parquet", rows=2, text=[b"gr\xc3\xbcn", b"\xff"])
    found = read("parquet", path)
    assert texts(found) == ["grün"] and "not UTF-8 at byte 0" in bad(found)[0].reason


def test_parquet_without_the_column_or_cut(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet")
    assert "no column 'content' (it has: text, id, url)" in bad(read("parquet", path, text_key="content"))[0].reason
    data = path.read_bytes()
    for size in (0, 3, 100, len(data) - 1):
        path.write_bytes(data[:size])
        (one,) = bad(read("parquet", path))
        assert one.damaged and "not a Parquet file" in one.reason


def test_parquet_damaged_group_leaves_the_others(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=[f"{i} " * 50 for i in range(100)])
    column = parquet.ParquetFile(path).metadata.row_group(4).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(data))
    found = read("parquet", path)
    assert len(texts(found)) == 90 and [one.line for one in bad(found)] == [41]
    assert "10 rows of row group 4" in bad(found)[0].reason and bad(found)[0].damaged


@pytest.mark.parametrize("shard_bytes", [50, 700, 1 << 20])
def test_every_row_group_is_in_one_range(tmp_path: Path, shard_bytes: int) -> None:
    from megafp8.corpus.compressed import InputStream

    path = table(tmp_path / "a.parquet")
    config = SourceConfig(kind="parquet", files=(str(path),))
    shards = plan_shards(find_files((str(path),)), config, shard_bytes, {})
    assert (len(shards) > 1) == (shard_bytes < path.stat().st_size)
    found = []
    for shard in shards:
        with InputStream(path, start=shard.start, stop=shard.stop) as stream:
            found += [(record.line, record.data.text) for record in stream_records(str(path), stream, config)]  # type: ignore[union-attr]
    assert found == [(i + 1, f"text {i}") for i in range(100)]


PAGE = (
    "<html><head><title>t</title></head><body><nav><a href=x>menu</a></nav><main><p>Hello, this is the content "
    "of a page.</p><p>Grüße &amp; mehr</p></main><footer>imprint</footer></body></html>"
)


def http(body: bytes, status: str = "200 OK", kind: str = "text/html; charset=utf-8", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def warc_record(kind: str, number: int, payload: bytes, content: str = "application/http; msgtype=response") -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a/{number}\r\nWARC-Date: 2020-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:{number}>\r\nContent-Type: {content}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload + b"\r\n\r\n"


def archive() -> list[bytes]:
    return [
        warc_record("warcinfo", 1, b"software: x\r\n", "application/warc-fields"),
        warc_record("request", 2, b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        warc_record("response", 3, http(PAGE.encode())),
        warc_record("response", 4, http(gzip.compress(PAGE.encode()), more="Content-Encoding: gzip\r\n")),
        warc_record("response", 5, http("<p>Größe</p>".encode("latin-1"), kind="text/html; charset=iso-8859-1")),
        warc_record("response", 6, http(b"gone", status="404 Not Found")),
        warc_record("response", 7, http(b"\x89PNG\r\n", kind="image/png")),
        warc_record("conversion", 8, "Text einer Seite, größer".encode(), "text/plain"),
        warc_record("conversion", 9, b"\xff\xfe", "text/plain"),
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_warc_pages(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(gzip.compress(one) if packed else one for one in archive()))
    found = read("warc", path)
    content = "Hello, this is the content of a page.\n\nGrüße & mehr"
    assert texts(found) == [content, content, "Größe", "Text einer Seite, größer"]
    assert isinstance(found[0], Document)
    assert found[0].id == "3" and found[0].metadata == {"url": "http://a/3", "date": "2020-01-01T00:00:00Z"}
    skipped = [(one.document.id, one.why.reason) for one in found if isinstance(one, Skipped)]
    assert skipped == [("6", "HTTP status 404"), ("7", "no text")]
    assert [(one.line, one.damaged) for one in bad(found)] == [(9, False)] and "not UTF-8" in bad(found)[0].reason
    assert len(read("warc", path, max_record_bytes=100)) == 7


@pytest.mark.parametrize("charset", ["no-such-set", "hex", "日本"])
def test_a_server_that_names_no_character_set_that_there_is(tmp_path: Path, charset: str) -> None:
    """Found by changing bytes at random: it cost all pages of the archive."""
    page = '<html><head><meta charset="utf-8"></head><body><p>Größe und Länge</p></body></html>'
    records = [warc_record("response", 1, http(page.encode(), kind=f"text/html; charset={charset}")), *archive()[2:3]]
    (tmp_path / "a.warc").write_bytes(b"".join(records))
    found = read("warc", tmp_path / "a.warc")
    assert texts(found)[0] == "Größe und Länge" and len(texts(found)) == 2


def test_extraction_that_fails_costs_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("no tree\nat all")

    monkeypatch.setattr("megafp8.corpus.formats.warc.extract_plain_text", fail)
    (tmp_path / "a.warc").write_bytes(b"".join(archive()))
    found = read("warc", tmp_path / "a.warc")
    assert texts(found) == ["Text einer Seite, größer"]
    assert bad(found)[0].reason == "http://a/3: RuntimeError: no tree" and not bad(found)[0].damaged


@pytest.mark.parametrize("packed", [False, True])
def test_every_cut_of_an_archive_is_noticed(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "a.warc"
    parts = [gzip.compress(one) if packed else one for one in archive()[2:4]]
    data, borders = b"".join(parts), {len(parts[0]), len(parts[0]) + len(parts[1])}
    if not packed:  # the two empty lines behind a record carry nothing
        borders |= {border - i for border in borders for i in range(1, 5)}
    for size in range(4, len(data)):
        path.write_bytes(data[:size])
        found = read("warc", path)
        assert bool(bad(found)) == (size not in borders), size
        assert len(texts(found)) >= (size >= len(parts[0])), size


def test_garbage_in_an_archive_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(archive()[2] + b"garbage\r\n\r\n" + archive()[7])
    found = read("warc", path)
    assert len(texts(found)) == 1 and [(one.line, one.damaged) for one in bad(found)] == [(2, True)]


def test_source_tree(tmp_path: Path) -> None:
    for name, data in {
        "a/b.py": b"print(1)\n", "a/c.md": "# Größe\n".encode(), "a/d.bin": b"\0", ".git/e.py": b"x", "a/.f.py": b"x",
        "node_modules/g.py": b"x", "binary.py": b"x = 1\n\0", "latin.py": b"# \xe4", "long.py": b"x" * 500,
        "zipped.py": gzip.compress(b"x"),
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link.py").symlink_to(tmp_path / "a/b.py")
    found = read("source_tree", tmp_path, suffixes=(".py", ".md"), max_record_bytes=400)
    assert texts(found) == ["print(1)\n", "# Größe\n"]
    assert isinstance(found[0], Document) and found[0].metadata == {"suffix": ".py"}
    reasons = {Path(one.file).name: one.reason for one in bad(found)}
    assert set(reasons) == {"binary.py", "latin.py", "long.py", "zipped.py"}
    assert "binary: a NUL at byte 6" in reasons["binary.py"] and "longer than 400" in reasons["long.py"]
    with pytest.raises(DataError, match="matches no file"):
        read("source_tree", tmp_path, suffixes=(".rs",))


def put(url: str, data: bytes, **options: object) -> None:
    with fsspec.open(url, "wb", **options) as file:
        file.write(data)


def lines(count: int) -> bytes:
    return b"".join(b'{"text":"document %d"}\n' % i for i in range(count))


def test_urls(tmp_path: Path) -> None:
    put("memory://store/a.jsonl.gz", gzip.compress(lines(5)))
    put("memory://store/b.jsonl", lines(3) + b"no json\n")
    found = read("jsonl", "memory://store/*.jsonl*")
    assert len(texts(found)) == 8 and len(bad(found)) == 1
    assert bad(found)[0].file.endswith("store/b.jsonl") and bad(found)[0].line == 4
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), buffer)
    put("memory://store/c.parquet", buffer.getvalue())
    assert texts(read("parquet", "memory://store/c.parquet")) == ["a", "b"]
    for url in ("memory://store/*.zst", "memory://absent/x", "nostore://x/y"):
        with pytest.raises(DataError, match=r"matches no file|no such store"):
            find_files((url,))


def test_corpus_from_an_s3_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_module = pytest.importorskip("moto.server", reason="moto's S3 server is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for key, value in {
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
            "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():  # fmt: skip
            monkeypatch.setenv(key, value)
        fsspec.filesystem("s3").mkdir("texts")
        put("s3://texts/part/a.jsonl.gz", gzip.compress(lines(300)))
        put("s3://texts/part/b.jsonl", lines(400)[8000:] + b"bad\n")
        config = build(
            CorpusConfig,
            {
                "source": {"kind": "jsonl", "files": ["s3://texts/part/*.jsonl*"], "max_bad_share": 0.5},
                "tokenizer": {"path": "bytes"},
                "output": {"folder": str(tmp_path / "out"), "workers": 1},
                "executor": {"shard_bytes": 1000},
            },
        )
        counts = preprocess(config).manifest["counts"]
        assert counts["num_records"] == 300 + lines(400)[8000:].count(b"\n") + 1 and counts["num_bad"] == 2
        assert preprocess(config).was_done
    finally:
        server.stop()


def test_corpora_of_tables_and_archives_add_up(tmp_path: Path) -> None:
    """The whole pipeline: all records are in the counts, skipped ones by their reason."""
    table(tmp_path / "a.parquet", text=[f"text {i} " * 20 for i in range(99)] + [None])
    (tmp_path / "a.warc").write_bytes(b"".join(archive()))
    for kind, name, records, dropped in (("parquet", "a.parquet", 100, 0), ("warc", "a.warc", 7, 2)):
        config = build(
            CorpusConfig,
            {
                "source": {"kind": kind, "files": [str(tmp_path / name)], "max_bad_share": 0.5},
                "split": {"valid_share": 0.0},
                "tokenizer": {"path": "bytes"},
                "output": {"folder": str(tmp_path / kind), "workers": 1},
                "executor": {"shard_bytes": 2000},
            },
        )
        counts = preprocess(config).manifest["counts"]
        assert (counts["num_records"], counts["num_bad"]) == (records, 1)
        assert sum(sum(reasons.values()) for reasons in counts["dropped"].values()) == dropped


def test_times_of_objects(tmp_path: Path) -> None:
    put("memory://times/a", b"x")
    one = find_files(("memory://times/a",))[0]
    assert isinstance(one, InputFile) and one.num_bytes == 1 and one.mtime_ns > 0
