"""Languages as a tokenizer's training weighs them: those with a weight of their own, and all others together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.corpus.config import TokenizerConfig

ALL = "*"  # the group of all languages that have no weight of their own


def group_of(language: str, groups: Mapping[str, Any]) -> str | None:
    """The group whose share a document counts for; None: it is not trained on."""
    return language if language in groups else ALL if ALL in groups else None


def quotas(config: TokenizerConfig) -> dict[str, int]:
    """{group: bytes that are trained on}."""
    weights = config.language_weights or {ALL: 1.0}
    return {name: max(1, int(config.train_bytes * weight / sum(weights.values()))) for name, weight in weights.items()}
