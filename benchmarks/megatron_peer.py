"""megatron-core's GPT training step on a CPU: a peer to measure against, never imported by the package.

megatron-core assumes CUDA in a handful of calls; `run_on_cpu` points them at the CPU, and nothing else is changed. Its
own schedules, distributed data parallel buckets and optimizer run. Sequence and context parallelism and FP8 do not
work so. Written for megatron-core 0.16.1, the newest for Python 3.11.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


def version() -> str | None:
    """The installed megatron-core, if any."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def run_on_cpu() -> None:
    """Point megatron-core's CUDA calls at the CPU; for a process that does nothing else."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.FloatTensor, cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    for name in ("tensor", "zeros", "ones", "empty", "full", "zeros_like"):
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *args, **kwargs: self
    type_of = tensor_class.type
    # its gradient buffers are found by the name of CUDA's tensor type
    tensor_class.type = lambda self, *args, **kwargs: (
        found.replace("torch.", "torch.cuda.") if isinstance(found := type_of(self, *args, **kwargs), str) else found
    )
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()  # nothing is dropped


def build(shape: dict[str, int], *, tp: int, pp: int, micro_batch: int, micro_batches: int) -> Callable[[], float]:
    """A training step: forward and backward of all micro-batches, gradient reduction, clip, Adam.

    Args:
        shape: layers, hidden, ffn, heads, groups, vocabulary, length.
        micro_batch, micro_batches: of each data-parallel rank.
    """
    run_on_cpu()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(tp, pp)
    config = _config(shape, tp, pp)
    overlap = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(config, overlap, _model(config, shape))
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    settings = OptimizerConfig(optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [model])
    forward_backward = get_forward_backward_func()
    length = shape["length"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape["vocabulary"], (micro_batch, length), generator=generator)
    positions = torch.arange(length).expand(micro_batch, length)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(batches: Any, stage: Any) -> Any:
        next(batches)
        return stage(tokens, positions, hidden, labels=tokens.roll(-1, 1)), _mean

    run = partial(
        forward_backward, forward_step_func=forward, model=model, num_microbatches=micro_batches, seq_length=length,
        micro_batch_size=micro_batch, forward_only=False,
    )  # fmt: skip

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(data_iterator=iter(range(micro_batches)))
        optimizer.step()
        return float(sum(part["loss"] for part in losses)) if losses else float("nan")

    return step


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach()}


def _config(shape: dict[str, int], tp: int, pp: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )


def _model(config: Any, shape: dict[str, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape["vocabulary"],
        max_sequence_length=shape["length"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model.bfloat16()
