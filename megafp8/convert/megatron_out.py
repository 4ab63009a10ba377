"""to_megatron: a checkpoint as a torch_dist one that megatron-core's dist_checkpointing loads, whatever its tp and pp.

torch.distributed.checkpoint's own writer lays the files out, from a plan whose tensors are read when it is their turn.
All layers are one tensor there, each layer a chunk of it, as Megatron writes them.
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megafp8 import __version__
from megafp8.convert.folder import RECORD_NAME, Beside, is_done
from megafp8.convert.megatron_config import arguments_of, padded_rows, refuse
from megafp8.convert.megatron_in import LATEST, MegatronFolder
from megafp8.convert.source import Source, open_source
from megafp8.core.errors import CheckpointError, ConfigError, ResourceError
from megafp8.core.jsonio import resource_error, write_atomic, write_json
from megafp8.infer.weights import DTYPES
from megafp8.models import ModelConfig

RELEASE = "release"
_NAMES = ("bf16", "fp16", "fp32")
# what their layers have -> what ours have
_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "attention_norm.bias",
    "self_attention.linear_qkv.weight": "attention.qkv.weight",
    "self_attention.linear_qkv.bias": "attention.qkv.bias",
    "self_attention.q_layernorm.weight": "attention.q_norm.weight",
    "self_attention.k_layernorm.weight": "attention.k_norm.weight",
    "self_attention.linear_proj.weight": "attention.out.weight",
    "self_attention.linear_proj.bias": "attention.out.bias",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm.weight",
    "mlp.linear_fc1.layer_norm_bias": "mlp_norm.bias",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",  # of layers with experts, by Transformer Engine's spec
    "pre_mlp_layernorm.bias": "mlp_norm.bias",
    "mlp.linear_fc1.weight": "mlp.{first}.weight",
    "mlp.linear_fc1.bias": "mlp.{first}.bias",
    "mlp.linear_fc2.weight": "mlp.down.weight",
    "mlp.linear_fc2.bias": "mlp.down.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "embedding.position_embeddings.weight": "position_embedding.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
    "output_layer.weight": "output.weight",
}
# Linears whose (empty) state of FP8 is asked for when a model is loaded
_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT_STATES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_MORE_STATES = ("self_attention.core_attention",)  # Transformer Engine's; who has none does not ask


def to_megatron(
    source: Path | str,
    out: Path | str,
    *,
    dtype: str = "bf16",
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> None:
    """Write a checkpoint as `<out>/release` in Megatron's torch_dist format, for `--load <out>`.

    An interrupted export starts anew; else as `hf.to_hf`.

    Args:
        dtype: of the weights: "bf16", "fp16", "fp32"; rounded once, from the fp32 masters.
        verify: read the folder back through its own metadata and compare every element.

    Raises:
        CheckpointError: no checkpoint, damaged, or the comparison differs; `out` holds nothing then.
        ConfigError: Megatron's GPT model cannot be this one.
        ResourceError: `out` is in use, no space, no permission.
    """
    out = Path(out)
    if dtype not in _NAMES:
        raise ConfigError(f"--dtype {dtype}: Megatron checkpoints have {', '.join(_NAMES)}")
    if (out / LATEST).exists() and not (out / RELEASE).exists():
        raise ResourceError(f"{out}: holds iterations of a run already; choose another folder")
    with open_source(source) as model:
        refuse(model.config)
        record = {
            "source": str(model.path.absolute()), "source_fingerprint": model.fingerprint, "dtype": dtype,
            "megafp8": __version__, "verified": verify,
        }  # fmt: skip
        if is_done(out / RELEASE, record, ("source_fingerprint", "dtype"), verify=verify):
            say(f"{out}: already made from {model.path}")
        else:
            with Beside(out / RELEASE) as folder:
                for left in (path for path in folder.iterdir() if path.suffix == ".distcp"):
                    left.unlink()  # of an export that was killed
                _write(folder, model, DTYPES[dtype], workers or 1)
                if verify:
                    count = _compare(folder, model, DTYPES[dtype])
                    say(f"read back: {count} tensors equal")
                write_json(folder / RECORD_NAME, record)
            say(f"{out}: written, {'verified' if verify else 'not verified'}; load it with megatron-core")
        write_atomic(out / LATEST, f"{RELEASE}\n".encode())


def _write(folder: Path, model: Source, dtype: torch.dtype, threads: int) -> None:
    items = list(_items(model, dtype))
    args = argparse.Namespace(**arguments_of(model.config), params_dtype=dtype, bf16=dtype == torch.bfloat16,
                              fp16=dtype == torch.float16, ckpt_format="torch_dist")  # fmt: skip
    try:
        writer = dcp.FileSystemWriter(folder, thread_count=threads, overwrite=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # that one process saves is what is meant
            dcp.save({}, storage_writer=writer, planner=_Planner(model, items), no_dist=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
        kinds = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_json(folder / "metadata.json", {**kinds, "common_backend": "torch", "common_backend_version": 1})
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise resource_error(cause, folder) from error
        raise cause from error
    except OSError as error:
        raise resource_error(error, folder) from error


@dataclass(frozen=True)
class _Item:
    """A chunk to be written: of which whole, where in it, and of which tensor of ours ("": an empty state)."""

    name: str
    ours: str
    dtype: torch.dtype
    whole: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def written(self) -> WriteItem:
        """The entry of the plan."""
        if not self.ours:
            return WriteItem(MetadataIndex(self.name), WriteItemType.BYTE_IO)
        offsets = torch.Size(self.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.whole))
        return WriteItem(MetadataIndex(self.name, offsets), WriteItemType.SHARD, tensor_data=data)


def _items(model: Source, dtype: torch.dtype) -> list[_Item]:
    config = model.config
    items = []
    for theirs, ours in _OUTSIDE.items():
        if ours in model.shapes:
            sizes = model.shapes[ours]
            if ours in ("embedding.weight", "output.weight"):
                sizes = (padded_rows(config.vocab_size), *sizes[1:])
            items.append(_Item(theirs, ours, dtype, sizes, (0,) * len(sizes), sizes))
    for layer in range(config.num_layers):
        for theirs, ours in _LAYER.items():
            ours = f"layers.{layer}.{ours.format(first='gate_up' if config.activation == 'swiglu' else 'up')}"
            if ours in model.shapes and (config.moe.num_experts or not theirs.startswith("pre_mlp")):
                sizes = (1, *_their_shape(ours, model.shapes[ours]))
                offsets = (layer, *(0,) * (len(sizes) - 1))
                whole = (config.num_layers, *sizes[1:])
                items.append(_Item(f"decoder.layers.{theirs}", ours, dtype, whole, offsets, sizes))
    return items + [_Item(name, "", dtype) for name in _state_names(config)]


def _their_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Gate and up are one matrix there, gate first; an axis of ours, [..., 2, F, H] (biases [2, F])."""
    axis = 1 if ours.endswith("mlp.experts.gate_up") else 0
    if ".gate_up" not in ours:
        return shape
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _state_names(config: ModelConfig) -> list[str]:
    layers, experts = config.num_layers, config.moe.num_experts
    names = [
        f"decoder.layers.{linear}._extra_state/shard_{i}_{layers}"
        for linear in (*(_STATES[:2] if experts else _STATES), *_MORE_STATES)
        for i in range(layers)
    ]
    return names + [
        f"decoder.layers.{linear}._extra_state/shard_{i}.{e}_{layers}.{experts}"
        for linear in _EXPERT_STATES
        for i in range(layers)
        for e in range(experts)
    ]


class _Planner(dcp.DefaultSavePlanner):
    """A plan of chunks that are read when the writer asks for them."""

    def __init__(self, model: Source, items: list[_Item]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._model = model
        self._items = {(item.name, item.offsets): item for item in items}

    def create_local_plan(self) -> SavePlan:
        """All chunks."""
        self.plan = SavePlan([item.written() for item in self._items.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of one chunk."""
        item = self._items[write_item.index.fqn, tuple(write_item.index.offset or ())]
        if not item.ours:
            state = io.BytesIO()
            torch.save([None], state)  # a list of the ranks' states, as megatron-core writes it
            return state
        tensor = self._model.read(item.ours, item.dtype)
        if item.dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise CheckpointError(f"{item.ours} holds values that fp16 cannot (above 65504, or none): use --dtype bf16")
        missing = torch.Size(item.sizes).numel() - tensor.numel()
        if missing:  # padding of the vocabulary
            tensor = torch.cat((tensor, tensor.new_zeros(missing // tensor.shape[1], tensor.shape[1])))
        return tensor.reshape(item.sizes)


def _compare(folder: Path, model: Source, dtype: torch.dtype) -> int:
    """Read the folder as an import does, by its own arguments; returns how many tensors are equal."""
    with MegatronFolder(folder) as written:
        what = {name: getattr(model.config, name) for name in vars(model.config) if name not in ("family", "preset")}
        found = {name: getattr(written.config, name) for name in what}
        wrong = [f"{n} is {found[n]!r}, not {v!r}" for n, v in what.items() if n not in ("moe",) and found[n] != v]
        wrong += [
            f"moe.{name} differs"
            for name in ("num_experts", "top_k", "normalize_top_k", "scaling_factor", "ffn_hidden_size")
            if getattr(written.config.moe, name) != getattr(model.config.moe, name)
        ]
        for name in model.shapes:
            if not wrong and not torch.equal(written.read(name), model.read(name, dtype).to(dtype)):
                wrong.append(f"{name} differs")
        if wrong:
            raise CheckpointError(f"the written folder does not say what the model says: {'; '.join(wrong[:10])}; "
                                  "please report it (--no-verify writes it anyway)")
    return len(model.shapes)
