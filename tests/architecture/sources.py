"""What the rules look at: parsed Python files with their place in the house, and what a broken rule says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Violation:
    """One broken rule; `key` is what an exception names: the path, with the function after a colon if it has one."""

    rule: str
    key: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.key.split(':')[0]}:{self.line}: [{self.rule}] {self.what}"


@dataclass(frozen=True)
class Source:
    """A Python file: `path` is relative to the repository, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Dotted name, a package's `__init__` under the package's own name."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def room(self) -> str:
        """The folder below megafp8 (`core`, `fp8`, ...), `.` for files directly in it, else the empty string."""
        parts = self.path.split("/")
        return "" if parts[0] != "megafp8" else parts[1] if len(parts) > 2 else "."


def read_sources(root: Path, *folders: str) -> list[Source]:
    """All Python files below `folders` of `root`, sorted by path."""
    files = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in files]


def imports(source: Source, names: frozenset[str] = frozenset()) -> Iterator[tuple[int, str, bool]]:
    """(line, module, inside a function?) of each import statement.

    `from package import x` yields `package.x` where `names` knows it as a module, else `package`.
    """
    inside = {id(n) for f in ast.walk(source.tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f) if n is not f}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            for module in dict.fromkeys(
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base for alias in node.names
            ):
                yield node.lineno, module, id(node) in inside


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    parts = parts if source.path.endswith("__init__.py") else parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)
