"""A reader of native TensorRT-LLM checkpoints that shares nothing with the writer: ranks joined as engines see them.

It goes by config.json alone: which heads, rows and experts a rank has follows from the mapping, shapes are held
against it, what several ranks hold must be equal, and the result bears Hugging Face's names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megafp8.convert.fp8_read import Decoded
from megafp8.convert.optional import load
from megafp8.core.errors import CheckpointError

Tensor = torch.Tensor
_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPTForCausalLM": "gpt2",
}  # fmt: skip


def read_ranks(folder: Path) -> Decoded:
    """Read all ranks, put them together and decode them.

    Raises:
        CheckpointError: files or tensors are missing, too many, of wrong shapes, or ranks disagree; all listed.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    mapping = config["mapping"]
    tp, pp = mapping["tp_size"], mapping["pp_size"]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    wanted = sorted(f"rank{rank}.safetensors" for rank in range(tp * pp))
    if files != wanted or mapping["world_size"] != tp * pp:
        raise CheckpointError(f"{folder}: holds {', '.join(files)}; tp {tp} x pp {pp} asks for {', '.join(wanted)}")
    ranks = [load("safetensors.torch").load_file(folder / f"rank{rank}.safetensors") for rank in range(tp * pp)]
    joined = _Joined(config, ranks)
    joined.join()
    if joined.problems:
        raise CheckpointError(f"{folder}: {'; '.join(joined.problems[:10])}")
    return joined.found


class _Joined:
    def __init__(self, config: dict[str, Any], ranks: list[dict[str, Tensor]]) -> None:
        self.config, self.ranks = config, ranks
        self.tp, self.pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
        self.ep = config["mapping"].get("moe_ep_size", 1)
        self.kind = _TYPES[config["architecture"]]
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["head_size"]
        quantization = config.get("quantization") or {}
        self.fp8 = quantization.get("quant_algo") == "FP8"
        self.fp8_cache = quantization.get("kv_cache_quant_algo") == "FP8"
        self.found = Decoded(_foreign_config(config, self.kind), "FP8" if self.fp8 else "none")
        self.problems: list[str] = []
        self.used = [set[str]() for _ in ranks]

    def join(self) -> None:
        """Fill `found`, or `problems`."""
        try:
            self._outside()
            layers = self.config["num_hidden_layers"]
            cuts = torch.tensor_split(torch.arange(layers), self.pp)
            for stage, span in enumerate(cuts):
                for local, number in enumerate(span.tolist()):
                    self._layer(stage, f"transformer.layers.{local}.", number)
        except KeyError as error:
            self.problems.append(f"{error.args[0]} is missing")
            return
        except (RuntimeError, IndexError) as error:  # shapes that do not go together
            self.problems.append(f"ranks do not go together: {str(error).splitlines()[0]}")
            return
        for rank, tensors in enumerate(self.ranks):
            for name in sorted(set(tensors) - self.used[rank]):
                self.problems.append(f"rank {rank}: {name} has no place in this model")

    def _take(self, stage: int, name: str, shape: tuple[int, ...] | None = None) -> list[Tensor]:
        """A tensor of every tp rank of a stage."""
        parts = []
        for rank in range(stage * self.tp, (stage + 1) * self.tp):
            if name not in self.ranks[rank]:
                raise KeyError(f"rank {rank}: {name}")
            self.used[rank].add(name)
            parts.append(self.ranks[rank][name])
            if shape is not None and tuple(parts[-1].shape) != shape:
                self.problems.append(f"rank {rank}: {name} has shape {tuple(parts[-1].shape)}, not {shape}")
        return parts

    def _same(self, stage: int, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        parts = self._take(stage, name, shape)
        if not all(torch.equal(part, parts[0]) for part in parts[1:]):
            self.problems.append(f"{name} differs between the ranks of stage {stage}")
        return parts[0]

    def _outside(self) -> None:
        vocab, hidden, last = self.config["vocab_size"], self.config["hidden_size"], self.pp - 1
        gpt = self.kind == "gpt2"
        names = ("transformer.wte", "transformer.ln_f") if gpt else ("model.embed_tokens", "model.norm")
        embedding = self._same(0, "transformer.vocab_embedding.weight", (vocab, hidden))
        rows = -(-vocab // self.tp)
        head = torch.cat(self._take(last, "lm_head.weight", (rows, hidden)))
        if bool(head[vocab:].any()):
            self.problems.append("lm_head.weight: rows behind the vocabulary are not zero")
        self._keep(f"{names[0]}.weight", embedding)
        self.found.config["tie_word_embeddings"] = tied = torch.equal(head[:vocab], embedding)
        if not tied:
            self._keep("lm_head.weight", head[:vocab])
        for ending in ("weight", "bias") if gpt else ("weight",):
            self._keep(f"{names[1]}.{ending}", self._same(last, f"transformer.ln_f.{ending}", (hidden,)))
        if gpt:
            positions = (self.config["max_position_embeddings"], hidden)
            self._keep(
                "transformer.wpe.weight", self._same(0, "transformer.position_embedding.weight", positions)
            )

    def _layer(self, stage: int, local: str, number: int) -> None:
        gpt, hidden = self.kind == "gpt2", self.config["hidden_size"]
        stem = f"transformer.h.{number}." if gpt else f"model.layers.{number}."
        norms = ("ln_1", "ln_2") if gpt else ("input_layernorm", "post_attention_layernorm")
        for ending in ("weight", "bias") if gpt else ("weight",):
            for theirs, name in zip(norms, ("input_layernorm", "post_layernorm"), strict=True):
                self._keep(f"{stem}{theirs}.{ending}", self._same(stage, f"{local}{name}.{ending}", (hidden,)))
        if self.kind.startswith("qwen3"):
            for x in "qk":
                norm = self._same(stage, f"{local}attention.{x}_layernorm.weight", (self.dim,))
                self._keep(f"{stem}self_attn.{x}_norm.weight", norm)
        self._attention(stage, local, stem)
        if "moe" in self.config:
            self._experts(stage, local, stem)
        else:
            self._mlp(stage, local, stem)

    def _attention(self, stage: int, local: str, stem: str) -> None:
        name, hidden = f"{local}attention.qkv", self.config["hidden_size"]
        mine, shared = self.heads // self.tp, max(1, self.kv // self.tp)
        rows = (mine + 2 * shared) * self.dim
        gpt = self.kind == "gpt2"
        bias = gpt or self.config.get("attn_bias", False)
        for ending, shape in (("weight", (rows, hidden)), *((("bias", (rows,)),) if bias else ())):
            parts = self._take(stage, f"{name}.{ending}", shape)
            sizes = [mine * self.dim, shared * self.dim, shared * self.dim]
            queries, keys, values = zip(*(part.split(sizes) for part in parts), strict=True)
            whole = [torch.cat(queries), *(self._kv(name, heads) for heads in (keys, values))]
            scales = self._scales(stage, name) if ending == "weight" else None
            if gpt:
                self._put(f"{stem}attn.c_attn", ending, torch.cat(whole), scales, conv=True)
            else:
                for x, tensor in zip("qkv", whole, strict=True):
                    self._put(f"{stem}self_attn.{x}_proj", ending, tensor, scales)
        dense = f"{local}attention.dense"
        self._row(stage, dense, f"{stem}{'attn.c_proj' if gpt else 'self_attn.o_proj'}", gpt or
                  (bias and self.kind in ("llama", "mistral")), self.heads * self.dim)  # fmt: skip
        if self.fp8_cache:
            scale = float(self._same(stage, f"{local}attention.kv_cache_scaling_factor", (1,)))
            self.found.kv_scales[f"{stem}{'attn' if gpt else 'self_attn'}"] = scale, scale

    def _kv(self, name: str, parts: tuple[Tensor, ...]) -> Tensor:
        """kv heads of all ranks; where consecutive ranks have the same head, once."""
        if self.kv >= self.tp:
            return torch.cat(parts)
        copies = self.tp // self.kv
        for first in range(0, self.tp, copies):
            if not all(torch.equal(parts[first], part) for part in parts[first + 1 : first + copies]):
                self.problems.append(f"{name}: ranks {first} to {first + copies - 1} do not have the same kv head")
        return torch.cat(parts[::copies])

    def _row(self, stage: int, name: str, theirs: str, bias: bool, width: int) -> None:
        parts = self._take(stage, f"{name}.weight", (self.config["hidden_size"], width // self.tp))
        self._put(theirs, "weight", torch.cat(parts, 1), self._scales(stage, name), conv=self.kind == "gpt2")
        if bias:
            self._put(theirs, "bias", self._same(stage, f"{name}.bias", (self.config["hidden_size"],)), None)

    def _mlp(self, stage: int, local: str, stem: str) -> None:
        gpt, width, hidden = self.kind == "gpt2", self.config["intermediate_size"], self.config["hidden_size"]
        names = {"fc": "mlp.c_fc"} if gpt else {"fc": "mlp.gate_proj", "gate": "mlp.up_proj"}
        bias = gpt or self.config.get("mlp_bias", False)
        for ours, theirs in names.items():
            name = f"{local}mlp.{ours}"
            parts = self._take(stage, f"{name}.weight", (width // self.tp, hidden))
            self._put(f"{stem}{theirs}", "weight", torch.cat(parts), self._scales(stage, name), conv=gpt)
            if bias:
                self._put(f"{stem}{theirs}", "bias", torch.cat(self._take(stage, f"{name}.bias")), None)
        self._row(stage, f"{local}mlp.proj", f"{stem}{'mlp.c_proj' if gpt else 'mlp.down_proj'}", bias, width)

    def _experts(self, stage: int, local: str, stem: str) -> None:
        mixtral = self.kind == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        block = f"{stem}{'block_sparse_moe' if mixtral else 'mlp'}."
        count, hidden = self.config["moe"]["num_experts"], self.config["hidden_size"]
        router = self._same(stage, f"{local}mlp.router.weight", (count, hidden))
        if router.dtype != torch.float32:
            self.problems.append(f"{local}mlp.router.weight is {router.dtype}, not fp32")
        self._keep(f"{block}gate.weight", router)
        each, shares = count // self.ep, self.tp // self.ep
        width = self.config["intermediate_size"] // shares
        fc = self._take(stage, f"{local}mlp.fc.weight", (each, 2 * width, hidden))
        proj = self._take(stage, f"{local}mlp.proj.weight", (each, hidden, width))
        scales = {part: self._expert_scales(stage, f"{local}mlp.{part}", each) for part in ("fc", "proj")}
        for expert in range(count):
            group, place = divmod(expert, each)
            holders = [share * self.ep + group for share in range(shares)]  # tp rank = moe_tp rank * ep + ep rank
            up, gate = zip(*(fc[rank][place].split(width) for rank in holders), strict=True)
            down = torch.cat([proj[rank][place] for rank in holders], 1)
            whole = torch.cat(gate), torch.cat(up), down
            for name, tensor, part in zip(names, whole, ("fc", "fc", "proj"), strict=True):
                pair = scales[part]
                own = None if pair is None else (pair[0][expert], pair[1])
                self._put(f"{block}experts.{expert}.{name}", "weight", tensor, own)

    def _scales(self, stage: int, name: str) -> tuple[Tensor, Tensor] | None:
        """Weight and activation scale of a linear, the same on all ranks."""
        if not self.fp8:
            return None
        endings = ("weights_scaling_factor", "activation_scaling_factor")
        weight, activation = (self._same(stage, f"{name}.{ending}", (1,)) for ending in endings)
        self._sound(name, weight, activation)
        return weight, activation

    def _expert_scales(self, stage: int, name: str, each: int) -> tuple[Tensor, Tensor] | None:
        if not self.fp8:
            return None
        parts = self._take(stage, f"{name}.weights_scaling_factor", (each, 1))
        for rank, part in enumerate(parts):
            if not torch.equal(part, parts[rank % self.ep]):
                self.problems.append(f"{name}: ranks that share experts have other scales")
        activation = self._same(stage, f"{name}.activation_scaling_factor", (1,))
        weight = torch.cat(parts[: self.ep])
        self._sound(name, weight, activation)
        return weight, activation

    def _sound(self, name: str, *scales: Tensor) -> None:
        if not all(bool((scale.isfinite() & (scale > 0)).all()) for scale in scales):
            self.problems.append(f"{name}: a scale is not finite and positive")

    def _keep(self, name: str, tensor: Tensor, scale: Tensor | None = None) -> None:
        """`tensor` as it is, or codes, which are decoded when asked for."""
        self.found.tensors.made[name] = lambda: tensor if scale is None else tensor.float() * scale
        self.found.shapes[name] = tuple(tensor.shape)

    def _put(
        self, module: str, ending: str, tensor: Tensor, scales: tuple[Tensor, Tensor] | None, *, conv: bool = False
    ) -> None:
        """Keep a tensor, decoded; GPT-2's class has its unquantized weights as [in, out]."""
        name = f"{module}.{ending}"
        if scales is None:
            self._keep(name, tensor.T.contiguous() if conv and ending == "weight" else tensor)
            return
        if tensor.dtype != torch.float8_e4m3fn:
            self.problems.append(f"{name} is {tensor.dtype}, the configuration says FP8")
        self._keep(name, tensor, scales[0])
        self.found.steps.made[name] = lambda: scales[0]
        self.found.input_scales[module] = float(scales[1])


def _foreign_config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Hugging Face's configuration of what a native one describes."""
    names = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads", "max_position_embeddings": "max_position_embeddings",
    }  # fmt: skip
    if kind == "gpt2":
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config["vocab_size"],
            "n_embd": config["hidden_size"], "n_layer": config["num_hidden_layers"],
            "n_head": config["num_attention_heads"], "n_positions": config["max_position_embeddings"],
            "n_inner": config["intermediate_size"], "layer_norm_epsilon": config["norm_epsilon"],
            "activation_function": config["hidden_act"], "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
    made = {theirs: config[ours] for ours, theirs in names.items()}
    made |= {
        "model_type": kind, "architectures": [config["architecture"]], "hidden_act": "silu",
        "num_key_value_heads": config["num_key_value_heads"], "head_dim": config["head_size"],
        "rms_norm_eps": config["norm_epsilon"], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "intermediate_size": config["intermediate_size"], "sliding_window": None,
    }  # fmt: skip
    if kind == "llama":
        made |= {"attention_bias": config["attn_bias"], "mlp_bias": config["mlp_bias"]}
    if kind.startswith("qwen"):
        made |= {"attention_bias": config["attn_bias"], "use_sliding_window": False}
    if "moe" in config:
        moe = config["moe"]
        made |= {"num_local_experts": moe["num_experts"], "num_experts": moe["num_experts"],
                 "num_experts_per_tok": moe["top_k"], "norm_topk_prob": moe["normalization_mode"] == 1,
                 "moe_intermediate_size": config["intermediate_size"]}  # fmt: skip
    rope = {key: value for key, value in (config["rotary_scaling"] or {}).items() if key != "type"}
    rope.setdefault("rope_type", "default")
    made["rope_parameters"] = rope | {"rope_theta": config["rotary_base"]}
    return made
