"""What the journeys of a small run begin from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.runs import write_config, write_corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder)
    return folder


@pytest.fixture
def config(data, tmp_path) -> Path:
    return write_config(tmp_path, data)
