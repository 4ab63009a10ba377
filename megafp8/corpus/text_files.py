"""Texts of small files that steps are given: evaluation sets and samples of good text.

A file with ".json" in its name holds one JSON object a line, any other one holds texts that blank lines part. Both may
be compressed. Unlike readers of corpora this one forgives nothing: a file of this kind with a bad line is a mistake.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megafp8.corpus.compressed import InputStream


def resolve(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The files of paths and globs, sorted, each once.

    Raises:
        ValueError: a pattern that no file matches.
    """
    found: set[str] = set()
    for pattern in patterns:
        files = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not files:
            raise ValueError(f"{pattern}: no such file, seen from {Path.cwd()}; give a path or a glob that matches one")
        found.update(files)
    return tuple(sorted(found))


def read_texts(path: str, keys: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """(line, text) of each text of a file; of JSON lines the strings under `keys`, or all strings if there are none.

    Raises:
        ValueError: not UTF-8, not JSON, or a line has none of the keys.
    """
    with InputStream(path) as stream:
        is_json = ".json" in Path(path).name
        paragraph: list[str] = []
        number = 0
        for number, data in enumerate(stream.reader, start=1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if is_json and line:
                    yield from ((number, text) for text in _strings_of(json.loads(line), keys))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            if is_json:
                continue
            if line:
                paragraph.append(line)
            elif paragraph:
                yield number - len(paragraph), "\n".join(paragraph)
                paragraph = []
        if paragraph:
            yield number - len(paragraph) + 1, "\n".join(paragraph)


def _strings_of(value: Any, keys: tuple[str, ...]) -> list[str]:
    if not keys:
        return _strings(value)
    if not isinstance(value, dict) or not any(key in value for key in keys):
        raise ValueError(f"has none of the keys {', '.join(keys)}")
    return [text for key in keys if key in value for text in _strings(value[key])]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for part in value for text in _strings(part)] if isinstance(value, list) else []
