"""The memory that a verification takes is told, and refused, before anything is written."""

from functools import partial

import pytest

from megafp8.convert import from_hf, memory, to_hf
from megafp8.convert.fp8_folder import Options, to_quantized
from megafp8.convert.trtllm import to_trtllm
from megafp8.convert.trtllm_config import Target
from megafp8.core.errors import ResourceError
from tests.unit.infer.models import config_of, save_model


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


def test_free_memory_is_the_least_that_any_limit_leaves(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_memory() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() > 1 << 20
