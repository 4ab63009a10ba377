"""megatron-core's GPT on CPUs, as a program: save a checkpoint and its logits, or load one and say its logits.

    python -m tests.contract.megatron_gpt save | load  FOLDER  SHAPE.json  LOGITS.safetensors

Several ranks (RANK, WORLD_SIZE) split it by TP and PP, what is left is data-parallel; they meet in the file
SHAPE.json.store. With TRAINER=1 it is trained and saved as Megatron-LM's training script does it: with the distributed
optimizer, whose state lies beside the model, the schedule, random states and arguments of all kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.megatron_peer import run_on_cpu

PADDED, LENGTH = 256, 64  # 200 tokens and padding
TP, PP, RANK, RANKS = (
    int(os.environ.get(name, default)) for name, default in (("TP", 1), ("PP", 1), ("RANK", 0), ("WORLD_SIZE", 1))
)
TRAINER = "TRAINER" in os.environ


def arguments(shape: dict[str, Any]) -> argparse.Namespace:
    """What Megatron-LM's training script would keep in the checkpoint."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **shape, vocab_size=200, padded_vocab_size=PADDED, max_position_embeddings=LENGTH, norm_epsilon=1e-5,
        iteration=7, tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP, rank=0, world_size=RANKS,
        ckpt_format="torch_dist", use_distributed_optimizer=True, lr=1e-3, data_path=["1.0", "/data/a_text_document"],
        tokenizer_type="SentencePieceTokenizer", exit_signal=signal.SIGTERM, recompute_modules=None, save="/ckpt",
        eval_iters=torch.tensor(10), fp8=None, moe_router_load_balancing_type="aux_loss", start_weight_decay=0.01,
        group_query_attention=shape["num_query_groups"] != shape["num_attention_heads"], rotary_percent=1.0,
        params_dtype=torch.float32, attention_backend=AttnBackend.auto, rotary_interleaved=False,
    )  # fmt: skip


def build(shape: dict[str, Any]) -> Any:
    """The model by the local spec."""
    from megatron.core import parallel_state
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
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP, pipeline_dtype=torch.float32,
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
        parallel_output=TP == 1 or TRAINER,  # else logits are gathered
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
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
    """Logits [B, S, PADDED], or losses; of a pipeline's last stage, what the others give is handed on."""
    from megatron.core import parallel_state as ps

    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if not ps.is_pipeline_first_stage():
        hidden = torch.empty(length, len(tokens), model.config.hidden_size)
        dist.recv(hidden, ps.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out: torch.Tensor = model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels)
    if not ps.is_pipeline_last_stage():
        dist.send(out.contiguous(), ps.get_pipeline_model_parallel_next_rank())
    return out


def train_and_save(model: Any, tokens: torch.Tensor, folder: str, args: argparse.Namespace) -> None:
    """Two steps and a checkpoint as Megatron-LM's training script makes them."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import get_rerun_state_machine, initialize_rerun_state_machine

    initialize_rerun_state_machine()
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, reduction, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.05, min_lr=0.0, use_distributed_optimizer=True, params_dtype=torch.float32
        ),
        [wrapped],
    )
    schedule = OptimizerParamScheduler(optimizer, 0.0, 0.05, 0.0, 1, 10, "cosine", 0.01, 0.01, 10, "constant")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)

    def forward(batches: Any, stage: Any) -> Any:
        next(batches)
        return stage(tokens, positions, mask, labels=tokens.roll(-1, 1)), lambda x: (x.float().mean(), {})

    for _ in range(2):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, model=wrapped, num_microbatches=2, seq_length=32, micro_batch_size=2,
            data_iterator=iter(range(2)), forward_only=False,
        )  # fmt: skip
        optimizer.step()
        schedule.step(increment=1)
    metadata = {"distrib_optim_sharding_type": os.environ["TRAINER"], "chained_optim_avoid_prefix": True}
    weights = model.sharded_state_dict(metadata=metadata)
    states = [{"random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state(),
               "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}]  # fmt: skip
    state = {
        "args": args, "checkpoint_version": 3.0, "iteration": 7, "num_floating_point_operations_so_far": 1e12,
        "model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=False, metadata=metadata),
        "opt_param_scheduler": schedule.state_dict(),
        "rng_state": ShardedObject("rng_state", states, (RANKS,), (RANK,), replica_id=0),
        "rerun_state_machine": get_rerun_state_machine().state_dict(None, "torch_dist", force=True),
    }  # fmt: skip
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"))
    dist_checkpointing.save(state, folder, strategy, content_metadata=metadata)


def main(what: str, folder: str, shape_path: str, logits: str) -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    shape = json.loads(Path(shape_path).read_text())
    run_on_cpu()
    rank, ranks = RANK, RANKS
    store = dist.FileStore(f"{shape_path}.store", ranks) if ranks > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets it where Transformer Engine is not
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010  mypy knows the attribute from where it is
    parallel_state.initialize_model_parallel(TP, PP)
    torch.manual_seed(0)
    model = build(shape)
    tokens = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(1))
    if what == "save":
        Path(folder).mkdir(parents=True, exist_ok=True)
        if TRAINER:
            train_and_save(model, tokens, folder, arguments(shape))
        else:
            if ranks == 1:
                train(model, tokens)
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
    if TP > 1 and TRAINER and parallel_state.is_pipeline_last_stage():  # the loss wants them split
        found = gather_from_tensor_model_parallel_region(found)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_data_parallel_rank() == 0:
        save_file({"tokens": tokens, "logits": found}, logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
