"""Progress: a bar on a terminal, lines with rate and ETA elsewhere, and neither for a step that is short."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from megafp8.corpus import progress as module
from megafp8.corpus.progress import Progress


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("megafp8")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="megafp8")
    return caplog


def test_lines_have_rate_and_eta(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Progress("tokenizing", 1000) as progress:
        progress.begin(documents=10, text_bytes=0, tokens=0)
        clock[0] = 10.0
        progress.update(100, documents=20, text_bytes=10, tokens=10)
        clock[0] = 20.0
        progress.update(250, documents=30, text_bytes=40_000_000, tokens=1_000_000)
    text = [record.getMessage() for record in lines.records]
    assert len(text) == 2, "quiet: nothing at 10 s, a line at 20 s, and the end"
    assert "1 docs/s, 2.00 MB/s, 50,000 tokens/s" in text[0]
    assert "done=25%" in text[0] and "eta_seconds=60" in text[0] and "num_tokens=1000000" in text[0]
    assert "tokenizing: done" in text[1] and "seconds=20" in text[1]


def test_bar_on_a_terminal(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_REFRESH_SECONDS", 0.0)
    with Progress("tokenizing", 1000) as progress:
        progress.update(500, documents=1, text_bytes=1, tokens=1)
    assert "tokenizing" in terminal.getvalue()
    with Progress("training a tokenizer"):
        pass


def test_an_error_does_not_say_done(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), Progress("tokenizing"):
        raise KeyError
    assert not lines.records
