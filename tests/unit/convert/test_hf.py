"""Hugging Face folders: every family through and back bit for bit, and a verification that catches every mutant."""

import json
import os
import shutil
import stat

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from megafp8 import checkpoint
from megafp8.cli.main import main
from megafp8.convert import from_hf, hf, hf_files, source, to_hf
from megafp8.convert.verify_hf import TEXTS, verify_folder
from megafp8.core.errors import CheckpointError, ConfigError, ResourceError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.weights import MASTER, model_config, weights
from tests.unit.infer.models import config_of, save_model

LLAMA3 = {"type": "llama3", "factor": 4.0, "original_max_length": 24}
EXPERTS = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "first_dense_layers": 1}
GROUPED = EXPERTS | {"num_groups": 4, "top_k_groups": 2, "num_shared_experts": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
MODELS = {
    "llama": config_of(num_kv_heads=2, rope_theta=500.0),
    "llama, one kv head, tied": config_of(num_kv_heads=1, tied_embeddings=True),
    "a vocabulary that nothing divides": config_of(vocab_size=503, num_kv_heads=2),  # no padded rows to take off
    "llama, biases, wide heads": config_of(num_kv_heads=2, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama 3 scaling": config_of(rope_theta=1000.0, rope_scaling=LLAMA3),
    "linear scaling": config_of(rope_scaling={"type": "linear", "factor": 4.0}),
    "dynamic scaling": config_of(rope_scaling={"type": "dynamic", "factor": 4.0}),
    "yarn scaling": config_of(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_length": 24}),
    "mistral": config_of("mistral", num_kv_heads=2),
    "qwen2": config_of("qwen2", num_kv_heads=2),
    "qwen2, tied": config_of("qwen2", num_kv_heads=1, tied_embeddings=True),
    "qwen3": config_of("qwen3", num_kv_heads=2),
    "gpt": config_of("gpt", tied_embeddings=True),
    "mixtral": config_of("mixtral", num_kv_heads=2, moe={"num_experts": 4}),
    "qwen3_moe": config_of("qwen3_moe", num_kv_heads=2, moe=EXPERTS),
    "deepseek": config_of("deepseek", head_dim=0, mla=MLA, moe=GROUPED),
    "deepseek, no latent queries": config_of("deepseek", head_dim=0, mla=MLA | {"q_lora_rank": 0}, moe=GROUPED),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="session")
def qwen_like(tmp_path_factory):
    """A tokenizer by the rules that transformers 5 gives every folder of model_type qwen2, whatever its files say."""
    pre, path = tokenizers.pre_tokenizers, tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    alphabet = sorted(pre.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer, made.decoder = pre.ByteLevel(False, use_regex=False), tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(path))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_exact_and_transformers_agrees(tmp_path, name, qwen_like):
    source = save_model(tmp_path / "run", MODELS[name], tokenizer=qwen_like if "qwen2" in name else "bytes")
    report = to_hf(source, tmp_path / "hf", dtype="bf16")
    assert report is not None and not report.problems
    # fp32 errors of 2^-24 sqrt(48 terms x 5 branches) = 1e-6, amplified by saturated attention; measured 3e-6 of the
    # largest logit, and 2.2e-5 where transformers rounds llama3's frequencies otherwise
    assert report.logits[0].largest <= (5e-5 if "llama 3" in name else 1e-5) * report.logits[0].scale
    back = from_hf(tmp_path / "hf", tmp_path / "back", verify=False)
    assert model_config(back) == MODELS[name]
    ours, theirs = weights(source, torch.bfloat16), weights(back, torch.bfloat16)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    to_hf(back, tmp_path / "again", verify=False)
    first, second = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "again"))
    assert first.keys() == second.keys() and all(torch.equal(bits(first[n]), bits(second[n])) for n in first)
    a, b = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "again"))
    assert a == b and a["vocab_size"] == MODELS[name].vocab_size


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes(tmp_path, dtype):
    source = save_model(tmp_path / "run", MODELS["llama"])
    report = to_hf(source, tmp_path / "hf", dtype=dtype)
    assert report is not None and not report.problems
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {{"fp32": torch.float32, "fp16": torch.float16}[dtype]}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == {"fp32": "float32", "fp16": "float16"}[dtype]


def test_the_folder_holds_what_others_look_for(tmp_path):
    to_hf(save_model(tmp_path / "run", MODELS["llama 3 scaling"]), tmp_path / "hf", verify=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1000.0
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    assert config["tie_word_embeddings"] is False and config["head_dim"] == 8 and config["vocab_size"] == 260
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 3)
    raw = (tmp_path / "hf" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "hf").iterdir()} == {0o640}


def test_shards_and_their_index(tmp_path, monkeypatch):
    source = save_model(tmp_path / "run", MODELS["llama"])
    monkeypatch.setattr(hf_files, "SHARD_BYTES", 20_000)
    report = to_hf(source, tmp_path / "hf")
    assert report is not None and not report.problems  # transformers reads them
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "hf").glob("model-*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = {n: t for f in files for n, t in load_file(tmp_path / "hf" / f).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    back = from_hf(tmp_path / "hf", tmp_path / "back", verify=False)
    ours, theirs = weights(source, torch.bfloat16), weights(back, torch.bfloat16)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def swap(a, b):
    def change(tensors, config):
        for layer in range(2):
            x, y = (f"model.layers.{layer}.{name}.weight" for name in (a, b))
            tensors[x], tensors[y] = tensors[y], tensors[x]

    return change


def roll(name):
    def change(tensors, config):
        tensors[name] = tensors[name].roll(1, 0).contiguous()

    return change


def without_theta(tensors, config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10000.0


def interleaved_heads(tensors, config):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].reshape(4, 4, 2, 32).transpose(1, 2).reshape(32, 32).contiguous()


MUTANTS = {
    "k and v swapped": swap("self_attn.k_proj", "self_attn.v_proj"),
    "gate and up swapped": swap("mlp.gate_proj", "mlp.up_proj"),
    "rows off by one": roll("model.embed_tokens.weight"),
    "output off by one": roll("lm_head.weight"),
    "heads interleaved": interleaved_heads,
    "theta lost": without_theta,
    "norm lost": lambda t, c: t["model.norm.weight"].fill_(1.0),
    "one weight lost": lambda t, c: t["model.layers.1.mlp.down_proj.weight"][3].zero_(),
    "eps changed": lambda t, c: c.update(rms_norm_eps=1e-2),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    source = save_model(root / "run", MODELS["llama"])
    to_hf(source, root / "hf", verify=False)
    return source, root / "hf"


def verify(folder, source):
    read = weights(source, torch.bfloat16).__getitem__
    return verify_folder(folder, MODELS["llama"], read, torch.bfloat16, load_tokenizer("bytes"))


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(tmp_path, exported, name):
    source, folder = exported
    shutil.copytree(folder, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    MUTANTS[name](tensors, config)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    report = verify(tmp_path / "hf", source)
    assert any(problem.startswith("logits in float32") for problem in report.problems)


def test_another_tokenizer_is_caught(tmp_path, exported):
    source, folder = exported
    shutil.copytree(folder, tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    report = verify(tmp_path / "hf", source)
    assert len(report.texts_differing) >= len(TEXTS) - 2


def test_a_class_that_ignores_the_tokenizers_rules_is_named(tmp_path):
    source = save_model(tmp_path / "run", MODELS["qwen2"])  # with our bytes, which keep decomposed letters
    with pytest.raises(CheckpointError, match="as Qwen2Tokenizer, whose own rules replace those"):
        to_hf(source, tmp_path / "hf")


def test_out_of_bounds_leaves_nothing_and_exits_4(tmp_path, monkeypatch, capsys):
    source = save_model(tmp_path / "run", MODELS["llama"])
    real = hf.split
    monkeypatch.setattr(hf, "split", lambda config, rule, tensor: [x.roll(1, 0) for x in real(config, rule, tensor)])
    assert main(["convert", "--to", "hf", str(source), str(tmp_path / "out" / "hf")]) == 4
    assert "does not say what the model says" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_command_line_both_ways(tmp_path, capsys):
    save_model(tmp_path / "run" / "checkpoints", MODELS["llama"])
    run, out = str(tmp_path / "run"), str(tmp_path / "hf")
    assert main(["convert", "--to", "hf", run, out]) == 0
    said = capsys.readouterr().out
    assert "largest difference" in said and "KL" in said and "top-1 agreement 100.00%" in said
    assert "ids equal for 11 of 11 texts" in said
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "hf").iterdir())
    assert main(["convert", "--to", "hf", run, out]) == 0  # nothing to do
    assert "already made" in capsys.readouterr().out
    assert before == sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "hf").iterdir())
    assert main(["convert", "--from", "hf", out, str(tmp_path / "back")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "back"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("ab")


def test_an_import_is_verified(tmp_path, exported, monkeypatch, capsys):
    out = tmp_path / "deep" / "out"
    assert main(["convert", "--from", "hf", str(exported[1]), str(out)]) == 0
    said = capsys.readouterr().out
    assert (
        "logits in float32: largest difference" in said and "logits in bfloat16" in said and "written, verified" in said
    )
    assert checkpoint.verify(out / "step_00000000")
    assert main(["convert", "--from", "hf", str(exported[1]), str(tmp_path / "b"), "--dtype", "fp16"]) == 2
    assert "--dtype does not go with --from hf; options of its own: none" in capsys.readouterr().err
    assert main(["convert", "--to", "hf", str(exported[0]), str(tmp_path / "b"), "--kv-cache", "fp8"]) == 2
    assert "--kv-cache does not go with --to hf" in capsys.readouterr().err
    real = source.join
    swapped = lambda config, rule, parts: real(config, rule, [parts[0], *parts[:0:-1]])  # noqa: E731 - v for k
    monkeypatch.setattr(source, "join", swapped)
    assert main(["convert", "--from", "hf", str(exported[1]), str(tmp_path / "swapped")]) == 4
    assert "does not say what transformers reads there" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["deep"]


def test_bad_targets_are_refused_in_one_line(tmp_path, monkeypatch):
    source = save_model(tmp_path / "run", MODELS["llama"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="is a file"):
        to_hf(source, tmp_path / "file")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("x")
    with pytest.raises(ResourceError, match="holds something else already"):
        to_hf(source, tmp_path / "used")
    with pytest.raises(CheckpointError, match="no such folder"):
        to_hf(tmp_path / "nowhere", tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(ResourceError, match="needs .* bytes, 10 are free"):
        to_hf(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["file", "run", "used"]


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    source = save_model(tmp_path / "run", config_of(norm="layernorm"))
    with pytest.raises(ConfigError, match=r"model.norm = 'layernorm' cannot be exported"):
        to_hf(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def broken_folder(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path / "bad")
    change(tmp_path / "bad")
    return tmp_path / "bad"


def rewrite(name, change):
    def apply(folder):
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def retensor(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def index_of(weight_map):
    def apply(folder):
        value = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))

    return apply


def only_pickle(folder):
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


BROKEN = {
    "has no config.json": lambda f: (f / "config.json").unlink(),
    "config.json: cannot be read": lambda f: (f / "config.json").write_text("{"),
    "has no model_type": rewrite("config.json", lambda c: c.pop("model_type")),
    "model_type 'mamba' is not one of": rewrite("config.json", lambda c: c.update(model_type="mamba")),
    "weights are quantized": rewrite("config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})),
    "pickled weights .* are not read": only_pickle,
    "model.safetensors: cannot be read": lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04pickle"),
    "missing: model.norm.weight": retensor(lambda t: t.pop("model.norm.weight")),
    "unknown: extra.weight": retensor(lambda t: t.update({"extra.weight": torch.zeros(2)})),
    "final_norm.weight has shape": retensor(lambda t: t.update({"model.norm.weight": torch.zeros(7)})),
    "only bf16, fp16 and fp32": retensor(lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)})),
    "no safetensors file of this folder": index_of({"model.norm.weight": "../model.safetensors"}),
    "which model.safetensors does not hold": index_of({"not.there": "model.safetensors"}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_folders_are_refused_in_one_line(tmp_path, exported, message):
    bad = broken_folder(exported[1], tmp_path, BROKEN[message])
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        from_hf(bad, tmp_path / "out", verify=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_from_hf_keeps_existing_checkpoints(tmp_path, exported):
    from_hf(exported[1], tmp_path / "out", verify=False)
    with pytest.raises(ResourceError, match="holds checkpoints already"):
        from_hf(exported[1], tmp_path / "out", verify=False)
    names = checkpoint.load_tensors(tmp_path / "out" / "step_00000000")
    assert all(name.startswith(MASTER) and tensor.dtype == torch.float32 for name, tensor in names.items())
