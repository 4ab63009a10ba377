"""What context parallelism refuses, with the nearest values that it would take."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.models.config import ModelConfig, check_model
from megafp8.parallel.context_check import exchange_problems, sequence_problems


@pytest.mark.parametrize(("length", "cp", "shards", "rule", "nearest"), [
    (20, 4, 1, "2 x parallel.cp 4 = 8, as context", "16 or 24"),
    (24, 4, 4, "parallel.cp 4 x parallel.tp 4 = 16, as sequence", "16 or 32, or parallel.sequence_parallel = false"),
    (6, 2, 3, "2 x parallel.cp 2 x parallel.tp 3 = 12, as sequence", "12"),
    (10, 1, 4, "parallel.tp 4, as sequence", "8 or 12, or parallel.sequence_parallel = false"),
])  # fmt: skip
def test_lengths(length: int, cp: int, shards: int, rule: str, nearest: str) -> None:
    line = f"sequence_length {length} is not divisible by {rule} parallelism needs; nearest: {nearest}"
    assert sequence_problems(length, cp=cp, shards=shards) == [line]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_what_is_taken_divides(cp: int, shards: int) -> None:
    taken = [length for length in range(1, 100) if not sequence_problems(length, cp=cp, shards=shards)]
    assert taken == [n for n in range(1, 100) if n % (2 * cp if cp > 1 else 1) == 0 and n % (cp * shards) == 0]


def test_heads_for_all_to_all() -> None:
    line = (
        "parallel.cp_exchange = 'all_to_all': model.num_attention_heads 12 / parallel.tp 2 = 6 is not divisible by "
        "parallel.cp 4; nearest: parallel.cp = 3 or 6, or parallel.cp_exchange = 'ring'"
    )
    assert exchange_problems("all_to_all", cp=4, tp=2, num_heads=12) == [line]
    assert exchange_problems("all_to_all", cp=3, tp=2, num_heads=12) == []
    assert exchange_problems("ring", cp=4, tp=2, num_heads=12) == []


def test_all_at_once() -> None:
    config = ModelConfig(num_attention_heads=6, head_dim=32, num_kv_heads=3, hidden_size=192, max_sequence_length=10)
    mesh: dict[str, Any] = {"cp": 4, "cp_exchange": "all_to_all"}
    problems = check_model(config, sequence_length=20, **mesh)
    assert len(problems) == 3
    for word in ("max_sequence_length", "2 x parallel.cp", "all_to_all"):
        assert any(word in line for line in problems)
