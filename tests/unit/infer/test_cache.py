"""Generation with a cache says what the whole text would have said: every family, every length, FP8, tp."""

import numpy as np
import pytest
import torch

from megafp8.infer.generate import Sampling, choose, generate
from megafp8.infer.weights import AS_TRAINED, build_model, load_model
from megafp8.nn.cache import KeyValueCache
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks
from tests.unit.infer.models import config_of, masters_of, save_model

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MODELS = {
    "grouped": {"num_kv_heads": 2},
    "tied, biases": {"tied_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "learned positions": {"family": "gpt"},
    "head norms": {"family": "qwen3", "num_kv_heads": 1},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_length": 48}},
    "experts": {"family": "mixtral", "num_kv_heads": 2, "moe": EXPERTS},
    "latent": {"family": "deepseek", "mla": LATENT, "head_dim": 0,
               "moe": {**EXPERTS, "num_groups": 2, "top_k_groups": 1, "first_dense_layers": 1}},
}  # fmt: skip
PROMPTS = [[5, 80, 200], [7], [9, 9, 9, 9, 9, 11, 13]]


def whole_text(model, prompt, new):
    """The new ids and their logits, the model run over the whole text for each."""
    ids, rows = list(prompt), []
    for _ in range(new):
        with torch.no_grad():
            rows.append(model(torch.tensor([ids]))[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_changes_nothing(name):
    config = config_of(**MODELS[name])
    model = build_model(config, {n: t.double() for n, t in masters_of(config).items()})
    made = generate(model, PROMPTS, max_new_tokens=5)
    assert made == [whole_text(model, prompt, 5)[0] for prompt in PROMPTS]


def test_logits_of_parts_equal_those_of_the_whole():
    """A text in parts of 5, 1, 3 and 7 tokens; fp64, so that only a wrong slot, mask or angle can show."""
    config = config_of(num_kv_heads=2)
    model = build_model(config, {n: t.double() for n, t in masters_of(config).items()})
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 260, (2, 16)))
    cache, start, parts = KeyValueCache(2, 16), 0, []
    with torch.inference_mode():
        for size in (5, 1, 3, 7):
            places = torch.arange(start, start + size).expand(2, -1)
            parts.append(model(tokens[:, start : start + size], positions=places, cache=cache))
            start += size
        whole = model(tokens)
    # sums of 16 terms in another order, logits up to 30: 30 * 16 * 2^-53, times ten layers of operations
    assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-12
    # two layers, k and v, 2 rows x 2 kv heads x 16 slots x 8 dims of 8 bytes
    assert cache.num_bytes == 2 * 2 * 2 * 2 * 16 * 8 * 8


def test_bf16_and_rows_that_end_early():
    config = config_of(num_kv_heads=2)
    model = build_model(config, {n: t.bfloat16() for n, t in masters_of(config).items()})
    made = generate(model, PROMPTS, max_new_tokens=12)
    (end,) = made[0][3:4]
    sizes: list[int] = []
    short = generate(model, PROMPTS, max_new_tokens=12, eod_id=end, on_step=sizes.append)
    wanted = [row[: row.index(end)] if end in row else row for row in made]
    assert short == wanted and sizes[0] == 3 and min(sizes) < 3  # who has ended is computed no more
    stopped = generate(model, PROMPTS, max_new_tokens=12, stop=lambda row, ids: row == 1 and len(ids) == 2)
    assert [len(row) for row in stopped] == [12, 2, 12] and stopped[0] == made[0] and stopped[2] == made[2]


def test_filters_of_sampling():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).expand(3000, -1)
    index = torch.arange(3000)
    for sampling, kept in ((Sampling(1.0, top_k=2), 2), (Sampling(1.0, top_p=0.7), 2), (Sampling(1.0, top_p=0.5), 1),
                           (Sampling(1.0, top_p=0.76), 3), (Sampling(1.0, top_k=3, top_p=0.999), 3)):  # fmt: skip
        found = torch.bincount(choose(logits, sampling, index), minlength=4) / 3000
        wanted = torch.tensor([0.5, 0.25, 0.15, 0.1])
        wanted[kept:] = 0
        # 3000 draws: a share's standard deviation is at most 0.009
        assert float((found - wanted / wanted.sum()).abs().max()) < 0.04, sampling


def _on_rank(rank, world, path):
    mesh = build_mesh(ParallelConfig(tp=world, dp=1, sequence_parallel=False), world, kv_heads=2)
    model = load_model(path, dtype=torch.float64, mesh=mesh).model
    held = sum(p.numel() for p in model.parameters())
    return generate(model, PROMPTS, max_new_tokens=8), held


def test_ranks_of_tp_say_the_same_and_hold_a_part(tmp_path):
    path = save_model(tmp_path / "checkpoints", config_of(num_kv_heads=2))
    alone = load_model(path, dtype=torch.float64).model
    wanted = generate(alone, PROMPTS, max_new_tokens=8)
    held = sum(p.numel() for p in alone.parameters())
    for world in (2, 4):  # 4: two ranks share a kv head
        found = run_ranks(_on_rank, world, path)
        assert [made for made, _ in found] == [wanted] * world
        assert max(part for _, part in found) < 0.7 * held


def test_fp8_makes_its_scales_or_takes_those_of_the_run(tmp_path):
    config = config_of(num_kv_heads=2, hidden_size=64, head_dim=16, ffn_hidden_size=64)
    path = save_model(tmp_path / "checkpoints", config)
    exact = load_model(path, dtype=torch.float32).model
    tokens = torch.tensor([[5, 80, 200, 31]])
    with torch.inference_mode():
        logits = exact(tokens)
        near = load_model(path, dtype=torch.float32, recipe="current").model(tokens)
    # E4M3 rounds by up to 6 %: visible, and small beside the logits
    error = float((near - logits).norm() / logits.norm())
    assert 1e-4 < error < 0.3
    with pytest.raises(Exception, match="its precision is not one of this version's runs"):
        load_model(path, recipe=AS_TRAINED)
