"""The registry of steps: kinds are files, options are checked before anything starts, a wrong name gets the nearest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megafp8.core.config import build, dump_toml, load_toml
from megafp8.core.errors import ConfigError
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.step_registry import make_step, step_kinds
from megafp8.corpus.steps.length import Length


def document(text: str) -> Document:
    return Document("i", text, "en", "s")


def test_every_kind_keeps_the_protocol() -> None:
    assert "length" in step_kinds()
    for kind in step_kinds():
        step = make_step({"kind": kind}) if kind == "length" else None
        assert step is None or (step.name and isinstance(step.version, int) and callable(step.apply))


def test_length() -> None:
    step = make_step({"kind": "length", "min_characters": 3, "max_characters": 5})
    assert step.apply(document("abc")) == document("abc")
    assert step.apply(document("ab")) == Dropped("too short", "2 characters")
    assert step.apply(document("abcdef")) == Dropped("too long", "6 characters")
    assert isinstance(make_step({"kind": "length"}).apply(document("x" * 10**6)), Document)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([{"kind": "lenght"}], r"steps\[1\] \(lenght\): kind: 'lenght' is no kind of step; nearest: length; there are"),
        ([{}], r"steps\[1\]: kind: missing; there are"),
        ([{"kind": 3}], "kind: 3 is no kind"),
        ([{"kind": "length"}, {"kind": "length", "min_charcters": 2}], r"steps\[2\].*nearest: min_characters"),
        ([{"kind": "length", "min_characters": -1}], "min_characters: -1 is refused"),
        ([{"kind": "length", "min_characters": 9, "max_characters": 2}], "max_characters 2 is below min_characters 9"),
    ],
)
def test_wrong_steps_are_refused_by_name(config: Callable, tables: list[dict], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(steps=tables)


def test_all_problems_at_once(config: Callable) -> None:
    with pytest.raises(ConfigError) as caught:
        config(steps=[{"kind": "x"}, {"kind": "length", "a": 1, "b": 2}])
    assert len(str(caught.value).splitlines()) == 3


def test_steps_survive_toml(config: Callable, tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = config(steps=[{"kind": "length", "min_characters": 3}])
    (tmp_path / "c.toml").write_text(dump_toml(made))
    assert build(CorpusConfig, load_toml(tmp_path / "c.toml")) == made
    assert make_step(made.steps[0]) == Length(min_characters=3)


def test_metadata_is_part_of_a_document() -> None:
    assert document("x").metadata == {} and hash(document("x")) == hash(document("x"))
    assert Document("i", "x", "en", "s", {"a": 1}) != document("x")
