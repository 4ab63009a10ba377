"""Batches: the set of a step is the same at any dp, one integer resumes, documents can be kept apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.core.config import build
from megafp8.core.errors import ConfigError, DataError
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.batch_size import BatchSize
from megafp8.data.blend import Blend
from megafp8.data.config import DataConfig, DatasetConfig
from megafp8.data.loader import Batch, Loader, segments
from megafp8.data.samples import SampleStream
from megafp8.data.sources import check_tokenizer, open_blend
from megafp8.data.tokenizer import ByteTokenizer, identity

EOD = 2


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "d", "u2", metadata={"tokenizer": identity(ByteTokenizer())}) as writer:
        for _ in range(60):
            writer.add_document([*rng.integers(4, 260, size=rng.integers(1, 40)).tolist(), EOD])
    return tmp_path / "d"


def make(prefix: Path, *, dp_rank: int = 0, dp_size: int = 1, micro_batch: int = 2, batches: int | BatchSize = 8,
         **options: object) -> Loader:
    source = Blend([SampleStream(IndexedDataset(prefix), 16, seed=1)], [1.0], 1)
    return Loader(
        source, micro_batch=micro_batch, global_batch=batches, dp_rank=dp_rank, dp_size=dp_size, eod_id=EOD,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def ids(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.sample_ids]


def test_shapes_and_shift(prefix: Path) -> None:
    (first, *rest) = make(prefix).next_step()
    assert len(rest) == 3 and first.tokens.shape == (2, 16) and first.tokens.dtype == torch.int64
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert first.segment_ids is None and first.positions is None


def test_step_is_the_same_set_at_any_dp(prefix: Path) -> None:
    for step in range(3):
        sets = []
        for dp_size in (1, 2, 4):
            loaders = [make(prefix, dp_rank=r, dp_size=dp_size, consumed_samples=8 * step) for r in range(dp_size)]
            steps = [loader.next_step() for loader in loaders]
            sets.append(sorted(i for batches in steps for i in ids(batches)))
            by_micro_batch = [sorted(i for batches in steps for i in ids([batches[m]])) for m in range(len(steps[0]))]
            in_order = [i for micro_batch in by_micro_batch for i in micro_batch]
            assert in_order == list(range(8 * step, 8 * step + 8)), "micro-batches are taken in order"
        assert sets[0] == sets[1] == sets[2] == list(range(8 * step, 8 * step + 8))


def test_one_integer_resumes_in_the_middle_of_an_epoch(prefix: Path) -> None:
    straight = make(prefix)
    for _ in range(5):
        straight.next_step()
    resumed = make(prefix, consumed_samples=straight.consumed_samples)
    for a, b in zip(straight.next_step(), resumed.next_step(), strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.sample_ids, b.sample_ids)


def test_epochs_serve_every_sample_once(prefix: Path) -> None:
    stream = SampleStream(IndexedDataset(prefix), 16, seed=1)
    loader, n = make(prefix), stream.num_samples
    rows = [row for _ in range(2 * n // 8 + 1) for batch in loader.next_step() for row in batch.tokens.tolist()]
    first, second = rows[:n], rows[n : 2 * n]
    assert sorted(first) == sorted(second) and first != second
    assert len({tuple(row) for row in first}) == n


def test_ranks_go_on_together_where_the_corpus_does_not_divide(prefix: Path) -> None:
    """R108: an epoch is no multiple of the step; samples of the next one fill it, and every rank has as many."""
    n = SampleStream(IndexedDataset(prefix), 16, seed=1).num_samples
    assert n % 8
    ranks = [make(prefix, dp_rank=rank, dp_size=2) for rank in range(2)]
    for _ in range(3 * n // 8 + 1):
        served = [ids(loader.next_step()) for loader in ranks]
        assert [len(numbers) for numbers in served] == [4, 4] and not set(served[0]) & set(served[1])


def test_segments_and_positions() -> None:
    tokens = np.asarray([[5, 6, EOD, 7, EOD, EOD, 8, 9]])
    segment_ids, positions = segments(tokens, EOD)
    assert segment_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]


def test_document_mask_and_eod_loss(prefix: Path) -> None:
    for batch in make(prefix, document_mask=True, mask_eod_loss=True).next_step():
        assert batch.segment_ids is not None and batch.positions is not None
        for row in range(2):
            after = torch.nonzero(batch.tokens[row] == EOD).flatten()
            assert (batch.targets[row, after] == -100).all()
            after = after[after < 15] + 1
            assert (batch.positions[row, after] == 0).all()
            steps = batch.segment_ids[row].diff()
            assert torch.equal(torch.nonzero(steps).flatten() + 1, after)
        assert ((batch.targets == -100) == (batch.tokens == EOD)).all()


def test_global_batch_must_divide(prefix: Path) -> None:
    with pytest.raises(ConfigError, match=r"global_batch 8 .* dp 1 x train.micro_batch 3; nearest: 6, 9"):
        make(prefix, micro_batch=3)


def test_ids_beyond_the_vocabulary_are_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match="vocabulary has 200 ids"):
        for _ in range(5):
            make(prefix, vocab_size=200).next_step()


def test_tokenizer_that_does_not_match(prefix: Path) -> None:
    tokenizer = ByteTokenizer()
    check_tokenizer(IndexedDataset(prefix), tokenizer)
    tokenizer.fingerprint = "0" * 64
    with pytest.raises(DataError, match="name the one it was written with"):
        check_tokenizer(IndexedDataset(prefix), tokenizer)
    (prefix.with_name("d.json")).unlink()
    check_tokenizer(IndexedDataset(prefix), tokenizer)


def test_open_blend(prefix: Path) -> None:
    datasets = [DatasetConfig(path=str(prefix), weight=2.0), DatasetConfig(path=str(prefix), weight=1.0)]
    mix = open_blend(datasets, tokenizer=ByteTokenizer(), sequence_length=16, seed=1)
    assert [mix.locate(i)[0] for i in range(300)].count(0) == pytest.approx(200, abs=1)


def test_config_names_its_rules() -> None:
    config = build(DataConfig, {"train": [{"path": "a/b"}], "tokenizer": "bytes", "sequence_length": 8})
    assert config.train[0].weight == 1.0 and not config.document_mask
    with pytest.raises(ConfigError) as caught:
        build(DataConfig, {"train": [{"path": "a", "wieght": 1}], "tokenizer": "bytes", "sequence_length": 0})
    assert "nearest: weight" in str(caught.value) and "sequence_length" in str(caught.value)
    with pytest.raises(ConfigError, match="used twice"):
        build(
            DataConfig,
            {"train": [{"path": "a"}], "tokenizer": "bytes", "sequence_length": 8,
             "valid": [{"path": "x/v"}, {"path": "y/v"}]},
        )  # fmt: skip


def test_a_ramp_resumes_from_the_one_integer(prefix: Path) -> None:
    ramp = BatchSize(8, (4, 2, 20))
    straight, sizes, seen = make(prefix, batches=ramp), [], []
    for _ in range(8):
        sizes.append(straight.global_batch)
        seen.append(ids(straight.next_step()))
        assert len(seen[-1]) == sizes[-1]
    assert sizes == [4, 4, 4, 6, 6, 8, 8, 8]
    assert [i for step in seen for i in step] == list(range(sum(sizes)))
    resumed = make(prefix, batches=ramp, consumed_samples=sum(sizes[:4]))
    assert [ids(resumed.next_step()) for _ in range(4)] == seen[4:]
    with pytest.raises(ConfigError, match=r"batch_ramp's increment 2 is not divisible by dp 2 x train.micro_batch 2"):
        make(prefix, batches=ramp, dp_size=2)


def test_the_order_does_not_depend_on_the_process(prefix: Path) -> None:
    """R146: ranks whose hash seeds differ agree on what each sample is."""
    code = (
        "import sys; from tests.unit.data.test_loader import make; from pathlib import Path;"
        "print([b.tokens.sum(1).tolist() for _ in range(4) for b in make(Path(sys.argv[1])).next_step()])"
    )
    outputs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", code, str(prefix)]
        outputs.append(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 100
