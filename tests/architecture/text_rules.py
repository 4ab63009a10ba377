"""Rules of what a file may hold: sizes, names, docstrings, prints, and what the models folder must not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from tests.architecture.sources import Source, Violation

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NAME_LETTERS = 32
BANNED_FILES = {"util", "utils", "common", "helper", "helpers", "misc"}
PRINTERS = ("megafp8/cli/", "tools/", "benchmarks/", "tests/", "setup.py")
COLLECTIVES = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce_", "broadcast_",
    "copy_to", "reduce_from", "gather_from", "scatter_to", "split_to",
}  # fmt: skip
# arithmetic for `check`: how many bytes a rank holds at a tp and a precision; no model code
MODEL_ARITHMETIC = ("megafp8/models/config.py", "megafp8/models/cost.py")
_FP8 = re.compile(r"(?<!mega)fp8", re.IGNORECASE)


def file_lines(sources: Sequence[Source]) -> list[Violation]:
    """No file above 400 lines."""
    counts = [(source, source.text.count("\n")) for source in sources]
    return [
        Violation("file-lines", source.path, MAX_FILE_LINES, f"{count} lines, the wall is {MAX_FILE_LINES}")
        for source, count in counts
        if count > MAX_FILE_LINES
    ]


def function_lines(sources: Sequence[Source]) -> list[Violation]:
    """No function above 60 lines."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    what = f"{node.name} has {count} lines, the wall is {MAX_FUNCTION_LINES}"
                    found.append(Violation("function-lines", f"{source.path}:{node.name}", node.lineno, what))
    return found


def name_letters(sources: Sequence[Source]) -> list[Violation]:
    """No name over 32 letters; names of tests are sentences and free."""
    return [
        Violation("name-letters", f"{source.path}:{name}", line, f"{name} has {len(name)} letters")
        for source in sources
        if not source.path.startswith("tests/")
        for line, name in sorted(set(_defined(source)))
        if len(name) > MAX_NAME_LETTERS
    ]


def _defined(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def file_names(sources: Sequence[Source]) -> list[Violation]:
    """A file's name says its idea: no utils, common, helpers, misc."""
    return [
        Violation("file-names", source.path, 1, f"{part} says nothing; name the idea")
        for source in sources
        for part in PurePosixPath(source.path).with_suffix("").parts
        if part in BANNED_FILES
    ]


def docstrings(sources: Sequence[Source]) -> list[Violation]:
    """Each file starts with a docstring; public functions and classes of the package have one."""
    found = []
    for source in sources:
        if source.text.strip() and not ast.get_docstring(source.tree):
            found.append(Violation("docstrings", source.path, 1, "no docstring at the head of the file"))
        for node in source.tree.body if source.room else ():
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                what = f"{node.name} is public and has no docstring"
                found.append(Violation("docstrings", f"{source.path}:{node.name}", node.lineno, what))
    return found


def prints(sources: Sequence[Source]) -> list[Violation]:
    """`print` belongs to tools/ and cli/; the rest logs."""
    return [
        Violation("prints", source.path, node.lineno, "print(); log an event instead")
        for source in sources
        if not source.path.startswith(PRINTERS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def plain_models(sources: Sequence[Source]) -> list[Violation]:
    """models/ holds no collective, no "fp8" and no "if tp": its layers are parallel, the model is not."""
    found = []
    for source in sources:
        if source.room != "models" or source.path in MODEL_ARITHMETIC:
            continue
        docs = _docstring_nodes(source.tree)
        if "/families/" in source.path:  # a preset may be called after the experiment that it serves
            docs |= {id(node) for node in ast.walk(source.tree) if isinstance(node, ast.Constant)}
        for node in ast.walk(source.tree):
            words = set() if id(node) in docs else _words(node)
            for word in sorted(words):
                if _FP8.search(word) or word in COLLECTIVES:
                    what = f'{word}: no collective and no "fp8" here'
                    found.append(Violation("plain-models", f"{source.path}:{word}", _line(node), what))
            if isinstance(node, (ast.If, ast.IfExp)) and "tp" in {w for n in ast.walk(node.test) for w in _words(n)}:
                found.append(Violation("plain-models", source.path, node.lineno, "branches on tp"))
    return found


def _docstring_nodes(tree: ast.Module) -> set[int]:
    owners = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    firsts = [owner.body[0] for owner in owners if owner.body]
    return {id(node.value) for node in firsts if isinstance(node, ast.Expr)}


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _words(node: ast.AST) -> set[str]:
    """Identifiers and string constants of one node."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)} - {"megafp8"}
    if isinstance(node, (ast.arg, ast.keyword)):
        return {node.arg or ""}
    return {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()


RULES = (file_lines, function_lines, name_letters, file_names, docstrings, prints, plain_models)
