"""A corpus, a run's TOML, and what comes of that run when nothing happens to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.attempts import attempt
from tests.faults.outcome import curve
from tests.journeys.runs import overrides, write_config, write_corpus

STEPS = 30
WORDS = overrides(
    train__steps=STEPS, train__eval_interval=10, checkpoint__interval=5, precision__dtype="fp32",
    train__timeout_seconds=20,
)  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def calm(data, tmp_path_factory) -> Path:
    """The folder of two ranks' run to its end."""
    folder = tmp_path_factory.mktemp("calm")
    ended = attempt(write_config(folder, data), 2, WORDS, folder=folder / "orders")
    assert ended.codes == [0, 0], ended.said
    return folder


@pytest.fixture
def config(data, tmp_path) -> Path:
    return write_config(tmp_path, data)


@pytest.fixture
def as_calm(calm, tmp_path):
    """Whether the run of this test came to the same losses, bit for bit."""
    return lambda: curve(tmp_path / "run") == curve(calm / "run")
