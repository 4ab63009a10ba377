"""Floor 6: one HTML page out of run folders, or of a corpus. It reads what runs left and starts nothing.

The pages are loaded when they are asked for: that of runs draws with matplotlib, which takes a second to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.report.corpus_page import build_corpus as build_corpus
    from megafp8.report.page import build as build
    from megafp8.report.page import summary as summary

_PAGES = {"build": "page", "summary": "page", "build_corpus": "corpus_page"}


def __getattr__(name: str) -> Any:
    if name not in _PAGES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"megafp8.report.{_PAGES[name]}"), name)
