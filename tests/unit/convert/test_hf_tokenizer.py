"""tokenizer.json against SentencePiece itself: equal ids for BPE and Unigram, plain or normalising."""

import base64
import io
import json
import random

import pytest
import sentencepiece
import tokenizers
import transformers

from megafp8.convert.hf_tokenizer import write_tokenizer
from megafp8.convert.hf_tokenizer_ranks import byte_letters
from megafp8.convert.verify_hf import TEXTS, _Ties
from megafp8.core.errors import ConfigError
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.tokenizer_ranks import side_file

LINES = [
    f"{text} {number * 37 % 1000} {'ab' * (number % 7)}{' ' * (number % 5)}end\n"
    for number in range(60)
    for text in TEXTS
]


def train(path, **options):
    out = io.BytesIO()
    defaults = {
        "vocab_size": 450, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True,
        "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3, "minloglevel": 2, "num_threads": 1,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=out, **{**defaults, **options})
    path.write_bytes(out.getvalue())
    return path


def samples():
    rng = random.Random(5)
    text = "".join(LINES)
    yield from TEXTS
    yield from ("  ", " a", "a ", "\n\n x", "a\r\nb", "\0", "a  b   c", "x" * 100, "１２３", "𝔘")
    for _ in range(150):
        start = rng.randrange(len(text))
        yield text[start : start + rng.randrange(1, 200)]
    for _ in range(150):
        yield "".join(rng.choice("abe  \n\t0１éあ漢🙂.,-ﬁ") for _ in range(rng.randrange(40)))


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_and_texts_equal_sentencepieces(tmp_path, kind, rule, trimmed):
    path = train(tmp_path / "t.model", model_type=kind, normalization_rule_name=rule, remove_extra_whitespaces=trimmed)
    (tmp_path / "hf").mkdir()
    assert write_tokenizer(path, tmp_path / "hf", max_length=9999) == {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    }  # fmt: skip
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == path.read_bytes()
    ours = load_tokenizer(path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(theirs) == ours.vocab_size
    ties = _Ties(tmp_path / "hf" / "tokenizer.model")
    tied = 0
    for text in samples():
        wanted, got = ours.encode(text), theirs(text)["input_ids"]
        tied += wanted != got
        assert wanted == got or ties.hold(wanted, got), repr(text)
        assert theirs.decode(wanted) == ours.decode(wanted)
    assert tied == 0 if kind == "bpe" else tied < 10  # fp32 against fp64 sums; see _Ties


def test_a_tie_is_not_any_difference(tmp_path):
    path = train(tmp_path / "tokenizer.model", model_type="unigram")
    ties, ours = _Ties(path), load_tokenizer(path)
    ids = ours.encode("the lazy dog")
    assert ties.hold(ids, ids) and not ties.hold(ids, ours.encode("the lazy fox"))
    assert not ties.hold(ids, [n for c in "the lazy dog" for n in ours.encode(c)])
    assert not _Ties(train(tmp_path / "bpe.model", model_type="bpe")).hold(ids, ids)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_user_defined_symbols_stay_whole(tmp_path, kind):
    path = train(tmp_path / "t.model", model_type=kind, user_defined_symbols=["<tag>", "©©", "(a|b)"])
    (tmp_path / "hf").mkdir()
    write_tokenizer(path, tmp_path / "hf", max_length=10)
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    rng = random.Random(7)
    texts = ["a<tag>", "<tag>b", "x©©", " <tag> ", "<tag><tag>", "the <tag>the", "(a|b)", "", " "]
    texts += [
        "".join(rng.choice(["<tag>", "©©", "(a|b)", "the ", " dog", "x", "<", "\n"]) for _ in range(9))
        for _ in range(99)
    ]
    ties = _Ties(tmp_path / "hf" / "tokenizer.model")
    for text in texts:
        wanted, got = ours.encode(text), theirs(text)["input_ids"]
        if kind == "bpe" and text == "(a|b)":  # a whole text that is a symbol has no space before it there
            assert wanted == [ours.model.piece_to_id("▁"), *got]
        else:
            assert wanted == got or ties.hold(wanted, got), text


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_a_text_begins_as_in_training(tmp_path, add_bos):
    path = train(tmp_path / "t.model", model_type="bpe")
    folders = [tmp_path / name for name in ("first", "second", "back")]
    for folder in folders:
        folder.mkdir()
    write_tokenizer(path, folders[0], max_length=10, add_bos=add_bos)
    write_tokenizer(folders[0] / "tokenizer.json", folders[1], max_length=10, add_bos=not add_bos)  # of another run
    write_tokenizer(folders[1] / "tokenizer.json", folders[2], max_length=10)  # not known: as it is
    ids = load_tokenizer(path).encode("the dog")
    for folder, begins in zip(folders, (add_bos, not add_bos, not add_bos), strict=True):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs("the dog")["input_ids"] == [1] * bool(begins) + ids
        assert theirs("the dog", add_special_tokens=False)["input_ids"] == ids


PATTERNS = ["gpt2", "cl100k_base", "o200k_base", r"\p{N}{1,3}+|\S+| +$|\s"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tiktokens_ranks(tmp_path, pattern):
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(LINES, trainer)
    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    pieces = sorted((number, bytes(bytes_of[c] for c in piece)) for piece, number in made.get_vocab().items())
    pieces.append((len(pieces), b"zqjx"))  # of no two pieces, but a piece
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(piece), number) for number, piece in pieces))
    special = {"<|startoftext|>": len(pieces), "<|endoftext|>": len(pieces) + 1}
    side_file(path).write_text(json.dumps({"pattern": pattern, "special_tokens": special}))
    (tmp_path / "hf").mkdir()
    ids = write_tokenizer(path, tmp_path / "hf", max_length=10)
    assert ids == {"bos_token_id": len(pieces), "eos_token_id": len(pieces) + 1}
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (*samples(), "I'M we'Re 1234567 x  \n\n ", "a \n", "tail   ", "zqjx azqjx"):
        assert theirs(text)["input_ids"] == ours.encode(text), repr(text)
        assert theirs.decode(ours.encode(text)) == text


def test_gaps_among_tiktokens_ids_are_refused(tmp_path):
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)))
    side_file(path).write_text(json.dumps({"pattern": "gpt2", "special_tokens": {"<|endoftext|>": 300}}))
    with pytest.raises(ConfigError, match="has id 300 where 256 is next"):
        write_tokenizer(path, tmp_path, max_length=10)


def test_what_cannot_be_expressed_is_refused(tmp_path):
    path = train(tmp_path / "t.model", model_type="bpe", treat_whitespace_as_suffix=True)
    with pytest.raises(ConfigError, match="treat_whitespace_as_suffix"):
        write_tokenizer(path, tmp_path, max_length=10)


def test_bytes(tmp_path):
    write_tokenizer("bytes", tmp_path, max_length=10)
    ours, theirs = load_tokenizer("bytes"), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "".join(map(chr, range(0x250)))):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


def test_a_hugging_face_tokenizer_is_passed_on(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    write_tokenizer("bytes", first, max_length=10)
    ids = write_tokenizer(first, second, max_length=10)
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert json.loads((second / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
