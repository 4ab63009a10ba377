"""Folders as transformers itself saves them: read, verified, and written again with the same tensors, bit for bit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megafp8.checkpoint.folders import verify
from megafp8.convert.hf import from_hf, hf_groups
from megafp8.convert.hf_files import list_weights
from megafp8.convert.source import open_source
from megafp8.convert.stream import write_groups

SIZE = {
    "vocab_size": 71, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, **MOE,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
SAVED = {
    "llama": SIZE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE},
    "mistral": SIZE | {"sliding_window": None, "head_dim": 16},
    "qwen2": SIZE | {"tie_word_embeddings": True},
    "qwen3": SIZE | {"head_dim": 16},
    "gpt2": {"vocab_size": 71, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3,
             "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": SIZE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SIZE | {"num_experts": 4, "head_dim": 16, "mlp_only_layers": [0], **MOE},
    "deepseek_v3": SIZE | LATENT,
}  # fmt: skip


@pytest.mark.parametrize("model_type", SAVED)
def test_what_transformers_saves_comes_back(tmp_path, model_type):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **SAVED[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases off their neutral start
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    lines = []
    checkpoint = from_hf(tmp_path / "theirs", tmp_path / "ours", say=lines.append)  # verified
    assert any(line.startswith("logits in bfloat16") for line in lines) and verify(checkpoint)
    with open_source(checkpoint) as source:
        (tmp_path / "again").mkdir()
        write_groups(tmp_path / "again", source, hf_groups(source, torch.bfloat16))
    first, second = (
        {n: load_file(tmp_path / folder / file)[n] for n, (file, _) in list_weights(tmp_path / folder).items()}
        for folder in ("theirs", "again")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name
    fp32 = {name for name, tensor in first.items() if tensor.dtype == torch.float32}
    assert len(fp32) == (2 if model_type == "deepseek_v3" else 0)  # its router, which transformers never rounds
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert source.config.vocab_size == 71 and written["model_type"] == model_type
