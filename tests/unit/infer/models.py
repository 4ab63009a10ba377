"""Tiny models saved as a run saves them, for the tests of inference and conversion."""

import torch

from megafp8 import checkpoint
from megafp8.core.config import to_dict
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.infer.weights import stored_name
from megafp8.models import ModelConfig, build
from megafp8.parallel.mesh import Mesh

SIZE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "max_sequence_length": 96,
}


def config_of(family="llama", **fields):
    """A config of two small layers. Weights of std 0.3 give logits that depend on everything."""
    return ModelConfig(family=family, **{**SIZE, "init_std": 0.3, "num_kv_heads": 4, "head_dim": 8, **fields})


def masters_of(config, seed=3):
    """fp32 weights by name; norms and biases are moved off their neutral start, so that losing one shows."""
    model = build(config, dtype=torch.float32, seed=seed)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=random)
    return tensors


def save_model(root, config, *, tensors=None, tokenizer="bytes", step=1, length=64):
    """A checkpoint as a run leaves it; returns its folder."""
    meta = {
        "step": step,
        "config": {"model": to_dict(config), "data": {"tokenizer": str(tokenizer), "sequence_length": length}},
        "tokenizer": identity(load_tokenizer(tokenizer)),
    }
    tensors = masters_of(config) if tensors is None else tensors
    state = {stored_name(name): tensor for name, tensor in tensors.items()}
    state |= {"optimizer.exp_avg." + name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return checkpoint.save(root, step, state, {}, Mesh.single(), meta)
