"""core/config: TOML, overrides, all broken rules at once, nearest names, round trip."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from megafp8.core.config import apply_overrides, build, config_dataclass, diff_from_defaults, dump_toml, load_toml
from megafp8.core.errors import ConfigError


@config_dataclass
class Inner:
    """A section."""

    steps: Annotated[int, Field(gt=0)] = 3
    name: str = "x"
    options: dict[str, str] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps == 7:
            raise ValueError("steps 7 is unlucky; nearest: 6, 8")


@config_dataclass
class Source:
    """An entry of an array of tables."""

    path: str
    weight: float = 1.0


@config_dataclass
class Outer:
    """A whole configuration."""

    inner: Inner = Field(default_factory=Inner)
    sources: tuple[Source, ...] = ()
    seed: int = 1


def test_all_problems_at_once_with_nearest_names():
    with pytest.raises(ConfigError) as caught:
        build(Outer, {"inner": {"steps": 0, "nam": 1}, "sed": 3, "sources": [{"pth": "a"}]})
    message = str(caught.value)
    assert "inner.steps: 0 is refused" in message
    assert "inner.nam: unknown key; nearest: name" in message
    assert "sed: unknown key; nearest: seed" in message
    assert "sources.0.path: missing" in message and "sources.0.pth: unknown key; nearest: path" in message


def test_own_rules_speak_for_themselves():
    with pytest.raises(ConfigError, match=r"^inner: steps 7 is unlucky; nearest: 6, 8$"):
        build(Outer, {"inner": {"steps": 7}})


def test_a_fraction_is_not_cut_to_an_integer():
    with pytest.raises(ConfigError, match=r"inner\.steps: 2\.5 is refused"):
        build(Outer, {"inner": {"steps": 2.5}})


def test_overrides_and_round_trip(tmp_path):
    values = apply_overrides(
        {"sources": [{"path": 'a "quoted" \\ path\n'}], "inner": {"name": "y"}},
        ["--inner.steps", "5", "--inner.name=tiny-run", "--inner.options.k", "v", "--seed", "9"],
    )
    config = build(Outer, values)
    assert (config.inner.steps, config.inner.name, config.seed) == (5, "tiny-run", 9)
    assert config.inner.options == {"k": "v"}
    path = tmp_path / "c.toml"
    path.write_text(dump_toml(config, comments=True))
    assert build(Outer, load_toml(path)) == config
    assert diff_from_defaults(config)["inner.steps"] == (3, 5)
    assert "inner.steps" not in diff_from_defaults(build(Outer, {}))


def test_bad_overrides_and_files(tmp_path):
    with pytest.raises(ConfigError, match="has no value"):
        apply_overrides({}, ["--train.steps"])
    with pytest.raises(ConfigError, match="is not an override"):
        apply_overrides({}, ["steps=3"])
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        apply_overrides({"seed": 1}, ["--seed.x", "2"])
    with pytest.raises(ConfigError, match="no such file"):
        load_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match="not TOML"):
        load_toml(tmp_path / "bad.toml")
