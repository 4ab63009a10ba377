"""The model section of a run's configuration, and what a model refuses before anything is built.

No torch here: `megafp8 check` must answer in a second. A preset or a family fills what the section leaves out;
what is written out wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from megafp8.core.config import config_dataclass
from megafp8.core.errors import ConfigError
from megafp8.models.families import FAMILIES, preset
from megafp8.models.mla_config import MLAConfig
from megafp8.models.moe_config import MoEConfig, check_experts, nearest_divisors, with_widths
from megafp8.nn.precision import PrecisionConfig, backend_problems, dim_problems, plan_gemms, smooth_problems
from megafp8.parallel.context_check import exchange_problems, sequence_problems

_Rate = Annotated[float, Field(ge=0, lt=1, description="share of elements dropped")]


@config_dataclass
class RopeScaling:
    """How rotary frequencies are stretched for sequences beyond those of pretraining; a zero is "not given"."""

    type: Annotated[
        Literal["none", "linear", "dynamic", "llama3", "yarn"],
        Field(description="the rule, as transformers computes it"),
    ] = "none"
    factor: Annotated[float, Field(ge=1, description="how many times longer")] = 1.0
    original_max_length: Annotated[int, Field(ge=0, description="tokens; llama3, yarn")] = 0
    low_freq_factor: Annotated[float, Field(gt=0, description="llama3")] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0, description="llama3")] = 4.0
    beta_fast: Annotated[float, Field(gt=0, description="yarn, rotations")] = 32.0
    beta_slow: Annotated[float, Field(gt=0, description="yarn, rotations")] = 1.0
    attention_factor: Annotated[float, Field(ge=0, description="yarn; 0 = 0.1 ln(factor) + 1")] = 0.0
    mscale: Annotated[float, Field(ge=0, description="yarn as DeepSeek has it; with mscale_all_dim")] = 0.0
    mscale_all_dim: Annotated[float, Field(ge=0, description="yarn as DeepSeek has it: scales the softmax")] = 0.0

    def __post_init__(self) -> None:
        if self.type in ("llama3", "yarn") and not self.original_max_length:
            raise ValueError(f"rope_scaling {self.type} needs original_max_length, e.g. 8192 tokens")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}; usual: 4 and 1"
            )


@config_dataclass
class ModelConfig:
    """A decoder. `preset` or `family` fills what is not given."""

    family: Annotated[
        Literal["llama", "mistral", "qwen2", "qwen3", "gpt", "mixtral", "qwen3_moe", "deepseek"],
        Field(description="defaults, foreign names"),
    ] = "llama"
    num_layers: Annotated[int, Field(gt=0, le=10_000, description="decoder layers")] = 8
    hidden_size: Annotated[int, Field(gt=0, le=1 << 24, description="width of the residual stream")] = 512
    ffn_hidden_size: Annotated[int, Field(gt=0, le=1 << 24, description="width of the MLP")] = 1408
    num_attention_heads: Annotated[int, Field(gt=0, le=1 << 16, description="query heads")] = 8
    num_kv_heads: Annotated[int, Field(ge=0, le=1 << 16, description="key/value heads; 0 = as many as query heads")] = 0
    head_dim: Annotated[int, Field(ge=0, le=1 << 16, description="0 = hidden_size / num_attention_heads")] = 0
    vocab_size: Annotated[int, Field(gt=1, le=1 << 31, description="tokens in the vocabulary")] = 8192
    max_sequence_length: Annotated[int, Field(gt=0, le=1 << 40, description="tokens")] = 2048
    norm: Annotated[Literal["rmsnorm", "layernorm"], Field(description="normalisation")] = "rmsnorm"
    norm_eps: Annotated[float, Field(gt=0, description="added to the variance")] = 1e-5
    activation: Annotated[Literal["swiglu", "gelu"], Field(description="of the MLP; gelu is the tanh form")] = "swiglu"
    position: Annotated[Literal["rope", "learned"], Field(description="how positions enter")] = "rope"
    rope_theta: Annotated[float, Field(gt=0, description="base of the rotary frequencies")] = 10000.0
    rope_scaling: RopeScaling = Field(default_factory=RopeScaling)
    qk_norm: Annotated[bool, Field(description="RMSNorm on every query and key head")] = False
    mla: MLAConfig = Field(default_factory=MLAConfig)
    tied_embeddings: Annotated[bool, Field(description="the output layer uses the embedding's weight")] = False
    attention_bias: Annotated[bool, Field(description="biases in the attention's linears")] = False
    qkv_bias: Annotated[bool, Field(description="biases of queries, keys and values alone (Qwen2)")] = False
    mlp_bias: Annotated[bool, Field(description="biases in the MLP's linears")] = False
    hidden_dropout: _Rate = 0.0
    attention_dropout: _Rate = 0.0
    init_std: Annotated[float, Field(gt=0, description="of weights; out and down get / sqrt(2 num_layers)")] = 0.02
    moe: MoEConfig = Field(default_factory=MoEConfig)
    preset: Annotated[str, Field(description="a named size; what is written beside it wins")] = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        given = dict(values.kwargs or {}) if isinstance(values, ArgsKwargs) else dict(values)
        try:
            start = preset(given["preset"]) if given.get("preset") else {}
        except ConfigError as error:
            raise ValueError(str(error)) from None
        family = FAMILIES.get(str(given.get("family", start.get("family", "llama"))))
        if family is not None and start.get("family", family.name) != family.name:
            raise ValueError(f"preset {given['preset']} is not of family {family.name}; leave family out")
        base = {**(family.defaults if family else {}), **start}
        for section in ("moe", "mla"):  # what is written there is laid over the preset's or the family's section
            if isinstance(given.get(section), Mapping):
                given[section] = {**base.get(section, {}), **given[section]}
        return {**base, **given}

    def __post_init__(self) -> None:
        fill: dict[str, Any] = {}
        if not self.num_kv_heads:
            fill["num_kv_heads"] = self.num_attention_heads
        if self.mla.enabled:
            self._check_mla()
            fill["head_dim"] = self.mla.qk_head_dim
        elif not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; nearest: {_nearest(self.hidden_size, self.num_attention_heads)}, "
                    "or give head_dim"
                )
            fill["head_dim"] = self.hidden_size // self.num_attention_heads
        fill["moe"] = with_widths(self.moe, self.ffn_hidden_size)
        for name, value in fill.items():
            object.__setattr__(self, name, value)
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_kv_heads "
                f"{self.num_kv_heads}; nearest: {nearest_divisors(self.num_attention_heads, self.num_kv_heads)}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rope; nearest: {self.head_dim + 1}")

    def _check_mla(self) -> None:
        """Latent attention has a key and a value for each query head, and rotary positions."""
        wrong = {
            "num_kv_heads": self.num_kv_heads not in (0, self.num_attention_heads),
            "head_dim": self.head_dim not in (0, self.mla.qk_head_dim),
            "position": self.position != "rope",
            "qk_norm": self.qk_norm,
            "attention_bias": self.attention_bias,
            "qkv_bias": self.qkv_bias,
        }
        right = (0, 0, "rope", False, False, False)
        for (name, broken), value in zip(wrong.items(), right, strict=True):
            if broken:
                raise ValueError(f"{name} {getattr(self, name)!r} does not go with mla; nearest: {value!r}")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases, be it alone or with the attention's output."""
        return self.attention_bias or self.qkv_bias

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query/key/value weight."""
        return (self.num_attention_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_mlp_inputs(self) -> int:
        """Matrices from hidden to ffn: gate and up, or up alone."""
        return 2 if self.activation == "swiglu" else 1


def gemm_shapes(config: ModelConfig, *, tp: int = 1) -> dict[str, tuple[int, int, str]]:
    """`{linear's name: (in_features, out_features, which of the two tp splits)}` of the decoder layers, in order.

    `tp` ranks that share a kv head multiply its k and v each: out_features is what all of them make together.

    Split is "out", "in", or "" for a linear that every tp rank has whole. Routers and routed experts are not among
    them (`expert_shapes`); shared experts are.
    """
    attention = _attention_shapes(config, tp)
    dense = _mlp_shapes(config, "mlp", config.ffn_hidden_size)
    shared = _mlp_shapes(config, "mlp.shared", config.moe.shared_ffn_hidden_size)
    return {
        f"layers.{i}.{name}": shape
        for i in range(config.num_layers)
        for name, shape in (attention | (shared if config.moe.is_moe_layer(i) else dense)).items()
    }


def _mlp_shapes(config: ModelConfig, name: str, ffn: int) -> dict[str, tuple[int, int, str]]:
    if not ffn:
        return {}
    first = "gate_up" if config.activation == "swiglu" else "up"
    return {
        f"{name}.{first}": (config.hidden_size, config.num_mlp_inputs * ffn, "out"),
        f"{name}.down": (ffn, config.hidden_size, "in"),
    }


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, int, str]]:
    """`{stacked experts' name: (in_features, out_features, which of the two etp splits)}` of one of the experts.

    A layer has moe.num_experts such matrices, split over ep; a token passes moe.top_k of them.
    """
    kinds = {
        "gate_up": (config.hidden_size, 2 * config.moe.ffn_hidden_size, "out"),
        "down": (config.moe.ffn_hidden_size, config.hidden_size, "in"),
    }
    layers = [i for i in range(config.num_layers) if config.moe.is_moe_layer(i)]
    return {f"layers.{i}.mlp.experts.{name}": shape for i in layers for name, shape in kinds.items()}


def quantizable_shapes(config: ModelConfig, *, tp: int = 1, etp: int = 1) -> dict[str, tuple[int, int, str]]:
    """All GEMMs that FP8 may take, in layer order; experts' with the dims that one of `etp` ranks has, split ""."""
    experts = {
        name: (inputs // etp if side == "in" else inputs, outputs // etp if side == "out" else outputs, "")
        for name, (inputs, outputs, side) in expert_shapes(config).items()
    }
    shapes = gemm_shapes(config, tp=tp) | experts
    return dict(sorted(shapes.items(), key=lambda item: int(item[0].split(".")[1])))


def _attention_shapes(config: ModelConfig, tp: int) -> dict[str, tuple[int, int, str]]:
    hidden, mla = config.hidden_size, config.mla
    if not mla.enabled:
        kv_size = max(config.num_kv_heads, tp) * config.head_dim
        return {
            "attention.qkv": (hidden, config.q_size + 2 * kv_size, "out"),
            "attention.out": (config.q_size, hidden, "in"),
        }
    heads = config.num_attention_heads
    shapes = {"attention.q": (hidden, config.q_size, "out")}
    if mla.q_lora_rank:
        shapes = {
            "attention.q_down": (hidden, mla.q_lora_rank, ""),
            "attention.q_up": (mla.q_lora_rank, config.q_size, "out"),
        }
    return shapes | {
        "attention.kv_down": (hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, ""),
        "attention.kv_up": (mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), "out"),
        "attention.out": (heads * mla.v_head_dim, hidden, "in"),
    }


def check_model(
    config: ModelConfig,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int = 0,
    cp: int = 1,
    cp_exchange: str = "ring",
    sequence_parallel: bool = True,
    sequence_length: int | None = None,
    precision: PrecisionConfig | None = None,
) -> list[str]:
    """Every rule that this model breaks on such a mesh, a line each with the way out; empty if it can be built.

    Args:
        etp: 0 = tp.
    """
    problems = []
    moe = config.moe
    split = {
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
    }
    if all(moe.is_moe_layer(i) for i in range(config.num_layers)):
        del split["ffn_hidden_size"]  # no layer has a dense MLP
    for name, value in split.items():
        if value % tp:
            problems.append(
                f"model.{name} {value} is not divisible by parallel.tp {tp}; nearest: {_nearest(value, tp)}, or tp "
                f"{nearest_divisors(value, tp)}"
            )
    problems += _kv_head_problems(config, tp)
    splits = not problems
    problems += check_experts(
        moe,
        num_layers=config.num_layers,
        activation=config.activation,
        mlp_bias=config.mlp_bias,
        tp=tp,
        ep=ep,
        etp=etp or tp,
    )
    if -(-config.vocab_size // tp) * (tp - 1) >= config.vocab_size:
        problems.append(
            f"model.vocab_size {config.vocab_size} leaves a tp rank without a token at parallel.tp {tp}; "
            f"use at least {tp * tp} tokens"
        )
    if sequence_length is not None:
        split_anyway = moe.num_experts > 0  # the tp ranks share out the tokens that go to experts
        ranks = tp if sequence_parallel or split_anyway else 1
        problems += _length_problems(config, sequence_length)
        problems += sequence_problems(sequence_length, cp=cp, shards=ranks, experts=split_anyway)
    problems += exchange_problems(cp_exchange, cp=cp, tp=tp, num_heads=config.num_attention_heads)
    if precision is not None and splits:  # else the dims of a rank are no numbers
        shapes = quantizable_shapes(config, tp=tp, etp=etp or tp)
        plan, misses = plan_gemms(precision, list(shapes), config.num_layers)
        problems += misses + dim_problems(plan, shapes, tp) + backend_problems(precision)
        problems += smooth_problems(precision, plan, config.activation)
    return problems


def _kv_head_problems(config: ModelConfig, tp: int) -> list[str]:
    """Each rank has whole kv heads, or each kv head lies on the same number of ranks."""
    heads = config.num_kv_heads
    if heads % tp == 0 or tp % heads == 0:
        return []
    choices = [n for n in range(1, config.num_attention_heads + 1) if config.num_attention_heads % n == 0]
    fitting = [n for n in choices if n % tp == 0 or tp % n == 0]
    ranks = [n for n in choices if n % heads == 0 or heads % n == 0]
    return [
        f"model.num_kv_heads {heads} and parallel.tp {tp}: the one must be a multiple of the other; nearest: "
        f"num_kv_heads {_two_nearest(fitting, heads)}, or tp {_two_nearest(ranks, tp)}"
    ]


def _two_nearest(values: list[int], near: int) -> str:
    return " or ".join(str(v) for v in sorted(sorted(values, key=lambda v: abs(v - near))[:2]))


def _length_problems(config: ModelConfig, length: int) -> list[str]:
    if length <= config.max_sequence_length:
        return []
    return [
        f"sequence_length {length} is above model.max_sequence_length {config.max_sequence_length}; "
        "raise the one or lower the other"
    ]


def _nearest(value: int, step: int) -> str:
    below, above = value // step * step, -(-value // step) * step
    return f"{below} or {above}" if below else str(above)
