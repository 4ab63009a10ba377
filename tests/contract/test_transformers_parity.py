"""Our models against transformers' own classes: logits, every gradient, a 20-step AdamW curve, names both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megafp8.models import ModelConfig, build, preset_names
from megafp8.models.cost import num_parameters
from megafp8.models.names import config_from_hf, from_hf_tensors, hf_config, to_hf_tensors

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 64, "num_attention_heads": 6, "num_kv_heads": 3,
    "vocab_size": 96, "max_sequence_length": 32, "init_std": 0.05,
}  # fmt: skip
LLAMA = {"family": "llama", **SMALL}
MLA = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK = {
    "family": "deepseek", **SMALL, "num_layers": 3, "num_kv_heads": 6, "mla": MLA,
    "moe": {
        "num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "num_shared_experts": 2, "first_dense_layers": 1,
        "num_groups": 4, "top_k_groups": 2,
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied_biased": LLAMA | {"tied_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": LLAMA | {"head_dim": 16},
    "llama_linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_llama3": LLAMA
    | {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_length": 16}, "rope_theta": 100.0},
    "llama_yarn": LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_length": 16}},
    "llama_dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_sequence_length": 16},
    "mistral": {"family": "mistral", **SMALL},
    "qwen2": {"family": "qwen2", **SMALL},
    "qwen3": {"family": "qwen3", **SMALL, "head_dim": 16, "tied_embeddings": True},
    "gpt": {"family": "gpt", **SMALL, "num_kv_heads": 6},
    "mixtral": {"family": "mixtral", **SMALL, "moe": {"num_experts": 5, "top_k": 2}},
    "qwen3_moe": {
        "family": "qwen3_moe", **SMALL, "num_layers": 3, "head_dim": 16,
        "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "normalize_top_k": False, "first_dense_layers": 1},
    },
    "qwen3_moe_normalized": {
        "family": "qwen3_moe", **SMALL, "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24},
    },
    "deepseek": DEEPSEEK,
    "deepseek_q": DEEPSEEK | {"mla": MLA | {"q_lora_rank": 0, "rope_interleave": False}, "attention_dropout": 0.0},
    "deepseek_yarn": DEEPSEEK
    | {
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_length": 16, "mscale": 0.7, "mscale_all_dim": 1.3,
        },
    },
}  # fmt: skip

# fp32: a few hundred roundings of 2^-24 on values of size 1, and gradients are sums of 64 tokens of them
LOGITS, GRADIENTS = 1e-5, 1e-5


def pair(values: dict[str, Any]) -> tuple[Any, Any, ModelConfig]:
    """Our model and transformers' with the same weights."""
    config = ModelConfig(**values)
    ours = build(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in ours.named_parameters():
            if param.dim() == 1:  # off 0 and 1, so that a swap of two norms or biases shows
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
                param.add_(noise, alpha=0.1)
        for name, buffer in ours.named_buffers():
            if name.endswith("router.bias"):  # as large as the differences of scores, so that it decides
                buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    theirs_config = json.loads(json.dumps(hf_config(config)))  # as it comes back from a file
    model_type = theirs_config.pop("model_type")
    theirs_config |= {"bos_token_id": 0, "eos_token_id": 0}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **theirs_config)
    )
    tensors = {k: v.clone() for k, v in in_memory(to_hf_tensors(config, ours.state_dict())).items()}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return ours, theirs.eval(), config


def in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published tensors as transformers 5 holds them: an expert's matrices stacked, gate above up."""
    tensors = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if ".experts.0." not in name:
            continue
        experts = range(sum(name.replace(".experts.0.", f".experts.{e}.") in tensors for e in range(256)))
        layer, part = name.split(".experts.0.")
        layer += ".experts."
        stacked = torch.stack([tensors[f"{layer}{e}.{part}"] for e in experts])
        if part in ("gate_proj.weight", "w1.weight"):
            other = "up_proj.weight" if part == "gate_proj.weight" else "w3.weight"
            up = torch.stack([tensors[f"{layer}{e}.{other}"] for e in experts])
            result[f"{layer}gate_up_proj"] = torch.cat((stacked, up), 1)
        elif part in ("down_proj.weight", "w2.weight"):
            result[f"{layer}down_proj"] = stacked
    return result


def published(tensors: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """The inverse of `in_memory`."""
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    result = {}
    for name, tensor in tensors.items():
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, experts, part = name.partition(".experts.")
        if not experts:
            result[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if part == "gate_up_proj" else [matrix]
            for piece, which in zip(parts, names[:2] if part == "gate_up_proj" else names[2:], strict=True):
                result[f"{prefix}.experts.{e}.{which}.weight"] = piece
    return result


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(step))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, 4] = -100
    return tokens, targets


def their_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    ours, theirs, config = pair(MODELS[name])
    tokens, targets = batch()
    expected = theirs(input_ids=tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=LOGITS)
    loss, count = ours(tokens, targets)
    (loss / count).backward()
    their_loss(theirs, tokens, targets).backward()
    mine = {n: torch.zeros_like(b) for n, b in ours.state_dict().items()} | {
        n: p.grad for n, p in ours.named_parameters()
    }
    gradients = in_memory(to_hf_tensors(config, mine))
    for parameter, param in theirs.named_parameters():
        difference = (gradients[parameter] - param.grad).norm() / param.grad.norm()
        assert difference < GRADIENTS, parameter


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt", "mixtral", "qwen3_moe", "deepseek"])
def test_twenty_steps(name: str) -> None:
    ours, theirs, _ = pair(MODELS[name])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5) for model in (ours, theirs)]
    for step in range(20):
        tokens, targets = batch(step % 4)
        loss, count = ours(tokens, targets)
        losses = (loss / count, their_loss(theirs, tokens, targets))
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5), step
        for optimizer, value in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert losses[0].item() < 4.0  # it has learned: ln 96 = 4.56 at the start


@pytest.mark.parametrize("name", MODELS)
def test_names_and_config_come_back(name: str) -> None:
    ours, theirs, config = pair(MODELS[name])
    back = from_hf_tensors(config, published(theirs.state_dict(), config.family))
    for parameter, param in ours.state_dict().items():
        assert torch.equal(back[parameter], param), parameter
    assert config_from_hf(theirs.config.to_dict()) == config


def test_documents_do_not_see_each_other() -> None:
    """Two documents packed into a sample, with a mask and restarted positions, are as each alone."""
    for name in ("llama", "gpt"):
        ours, theirs, _ = pair(MODELS[name])
        tokens, _ = batch()
        segments = torch.tensor([[4] * 12 + [5] * 20] * 2)
        positions = torch.tensor([[*range(12), *range(20)]] * 2)
        packed = ours(tokens, segment_ids=segments, positions=positions)
        alone = [theirs(input_ids=part).logits for part in tokens.split([12, 20], 1)]
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=LOGITS)


def test_parameter_counts_are_transformers() -> None:
    """Every preset up to 8B, and every one with experts, has as many parameters as transformers' class of it."""
    for name in preset_names():
        config = ModelConfig(preset=name)
        if num_parameters(config) > 9e9 and not config.moe.num_experts:
            continue
        values = hf_config(config)
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(values.pop("model_type"), **values)
            )
        assert sum(p.numel() for p in theirs.parameters()) == num_parameters(config), name
