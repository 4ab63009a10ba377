"""tokenizer.json against SentencePiece itself: equal ids for BPE and Unigram, plain or normalising."""

import io
import json
import random

import pytest
import sentencepiece
import transformers

from megafp8.convert.hf_tokenizer import write_tokenizer
from megafp8.convert.verify_hf import TEXTS, _Ties
from megafp8.core.errors import ConfigError
from megafp8.data.tokenizer import load_tokenizer

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


def test_user_defined_symbols_stay_whole(tmp_path):
    path = train(tmp_path / "t.model", model_type="bpe", user_defined_symbols=["<tag>", "©©"])
    (tmp_path / "hf").mkdir()
    write_tokenizer(path, tmp_path / "hf", max_length=10)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("a<tag>", "<tag>b", "x©©"):
        got = theirs.convert_ids_to_tokens(theirs(text)["input_ids"])
        assert "<tag>" in got or "©©" in got


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
