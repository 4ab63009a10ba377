"""Quantized folders: every family and scheme passes its own verification, which sees each planted fault."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafp8.convert import fp8_weights
from megafp8.convert.folder import RECORD_NAME
from megafp8.convert.fp8_folder import SCHEMES, Options, to_quantized
from megafp8.convert.fp8_inputs import Inputs
from megafp8.convert.fp8_read import read_quantized
from megafp8.convert.fp8_verify import decoded_model, verify_quantized
from megafp8.convert.scales import Calibration
from megafp8.convert.source import open_source
from megafp8.convert.tensor_files import bytes_of
from megafp8.convert.verify_hf import sample_ids
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.fp8.formats import E4M3, cast
from tests.unit.infer.models import config_of, save_model

pytest.importorskip("transformers")
TEXT = "Every good scale has seen some text: 12 words, größere Wörter, 日本語, and\ttabs.\n" * 40
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
SIGMOID = EXPERTS | {
    "num_shared_experts": 1, "first_dense_layers": 1, "score": "sigmoid", "normalize_top_k": True, "num_groups": 2,
    "top_k_groups": 1, "scaling_factor": 2.5, "bias_update_rate": 0.001,
}  # fmt: skip
MODELS = {
    "llama": config_of(num_kv_heads=2),
    "tied": config_of(num_kv_heads=2, tied_embeddings=True),
    "gpt": config_of(family="gpt"),
    "qwen2": config_of(family="qwen2", num_kv_heads=2),
    "qwen3": config_of(family="qwen3", num_kv_heads=2),
    "mixtral": config_of(family="mixtral", num_kv_heads=2, moe=EXPERTS),
    "mistral": config_of(family="mistral", num_kv_heads=2),
    "qwen3_moe": config_of(family="qwen3_moe", num_kv_heads=2, moe=EXPERTS),
    "deepseek": config_of(family="deepseek", head_dim=0, mla=LATENT, moe=SIGMOID),
}
QUICK = ("llama", "tied", "gpt", "qwen2", "qwen3", "mixtral")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT)
    return path


def convert(tmp_path, config, corpus, layout="modelopt", scheme="", kv=False, **more):
    source = save_model(tmp_path / "run" / "checkpoints", config)
    said: list[str] = []
    options = Options(layout, scheme, kv, Calibration(str(corpus), 16))
    to_quantized(source, tmp_path / "out", options, say=said.append, **more)
    return source, tmp_path / "out", said


@pytest.mark.parametrize("name", QUICK)
def test_fp8_of_every_family(tmp_path, corpus, name):
    _, out, said = convert(tmp_path, MODELS[name], corpus, kv=True)
    record = json.loads((out / RECORD_NAME).read_text())
    config, legacy = (json.loads((out / n).read_text()) for n in ("config.json", "hf_quant_config.json"))
    assert record["verified"] and set(record["comparisons"]) > {"weights", "weights, FP8 cache"}
    assert config["quantization_config"]["ignore"] == legacy["quantization"]["exclude_modules"]
    assert "lm_head" in legacy["quantization"]["exclude_modules"]
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert any(line.startswith("layers.0.mlp") for line in said)


@pytest.mark.parametrize(
    ("layout", "scheme"), [("modelopt", "fp8-block"), ("modelopt", "nvfp4"), ("compressed-tensors", "")]
)
def test_other_schemes(tmp_path, corpus, layout, scheme):
    _, out, _ = convert(tmp_path, MODELS["llama"], corpus, layout, scheme)
    decoded = read_quantized(out)
    assert len(decoded.steps) == 2 * 7
    stored = load_file(out / "model.safetensors")
    if scheme == "fp8-block":
        assert stored["model.layers.0.self_attn.q_proj.weight_scale"].shape == (1, 1, 1, 1)
    if scheme == "nvfp4":
        assert stored["model.layers.0.mlp.down_proj.weight"].shape == (32, 24)
        assert stored["model.layers.0.mlp.down_proj.weight_scale"].shape == (32, 3)


def test_fused_weights_share_a_scale(tmp_path, corpus):
    _, out, _ = convert(tmp_path, MODELS["llama"], corpus)
    stored = load_file(out / "model.safetensors")
    layer = "model.layers.1."
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for ending in ("weight_scale", "input_scale"):
            assert len({float(stored[f"{layer}{name}.{ending}"]) for name in names}) == 1
    largest = max(float(stored[f"{layer}self_attn.{x}_proj.weight"].float().abs().max()) for x in "qkv")
    assert largest == 448  # the largest of the fused group reaches the format's end


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_scheme_of_every_family(tmp_path, corpus, name):
    for layout, schemes in SCHEMES.items():
        for scheme in schemes if (name, layout) != ("gpt", "compressed-tensors") else ():
            cache = layout == "modelopt" and name != "deepseek"  # which has no scales for latents
            convert(tmp_path / scheme, MODELS[name], corpus, layout, scheme, cache)


def test_latent_attention(tmp_path, corpus):
    """Its two down-projections see the same input, and servers compute them as one."""
    _, out, _ = convert(tmp_path, MODELS["deepseek"], corpus)
    stored = load_file(out / "model.safetensors")
    layer = "model.layers.1.self_attn."
    names = ("q_a_proj", "kv_a_proj_with_mqa")
    for ending in ("weight_scale", "input_scale"):
        assert len({float(stored[f"{layer}{name}.{ending}"]) for name in names}) == 1
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    with pytest.raises(ConfigError, match="latent attention keeps latents"):
        convert(tmp_path / "kv", MODELS["deepseek"], corpus, kv=True)


def test_no_reader_takes_gpt_as_compressed_tensors(tmp_path, corpus):
    with pytest.raises(ConfigError, match="Conv1D.*nearest: --to modelopt"):
        convert(tmp_path, MODELS["gpt"], corpus, "compressed-tensors")


def test_codes_are_those_of_the_definition():
    weight = torch.randn(300, 160)
    for scheme, amax in (("fp8", weight.abs().max()), ("fp8-channel", weight.abs().amax(1, keepdim=True))):
        (codes, inverse, *_), note = fp8_weights.quantize_fused(scheme, [weight], 2.0)
        assert bytes(bytes_of(codes)) == bytes(bytes_of(cast(weight * (448 / amax), E4M3)))
        error = codes.float() * inverse - weight
        assert note["mse"] == pytest.approx(float(error.square().mean()), rel=1e-4)
    weight[3, 5] = float("nan")  # no amax sees it
    assert fp8_weights.quantize_fused("fp8", [weight], 2.0)[1]["weight_amax"] == float(weight.nan_to_num().abs().max())


@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block", "nvfp4"])
def test_chunks_change_nothing(monkeypatch, scheme):
    weights = [torch.randn(300, 160), torch.randn(40, 160) * 3]
    whole, note = fp8_weights.quantize_fused(scheme, weights, 2.0)
    monkeypatch.setattr(fp8_weights, "_CHUNK", 1)  # 128 rows at a time
    chunked, other = fp8_weights.quantize_fused(scheme, weights, 2.0)
    assert all(bytes(bytes_of(a)) == bytes(bytes_of(b)) for a, b in zip(whole, chunked, strict=True))
    assert other == pytest.approx(note, rel=1e-4)  # sums of squares, in fp32 within a chunk
    shapes = [part.shape for weight in weights for part in fp8_weights.parts(scheme, *weight.shape)]
    assert [tuple(tensor.shape) for tensor in whole] == shapes


def swapped(a, b):
    def change(stored):
        stored[a], stored[b] = stored[b], stored[a]

    return change


def scaled(ending, factor):
    def change(stored):
        for name in stored:
            if name.endswith(ending):
                stored[name] = factor(stored[name])

    return change


K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
GATE, UP = (f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up"))
FAULTS = {
    "keys and values swapped": swapped(K, V),
    "gate and up swapped": swapped(GATE, UP),
    "weight scales inverted": scaled("weight_scale", lambda s: 1 / s),
    "one input scale too small": scaled("layers.1.mlp.down_proj.input_scale", lambda s: s / 64),
    "input scales inverted": scaled("input_scale", lambda s: 1 / s),
    "cache scales too small": scaled("k_scale", lambda s: s / 64),
    "a scale of zero": scaled("layers.0.mlp.up_proj.weight_scale", torch.zeros_like),
    "a weight scale missing": lambda stored: stored.pop("model.layers.0.mlp.up_proj.weight_scale"),
    "an input scale missing": lambda stored: stored.pop("model.layers.0.mlp.up_proj.input_scale"),
    "a cache scale missing": lambda stored: stored.pop("model.layers.1.self_attn.v_proj.v_scale"),
    "a norm changed": scaled("model.norm.weight", lambda t: t * 1.01),
    "a tensor too many": lambda stored: stored.update({"model.extra.weight": torch.zeros(2)}),
    "transposed": scaled("self_attn.o_proj.weight", lambda t: t.view(torch.uint8).T.contiguous().view(t.dtype)),
    "padding left in": scaled("lm_head.weight", lambda t: torch.cat((t, t[:4]))),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("converted")
    source, out, _ = convert(folder, MODELS["llama"], corpus, kv=True)
    return source, out


def verify(source, folder):
    with open_source(source) as model:
        return verify_quantized(folder, model, model.tokenizer(), lambda _: None)


def injured(out, folder, fault):
    """A copy of a converted folder with a fault in its tensors."""
    shutil.copytree(out, folder)
    stored = load_file(folder / "model.safetensors")
    fault(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(tmp_path, converted, fault):
    source, out = converted
    folder = injured(out, tmp_path / "out", FAULTS[fault])
    with pytest.raises(CheckpointError):
        verify(source, folder)


EXPERT_FAULTS = {
    "an expert's input scale too small": scaled("1.block_sparse_moe.experts.2.w2.input_scale", lambda s: s / 64),
    "an expert's input scale too large": scaled("0.block_sparse_moe.experts.1.w1.input_scale", lambda s: s * 4096),
    "experts' input scales inverted": scaled("w3.input_scale", lambda s: 1 / s),
    "two experts swapped": swapped(*(f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight" for e in (0, 1))),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, corpus):
    source, out, _ = convert(tmp_path_factory.mktemp("mixture"), MODELS["mixtral"], corpus)
    return source, out


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_each_fault_of_experts_is_seen(tmp_path, mixture, fault):
    source, out = mixture
    folder = injured(out, tmp_path / "out", EXPERT_FAULTS[fault])
    with pytest.raises(CheckpointError, match="experts"):
        verify(source, folder)


def test_an_expert_that_no_token_reaches_has_the_scale_of_the_others(tmp_path, corpus):
    """A bias of its router keeps all tokens from expert 2."""
    source, out, _ = convert(tmp_path, MODELS["deepseek"], corpus)
    with open_source(source) as model:
        ids = sample_ids(model.config, load_tokenizer(model.tokenizer()))
    decoded = read_quantized(out)
    bias = torch.tensor([0.0, 0.0, -100.0, 0.0])
    decoded.tensors.made["model.layers.1.mlp.gate.e_score_correction_bias"] = lambda: bias
    inputs = Inputs(decoded)
    decoded_model(pytest.importorskip("transformers"), decoded).logits(ids, torch.float32, inputs.within)
    assert not inputs.problems()
    decoded.input_scales["model.layers.1.mlp.experts.2.down_proj"] *= 1.5
    problems = inputs.problems()
    assert len(problems) == 1 and "experts.2.down_proj: no text reached it" in problems[0]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda c: c["quantization_config"].update(quant_algo="NVFP4")),
        ("config.json", lambda c: c["quantization_config"].pop("kv_cache_scheme")),
        ("config.json", lambda c: c["quantization_config"]["ignore"].append("model.layers.0.mlp.up_proj")),
        ("config.json", lambda c: c["rope_parameters"].update(rope_theta=500.0)),
        ("hf_quant_config.json", lambda c: c["quantization"].update(exclude_modules=[])),
    ],
    ids=["algorithm", "cache", "excluded", "theta", "nothing excluded"],
)
def test_configurations_that_do_not_fit(tmp_path, converted, file, change):
    source, out = converted
    folder = shutil.copytree(out, tmp_path / "out")
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        verify(source, folder)


def test_no_scale_is_made_up(tmp_path, corpus):
    source = save_model(tmp_path / "run" / "checkpoints", MODELS["llama"])
    with pytest.raises(ConfigError, match="holds no amax history of delayed scaling, and no scale is made up"):
        to_quantized(source, tmp_path / "out", Options("modelopt"))
    with pytest.raises(ConfigError, match="--calibrate"):
        to_quantized(source, tmp_path / "out", Options("modelopt", "fp8-block", kv_cache=True))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="compressed-tensors folders have fp8-channel"):
        Options("compressed-tensors", "nvfp4")
