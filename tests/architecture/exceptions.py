"""The dated exceptions to the house rules: (rule, path or path:name) -> who, when and why.

An exception that no longer matches anything fails the test, so that none outlives its reason.
"""

from __future__ import annotations

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("thin-packages", "megafp8/models/families/__init__.py"): (
        "maintainers, 2026-11-30: the folder is the registry of families, and a file beside it would only hold its list"
    ),
    ("plain-models", "megafp8/models/decoder.py:fp8_states"): (
        "maintainers, 2026-11-30: hands the layers' states on to the step; the model computes nothing with it"
    ),
}
