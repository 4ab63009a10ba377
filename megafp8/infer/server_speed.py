"""How fast a server is that speaks OpenAI's HTTP interface (TensorRT-LLM, vLLM, SGLang): streamed /v1/completions.

A batch size is a number of clients, each of which sends its next request when the last has ended, so that the server
always has that many. Python's standard library only.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megafp8.core.config import nearest
from megafp8.core.errors import ConfigError, MegaError, ResourceError, one_line
from megafp8.infer.sweep import Point, Workload, percentile

_IDS = range(100, 1000)  # prompts are of these token ids, which every vocabulary has and which are rarely special
_MAX_BYTES = 1 << 20  # of one line of a stream, or of an answer that is not one


@dataclass(frozen=True)
class Server:
    """A model on a server.

    Attributes:
        url: `http(s)://host[:port]`, with or without `/v1`.
        model: the name by which it serves it.
        timeout: seconds without a byte, or for a whole request before its first token, after which it counts as hung.
    """

    url: str
    model: str
    timeout: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.username:
            raise ConfigError(f"--url {self.url!r}: no address of a server; it looks like http://localhost:8000")
        if not self.timeout > 0:
            raise ConfigError(f"--timeout {self.timeout}: above 0 seconds")

    @property
    def place(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    def path(self, name: str) -> str:
        """Of a call of the interface."""
        return f"{urlsplit(self.url).path.rstrip('/').removesuffix('/v1')}/v1/{name}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection, which opens itself at the first request."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=self.timeout)


@dataclass(frozen=True)
class _Reply:
    """When a request was sent and its tokens came, in seconds; how many tokens, and of the prompt if it was said."""

    sent: float
    first: float
    last: float
    tokens: int
    prompt_tokens: int | None


class _GivenUp(Exception):
    """Another request failed, whose error is the one to tell."""


def check_server(server: Server) -> None:
    """Ask what it serves.

    Raises:
        ResourceError: nobody answers there.
        ConfigError: it speaks another interface, or serves another model.
    """
    connection = server.connect()
    try:
        connection.request("GET", server.path("models"))
        response = connection.getresponse()
        text = response.read(_MAX_BYTES)
        _check_status(server, "models", response.status, text)
        names = [str(entry["id"]) for entry in json.loads(text)["data"]]
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(server, error) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{server.url}: its /v1/models is not that of an OpenAI-style server; see --url") from None
    finally:
        connection.close()
    if server.model not in names:
        served = ", ".join(names[:10]) or "nothing"
        raise ConfigError(f"--model {server.model}: {server.url} serves {served}{nearest(server.model, names)}")


def measure_server(server: Server, workload: Workload, batch: int) -> Point:
    """The speed with `batch` requests at once.

    The time per token of a request is what passed between its first and its last, by the tokens after the first:
    servers may send several in a piece.

    Raises:
        ResourceError: it does not answer, or not in time.
        ConfigError: it refuses the request, or does not stream.
    """
    stop, replies = threading.Event(), list[_Reply]()
    start = threading.Barrier(batch + 1)

    def client(number: int) -> None:
        rng, connection = random.Random(f"{workload.seed} {batch} {number}"), server.connect()
        try:
            for turn in range(-workload.warmup, workload.repeats):
                if turn == 0:
                    start.wait()
                if stop.is_set():
                    return
                reply = _ask(server, connection, workload, rng, stop)
                if turn >= 0:
                    replies.append(reply)
        except BaseException:
            stop.set()
            start.abort()  # frees those that wait for the start
            raise
        finally:
            connection.close()

    with ThreadPoolExecutor(batch) as pool:
        work = [pool.submit(client, number) for number in range(batch)]
        try:
            start.wait()
        except threading.BrokenBarrierError:
            pass  # a client failed, and its error comes below
        except BaseException:
            stop.set()  # interrupted: the clients must not go on to their end
            start.abort()
            raise
        errors = [error for error in (one.exception() for one in work) if error is not None]
    if errors:
        raise next((e for e in errors if isinstance(e, MegaError)), errors[0])
    return _point(batch, replies)


def _point(batch: int, replies: list[_Reply]) -> Point:
    times = [(one.last - one.first) / (one.tokens - 1) for one in replies]
    spent = max(one.last for one in replies) - min(one.sent for one in replies)
    prompts = [one.prompt_tokens for one in replies if one.prompt_tokens is not None]
    return Point(
        batch=batch,
        first_token=percentile([one.first - one.sent for one in replies], 0.5),
        token=percentile(times, 0.5),
        token_p90=percentile(times, 0.9),
        tokens_per_second=sum(one.tokens for one in replies) / spent,
        new_tokens=sum(one.tokens for one in replies) / len(replies),
        prompt_tokens=sum(prompts) / len(prompts) if prompts else None,
    )


def _ask(
    server: Server,
    connection: http.client.HTTPConnection,
    workload: Workload,
    rng: random.Random,
    stop: threading.Event,
) -> _Reply:
    """One request, from its sending to its last token."""
    body = {
        "model": server.model,
        "prompt": rng.choices(_IDS, k=workload.prompt_tokens),
        "max_tokens": workload.new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,  # not OpenAI's own, but TensorRT-LLM, vLLM and SGLang know it
    }
    sent = time.perf_counter()
    try:
        connection.request("POST", server.path("completions"), json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            _check_status(server, "completions", response.status, response.read(_MAX_BYTES))
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise ConfigError(
                f"{server.url}: does not stream: it answered with {kind} where text/event-stream was asked for; "
                "without a stream there is no time per token"
            )
        return _listen(server, response, sent, stop)
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(server, error) from None


def _listen(server: Server, response: http.client.HTTPResponse, sent: float, stop: threading.Event) -> _Reply:
    """Read a stream to its end."""
    stamps, usage = list[float](), dict[str, Any]()
    for event in _events(server, response):
        now = time.perf_counter()
        if stop.is_set():
            raise _GivenUp
        if not stamps and now - sent > server.timeout:
            raise ResourceError(f"{server.url}: no token within {server.timeout:g} s (--timeout)")
        found = event.get("usage")
        usage = found if isinstance(found, dict) else usage
        choices = event.get("choices")
        # The piece that only says why it ended carries no token.
        if any(
            one.get("text") or not one.get("finish_reason") for one in (choices if isinstance(choices, list) else ())
        ):
            stamps.append(now)
    tokens = int(usage.get("completion_tokens") or len(stamps))
    if len(stamps) < 2 or tokens < 2:
        raise ConfigError(
            f"{server.url}: sent {tokens} tokens in {len(stamps)} pieces; a time per token needs at least two of both: "
            "more --new-tokens, or a server that streams in smaller pieces"
        )
    return _Reply(sent, stamps[0], stamps[-1], tokens, usage.get("prompt_tokens"))


def _events(server: Server, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`; an empty one for a sign of life."""
    ended = False
    while line := response.readline(_MAX_BYTES):
        text = line.strip()
        if text.startswith(b":"):
            yield {}
        if ended or not text.startswith(b"data:"):
            continue  # what follows the end is read so that the connection is free
        text = text[5:].strip()
        if text == b"[DONE]":
            ended = True
            continue
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ConfigError(f"{server.url}: sent {text[:60]!r} in its stream, which is no JSON object")
        if event.get("error"):
            raise ResourceError(f"{server.url}: broke off: {one_line(ValueError(event['error']))}")
        yield event
    if not ended:
        raise ResourceError(f"{server.url}: closed the stream before its end")


def _check_status(server: Server, call: str, status: int, text: bytes) -> None:
    if status == 200:
        return
    said = one_line(ValueError(text.decode("utf-8", "replace") or http.client.responses.get(status, "")))
    line = f"{server.url}: {status} to /v1/{call}: {said}"
    raise ResourceError(line) if status >= 500 or status == 429 else ConfigError(line)


def _unreachable(server: Server, error: Exception) -> MegaError:
    if isinstance(error, (TimeoutError, socket.timeout)):
        return ResourceError(f"{server.url}: silent for {server.timeout:g} s (--timeout)")
    return ResourceError(f"{server.url}: no connection: {one_line(error)}; is the server up, and is this its address?")
