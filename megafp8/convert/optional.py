"""Packages that only conversions need, loaded when one is first used, with the way out where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from megafp8.core.errors import ConfigError


def load(module: str, way_out: str = "") -> Any:
    """Import an optional module.

    Raises:
        ConfigError: it is not installed; says how to get it, and `way_out` if given.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        other = f", or {way_out}" if way_out else ""
        raise ConfigError(f"the package {package} is not installed; run `pip install {package}`{other}") from None
