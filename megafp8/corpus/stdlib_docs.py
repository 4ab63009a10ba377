"""The documentation and source of the running Python: real text on every machine, with no download and no licence
question (PSF licence).

Documents are the language reference's help topics (`pydoc_data.topics`), the docstrings of the standard library,
taken from its files by `ast` (nothing is imported), and a fixed slice of its source files. A file in the slice gives
no docstrings, for they stand in its source already: no text is on both sides of the train/validation split.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import xxhash

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record
from megafp8.corpus.readers import InputFile, input_file

_MIN_CHARACTERS = 80  # shorter docstrings are labels, not prose
# not the library's own text: packages installed beside it, its tests (not on every machine), tables of code points
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3", "pydoc_data",
}  # fmt: skip
_DOCS, _SOURCE = "python-stdlib/docs", "python-stdlib/source"


class StdlibSource:
    """A source of documents out of the running Python."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.root = Path(sysconfig.get_path("stdlib"))
        self.files = [input_file(str(path)) for path in self._paths()]
        self.checksums: dict[str, str] = {}
        self.position = 0

    def _paths(self) -> list[Path]:
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [n for n in folders if n not in _SKIPPED_FOLDERS and not n.startswith("config-")]
            # _sysconfigdata is the build's own record, other on each machine
            found += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        return sorted(found)

    @cached_property
    def source_slice(self) -> frozenset[str]:
        """Paths of the files taken whole: in the order of a hash of their names, up to `source_bytes`."""
        left, taken = self.config.source_bytes, []
        for file in sorted(self.files, key=lambda f: xxhash.xxh3_64_intdigest(self._name(f.path).encode())):
            if file.num_bytes <= left:
                left -= file.num_bytes
                taken.append(file.path)
        return frozenset(taken)

    def _name(self, path: str) -> str:
        return Path(path).relative_to(self.root).as_posix()

    def records(self) -> Iterator[Record]:
        total = sum(file.num_bytes for file in self.files)
        for number, record in enumerate(self._records, start=1):
            self.position = total * number // len(self._records)
            yield record

    @cached_property
    def _records(self) -> list[Record]:
        """All of them, some 4 MB of text: two passes (tokenizer, tokens) parse the files once."""
        records = [
            Record("pydoc_data.topics", 1, Document(f"stdlib/help/{name}", topics[name], "en", _DOCS))
            for name in sorted(topics)
        ]
        for file in self.files:
            records += self._file_records(file)
        return records

    def _file_records(self, file: InputFile) -> Iterator[Record]:
        with InputStream(file.path) as stream:
            data = stream.readall() or b""
            self.checksums[file.path] = stream.checksum()
        name = self._name(file.path)
        try:
            if file.path in self.source_slice:
                document = Document(f"stdlib/source/{name}", data.decode("utf-8"), "en", _SOURCE)
                yield Record(file.path, 1, document)
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in the library's own strings
                tree = ast.parse(data)
        except (SyntaxError, ValueError) as error:
            yield Record(file.path, 1, Bad(file.path, 1, f"not Python source in UTF-8: {error}"))
            return
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for qualified_name, line, text in _docstrings(tree, module):
            yield Record(file.path, line, Document(f"stdlib/{qualified_name}", text, "en", _DOCS))


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, int, str]]:
    """(qualified name, line, docstring) of a module, and of every class and function in it, in order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text and len(text) > _MIN_CHARACTERS:
            yield name, getattr(node, "lineno", 1), text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # most of the nodes, and no definition is inside one
            continue
        inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
        yield from _docstrings(child, f"{name}.{inner}" if inner else name)
