"""The memory that a verification takes is told, and refused, before anything is written."""

from functools import partial

import pytest
import torch

from megafp8.convert import from_hf, memory, to_hf
from megafp8.convert.by_layer import our_model
from megafp8.convert.fp8_folder import Options, to_quantized
from megafp8.convert.trtllm import to_trtllm
from megafp8.convert.trtllm_config import Target
from megafp8.core.errors import ResourceError
from megafp8.infer.weights import build_model
from tests.unit.infer.models import config_of, masters_of, save_model


def test_a_verification_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    source = save_model(tmp_path / "run", config_of())
    monkeypatch.setattr(memory, "free_memory", lambda: 200_000)
    calls = (
        partial(to_hf, source),
        partial(to_quantized, source, options=Options("compressed-tensors")),
        partial(to_trtllm, source, target=Target()),
    )
    for call in calls:
        with pytest.raises(ResourceError, match="takes about 0.0 GB of memory; 0.0 GB are free: .* --no-verify"):
            call(out=tmp_path / "out")
        assert not list(tmp_path.glob("*out*"))
    to_hf(source, tmp_path / "hf", verify=False)
    with pytest.raises(ResourceError, match="--no-verify"):
        from_hf(tmp_path / "hf", tmp_path / "back")


def test_a_deeper_model_is_verified_in_the_same_memory(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 50)
    shape = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_kv_heads": 8}
    for layers in (2, 32):
        memory.check_memory(config_of(**shape, head_dim=128, num_layers=layers), said.append)
    assert said[0] == said[1] and "2.8 GB" in said[0]  # 12.5 bytes x 220 million


def test_one_layer_of_a_model_is_in_memory_at_a_time():
    config = config_of(num_layers=3, num_kv_heads=2)
    tensors, here = masters_of(config), []
    model = our_model(config, tensors.__getitem__, torch.float64)

    def watch(*_):
        here.append({".".join(name.split(".")[:2]) for name, p in model.named_parameters() if not p.is_meta})

    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(watch)
    with torch.inference_mode():
        logits = model(torch.arange(20)[None])
        whole = build_model(config, {name: tensor.double() for name, tensor in tensors.items()})(torch.arange(20)[None])
    assert torch.equal(logits, whole)
    assert here == [{"layers.0"}, {"layers.1"}, {"layers.2"}]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_free_memory_is_the_least_that_any_limit_leaves(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\nactive_file 500\ninactive_file 1500\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_memory() == 3000, "what files take in the page cache is free for the asking"
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() > 1 << 20
