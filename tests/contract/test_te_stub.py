"""The stub shows Transformer Engine's real Python and leaves nothing behind."""

from __future__ import annotations

import inspect
import sys

import torch

from tests.contract.te_stub import transformer_engine


def test_the_real_modules_are_there_inside_and_gone_outside() -> None:
    for _ in range(2):  # a second time in one process too: the modules register operators with torch once
        with transformer_engine() as te:
            assert "parallel_mode" in inspect.signature(te.Linear).parameters
            layer = te.LayerNormLinear(64, 128, bias=False, normalization="RMSNorm", device="cpu")
            assert list(dict(layer.named_parameters())) == ["layer_norm_weight", "weight"]
            assert torch.cuda.is_available() and torch.zeros(1).is_cuda
        assert not [name for name in sys.modules if name.startswith("transformer_engine")]
        assert torch.cuda.device_count() == 0 or torch.zeros(1).device.type == "cpu"
        assert not torch.zeros(1).is_cuda
