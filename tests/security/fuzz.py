"""P10: mutated files of every kind that we read. `python -m tests.security.fuzz --seconds 600 --seed 1`.

A reader may refuse with one line or give what the file says; it may not end by another error, by a signal, by taking
2 GiB, or not end. The last line that is printed names kind, seed and number of the case that was under way, so that
`--kind KIND --seed S --first N --cases 1` replays it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.models import BPE

from megafp8 import checkpoint
from megafp8.checkpoint.manifest import MANIFEST_NAME, _seal
from megafp8.convert.source import open_source
from megafp8.core.config import apply_overrides, build, load_toml
from megafp8.core.errors import MegaError
from megafp8.core.jsonio import sealed
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.readers import stream_records
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.integrity import check_blocks, fingerprint
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.verify import problems, stats
from megafp8.parallel.mesh import Mesh
from megafp8.train.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 2 << 30
SECONDS = 20  # for one case
NUMBERS = (0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
WORDS = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    2**31,
    2**63,
    2**80,
    "",
    "x" * 300,
    "../x",
    "日本\u0000",
    [],
    {},
    [[]] * 9,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with bits flipped, numbers set, parts cut, doubled, swapped or made longer."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                width = rng.choice((1, 2, 4, 8))
                out[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little")
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randrange(1, 64)]
            case 4:
                out[at:at] = out[max(0, at - rng.randrange(1, 200)) : at]
            case 5:
                out[at:at] = rng.randbytes(rng.randrange(1, 64))
            case 6:
                out[at:at] = rng.choice((b"[" * 5000, b'{"a":' * 5000, b"\x00" * 4096, b"9" * 5000, b"\xff\xfe"))
            case _:
                out += rng.randbytes(rng.randrange(1, 300))
    return bytes(out)


def mutated_json(value: object, rng: random.Random) -> object:
    """A JSON value with some parts replaced, dropped or moved."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return value
        node, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del node[key]
            case 1:
                node[key] = copy.deepcopy(rng.choice(WORDS))
            case 2 if isinstance(node[key], int):
                node[key] += rng.choice((-1, 1, 8, 1 << 40))
            case _:
                other, name = rng.choice(places)
                node[key] = json.loads(json.dumps(other[name] if _has(other, name) else None))
    return value


def _has(node: object, key: object) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)  # type: ignore[operator,arg-type]


def _places(node: object):  # type: ignore[no-untyped-def]
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])  # type: ignore[index]


class Kinds:
    """A file of each kind, whole, and what reads it once it is mutated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[str, Callable[[random.Random], None]] = {}
        self._dataset()
        self._checkpoint()
        self._hugging_face()
        self._tokenizers()
        self._texts()

    def _bytes(self, kind: str, path: Path, read: Callable[[], object]) -> None:
        good = path.read_bytes()

        def case(rng: random.Random) -> None:
            path.write_bytes(mutated(good, rng))
            try:
                read()
            finally:
                path.write_bytes(good)

        self.all[kind] = case

    def _json(self, kind: str, path: Path, read: Callable[[], object], wrap: Callable[[object], bytes]) -> None:
        good = path.read_bytes()
        value = json.loads(good)

        def case(rng: random.Random) -> None:
            path.write_bytes(wrap(mutated_json(value, rng)))
            try:
                read()
            finally:
                path.write_bytes(good)

        self.all[kind] = case

    def _dataset(self) -> None:
        prefix, plain = self.folder / "d", self.folder / "plain"
        rng = random.Random(0)
        for path in (prefix, plain):
            with IndexedDatasetWriter(path, "u2", metadata={"tokenizer": {"vocab_size": 99, "eod_id": 2}}) as writer:
                for _ in range(40):
                    writer.add_document([*(rng.randrange(3, 99) for _ in range(rng.randrange(30))), 2])
        (self.folder / "plain.json").unlink()

        def read(path: Path) -> None:
            dataset = IndexedDataset(path)
            check_blocks(dataset)
            fingerprint(dataset)
            found = problems(dataset)
            for index in range(min(dataset.num_documents, 60)):
                dataset.document(index)
            if not found:
                stats(dataset)

        self._bytes("idx", self.folder / "plain.idx", lambda: read(plain))
        self._bytes("bin", self.folder / "plain.bin", lambda: read(plain))
        self._bytes("side file bytes", self.folder / "d.json", lambda: read(prefix))
        seal = lambda value: json.dumps(sealed(value) if isinstance(value, dict) else value).encode()  # noqa: E731
        self._json("side file", self.folder / "d.json", lambda: read(prefix), seal)

    def _checkpoint(self) -> None:
        state = {"optimizer.master.w": torch.ones(8, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
        path = checkpoint.save(self.folder / "ck", 1, state, {}, Mesh.single(), {"step": 1})

        def read() -> None:
            for tensor in checkpoint.load_tensors(path).values():
                assert tensor.numel() < 1 << 20
            checkpoint.load(path, {name: t.clone() for name, t in state.items()}, {}, Mesh.single())

        def wrap(value: object) -> bytes:
            if isinstance(value, dict):
                value.pop("checksum", None)
            body = json.dumps(value).encode()[:-1]
            return body + _seal(body)

        self._bytes("manifest bytes", path / MANIFEST_NAME, read)
        self._json("manifest", path / MANIFEST_NAME, read, wrap)
        self._bytes("piece", path / "piece_00000_00.safetensors", read)

    def _hugging_face(self) -> None:
        folder = self.folder / "hf"
        folder.mkdir()
        config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 32, "rope_theta": 1e4, "tie_word_embeddings": True}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        layer = "model.layers.0."
        shapes = {
            "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), f"{layer}input_layernorm.weight": (8,),
            f"{layer}post_attention_layernorm.weight": (8,), f"{layer}self_attn.q_proj.weight": (8, 8),
            f"{layer}self_attn.k_proj.weight": (4, 8), f"{layer}self_attn.v_proj.weight": (4, 8),
            f"{layer}self_attn.o_proj.weight": (8, 8), f"{layer}mlp.gate_proj.weight": (8, 8),
            f"{layer}mlp.up_proj.weight": (8, 8), f"{layer}mlp.down_proj.weight": (8, 8),
        }  # fmt: skip
        weights = folder / "model.safetensors"
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, weights)

        def read() -> None:
            with open_source(folder) as source:
                for name in source.shapes:
                    source.read(name)

        read()
        self._bytes("safetensors", weights, read)
        self._json("config.json", folder / "config.json", read, lambda value: json.dumps(value).encode())
        self._bytes("config.json bytes", folder / "config.json", read)

    def _tokenizers(self) -> None:
        path = self.folder / "tokenizer.json"
        made = tokenizers.Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2, "</s>": 3}, merges=[("a", "b")]))
        made.add_special_tokens(["</s>"])
        made.save(str(path))

        def read() -> None:
            tokenizer = load_tokenizer(path)
            tokenizer.decode(tokenizer.encode("abba </s> 日本"))

        self._json("tokenizer.json", path, read, lambda value: json.dumps(value).encode())
        self._bytes("tokenizer.json bytes", path, read)

    def _texts(self) -> None:
        lines = [json.dumps({"id": i, "text": "some text " * (i % 7), "lang": "en"}) for i in range(60)]
        for kind, name, data in (("jsonl", "x.jsonl", "\n".join(lines)), ("text", "x.txt", "a\n\nb\n" * 30)):
            path = self.folder / name
            path.write_text(data, encoding="utf-8")
            config = SourceConfig(files=(str(path),), kind=kind)

            def read(path: Path = path, config: SourceConfig = config) -> None:
                with InputStream(str(path)) as stream:
                    for record in stream_records(str(path), stream, config):
                        repr(record)

            self._bytes(kind, path, read)
        toml = self.folder / "run.toml"
        toml.write_bytes((ROOT / "examples/tiny_cpu/pretrain.toml").read_bytes())
        self._bytes("TOML", toml, lambda: build(RunConfig, apply_overrides(load_toml(toml), ["--train.steps", "3"])))


def main() -> int:
    """Run cases until the time or their number is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = Kinds(Path(folder))
        names = [args.kind] if args.kind else list(kinds.all)
        usage = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (usage + MEMORY_BYTES, resource.RLIM_INFINITY))
        end, number, refused = time.monotonic() + args.seconds, args.first, dict.fromkeys(names, 0)
        faults = 0
        while number - args.first < args.cases and time.monotonic() < end:
            kind = names[number % len(names)]
            print(f"\r--kind {kind!r} --seed {args.seed} --first {number} --cases 1", end="", flush=True)
            signal.alarm(SECONDS)
            try:
                kinds.all[kind](random.Random(f"{args.seed} {number} {kind}"))
            except MegaError as error:
                refused[kind] += 1
                assert str(error), "a refusal without a word"
            except Exception as error:  # the faults that this looks for
                faults += 1
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(frame.filename).name}:{frame.lineno}"
                print(f": {type(error).__name__}: {str(error)[:200]} ({where})", flush=True)
            finally:
                signal.alarm(0)
            number += 1
        print(f"\n{number - args.first} cases of {len(names)} kinds; faults: {faults}; refused: {refused}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
