"""Which layers a stage holds; stages of a model joined by hand are the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.models import ModelConfig, build
from megafp8.models.builder import build_stages, named_parameters
from megafp8.models.stages import Span, split_layers
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.stages import schedule_problems

SMALL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 64,
    "max_sequence_length": 16,
}  # fmt: skip


def counts(layers: int, **parallel: Any) -> list[int]:
    spans = split_layers(ModelConfig(**(SMALL | {"num_layers": layers})), ParallelConfig(**parallel))
    assert [span.first for span in spans] == [True] + [False] * (len(spans) - 1)
    assert [span.last for span in spans] == [False] * (len(spans) - 1) + [True]
    assert spans[0].start == 0 and spans[-1].stop == layers
    assert all(a.stop == b.start for a, b in pairwise(spans))
    return [span.stop - span.start for span in spans]


def test_even_uneven_and_counted_splits() -> None:
    assert counts(8, pp=4) == [2, 2, 2, 2]
    assert counts(8, pp=2, schedule="interleaved", virtual_stages=2) == [2, 2, 2, 2]
    assert counts(8, pp=2, schedule="zb_v") == [2, 2, 2, 2]
    assert counts(8, pp=2, virtual_stages=2) == [4, 4]  # virtual stages are interleaved's
    assert counts(6, pp=4, count_embedding_as_layer=True, count_loss_as_layer=True) == [1, 2, 2, 1]
    assert counts(7, pp=3, layers_per_stage=(1, 4, 2)) == [1, 4, 2]
    assert counts(4, pp=3, layers_per_stage=(0, 4, 0)) == [0, 4, 0]
    assert counts(3, pp=1) == [3]


@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("gpt", True)])
def test_stages_in_a_row_are_the_model(family: str, tied: bool) -> None:
    config = ModelConfig(**SMALL, family=family, tied_embeddings=tied)
    tokens = torch.arange(32).view(2, 16)
    model = build(config, dtype=torch.float64)
    spans = [Span(0, 1, last=False), Span(1, 3, first=False, last=False), Span(3, 4, first=False)]
    stages = build_stages(config, spans, mesh=Mesh.single(), dtype=torch.float64)
    x: Any = None
    for stage in stages[:-1]:
        x = stage(tokens, hidden=x)
        assert x.shape == stage.hidden_shape(*tokens.shape)
    loss, count = stages[-1](tokens, tokens, hidden=x)
    loss.backward()
    expected, expected_count = model(tokens, tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert count == expected_count
    mine = named_parameters(stages)
    assert [name for name, _ in mine] == [name for name, _ in model.named_parameters()]
    for (name, parameter), reference in zip(mine, model.parameters(), strict=True):
        # the same kernels on the same values; only the residual is added one step earlier at a border
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-10, atol=1e-13, msg=name)
    shared = getattr(stages[0].embedding.weight, "grad_uses", 1)
    assert shared == (2 if tied else 1)


def test_a_last_stage_alone_has_a_copy_of_the_tied_weight() -> None:
    config = ModelConfig(**SMALL, tied_embeddings=True)
    mesh = Mesh(dict(Mesh.single().sizes) | {"pp": 2, "embedding": 2}, rank=0, world=2)
    first, last = (
        build_stages(config, [span], mesh=mesh)[0] for span in (Span(0, 2, last=False), Span(2, 4, first=False))
    )
    assert torch.equal(first.embedding.weight, last.embedding.weight)
    assert layout_of(last.embedding.weight).grad_sum == layout_of(first.embedding.weight).grad_sum == ("embedding",)
    assert "embedding.weight" in dict(last.named_parameters()) and last.output.weight is None
    assert not hasattr(last.embedding.weight, "grad_uses")
    assert [n for n, _ in last.named_children()].count("layers") == 1 and "layers.3.mlp.down.weight" in dict(
        last.named_parameters()
    )


@pytest.mark.parametrize("layers", [*range(1, 14), 30])
def test_no_layer_is_lost_or_doubled(layers: int) -> None:
    """Every split that is not refused holds layers 0 ... n - 1 once, under the names of the whole model."""
    config = ModelConfig(**(SMALL | {"num_layers": layers}))
    whole = [name for name, _ in build(config, device="meta").named_parameters()]
    for pp in (1, 2, 4):
        for virtual in (1, 2):
            for counted in (False, True):
                parallel = ParallelConfig(
                    pp=pp,
                    schedule="interleaved" if virtual > 1 else "1f1b",
                    virtual_stages=virtual,
                    count_embedding_as_layer=counted,
                )
                if schedule_problems(parallel, layers):
                    continue
                spans = split_layers(config, parallel)
                assert [i for span in spans for i in range(span.start, span.stop)] == list(range(layers))
                stages = build_stages(config, spans, mesh=Mesh.single(), device="meta")
                assert [name for name, _ in named_parameters(stages)] == whole
