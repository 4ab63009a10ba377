"""The families: defaults, presets and the tables of foreign names, one file each; the registry is `FAMILIES`.

No torch here: `megafp8 check` reads this.
"""

from __future__ import annotations

from typing import Any

from megafp8.core.config import nearest
from megafp8.core.errors import ConfigError
from megafp8.models.families import deepseek, gpt, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megafp8.models.families.rules import Family

_MODULES = (llama, mistral, qwen2, qwen3, gpt, mixtral, qwen3_moe, deepseek)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}


def preset_names() -> list[str]:
    """All presets, sorted."""
    return sorted(name for family in FAMILIES.values() for name in family.presets)


def preset(name: str) -> dict[str, Any]:
    """The model section of a preset as a plain dict, family included.

    Raises:
        ConfigError: no such preset; the message names the nearest.
    """
    for family in FAMILIES.values():
        if name in family.presets:
            return {"family": family.name, **family.defaults, **family.presets[name]}
    raise ConfigError(f"model preset {name!r} does not exist{nearest(name, preset_names())}")
