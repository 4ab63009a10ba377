"""`megafp8 eval --save`: documents scored one by one, in the arithmetic that trained, kept in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megafp8.cli.main import main
from megafp8.core.config import build
from megafp8.data import IndexedDatasetWriter
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.train.config import RunConfig
from megafp8.train.loop import train

BYTES = load_tokenizer("bytes")
LENGTH = 32


def write(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, metadata={"tokenizer": identity(BYTES)}) as writer:
        for ids in documents:
            writer.add_document(np.array(ids))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in FP8 with delayed scaling; validation is a lone end of document and then one document of 96 ids."""
    folder = tmp_path_factory.mktemp("as_trained")
    rng = np.random.default_rng(5)
    write(folder / "train", [rng.integers(0, 120, 400).tolist() for _ in range(4)])
    write(folder / "valid", [[BYTES.eod_id], rng.integers(0, 120, 3 * LENGTH).tolist()])
    config = build(
        RunConfig,
        {
            "run": {"dir": str(folder / "run")},
            "model": {
                "family": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64,
                "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 272, "max_sequence_length": LENGTH,
                "init_std": 0.3,  # at 0.02 so small a model says the same of every token, in any arithmetic
            },
            "data": {
                "train": [{"path": str(folder / "train")}], "valid": [{"path": str(folder / "valid")}],
                "tokenizer": "bytes", "sequence_length": LENGTH,
            },
            "train": {"steps": 6, "global_batch": 4, "micro_batch": 4, "eval_interval": 0, "compile": "off"},
            "optimizer": {"lr": 1e-2, "warmup_steps": 1},
            "precision": {"recipe": "delayed", "emulation": "exact"},
            "log": {"tensorboard": False},
        },
    )  # fmt: skip
    assert train(config).exit_code == 0
    return folder / "run"


def evaluate(run: Path, *words: str) -> dict:
    name = words[words.index("--save") + 1]
    assert main(["eval", "--perplexity", str(run), "--data", str(run.parent / "valid"), *words]) == 0
    return json.loads((run / "heldout" / f"{name}.json").read_text())


def test_documents_judged_as_trained_are_what_the_run_saw(run, capsys):
    kept = evaluate(run, "--save", "valid", "--as-trained")
    (record,) = [r for r in map(json.loads, (run / "metrics.jsonl").open()) if r["kind"] == "eval"]
    assert kept["document_tokens"] == [1, record["tokens"]] == [1, 3 * LENGTH]
    # the same 96 losses; the run's softmax takes its exponentials in other fp32 kernels: 2^-24 of about 5 each
    assert kept["document_loss_sums"][1] / record["tokens"] == pytest.approx(record["loss"], abs=2e-6)
    assert kept["arithmetic"] == "as trained (delayed)" and kept["checkpoint"] == "step_00000006"
    rounded = evaluate(run, "--save", "valid-bf16")
    assert rounded["arithmetic"] == "bf16"
    # the same weights without FP8's rounding of 2^-4: near, and not the same
    assert 1e-4 < abs(rounded["document_loss_sums"][1] - kept["document_loss_sums"][1]) / record["tokens"] < 0.05
    capsys.readouterr()


def test_what_is_done_is_not_done_again(run, capsys):
    evaluate(run, "--save", "again")
    before = (run / "heldout" / "again.json").stat().st_mtime_ns
    capsys.readouterr()
    evaluate(run, "--save", "again")
    assert "already done" in capsys.readouterr().out
    assert (run / "heldout" / "again.json").stat().st_mtime_ns == before
    kept = evaluate(run, "--save", "again", "--max-tokens", "1")  # another question under the same name
    assert kept["document_tokens"] == [1]


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--text", "x", "--save", "a"], "--save a: documents are those of a dataset; give --data"),
        (["--data", "{valid}", "--save", "../a"], "a name of letters, digits"),
        (["--data", "{valid}", "--save", ""], "a name of letters, digits"),
    ],
)
def test_what_cannot_be_kept_is_refused(run, capsys, words, problem):
    words = [word.format(valid=run.parent / "valid") for word in words]
    assert main(["eval", "--perplexity", str(run), *words]) == 2
    assert problem in capsys.readouterr().err
