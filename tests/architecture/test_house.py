"""The repository obeys its own rules, or says by name, date and reason where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from tests.architecture import import_rules, text_rules
from tests.architecture.exceptions import EXCEPTIONS
from tests.architecture.sources import ROOT, Source, Violation, read_sources

Rule = Callable[[Sequence[Source]], list[Violation]]
RULES: tuple[Rule, ...] = (*import_rules.RULES, *text_rules.RULES)
SOURCES = read_sources(ROOT, "megafp8", "tools", "benchmarks", "tests")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    broken = [v for v in rule(SOURCES) if (v.rule, v.key) not in EXCEPTIONS]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(map(str, broken))


def test_exceptions_are_needed_and_explained() -> None:
    needed = {(v.rule, v.key) for rule in RULES for v in rule(SOURCES)}
    stale = [key for key in EXCEPTIONS if key not in needed]
    assert not stale, f"these exceptions match nothing any more, remove them: {stale}"
    for key, reason in EXCEPTIONS.items():
        assert re.match(r"\S.*, \d{4}-\d\d-\d\d: .{20,}", reason), f"{key}: write 'name, YYYY-MM-DD: reason'"


def test_examples_hold_no_python() -> None:
    assert not list((ROOT / "examples").rglob("*.py")), "an example is TOML, a script and a page"
