"""SentencePiece, Hugging Face `tokenizers`, tiktoken and plain bytes behind one protocol.

The promise that all of them keep: a control string written inside a text (`</s>`, `<|endoftext|>`) is text. It never
becomes a control id, so that no document can inject the end of a document. Training a tokenizer is
`corpus/train_tokenizer`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megafp8.core.errors import DataError, one_line
from megafp8.data.tokenizer_ranks import TiktokenTokenizer, is_tiktoken

_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer.tiktoken")
CONTROL = ("<unk>", "<s>", "</s>", "<pad>")  # ids 0 to 3 of the tokenizers that we train, and of "bytes"


class Tokenizer(Protocol):
    """What the rest of the house asks of a tokenizer.

    Attributes:
        kind: "sentencepiece", "huggingface", "tiktoken" or "bytes".
        vocab_size: one more than the largest id.
        eod_id: ends each document.
        bos_id: begins a text, -1 if there is none.
        fingerprint: sha256, 64 hex digits, of the file that defines it.
    """

    kind: str
    vocab_size: int
    eod_id: int
    bos_id: int
    fingerprint: str

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin or end ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; control ids have no text."""
        ...


def identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a side file or checkpoint records to recognise a tokenizer."""
    return {
        "kind": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "bos_id": tokenizer.bos_id,
    }


def load_tokenizer(spec: Path | str) -> Tokenizer:
    """Load by what `spec` names: a SentencePiece .model, a tokenizer.json, tiktoken's ranks, their folder, or "bytes".

    Raises:
        DataError: no such file, not a tokenizer, or one without an end-of-document id.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        found = [path / name for name in _FILES if (path / name).is_file()]
        if not found:
            raise DataError(f"{path}: a folder without {', '.join(_FILES[:-1])} or {_FILES[-1]}")
        path = found[0]
    if not path.is_file():
        raise DataError(f'{path}: no such tokenizer; give a .model, tokenizer.json, .tiktoken, a folder, or "bytes"')
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    with open(path, "rb") as file:
        head = file.read(4096)
    return TiktokenTokenizer(path) if is_tiktoken(head) else SentencePieceTokenizer(path)


class SentencePieceTokenizer:
    """A SentencePiece model; its encoder never yields control pieces from text (measured, and tested).

    Attributes:
        file_bytes: the file.
        model: the package's processor.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece  # optional: "bytes" and tokenizer.json work without it
        except ImportError:
            raise DataError(f"{path}: needs the package sentencepiece; run `pip install sentencepiece`") from None
        data = path.read_bytes()
        if not data:  # the package takes it, and answers every call with a default
            raise DataError(f"{path}: not a SentencePiece model (an empty file)")
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise DataError(f"{path}: not a SentencePiece model ({one_line(error)})") from None
        self.file_bytes = data
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.vocab_size = self.model.get_piece_size()
        self.eod_id, self.bos_id = self.model.eos_id(), self.model.bos_id()
        if self.eod_id < 0:
            raise DataError(f"{path}: has no end id (</s>) to end documents with; train one with eos_id set")

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.model.encode(list(texts), out_type=int, num_threads=1)  # processes, not threads, share the work

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A `tokenizer.json` read by the `tokenizers` package (not by transformers, which may rebuild it).

    Attributes:
        definition: the file's JSON, with control strings marked as special, without truncation and padding.
    """

    kind = "huggingface"
    _EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
    _BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers  # optional: only folders in Hugging Face's layout need it
        except ImportError:
            raise DataError(f"{path}: needs the package tokenizers; run `pip install tokenizers`") from None
        data = path.read_bytes()
        self.fingerprint = hashlib.sha256(data).hexdigest()
        try:
            definition = json.loads(data)
            controls = self._control_names(path.parent, definition)
            for token in definition.get("added_tokens", []):
                token["special"] = token["special"] or token["content"] in controls
            definition["truncation"] = definition["padding"] = None  # a document is neither cut nor filled up
            self.definition = json.dumps(definition)
            self._tokenizer = tokenizers.Tokenizer.from_str(self.definition)
            self._tokenizer.encode("a \u65e5")  # some faults show only then
        except BaseException as error:  # the package raises bare Exception, and its panics are not even that
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
                raise
            raise DataError(f"{path}: not a tokenizer.json ({one_line(error)})") from None
        self._tokenizer.encode_special_tokens = True  # a control string in a text is text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        ends = [vocabulary[name] for name in controls[:1] if name in vocabulary]
        if not ends:
            raise DataError(
                f"{path}: no end-of-document token; name one as eos_token in tokenizer_config.json beside it"
            )
        self.eod_id = ends[0]
        self.bos_id = next((vocabulary[name] for name in controls[1:] if name in vocabulary), -1)

    def _control_names(self, folder: Path, definition: dict[str, Any]) -> list[str]:
        """[end, begin ...] strings: from tokenizer_config.json, else by the usual names among the added tokens."""
        added = {token["content"] for token in definition.get("added_tokens", [])}
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
        names = []
        for key, usual in (("eos_token", self._EOD_NAMES), ("bos_token", self._BOS_NAMES)):
            named = config.get(key)
            named = named.get("content") if isinstance(named, dict) else named
            names.append(named or next((name for name in usual if name in added), ""))
        return names

    def _checked(self, ids: list[int]) -> list[int]:
        if self.eod_id in ids:  # a model whose own vocabulary, not an added token, spells the control string
            raise DataError(f"a text encodes to the end-of-document id {self.eod_id}; mark that token as special")
        return ids

    def encode(self, text: str) -> list[int]:
        return self._checked(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._checked(one.ids) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class ByteTokenizer:
    """UTF-8 bytes: id = 4 + byte, after the four control ids; nothing to train, for tests and tiny runs."""

    kind = "bytes"
    vocab_size = len(CONTROL) + 256
    bos_id, eod_id = CONTROL.index("<s>"), CONTROL.index("</s>")
    fingerprint = hashlib.sha256(b"megafp8 bytes 1").hexdigest()

    def encode(self, text: str) -> list[int]:
        return [byte + len(CONTROL) for byte in text.encode("utf-8")]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        data = bytes(int(i) - len(CONTROL) for i in ids if len(CONTROL) <= int(i) < self.vocab_size)
        return data.decode("utf-8", errors="replace")
