"""Rules of who may import whom: seven floors, imports at the top, light rooms that need no torch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.architecture.sources import Source, Violation, imports

FLOORS = {
    "core": 1,
    "fp8": 2, "parallel": 2, "data": 2, "checkpoint": 2,
    "nn": 3, "optim": 3, "corpus": 3,
    "models": 4,
    "infer": 5, "plan": 5,
    "train": 6, "convert": 6, "report": 6,
    "cli": 7, ".": 8,
}  # fmt: skip

# where an optional or costly package is loaded when it is needed, and not before
LATE_IMPORTS = (
    "megafp8/cli/", "megafp8/core/registry.py", "megafp8/nn/te", "megafp8/fp8/backends/", "megafp8/data/tokenizer",
    "megafp8/optim/", "megafp8/train/metrics.py", "megafp8/train/telemetry.py",
)  # fmt: skip

# what `--help`, `check` and the corpus tools load; the rest of the room may use torch
TORCH_FREE = (
    "megafp8/core/", "megafp8/corpus/", "megafp8/data/", "megafp8/cli/", "megafp8/__", "megafp8/models/config.py",
    "megafp8/models/cost.py", "megafp8/models/families/", "megafp8/nn/precision.py", "megafp8/optim/config.py",
    "megafp8/optim/lr.py", "megafp8/parallel/mesh_config.py", "megafp8/nn/te_config.py",
    "megafp8/parallel/actions.py", "megafp8/parallel/schedule", "megafp8/parallel/zero_bubble.py",
    "megafp8/parallel/stages.py", "megafp8/plan/mesh_table.py", "megafp8/plan/step_plan.py",
    "megafp8/checkpoint/config.py", "megafp8/train/config.py",
    "megafp8/train/check.py",
)  # fmt: skip
TORCH_ALLOWED = ("megafp8/core/layout.py", "megafp8/core/rng.py", "megafp8/data/loader.py")


def _modules(sources: Sequence[Source]) -> frozenset[str]:
    return frozenset(source.module for source in sources)


def floors(sources: Sequence[Source]) -> list[Violation]:
    """A file imports its own folder and lower floors; never a sibling folder, never upward."""
    found, names = [], _modules(sources)
    for source in sources:
        if source.room and source.room not in FLOORS:
            what = f"folder {source.room} stands on no floor of {sorted(FLOORS)}"
            found.append(Violation("floors", source.path, 1, what))
            continue
        for line, module, _ in imports(source, names) if source.room else ():
            other = _room_of(module, names)
            if other is None or other == source.room or FLOORS.get(other, 0) < FLOORS[source.room]:
                continue
            where = f"floor {FLOORS[source.room]} ({source.room}) imports floor {FLOORS[other]} ({other})"
            found.append(Violation("floors", source.path, line, f"{where}: {module}"))
    return found


def _room_of(module: str, names: frozenset[str]) -> str | None:
    parts = module.split(".")
    if parts[0] != "megafp8" or len(parts) == 1:  # `from megafp8 import __version__` is free to all
        return None
    return parts[1] if parts[1] in FLOORS else "." if module in names else None


def top_imports(sources: Sequence[Source]) -> list[Violation]:
    """Imports stand at the top of a file, save where an optional package or a verb's module is loaded."""
    found = []
    for source in sources:
        if not source.path.startswith(("megafp8/", "tools/")):
            continue
        for line, module, inside in imports(source):
            allowed = source.path.startswith(LATE_IMPORTS)
            optional = allowed and (source.room == "cli" or not module.startswith("megafp8"))
            if inside and not optional:
                found.append(Violation("top-imports", source.path, line, f"import of {module} inside a function"))
    return found


def wildcards(sources: Sequence[Source]) -> list[Violation]:
    """No `from x import *`."""
    return [
        Violation("wildcard", source.path, node.lineno, f"from {node.module} import *")
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def torch_free(sources: Sequence[Source]) -> list[Violation]:
    """Light rooms import no torch at module level, save for types."""
    return [
        Violation("torch-free", source.path, line, f"imports {module} at the top of a room that must stay light")
        for source in sources
        if source.path.startswith(TORCH_FREE) and not source.path.startswith(TORCH_ALLOWED)
        for line, module, inside in imports(source)
        if not inside and module.split(".")[0] in ("torch", "transformers", "matplotlib")
        if line not in _type_lines(source)
    ]


def _type_lines(source: Source) -> set[int]:
    blocks = [n for n in source.tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def cycles(sources: Sequence[Source]) -> list[Violation]:
    """Within a folder, files import only those that stand above them: the imports of a folder have no cycle."""
    names = _modules(sources)
    edges: dict[str, list[tuple[str, int, str]]] = {}
    for source in sources:
        packages = {p.module for p in sources if p.path.endswith("__init__.py")}
        if source.room and source.module not in packages:
            edges[source.module] = [
                (module, line, source.path)
                for line, module, inside in imports(source, names)
                if module in names and module not in packages and module != source.module and not inside
            ]
    found, state = [], dict.fromkeys(edges, 0)

    def visit(module: str, trail: tuple[str, ...]) -> None:
        state[module] = 1
        for other, line, path in edges.get(module, ()):
            if state.get(other) == 1:
                ring = (*trail[trail.index(other) :], other) if other in trail else (module, other)
                found.append(Violation("cycles", path, line, " -> ".join(ring)))
            elif state.get(other) == 0:
                visit(other, (*trail, other))
        state[module] = 2

    for module in edges:
        if state[module] == 0:
            visit(module, (module,))
    return found


def thin_packages(sources: Sequence[Source]) -> list[Violation]:
    """`__init__.py` holds a docstring, re-exports (also late ones by `__getattr__`), `__all__` and `__version__`."""
    found = []
    for source in sources:
        if not source.path.endswith("__init__.py") or not source.room:
            continue
        for node in source.tree.body:
            doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (doc or isinstance(node, (ast.Import, ast.ImportFrom)) or _is_dunder(node) or _is_late(node)):
                found.append(Violation("thin-packages", source.path, node.lineno, "code in an __init__.py"))
    return found


def _is_late(node: ast.stmt) -> bool:
    """A re-export that loads its module when it is first asked for (PEP 562), and its types."""
    late = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    return late or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def _is_dunder(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return bool(targets) and all(isinstance(t, ast.Name) and t.id.startswith("__") for t in targets)


RULES = (floors, top_imports, wildcards, torch_free, cycles, thin_packages)
