"""Floor 6: one HTML page out of run folders, or of a corpus. It reads what they hold and starts nothing.

The pages are fetched when first named: that of runs draws with matplotlib, which takes a second to load.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.report.corpus_page import build_corpus
    from megafp8.report.page import build, summary

__all__ = ["build", "build_corpus", "summary"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        page = "corpus_page" if name == "build_corpus" else "page"
        return getattr(importlib.import_module(f"{__name__}.{page}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
