"""megatron-core's GPT on CPUs, as a program: save a checkpoint and its logits, or load one and say its logits.

    python -m tests.contract.megatron_gpt save | load  FOLDER  SHAPE.json  LOGITS.safetensors

Several ranks (RANK, WORLD_SIZE) split it by tp; they meet in the file SHAPE.json.store.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.megatron_peer import run_on_cpu

PADDED, LENGTH = 256, 64  # 200 tokens and padding


def arguments(shape: dict[str, Any]) -> argparse.Namespace:
    """What Megatron-LM's training script would keep in the checkpoint."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **shape, vocab_size=200, padded_vocab_size=PADDED, max_position_embeddings=LENGTH, norm_epsilon=1e-5,
        group_query_attention=shape["num_query_groups"] != shape["num_attention_heads"], rotary_percent=1.0,
        params_dtype=torch.float32, attention_backend=AttnBackend.auto, rotary_interleaved=False,
    )  # fmt: skip


def build(shape: dict[str, Any]) -> Any:
    """The model by the local spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = dict(shape)
    swiglu, experts = shape.pop("swiglu"), shape.get("num_experts")
    config = TransformerConfig(
        **{name: shape[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                                          "num_query_groups", "normalization", "add_bias_linear", "qk_layernorm")},
        add_qkv_bias=shape["add_qkv_bias"], kv_channels=shape["kv_channels"], gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else _gelu, layernorm_epsilon=1e-5,
        num_moe_experts=experts, moe_router_topk=shape.get("moe_router_topk", 2),
        tensor_model_parallel_size=dist.get_world_size(),
        moe_ffn_hidden_size=shape.get("moe_ffn_hidden_size"), hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, init_method_std=0.2, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=shape["qk_layernorm"], normalization=shape["normalization"]
    )
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=LENGTH, rotary_base=shape["rotary_base"],
        position_embedding_type=shape["position_embedding_type"],
        share_embeddings_and_output_weights=not shape["untie_embeddings_and_output_weights"],
        parallel_output=dist.get_world_size() == 1,  # else logits are gathered
    )  # fmt: skip


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def train(model: Any, tokens: torch.Tensor) -> None:
    """Some steps, so that norms and biases are not what they were."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        run(model, tokens, labels=tokens.roll(-1, 1)).mean().backward()
        optimizer.step()


def run(model: Any, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [B, S, PADDED], or losses."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    out: torch.Tensor = model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels)
    return out


def main(what: str, folder: str, shape_path: str, logits: str) -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    shape = json.loads(Path(shape_path).read_text())
    run_on_cpu()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = dist.FileStore(f"{shape_path}.store", ranks) if ranks > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets it where Transformer Engine is not
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010  mypy knows the attribute from where it is
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.manual_seed(0)
    model = build(shape)
    tokens = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(1))
    if what == "save":
        if ranks == 1:
            train(model, tokens)
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {"args": arguments(shape), "checkpoint_version": 3.0, "iteration": 7}
        state |= model.sharded_state_dict()
        dist_checkpointing.save(state, folder)
        (Path(folder).parent / "latest_checkpointed_iteration.txt").write_text("7")
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # nothing is left of what it began with
            state = dist_checkpointing.load(model.sharded_state_dict(), folder)
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])
        assert state["args"].hidden_size == shape["hidden_size"] and state["checkpoint_version"] == 3.0
    with torch.no_grad():
        found = run(model.eval(), tokens).contiguous()
    if rank == 0:
        save_file({"tokens": tokens, "logits": found}, logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
