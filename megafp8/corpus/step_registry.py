"""The kinds of `[[steps]]` and their options.

A file in `steps/` (one document at a time) or in `dedup/` (over the whole corpus) that sets `STEP` is a kind, under
the file's name; `STEP` is a configuration dataclass. No other place lists them. A file is imported when a
configuration names it, since some need packages that others do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.core.config import build, nearest
from megafp8.core.errors import ConfigError

FOLDERS = ("steps", "dedup")
_ROOT = Path(__file__).parent


def step_kinds() -> dict[str, str]:
    """{kind: module} of all that there are, sorted; told by the files' text, nothing is imported."""
    found = {}
    for folder in FOLDERS:
        for path in (_ROOT / folder).glob("*.py"):
            if any(line.startswith("STEP = ") for line in path.read_text(encoding="utf-8").splitlines()):
                found[path.stem] = f"megafp8.corpus.{folder}.{path.stem}"
    return dict(sorted(found.items()))


def make_step(values: Mapping[str, Any]) -> Any:
    """The step of one `[[steps]]` table.

    Raises:
        ConfigError: no or unknown kind, unknown or wrong options (all of them, a line each), a package is missing.
    """
    kinds = step_kinds()
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        what = "kind: missing" if kind is None else f"kind: {kind!r} is no kind of step"
        near = nearest(kind, kinds) if isinstance(kind, str) else ""
        raise ConfigError(f"{what}{near}; there are {', '.join(kinds)}")
    try:
        step = importlib.import_module(kinds[kind]).STEP
    except ImportError as error:
        raise ConfigError(
            f'kind: "{kind}" needs a package that is not installed ({error}); run `pip install "megafp8[corpus]"`'
        ) from None
    return build(step, {key: value for key, value in values.items() if key != "kind"})


def step_problems(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with `[[steps]]`, a line each; empty if nothing is."""
    problems = []
    for number, table in enumerate(tables, start=1):
        try:
            make_step(table)
        except ConfigError as error:
            kind = table.get("kind", "")
            problems += [f"steps[{number}]{f' ({kind})' if kind else ''}: {line}" for line in str(error).splitlines()]
    return problems
