"""Models run with one layer in memory at a time: ours, and transformers' of a Hugging Face folder.

Verification compares logits of models that were converted tensor by tensor because they need not fit in memory; so it
must not need that either. Activations of the sample text are kept, weights are read when a layer's turn comes, and go.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafp8.convert.optional import load
from megafp8.core.errors import CheckpointError
from megafp8.infer.weights import place_weight
from megafp8.models import ModelConfig, build
from megafp8.models.decoder import Decoder

Tensor = torch.Tensor
Read = Callable[[str], Tensor]
LAYER = re.compile(r"^(model\.layers|transformer\.h)\.(\d+)\.")


@torch.inference_mode()
def our_logits(config: ModelConfig, read: Read, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, V] in fp64 of our model in `dtype`, of ids [1, S]; see `our_model`."""
    logits: Tensor = our_model(config, read, dtype)(ids)[0]
    return logits.double()


def our_model(config: ModelConfig, read: Read, dtype: torch.dtype) -> Decoder:
    """Our model in `dtype`; what a part of it needs is there while the part runs. For inference only.

    Args:
        read: a tensor by our name, in any dtype; called anew in each run of the model.
    """
    model = build(config, dtype=dtype, device="meta").eval()
    parts: dict[str, nn.Module] = {name: part for name, part in model.named_children() if name != "layers"}
    parts |= {f"layers.{number}": model.layers[number] for number in range(config.num_layers)}
    for prefix, part in parts.items():
        buffers = [(name, buffer) for name, buffer in part.named_buffers() if name.endswith("router.bias")]
        names = {f"{prefix}.{name}": tensor.shape for name, tensor in (*part.named_parameters(), *buffers)}
        if prefix == "output" and config.tied_embeddings:
            names = {"embedding.weight": model.embedding.weight.shape}
        _come_and_go(model, part, names, read, dtype)
    return model


def _come_and_go(
    model: Decoder, part: nn.Module, names: Mapping[str, torch.Size], read: Read, dtype: torch.dtype
) -> None:
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in names.items()}

    def come(*_: Any) -> None:
        for name in names:
            place_weight(model, name, read(name).to(torch.float32 if name.endswith("router.bias") else dtype))

    def go(*_: Any) -> None:
        for name, tensor in empty.items():
            place_weight(model, name, tensor)

    part.register_forward_pre_hook(come)
    part.register_forward_hook(go)


class Folder(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder, read by the safetensors library when asked for."""

    def __init__(self, path: Path) -> None:
        self._opened = ExitStack()
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        names = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else None
        if places is not None:
            names = [path / name for name in sorted(set(places.values()))]
        library = load("safetensors")
        files = {file.name: self._opened.enter_context(library.safe_open(file, framework="pt")) for file in names}
        self._files = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 - no mapping
        if places is not None and {name: files[file] for name, file in places.items()} != self._files:
            raise CheckpointError(f"{index}: does not say which tensors its files hold")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As the library names it ("F8_E4M3"), without reading it."""
        return str(self._files[name].get_slice(name).get_dtype())

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class TheirModel:
    """transformers' model of a configuration over foreign tensors: its own class, names and joins, a layer at a time.

    Each layer is a model of one layer to it, under number 0; what lies outside the layers is there for the first and
    the last one, elsewhere zeros of one row.

    Args:
        config: transformers' configuration of the whole.
    """

    def __init__(
        self, transformers: Any, config: Any, tensors: Mapping[str, Tensor], shape: Callable[[str], tuple[int, ...]]
    ) -> None:
        self.transformers, self.config, self.tensors = transformers, config, tensors
        self.outside = {name: shape(name) for name in tensors if not LAYER.match(name)}
        self.layers: dict[int, list[str]] = {}
        for name in tensors:
            if found := LAYER.match(name):
                self.layers.setdefault(int(found[2]), []).append(name)
        transformers.utils.logging.disable_progress_bar()
        if missing := [number for number in range(config.num_hidden_layers) if number not in self.layers]:
            raise CheckpointError(f"the layers {missing} of {config.num_hidden_layers} are missing")

    @torch.inference_mode()
    def logits(
        self,
        ids: Tensor,
        dtype: torch.dtype,
        within: Callable[[Any, int], AbstractContextManager[Any]] = lambda *_: nullcontext(),
    ) -> Tensor:
        """[S, V] in fp64 of ids [1, S].

        Args:
            within: entered around each layer's run, with the model of one layer and the layer's number.
        """
        hidden, last = None, self.config.num_hidden_layers - 1
        for number in range(last + 1):
            model = self._one(number, dtype)
            given = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
            out: list[Any] = []
            layer = model.base_model.get_submodule("h" if hasattr(model.base_model, "h") else "layers")[0]
            layer.register_forward_hook(lambda *args, out=out: out.append(args[-1]))
            with within(model, number):
                if number == last:
                    found: Tensor = model(**given, use_cache=False).logits[0].double()
                    return found
                model.base_model(**given, use_cache=False)
            hidden = out[0][0] if isinstance(out[0], tuple) else out[0]
        raise AssertionError("no layers")

    def _one(self, number: int, dtype: torch.dtype) -> Any:
        first, last = number == 0, number == self.config.num_hidden_layers - 1
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = 1
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        if not (first or last):
            config.vocab_size = 1
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number]]
        if hasattr(config, "mlp_only_layers"):
            config.mlp_only_layers = [0] if number in (config.mlp_only_layers or ()) else []
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = int(number < config.first_k_dense_replace)
        state = {LAYER.sub(r"\1.0.", name): self.tensors[name] for name in self.layers[number]}
        for name, shape in self.outside.items():
            state[name] = self.tensors[name] if self._is_used(name, first, last) else self._zeros(name, shape, config)
        with torch.device("meta"):
            kind = type(self.transformers.AutoModelForCausalLM.from_config(config))
        try:
            model, info = kind.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
            )
        except Exception as error:  # the package raises of every kind
            line = (str(error).strip().splitlines() or ["no message"])[0]
            what = f"{type(error).__name__}: {line}"
            raise CheckpointError(f"layer {number}: transformers cannot load it: {what}") from error
        wrong = [f"{what[:-5]} {', '.join(sorted(map(str, info[what])))}" for what in
                 ("missing_keys", "unexpected_keys", "mismatched_keys") if info[what]]  # fmt: skip
        if wrong:
            raise CheckpointError(f"layer {number}, as layer 0 of transformers' model: {'; '.join(wrong)}")
        return model.eval()

    def _is_used(self, name: str, first: bool, last: bool) -> bool:
        embeds = name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))
        return (first and embeds) or (last and (not embeds or (self.config.tie_word_embeddings and "wpe" not in name)))

    def _zeros(self, name: str, shape: tuple[int, ...], config: Any) -> Tensor:
        rows = config.vocab_size if shape[0] == self.config.vocab_size and len(shape) == 2 else shape[0]
        return torch.zeros(rows, *shape[1:])
