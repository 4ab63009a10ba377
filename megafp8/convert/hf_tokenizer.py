"""Tokenizer files of a Hugging Face folder whose ids are those of the tokenizer that trained the model.

transformers rebuilds a bare SentencePiece file by rules of its own and gets other ids (up to 94% of texts, for Unigram
models); a tokenizer.json made here and declared PreTrainedTokenizerFast gives the same ids. The one known difference:
a control string written inside a text is text to us and a control token to transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from megafp8.convert.hf_tokenizer_ranks import byte_letters, ranks_tokenizer
from megafp8.convert.optional import load
from megafp8.core.errors import ConfigError
from megafp8.core.jsonio import write_atomic, write_json
from megafp8.data.tokenizer import CONTROL, Tokenizer, load_tokenizer
from megafp8.data.tokenizer_ranks import TiktokenTokenizer

_SPACE = "▁"  # SentencePiece's visible space
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # SentencePiece.Type
_SPECIAL_KEYS = {"<unk>": "unk_token", "<s>": "bos_token", "</s>": "eos_token", "<pad>": "pad_token"}


def write_tokenizer(spec: str | Path, folder: Path, *, max_length: int, add_bos: bool | None = None) -> dict[str, int]:
    """Write the tokenizer files of `spec` into `folder`.

    Args:
        spec: as `load_tokenizer` takes it.
        max_length: tokens that the model has positions for.
        add_bos: whether a text begins with the begin id, as it did in training; None: as a tokenizer.json has it, else
            not.

    Returns:
        {"bos_token_id", "eos_token_id", "pad_token_id"}: those that exist, for the model's config.

    Raises:
        DataError: no such tokenizer.
        ConfigError: a SentencePiece option that tokenizer.json cannot express, or `tokenizers` is not installed.
    """
    tokenizer = load_tokenizer(spec)
    if tokenizer.kind == "huggingface":
        return _copy(Path(spec), tokenizer, folder, add_bos)
    if tokenizer.kind == "bytes":
        definition, special = _bytes_tokenizer(), {name: name for name in CONTROL}
    elif isinstance(tokenizer, TiktokenTokenizer):
        definition, special = ranks_tokenizer(tokenizer), _special_ranks(tokenizer)
    else:
        path = Path(spec) / "tokenizer.model" if Path(spec).is_dir() else Path(spec)
        model = load("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(path.read_bytes())
        definition, special = _sentencepiece_tokenizer(model), _special_pieces(model)
        shutil.copyfile(path, folder / "tokenizer.model")
    if add_bos:
        definition.post_processor = _begins_with(special["<s>"], tokenizer.bos_id)
    write_atomic(folder / "tokenizer.json", definition.to_str(pretty=True).encode())
    names = {_SPECIAL_KEYS[role]: piece for role, piece in special.items()}
    write_json(folder / "special_tokens_map.json", names)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            **names,
        },
    )
    ids = {key.replace("_token", "_token_id"): definition.token_to_id(piece) for key, piece in names.items()}
    ids.pop("unk_token_id", None)
    return ids


def _begins_with(piece: str, number: int) -> Any:
    return load("tokenizers").processors.TemplateProcessing(
        single=f"{piece} $A", pair=f"{piece} $A {piece}:1 $B:1", special_tokens=[(piece, number)]
    )


def _copy(path: Path, tokenizer: Tokenizer, folder: Path, add_bos: bool | None) -> dict[str, int]:
    source = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    made = load("tokenizers").Tokenizer.from_file(str(file))
    if add_bos is None or made.encode("").ids == [tokenizer.bos_id] * add_bos:
        shutil.copyfile(file, folder / "tokenizer.json")
    else:  # the file's own rule is not what the model was trained with
        begin = made.id_to_token(tokenizer.bos_id) if add_bos else ""
        made.post_processor = _begins_with(begin, tokenizer.bos_id) if add_bos else None
        write_atomic(folder / "tokenizer.json", made.to_str(pretty=True).encode())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    if not (folder / "tokenizer_config.json").exists():
        eos = next(token["content"] for token in added if token["id"] == tokenizer.eod_id)
        write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": eos},
        )
    pad = json.loads((folder / "tokenizer_config.json").read_bytes()).get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    pad_id = next((token["id"] for token in added if token["content"] == pad), -1)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eod_id, "pad_token_id": pad_id}
    return {key: number for key, number in ids.items() if number >= 0}


def _special_ranks(tokenizer: TiktokenTokenizer) -> dict[str, str]:
    """{role: piece} of the control pieces that a file of ranks has."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    ids = {"<s>": tokenizer.bos_id, "</s>": tokenizer.eod_id}
    return {role: names[number] for role, number in ids.items() if number in names}


def _special_pieces(model: Any) -> dict[str, str]:
    """{role: piece} of the control pieces that the model has."""
    trainer = model.trainer_spec
    ids = {"<unk>": trainer.unk_id, "<s>": trainer.bos_id, "</s>": trainer.eos_id, "<pad>": trainer.pad_id}
    return {role: model.pieces[number].piece for role, number in ids.items() if 0 <= number < len(model.pieces)}


def _sentencepiece_tokenizer(model: Any) -> Any:
    """A tokenizers.Tokenizer with the ids of a SentencePiece model."""
    tokenizers = load("tokenizers")
    _refuse_what_has_no_word(model)
    tokenizer = tokenizers.Tokenizer(_bpe(model) if model.trainer_spec.model_type == BPE else _unigram(model))
    own = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    frozen = own if model.trainer_spec.model_type == BPE else []  # Unigram's have scores that nothing beats
    tokenizer.normalizer = _normalizer(model.normalizer_spec, frozen)
    tokenizer.decoder = _decoder(model.normalizer_spec)
    added = [piece for piece in model.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(p.piece, special=True, normalized=False) for p in added])
    # Found in the text as it is normalised, or what follows one would count as the beginning of a text.
    tokenizer.add_tokens([tokenizers.AddedToken(piece, special=False, normalized=True) for piece in frozen])
    return tokenizer


def _refuse_what_has_no_word(model: Any) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (UNIGRAM, BPE):
        raise ConfigError("a SentencePiece model of type word or char cannot be exported; train unigram or bpe")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ConfigError(
            "a SentencePiece model with treat_whitespace_as_suffix, or without escape_whitespaces, cannot be exported"
        )


def _unigram(model: Any) -> Any:
    tokenizers = load("tokenizers")
    best = max((piece.score for piece in model.pieces if piece.type == _NORMAL), default=0.0)
    pieces = [
        # as SentencePiece scores a symbol, by its bytes, so that it is always taken
        (p.piece, len(p.piece.encode()) * best - 0.1 if p.type == _USER_DEFINED else p.score)
        for p in model.pieces
    ]
    return tokenizers.models.Unigram(pieces, model.trainer_spec.unk_id, model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> Any:
    tokenizers = load("tokenizers")
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    mergeable = {piece.piece: piece.score for piece in model.pieces if piece.type not in (_CONTROL, _UNKNOWN, _UNUSED)}
    merges = []
    for piece, score in mergeable.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in mergeable and pair[1] in mergeable]
        merges += [(-score, vocabulary[left], vocabulary[right], left, right) for left, right in pairs]
    return tokenizers.models.BPE(
        vocabulary,
        [(left, right) for *_, left, right in sorted(merges)],  # a higher score merges first
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _normalizer(spec: Any, symbols: list[str]) -> Any:
    """SentencePiece's normaliser: its character map, then its own treatment of spaces.

    `symbols` are normalised by it too, to be found in normalised texts; they must not get the space before a text.
    """
    tokenizers = load("tokenizers")
    normalizers, regex = tokenizers.normalizers, tokenizers.Regex
    steps = []
    if spec.precompiled_charsmap:
        mapped = normalizers.Precompiled(spec.precompiled_charsmap)
        # The package takes "\r\n" for one character and maps only its first half; SentencePiece maps both.
        if mapped.normalize_str("\r") == mapped.normalize_str("\n"):
            steps.append(normalizers.Replace("\r\n", "\n\n"))
        steps.append(mapped)
    if spec.remove_extra_whitespaces:  # spaces only: Strip would take line ends too
        steps += [normalizers.Replace(regex(r"\A +| +\z"), ""), normalizers.Replace(regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and symbols:
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(regex(rf"\A(?!(?:{alone})?\z)"), _SPACE))
    elif spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _decoder(spec: Any) -> Any:
    decoders = load("tokenizers").decoders
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else steps)


def _bytes_tokenizer() -> Any:
    """UTF-8 bytes as ids after the control ids: a BPE without merges."""
    tokenizers = load("tokenizers")
    letters = byte_letters()
    vocabulary = {name: number for number, name in enumerate(CONTROL)}
    vocabulary |= {letters[byte]: len(CONTROL) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=CONTROL[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in CONTROL])
    return tokenizer
