"""The Ray executor: the same bytes from a Ray of this machine, and from a cluster that loses a node."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.errors import ConfigError, DataError, ResourceError
from megafp8.corpus.run import preprocess

ray = pytest.importorskip("ray", reason="ray is not installed; pip install ray")
pytestmark = pytest.mark.slow  # starting Ray takes seconds

EXECUTOR = {"shard_bytes": 12_000, "part_bytes": 8_000}


@pytest.fixture
def whole(config: Callable, contents: Callable, tmp_path: Path) -> dict[str, bytes]:
    preprocess(config("whole", executor=EXECUTOR))
    return contents(tmp_path / "whole")


def test_a_ray_of_this_machine(config: Callable, contents: Callable, tmp_path: Path, whole: dict[str, bytes]) -> None:
    preprocess(config(output={"workers": 2}, executor={**EXECUTOR, "kind": "ray"}))
    assert contents(tmp_path / "out") == whole
    with pytest.raises(DataError, match="largest that works is"):
        preprocess(config(tokenizer={"vocab_size": 30000}, executor={**EXECUTOR, "kind": "ray"}))


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_cluster_that_loses_a_node(
    config: Callable,
    contents: Callable,
    tmp_path: Path,
    whole: dict[str, bytes],
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes of one CPU; one of them goes when the second task is done."""
    from megafp8.corpus import stage_run

    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    done, seen = stage_run._Listener.done, []

    @functools.wraps(done)
    def lose(self: Any, task: Any, record: Any) -> None:
        seen.append(task.id)
        if len(seen) == 2:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        done(self, task, record)

    monkeypatch.setattr(stage_run._Listener, "done", lose)
    preprocess(config(executor={**EXECUTOR, "kind": "ray", "address": cluster.address, "retries": 5}))
    assert contents(tmp_path / "out") == whole and not nodes[1:]
    log = [json.loads(line) for line in (tmp_path / "out" / "stages" / "log.jsonl").read_text().splitlines()]
    assert not [entry for entry in log if entry["event"] == "set aside"]


def test_no_cluster_there(config: Callable) -> None:
    with pytest.raises(ResourceError, match=r"no Ray at executor.address '127.0.0.1:1'"):
        preprocess(config(executor={"kind": "ray", "address": "127.0.0.1:1"}))
    with pytest.raises(ConfigError, match='address is for executor.kind "ray"'):
        config(executor={"address": "auto"})
