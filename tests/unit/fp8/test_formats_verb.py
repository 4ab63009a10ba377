"""`megafp8 formats`: the article's example, the tables, the picture, and what it refuses."""

import subprocess
import sys

import pytest

from megafp8.cli.main import main


def run(capsys, *words: str) -> str:
    assert main(["formats", *words]) == 0
    return capsys.readouterr().out


def test_a_value_in_every_format(capsys):
    lines = {line.split()[0]: line for line in run(capsys, "--value", "4.543").splitlines() if line.split()}
    assert "4.53125" in lines["BF16"] and "0 10000001 0010001" in lines["BF16"]
    assert lines["E4M3"].split()[1] == "4.5" and "0.947 %" in lines["E4M3"]
    assert lines["E5M2"].split()[1] == "5" and "10.1 %" in lines["E5M2"]
    assert lines["E2M1"].split()[1] == "4"


def test_values_that_do_not_fit_are_named(capsys):
    text = run(capsys, "--value", "1000", "-0.000000001", "0.001", "0")
    assert "448" in text and "saturated" in text and "underflow" in text and "subnormal" in text


@pytest.mark.parametrize("words", [(), ("--format", "E4M3")])
def test_tables_are_whole(capsys, words):
    text = run(capsys, *words)
    assert "the 127 values from zero up" in text and "0.00195312" in text and "448" in text
    assert "\u2026" not in text  # nothing is cut when the output is a pipe
    assert ("57344" in text) is (words == ())


def test_limits_of_every_format(capsys):
    text = run(capsys)
    assert "every power of two from 2^-127 (code 0) to 2^127 (code 254)" in text
    assert "values of E4M3 from zero up" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    # name, sign + exponent + mantissa bits, bias, largest, smallest normal, smallest subnormal
    assert rows["E4M3"][1:6] == ["1+4+3", "7", "448", "0.015625", "0.00195312"]
    assert rows["E5M2"][1:6] == ["1+5+2", "15", "57344", "6.10352e-05", "1.52588e-05"]
    assert rows["E2M1"][1:6] == ["1+2+1", "1", "6", "1", "0.5"]
    assert rows["UE4M3"][1:6] == ["0+4+3", "7", "448", "0.015625", "0.00195312"]
    assert rows["E8M0"][1:6] == ["0+8+0", "127", "1.70141e+38", "5.87747e-39", "-"]


def test_formats_of_scales_show_their_values_if_asked_for(capsys):
    text = run(capsys, "--format", "UE4M3")
    assert "UE4M3: the 127 values" in text and "448" in text
    text = run(capsys, "--format", "E8M0")
    assert "the 255 values" in text and "2^-127" in text and "2^127" in text and "NaN" in text


def test_picture(tmp_path, capsys):
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        run(capsys, "--plot", str(tmp_path / name))
        data = (tmp_path / name).read_bytes()
        assert data.startswith(magic) and len(data) > 20_000


def test_refusals(tmp_path, capsys):
    assert main(["formats", "--plot", str(tmp_path / "a.bmpx")]) == 2
    assert "one of .png, .svg, .pdf" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["formats", "--plot", str(tmp_path / "file" / "a.png")]) == 6


def test_the_module_is_light():
    code = "import sys, megafp8.cli.formats; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
