"""Transformer Engine's own Python on a machine without a GPU: a stub for what is compiled, patches for the rest.

The wheel `transformer-engine` holds Python only. `transformer_engine()` puts stand-ins for its compiled extension and
its loader into `sys.modules`, and lets torch say that there is a GPU whose tensors lie on the CPU; inside the `with`
block `transformer_engine.pytorch` is the real thing: signatures, modules, parameters, recipes. Modules run, too, with
Transformer Engine's reference quantizers (`CustomRecipe`) and with those of delayed and current scaling, for which
te_kernels computes what the extension would. Everything else is a mock: fused attention, block recipes, user buffers,
CUDA graphs. What a GPU computes is not known from here.

On leaving everything is as before, so that no other test sees a GPU.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.contract.te_kernels import KERNELS

VERSION = "2.20.2"
WHERE = Path(sys.prefix) / "contract"  # `make setup` puts it there: a bare wheel on the path would break its importers
HOW = f"`pip install --no-deps --target {WHERE} transformer-engine=={VERSION}` and `pip install einops onnxscript`"
Tensor = torch.Tensor

# the compiled extension's enums, by value; their names are checked by Transformer Engine itself on import
_DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
_FORWARD = [f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")]
_FUSED = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}

_loaded: dict[str, types.ModuleType] = {}  # imported once a process: the modules register operators with torch


class _Extension(types.ModuleType):
    """`transformer_engine_torch`: every name that is not set is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = mock.MagicMock(name=f"transformer_engine_torch.{name}")
        setattr(self, name, found)
        return found


def _numbered(name: str, names: list[str] | tuple[str, ...]) -> Any:
    return enum.IntEnum(name, {member: number for number, member in enumerate(names)})


def _extension() -> types.ModuleType:
    extension: Any = _Extension("transformer_engine_torch")
    extension.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    extension.DType = _numbered("DType", _DTYPES)
    extension.FP8FwdTensors = _numbered("FP8FwdTensors", _FORWARD)
    extension.FP8BwdTensors = _numbered("FP8BwdTensors", _BACKWARD)
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", _FUSED)
    extension.ubuf_built_with_mpi = lambda: False
    for name, kernel in KERNELS.items():
        setattr(extension, name, kernel)
    used = {
        name
        for path in _wheel().glob("pytorch/**/*.py")
        for name in re.findall(r"\b(?:tex|ext)\.(\w+)", path.read_text())
    }
    for name in sorted(used):
        getattr(extension, name)  # now, for the wheel takes them over by `import *`
    return extension


def _wheel() -> Path:
    spec = importlib.machinery.PathFinder.find_spec("transformer_engine")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _common() -> types.ModuleType:
    """`transformer_engine.common` without its loader of shared objects; `common.recipe` stays the wheel's own."""
    common: Any = _Extension("transformer_engine.common")
    common.__path__ = [str(_wheel() / "common")]
    common.__spec__ = importlib.machinery.ModuleSpec("transformer_engine.common", None, is_package=True)
    common.load_framework_extension = lambda framework: None
    common.decode_cudnn_version = lambda version: (9, 10, 0)
    return common


def missing() -> str | None:
    """What has to be installed for the stub, and how; None: all is there."""
    with mock.patch.object(sys, "path", [str(WHERE), *sys.path]):
        reason = _missing()
    return reason and f"{reason}; install it with {HOW}"


def _missing() -> str | None:
    for package in ("transformer-engine", "einops", "onnxscript"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
        if package == "transformer-engine" and found != VERSION:
            return f"transformer-engine is {found}, and these tests know {VERSION}"
    return None


def _triton_stubs() -> dict[str, types.ModuleType]:
    """Modules that need Triton, as mocks, where there is none (as beside torch for CPUs)."""
    if importlib.machinery.PathFinder.find_spec("triton") is not None:
        return {}
    names = ("cross_entropy", "pad", "permutation", "mhc", "grouped_dbias_dscales", "deinterleave_glu")
    stubs: dict[str, types.ModuleType] = {f"transformer_engine.pytorch.triton.{n}": _Extension(n) for n in names}
    package = _Extension("transformer_engine.pytorch.triton")
    package.__path__ = []
    return {"transformer_engine.pytorch.triton": package, **stubs}


@contextmanager
def transformer_engine(capability: tuple[int, int] = (9, 0)) -> Iterator[types.ModuleType]:
    """`transformer_engine.pytorch`, on a GPU of compute `capability` that is made up; skips where it is not installed.

    `te.pytorch.quantization`, `transformer_engine.common.recipe` and so on can be imported inside the block.
    """
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        before = {name: module for name, module in sys.modules.items() if _is_theirs(name)}
        stack.callback(_restore, before)
        stack.enter_context(mock.patch.object(sys, "path", [str(WHERE), *sys.path]))
        if not _loaded:
            _loaded.update(_triton_stubs())
            _loaded["transformer_engine_torch"], _loaded["transformer_engine.common"] = _extension(), _common()
        for name in before:
            del sys.modules[name]
        sys.modules.update(_loaded)
        for patch in _patches():
            stack.enter_context(patch)
        te = importlib.import_module("transformer_engine.pytorch")
        _loaded.update({name: module for name, module in sys.modules.items() if _is_theirs(name)})
        for name, module in list(_loaded.items()):
            if name.startswith("transformer_engine.pytorch") and "get_device_compute_capability" in vars(module):
                stack.enter_context(mock.patch.object(module, "get_device_compute_capability", lambda: capability))
        for name in ("transformer_engine.pytorch.module.base", "transformer_engine.pytorch.cpp_extensions.gemm"):
            if "get_cublas_workspace" in vars(sys.modules[name]):
                stack.enter_context(mock.patch.object(sys.modules[name], "get_cublas_workspace", mock.MagicMock()))
        distributed = sys.modules["transformer_engine.pytorch.distributed"]
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):  # of the GPU, which draws nothing here
            stack.enter_context(mock.patch.object(distributed, name, lambda *args, **rest: None))
        stack.enter_context(_OnCpu())
        yield te


def _restore(before: dict[str, types.ModuleType]) -> None:
    _loaded.update({name: module for name, module in sys.modules.items() if _is_theirs(name)})
    for name in [name for name in sys.modules if _is_theirs(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _is_theirs(name: str) -> bool:
    return name.split(".")[0] in ("transformer_engine", "transformer_engine_torch")


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on the GPU come to be on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _patches() -> list[Any]:
    """What makes torch speak of a GPU; tensors stay where they are."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(name="stub", major=9, minor=0, multi_processor_count=1, total_memory=1 << 30)
    return [
        mock.patch.object(cuda, "is_available", lambda: True),
        mock.patch.object(cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(cuda, "device_count", lambda: 1),
        mock.patch.object(cuda, "Stream", mock.MagicMock),
        mock.patch.object(cuda, "synchronize", lambda *a: None),
        mock.patch.object(cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(cuda, "get_device_properties", lambda *a: properties),
        mock.patch.object(cuda, "get_device_capability", lambda *a: (9, 0)),
        mock.patch.object(Tensor, "is_cuda", property(lambda self: True)),
        mock.patch.object(Tensor, "cuda", lambda self, *a, **k: self),
    ]
