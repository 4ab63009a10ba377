"""`megafp8 doctor`: which recipe runs on which backend here, and one clear line for what does not load."""

import sys

import pytest

from megafp8.cli.main import main
from megafp8.fp8.backends.hardware import Hardware


@pytest.fixture
def printed(capsys):
    def run(code: int = 0) -> str:
        assert main(["doctor"]) == code
        return capsys.readouterr().out

    return run


def rows(text: str) -> dict[str, list[str]]:
    lines = [line.split() for line in text.split("FP8 recipe")[1].splitlines()[1:]]
    return {words[0]: words[1:] for words in lines if len(words) == 5}


def test_table_of_this_machine(printed, monkeypatch):
    from megafp8.fp8.backends import hardware

    # a GPU that torch does not see here: only the table is asked
    hopper = Hardware("NVIDIA H100", (9, 0), (13, 0))
    monkeypatch.setattr(hardware, "hardware_of", lambda device: hopper)
    monkeypatch.setattr(sys.modules["megafp8.fp8.backend"], "hardware_of", lambda device: hopper)
    text = printed()
    assert rows(text)["blockwise"][:2] == ["yes", "yes"] and rows(text)["blockwise"][3] == "native"
    assert rows(text)["mxfp8"][:2] == ["yes", "no"] and rows(text)["mxfp8"][3] == "emulated"
    assert "native, mxfp8: MXFP8's blocks of 32 need Blackwell (SM 10.0), NVIDIA H100 is SM 9.0" in text


def test_backends_that_refuse_alike_share_a_line(printed):
    text = printed()
    te = [line for line in text.splitlines() if line.startswith("  te, ")]
    assert len(te) == 1 and "blockwise, current, delayed, mxfp8, nvfp4: " in te[0]


def test_a_broken_transformer_engine_is_one_line(printed, monkeypatch):
    from megafp8.nn import te_library

    def broken():
        raise AssertionError("undefined symbol: _ZN3c104cuda9SetDeviceEi\nin a long story")

    monkeypatch.setattr(te_library, "library", broken)
    text = printed()
    assert "Transformer Engine does not load: AssertionError: undefined symbol: _ZN3c104cuda9SetDeviceEi in a" in text


def test_a_broken_torch_is_one_line(printed, monkeypatch):
    import builtins

    real = builtins.__import__

    def without_torch(name, *args, **kw):
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    text = printed(1)
    assert "torch               does not load: OSError: libcudart.so.13: cannot open shared object file" in text
