"""Cases that converters have failed: rotary layout, heads that share keys, embeddings with room for more tokens."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megafp8.convert import from_hf, to_hf
from megafp8.infer.weights import build_model, weights
from tests.unit.infer.models import config_of, save_model

MLA = {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
GROUPED = {
    "num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "first_dense_layers": 1, "num_groups": 4, "top_k_groups": 2,
    "num_shared_experts": 2,
}  # fmt: skip
LLAMA = config_of(num_kv_heads=2, rope_theta=500.0)


def both(tmp_path, config):
    """Our model and transformers' of its export, both in fp32."""
    source = save_model(tmp_path / "run", config)
    to_hf(source, tmp_path / "hf", dtype="fp32", verify=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    return build_model(config, weights(source)), theirs.eval()


def error(ours, theirs, ids):
    """Largest difference of logits by position, relative to the largest logit."""
    with torch.inference_mode():
        a, b = ours(ids)[0], theirs(ids).logits[0]
    return (a - b).abs().amax(-1) / a.abs().max()


@pytest.mark.parametrize(
    "config",
    [LLAMA, config_of("deepseek", head_dim=0, mla=MLA, moe=GROUPED),
     config_of("deepseek", head_dim=0, mla=MLA | {"rope_interleave": False}, moe=GROUPED)],
    ids=["llama: halves", "deepseek: neighbours", "deepseek: halves"],
)  # fmt: skip
def test_rotary_layout_at_every_position(tmp_path, config):
    """R158: position 0 is not rotated, so that a wrong layout shows from the second token on."""
    ours, theirs = both(tmp_path, config)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written.get("rope_interleave") == (config.mla.rope_interleave if config.mla.enabled else None)
    for length in (1, 2, 63):
        ids = torch.arange(length).unsqueeze(0) * 37 % 260
        assert error(ours, theirs, ids).max() < 1e-5
    permuted = "model.layers.0.self_attn." + ("q_b_proj" if config.mla.enabled else "q_proj")
    weight = dict(theirs.named_parameters())[permuted + ".weight"]
    d, rotated = config.head_dim, config.mla.qk_rope_head_dim if config.mla.enabled else config.head_dim
    heads = weight.data.view(-1, d, weight.shape[1])
    rows = heads[:, d - rotated :].clone()
    heads[:, d - rotated :] = rows.view(-1, 2, rotated // 2, weight.shape[1]).transpose(1, 2).flatten(1, 2)
    found = error(ours, theirs, torch.arange(63).unsqueeze(0) * 37 % 260)
    assert found[0] < 1e-5 < 1e-3 < found[1:].max()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_share_keys(tmp_path, kv_heads):
    """R152: 100 prompts, weights there and back."""
    ours, theirs = both(tmp_path, config_of(num_kv_heads=kv_heads))
    ids = torch.randint(0, 260, (100, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        a, b = ours(ids), theirs(ids).logits
    assert (a - b).abs().max() / a.abs().max() < 1e-5
    back = weights(from_hf(tmp_path / "hf", tmp_path / "back", verify=False))
    first = weights(tmp_path / "run" / "step_00000001")
    assert all(torch.equal(back[name], first[name]) for name in first)


def test_rows_beyond_the_tokenizer_stay(tmp_path):
    """R160: the embedding has room for tokens that the tokenizer has not; config.json says its size."""
    source = save_model(tmp_path / "run", config_of(vocab_size=283, num_kv_heads=2))  # bytes have 260
    assert to_hf(source, tmp_path / "hf").problems == []
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape[0] == stored["lm_head.weight"].shape[0] == 283
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 283
