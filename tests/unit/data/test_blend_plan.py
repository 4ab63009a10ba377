"""A blend planned before it runs: what the table says is what the loader serves; nonsense is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafp8.cli.main import main
from megafp8.core.config import build, load_toml
from megafp8.core.errors import ConfigError, DataError
from megafp8.data import IndexedDatasetWriter
from megafp8.data.blend import Blend
from megafp8.data.blend_plan import data_section, plan_blend
from megafp8.data.config import DataConfig
from megafp8.data.sources import open_blend
from megafp8.data.tokenizer import ByteTokenizer, identity

S = 8


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    """Three sets of 81, 401 and 1601 tokens: 10, 50 and 200 samples of 8."""
    found = []
    for name, tokens in (("a", 81), ("b", 401), ("c", 1601)):
        with IndexedDatasetWriter(tmp_path / name, "u2", metadata={"tokenizer": identity(ByteTokenizer())}) as writer:
            writer.add_document(np.full(tokens, 7))
        found.append(str(tmp_path / name))
    return found


def pasted(section: str, folder: Path) -> DataConfig:
    """The section as a run reads it."""
    (folder / "run.toml").write_text(section)
    return build(DataConfig, load_toml(folder / "run.toml")["data"])


def test_the_plan_is_what_is_served(sets: list[str], tmp_path: Path) -> None:
    plan = plan_blend(sets, sequence_length=S, num_tokens=5003, weights=[5, 3, 2], seed=3)
    config = pasted(data_section(plan, tokenizer="bytes", valid=[]), tmp_path)
    blend = open_blend(config.train, tokenizer=ByteTokenizer(), sequence_length=config.sequence_length, seed=3)
    served = [0, 0, 0]
    for index in range(plan.num_samples):
        served[blend.locate(index)[0]] += 1
    assert served == [source.samples for source in plan.sources] and sum(served) == plan.num_samples == 625
    assert plan.num_tokens == 5000 and [round(source.epochs, 1) for source in plan.sources] == [31.2, 3.8, 0.6]
    assert [source.repeats for source in plan.sources] == [32, 4, 1]
    (warning,) = plan.warnings
    assert "a: 31.2 epochs" in warning and "a share of 0.064" in warning  # 4 * 10 of 625


def test_temperature(sets: list[str]) -> None:
    shares = {t: [s.share for s in plan_blend(sets, sequence_length=S, temperature=t).sources] for t in (1.0, 2.0, 1e9)}
    total = 81 + 401 + 1601
    assert shares[1.0] == pytest.approx([81 / total, 401 / total, 1601 / total], rel=1e-12)  # a few roundings of fp64
    roots = [tokens**0.5 for tokens in (81, 401, 1601)]
    assert shares[2.0] == pytest.approx([root / sum(roots) for root in roots], rel=1e-12)
    assert shares[1e9] == pytest.approx([1 / 3] * 3, rel=1e-7), "1e-9 ln(20) apart"
    plan = plan_blend(sets, sequence_length=S)
    assert plan.num_samples == 260 and all(abs(source.epochs - 1) < 0.2 for source in plan.sources), "by size: once"
    tiny = plan_blend(sets, sequence_length=S, num_tokens=S, weights=[1e-6, 1e-6, 1])
    assert len([line for line in tiny.warnings if "serves no sample" in line]) == 2


def test_counts_are_those_of_locate() -> None:
    class Stream:
        sequence_length = 4

    rng = np.random.default_rng(0)
    for _ in range(100):
        weights = rng.lognormal(sigma=3, size=rng.integers(1, 9)).tolist()
        blend, number = Blend([Stream() for _ in weights], weights, int(rng.integers(100))), 997  # type: ignore[misc]
        counts = [0] * len(weights)
        for index in range(number):
            counts[blend.locate(index)[0]] += 1
        assert blend.counts(number) == counts and sum(counts) == number
        assert sum(blend.counts(10**15 + 37)) == 10**15 + 37


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["A", "A"], 2, "named twice"),
        (["A=1", "B"], 2, "has no weight, others have"),
        (["A=-1", "B=1"], 2, "not positive and finite"),
        (["A=nan", "B=1"], 2, "not positive and finite"),
        (["A=lots", "B=1"], 2, "'lots' is no number"),
        (["A=1", "B=1", "--temperature", "2"], 2, "leave it out, or the weights"),
        (["A", "B", "--temperature", "0"], 2, "has to be a positive number"),
        (["A", "B", "--tokens", "7"], 2, "less than one sample"),
        (["A", "B", "--tokens", "1.5"], 2, "has to be a whole number"),
        (["A", "B", "--tokens", "lots"], 2, "has to be a whole number"),
        (["A", "B", "--sequence-length", "0"], 2, "has to be at least 1"),
        (["A", "B", "--sequence-length", "100"], 3, "sequence_length 100 needs 101"),
        (["A", "B", "--tokens", "1e9"], 3, "or allow it with --max-epochs"),
        (["A", "/nowhere/x"], 3, "no such file"),
    ],
)
def test_nonsense_is_one_line(
    sets: list[str], words: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [word.replace("A", sets[0], 1).replace("B", sets[1], 1) for word in words]
    assert main(["data", "blend", "--sequence-length", "8", *named]) == code
    errors = [text for text in capsys.readouterr().err.splitlines() if ": error: " in text]
    assert len(errors) == 1 and line in errors[0]


def test_two_tokenizers_are_refused(sets: list[str], tmp_path: Path) -> None:
    other = {"tokenizer": {"kind": "x", "fingerprint": "f"}}
    with IndexedDatasetWriter(tmp_path / "d", "u2", metadata=other) as writer:
        writer.add_document([1] * 50)
    with pytest.raises(DataError, match="written with tokenizer x f"):
        plan_blend([sets[0], str(tmp_path / "d")], sequence_length=S)
    with pytest.raises(ConfigError, match="no source"):
        plan_blend([], sequence_length=S)


def test_the_verb_takes_corpus_folders(sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("x/en", "y/en", "de"):
        for split in ("train", "valid"):
            place, facts = tmp_path / folder / split, {"tokenizer": identity(ByteTokenizer())}
            with IndexedDatasetWriter(place, "u2", metadata=facts) as writer:
                writer.add_document([7] * (90 if split == "train" else 0 if folder == "de" else 20))
    words = [f"{tmp_path}/x/en", f"{tmp_path}/y/en", f"{tmp_path}/de", sets[0]]
    assert main(["data", "blend", *words, "--sequence-length", "8", "--tokens", "2e3"]) == 0
    captured = capsys.readouterr()
    table, _, section = captured.out.partition("\n\n")
    assert "250 samples of 8 tokens" in table and captured.err.count("warning: ") == 4
    config = pasted(section, tmp_path)
    assert config.tokenizer == "bytes" and len(config.train) == 4
    assert [one.name for one in config.valid] == [f"{tmp_path}/x/en", f"{tmp_path}/y/en"], "names of their own"
