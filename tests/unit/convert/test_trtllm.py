"""Native TensorRT-LLM checkpoints: every family and target passes its own verification, which sees faults."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafp8.convert.fp8_verify import verify_decoded
from megafp8.convert.scales import Calibration
from megafp8.convert.source import open_source
from megafp8.convert.trtllm import to_trtllm
from megafp8.convert.trtllm_config import Target
from megafp8.convert.trtllm_read import read_ranks
from megafp8.core.errors import CheckpointError, ConfigError
from tests.unit.infer.models import config_of, save_model

pytest.importorskip("transformers")
LLAMA3 = {"type": "llama3", "factor": 4.0, "original_max_length": 24}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
WIDE = {"num_attention_heads": 8, "head_dim": 8, "num_kv_heads": 2, "ffn_hidden_size": 64, "vocab_size": 261}
MODELS = {
    "llama": config_of(**WIDE, rope_theta=500.0),
    "llama 3, biases": config_of(**WIDE, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True),
    "tied": config_of(**WIDE, tied_embeddings=True),
    "mistral": config_of("mistral", **WIDE),
    "qwen2": config_of("qwen2", **WIDE),
    "qwen3": config_of("qwen3", **WIDE),
    "gpt": config_of("gpt", **{**WIDE, "num_attention_heads": 4, "num_kv_heads": 4}),
    "mixtral": config_of("mixtral", **WIDE, moe=EXPERTS),
    "qwen3_moe": config_of("qwen3_moe", **WIDE, moe=EXPERTS),
}
TARGETS = [Target(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2)]
QUICK = [("llama", Target(4, 2), True), ("llama 3, biases", Target(4), True), ("tied", Target(2, 2), False),
         ("mistral", Target(1), False), ("qwen2", Target(8), True), ("qwen3", Target(2), False),
         ("gpt", Target(2, 2), True), ("mixtral", Target(4, 1, 2), True), ("mixtral", Target(2, 2), False)]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("Every good scale has seen some text: 12 words, größere Wörter, 日本語.\n" * 40)
    return path


def convert(tmp_path, name, target, corpus=None, *, cache=False, **more):
    source = save_model(tmp_path / "run" / "checkpoints", MODELS[name])
    calibration = Calibration(str(corpus), 8) if corpus else None
    to_trtllm(source, tmp_path / "out", target, fp8=corpus is not None, kv_cache=cache, calibration=calibration, **more)
    return source, tmp_path / "out"


@pytest.mark.parametrize(("name", "target", "fp8"), QUICK, ids=str)
def test_round_trip(tmp_path, corpus, name, target, fp8):
    _, out = convert(tmp_path, name, target, corpus if fp8 else None, cache=fp8)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 261 and len(list(out.glob("rank*"))) == target.tp * target.pp
    head = load_file(out / f"rank{target.tp * target.pp - 1}.safetensors")["lm_head.weight"]
    assert head.shape[0] == -(-261 // target.tp)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_target(tmp_path, corpus, name, target):
    if MODELS[name].num_attention_heads % target.tp:
        with pytest.raises(ConfigError, match="does not divide"):
            convert(tmp_path, name, target)
        return
    for kind in ("bf16", "fp8", "fp8, kv"):
        convert(tmp_path / kind, name, target, None if kind == "bf16" else corpus, cache="kv" in kind)


def test_any_target_says_the_same(tmp_path, corpus):
    targets = TARGETS[::2] + TARGETS[7:]
    made = [convert(tmp_path / str(n), "llama", t, corpus, verify=False) for n, t in enumerate(targets)]
    found = [read_ranks(out) for _, out in made]
    for other in found[1:]:
        assert other.tensors.keys() == found[0].tensors.keys()
        assert all(torch.equal(other.tensors[n], found[0].tensors[n]) for n in other.tensors)
        assert other.input_scales == found[0].input_scales


L0 = "transformer.layers.0."
FAULTS = {
    "a rank's shard swapped": None,
    "gate and up swapped": lambda r: r.update(
        {f"{L0}mlp.fc.weight": r[f"{L0}mlp.gate.weight"], f"{L0}mlp.gate.weight": r[f"{L0}mlp.fc.weight"]}
    ),
    "keys and values swapped": lambda r: r.update(
        {f"{L0}attention.qkv.weight": r[f"{L0}attention.qkv.weight"].view(torch.uint8)[
            torch.cat((torch.arange(32), torch.arange(40, 48), torch.arange(32, 40)))].view(torch.float8_e4m3fn)}
    ),
    "a scale inverted": lambda r: r.update(
        {f"{L0}mlp.proj.weights_scaling_factor": 1 / r[f"{L0}mlp.proj.weights_scaling_factor"]}
    ),
    "an activation scale missing": lambda r: r.pop(f"{L0}mlp.fc.activation_scaling_factor"),
    "a cache scale missing": lambda r: r.pop(f"{L0}attention.kv_cache_scaling_factor"),
    "a tensor too many": lambda r: r.update({f"{L0}extra.weight": torch.zeros(1)}),
    "padding left in the embedding": lambda r: r.update(
        {"transformer.vocab_embedding.weight": torch.cat((r["transformer.vocab_embedding.weight"], torch.zeros(3, 32)))}
    ),
    "rows behind the vocabulary": lambda r: r["lm_head.weight"].fill_(1.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def converted(tmp_path_factory, corpus):
    return convert(tmp_path_factory.mktemp("converted"), "llama", Target(2), corpus, cache=True)


def verify(source, folder):
    with open_source(source) as model:
        return verify_decoded(read_ranks(folder), model, model.tokenizer(), lambda _: None)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(tmp_path, converted, fault):
    source, out = converted
    folder = shutil.copytree(out, tmp_path / "out")
    a, b = (folder / f"rank{rank}.safetensors" for rank in (0, 1))
    if FAULTS[fault] is None:
        a.rename(folder / "x"), b.rename(a), (folder / "x").rename(b)
    else:
        stored = load_file(b)
        FAULTS[fault](stored)
        save_file({n: t.contiguous() for n, t in stored.items()}, b)
    with pytest.raises(CheckpointError):
        verify(source, folder)


@pytest.mark.parametrize("change", [
    {"rotary_base": 10000.0}, {"norm_epsilon": 1e-2}, {"num_key_value_heads": 8}, {"vocab_size": 262},
    {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}},
], ids=str)  # fmt: skip
def test_configurations_that_do_not_fit(tmp_path, converted, change):
    source, out = converted
    folder = shutil.copytree(out, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError):
        verify(source, folder)


def test_what_cannot_be_is_refused_all_at_once(tmp_path):
    with pytest.raises(ConfigError, match="--tp 3 does not divide 8 attention heads; nearest: 2") as error:
        convert(tmp_path, "llama", Target(3, 5))
    assert "--pp 5: the model has 2 layers" in str(error.value) and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="releases before 1.0 have no such class"):
        convert(tmp_path / "a", "qwen3", Target(compat="0.13"))
    with pytest.raises(ConfigError, match="no scale is made up"):
        source = save_model(tmp_path / "b", MODELS["llama"])
        to_trtllm(source, tmp_path / "b-out", Target(), fp8=True)
