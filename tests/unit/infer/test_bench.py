"""`megafp8 bench-inference`: our engine and a server measured, capacity at a budget, and what is wrong in one line."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from megafp8.cli.main import main
from megafp8.core.errors import ConfigError, ResourceError
from megafp8.infer import engine_speed
from megafp8.infer.server_speed import Server, check_server, measure_server
from megafp8.infer.sweep import Capacity, Curve, Point, Workload, capacity, percentile, run_sweep
from megafp8.infer.weights import build_model
from megafp8.report.latency_figure import latency_figure, standalone_svg
from tests.unit.infer.models import config_of, masters_of, save_model

GAP, WAIT = 0.02, 0.06  # seconds between tokens, and before the first, of the server below


class Handler(BaseHTTPRequestHandler):
    """A server of one model "m"; what it does wrong stands in `fault`."""

    protocol_version = "HTTP/1.1"
    fault, at_once, peak, prompts = "", 0, 0, Counter[tuple[int, ...]]()
    lock = threading.Lock()

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.fault != "no models"
        self.answer(200 if known else 404, json.dumps({"data": [{"id": "m"}]} if known else {"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["model"] == "m" and self.path == "/v1/completions"
        if self.fault == "refuses":
            return self.answer(400, json.dumps({"message": "prompt is too long"}))
        if self.fault == "whole":
            return self.answer(200, json.dumps({"choices": [{"text": "abc"}]}))
        with self.lock:
            Handler.at_once += 1
            Handler.peak = max(Handler.peak, Handler.at_once)
            Handler.prompts[tuple(body["prompt"])] += 1
        if self.fault == "busy" and sum(Handler.prompts.values()) > 1:
            return self.answer(503, "overloaded")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.stream(body["max_tokens"], len(body["prompt"]))
        with self.lock:
            Handler.at_once -= 1

    def stream(self, tokens: int, prompt: int) -> None:
        time.sleep(WAIT if self.fault != "hangs" else 1.0)
        for index in range(tokens):
            time.sleep(GAP if index else 0)
            self.piece({"choices": [{"text": "x", "finish_reason": None}]})
            if self.fault == "breaks":
                self.piece({"error": {"message": "engine died"}})
        self.piece({"choices": [{"text": "", "finish_reason": "length"}]})
        self.piece({"choices": [], "usage": {"prompt_tokens": prompt + 1, "completion_tokens": tokens}})
        self.chunk(b": a comment\n\ndata: [DONE]\n\n")
        self.chunk(b"")

    def piece(self, event: object) -> None:
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing: a test's output is its failures."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.fault, Handler.at_once, Handler.peak, Handler.prompts = "", 0, 0, Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bench"), config_of())


def point(batch: int, ms: float, rate: float) -> Point:
    return Point(batch, 0.1, ms / 1e3, ms / 1e3, rate, 8.0)


def test_capacity_lies_on_the_line_between_batch_sizes() -> None:
    points = [point(1, 10, 100), point(2, 12, 160), point(4, 20, 200)]
    between = capacity(points, 0.014)
    assert between is not None and not between.is_last
    assert (between.tokens_per_second, between.batch, between.token) == pytest.approx((170.0, 2.5, 0.014))
    assert capacity(points, 0.0099) is None
    assert capacity(points, 1.0) == Capacity(200, 0.02, 4, is_last=True)
    # more rows at less throughput: the best is not the last that fits
    best = capacity([*points, point(8, 30, 150)], 0.029)
    assert best is not None and best.tokens_per_second == 200 and best.batch == 4 and not best.is_last
    # a larger batch that is faster again (another kernel) counts
    again = capacity([point(1, 10, 100), point(2, 30, 90), point(4, 14, 300)], 0.015)
    assert again is not None and again.tokens_per_second == 300


def test_percentiles() -> None:
    assert percentile([3.0], 0.9) == 3 and percentile([4, 1, 2, 3], 0.5) == 2.5
    assert percentile(range(11), 0.9) == 9


def test_times_of_our_engine_are_those_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(
        [0.0, 9.0, 10.0, 11.0, *(100 + t for t in (0.0, 0.5, 0.6, 0.8)), *(200 + t for t in (0.0, 0.7, 0.8, 1.2))]
    )
    monkeypatch.setattr(engine_speed.time, "perf_counter", lambda: next(clock))
    model = build_model(config_of(), masters_of(config_of()))
    found = engine_speed.measure_engine(model, Workload(5, 3, warmup=1, repeats=2), 4)
    # the warm-up's seconds count nowhere; gaps 0.1 0.2 0.1 0.4
    assert found.first_token == pytest.approx(0.6) and found.token == pytest.approx(0.15)
    assert found.token_p90 == pytest.approx(0.34) and found.tokens_per_second == pytest.approx(4 * 3 * 2 / 2.0)


def test_our_engine_from_the_command_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench-inference",
        str(checkpoint),
        "--recipes",
        "none,current,as-trained",
        "--batches",
        "2,1",
        "--out",
        str(tmp_path),
    ]
    sizes = ["--prompt-tokens", "6", "--new-tokens", "4", "--repeats", "1", "--budget-ms", "100000"]
    assert main([*words, *sizes]) == 4  # a checkpoint that does not say how it was trained; the others are kept
    said = capsys.readouterr().out
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert [(c["label"], c["emulated"]) for c in kept["curves"]] == [
        ("BF16", False), ("FP8 current", True), ("as trained (BF16)", False)
    ]  # fmt: skip
    assert [p["batch"] for p in kept["curves"][0]["points"]] == [1, 2]
    assert all(p["tokens_per_second"] > 0 and p["first_token"] > 0 for c in kept["curves"] for p in c["points"])
    assert kept["curves"][1]["capacity"]["is_last"] in (True, False) and kept["machine"]["cpu"]
    assert "speed says nothing about a GPU" in said and "speed says nothing about a GPU" in kept["note"]
    assert said.count("FP8 current  ") == 2 and "as trained (BF16): not measured, " in said and "tokens/s" in said
    svg = (tmp_path / "latency.svg").read_text()
    assert "var(--" not in svg and "says nothing about a GPU" in svg and "FP8 current (emulated)" in svg
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_is_measured_with_as_many_requests_as_the_batch(url: str) -> None:
    server = Server(url + "/v1/", "m", 5.0)
    check_server(server)
    found = measure_server(server, Workload(7, 5, warmup=1, repeats=2, seed=3), 3)
    # Sleeps are never shorter than asked for; a busy machine makes them longer, by no more than fifty times.
    assert WAIT <= found.first_token < 50 * WAIT and GAP <= found.token <= found.token_p90 < 50 * GAP
    spent = 3 * 5 * 2 / found.tokens_per_second
    assert spent >= 2 * (WAIT + 4 * GAP)
    assert found.new_tokens == 5 and found.prompt_tokens == 8  # as the server counted, with its BOS
    assert Handler.peak == 3 and sum(Handler.prompts.values()) == 9
    assert max(Handler.prompts.values()) == 1  # a server's cache of prompts finds none again


def test_a_server_from_the_command_line(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench-inference", "--url", url, "--model", "m", "--prompt-tokens", "4", "--new-tokens", "3"]
    rounds = ["--warmup", "0", "--repeats", "1", "--budget-ms", "1", "--out", str(tmp_path)]
    assert main([*words, *rounds, "--batches", "1,2"]) == 0
    assert "m: within 1 ms a token none fits; the fastest is batch" in capsys.readouterr().out
    Handler.fault, Handler.prompts = "busy", Counter()
    # what was measured before it failed is kept, and the exit code says that something is missing
    assert main([*words, *rounds, "--batches", "1,2,4"]) == 6
    assert "m: no further, batch 2: " in (said := capsys.readouterr().out) and "503 to /v1/completions" in said
    (curve,) = json.loads((tmp_path / "bench.json").read_text())["curves"]
    assert [p["batch"] for p in curve["points"]] == [1] and curve["failure"] and curve["capacity"] is None


@pytest.mark.parametrize(
    "fault, kind, problem",
    [
        ("whole", ConfigError, "does not stream: it answered with application/json"),
        ("refuses", ConfigError, "400 to /v1/completions: .*prompt is too long"),
        ("breaks", ResourceError, "broke off: .*engine died"),
        ("hangs", ResourceError, r"silent for 0.3 s \(--timeout\)"),
    ],
)
def test_what_a_server_does_wrong_is_said(url: str, fault: str, kind: type[Exception], problem: str) -> None:
    Handler.fault = fault
    with pytest.raises(kind, match=problem) as caught:
        measure_server(Server(url, "m", 0.3 if fault == "hangs" else 30.0), Workload(4, 3, warmup=1, repeats=1), 2)
    assert "\n" not in str(caught.value)


def test_a_server_is_asked_what_it_serves_first(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--model mm: http://.* serves m, did you mean|--model mm: http://.* serves m"
    ):
        check_server(Server(url, "mm"))
    Handler.fault = "no models"
    with pytest.raises(ConfigError, match="404 to /v1/models"):
        check_server(Server(url, "m"))
    with pytest.raises(ResourceError, match="no connection: .*is the server up"):
        check_server(Server("http://127.0.0.1:9", "m", 5.0))


@pytest.mark.parametrize(
    "words, problem",
    [
        ([], "measure what? give CHECKPOINT_OR_RUN, or --url"),
        (["{path}", "--batches", "1,x"], "--batches '1,x': whole numbers from 1 up"),
        (["{path}", "--batches", "0"], "--batches '0': whole numbers from 1 up"),
        (["{path}", "--recipes", "none,curent"], "'curent' is none of none, as-trained, current"),
        (["{path}", "--new-tokens", "1"], "--new-tokens 1: at least 2"),
        (["{path}", "--prompt-tokens", "90", "--new-tokens", "10"], "exceed the model's 96 positions; ask for 4 fewer"),
        (["{path}", "--budget-ms", "-3"], "--budget-ms -3: above 0 ms"),
        (["--url", "localhost:8000", "--model", "m"], "--url 'localhost:8000': no address of a server"),
        (["--url", "http://localhost:8000"], "--url is given 1 and --model 0 times"),
        (["--url", "http://localhost:8000", "--model", "m", "--timeout", "0"], "--timeout 0.0: above 0 seconds"),
        (["{path}", "--out", "{path}/manifest.json"], "manifest.json: "),
    ],
)
def test_what_is_wrong_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    words = [word.format(path=checkpoint) for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path)]
    assert main(["bench-inference", *words, *out]) in (2, 6)
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_memory_that_is_full_ends_a_curve_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine_speed, "generate", full)
    with pytest.raises(ResourceError, match="4 rows of 8 tokens do not fit into the GPU's memory"):
        engine_speed.measure_engine(build_model(config_of(), masters_of(config_of())), Workload(5, 3), 4)

    def measure(batch: int) -> Point:
        if batch > 1:
            raise ResourceError("the GPU's memory is full")
        return point(batch, 10, 100)

    curve = run_sweep(Curve("BF16"), [1, 2, 4], measure)
    assert [p.batch for p in curve.points] == [1] and curve.failure == "batch 2: the GPU's memory is full"
    none = run_sweep(Curve("BF16"), [2, 1], measure)
    assert not none.points and isinstance(none.error, ResourceError)


def test_the_plot_marks_the_budget_and_what_fits() -> None:
    curves = [Curve("BF16", points=[point(1, 10, 100), point(4, 20, 200)]), Curve("FP8", points=[point(1, 6, 160)])]
    picture = latency_figure(curves, "A title", budget_seconds=0.015)
    svg = standalone_svg(picture)
    assert "150 tokens/s" in svg and "160 tokens/s or more" in svg and "budget 15 ms" in svg and "A title" in svg
    assert "within 15 ms a token: BF16 150 tokens/s, FP8 160 tokens/s or more" in picture.alt
    assert picture.png == latency_figure(curves, "A title", budget_seconds=0.015).png
    assert "beyond the picture" in latency_figure(curves, "A", budget_seconds=3).svg
