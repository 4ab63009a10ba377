"""Changes of characters, each kind counted; masks for personal data, and what only looks like it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import ftfy
import pytest

from megafp8.core.errors import ConfigError
from megafp8.corpus.documents import Document
from megafp8.corpus.step_registry import make_step
from megafp8.corpus.steps import normalise
from tests.unit.corpus.prose import TEXTS

NASTY = Path(__file__).resolve().parents[2] / "nasty"


def change(kind: str, text: str, **options: object) -> tuple[str, dict[str, int]]:
    result = make_step({"kind": kind, **options}).apply(Document("i", text, "en", "s"))
    return result.text, {key.removeprefix("count:"): number for key, number in result.metadata.items()}


@pytest.mark.parametrize(
    ("text", "expected", "counts"),
    [
        ("a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h\n", "a\nb\nc\nd\ne\nf\ng\nh\n", {"line_ends": 7}),
        ("\x00a\x07\x1b[31m\tb\x7f\x9f\uffff", "a[31m\tb", {"control": 6}),
        ("\ufeffso\u00adft zero\u200bwidth\u2060", "soft zerowidth", {"zero_width": 4}),
        ("東\u200d京\u200c と \u200d", "東京 と ", {"zero_width": 3}),
        ("می\u200cخواهم 👩\u200d👧 क\u200dष", "می\u200cخواهم 👩\u200d👧 क\u200dष", {}),  # joiners that mean something
        ("u\u0308ber cafe\u0301 か\u3099", "über café が", {"nfc": 1}),
        ("ｱｲｳ ＡＢＣ ﬁ ㎏ ½", "ｱｲｳ ＡＢＣ ﬁ ㎏ ½", {}),  # NFC, not NFKC
    ],
)
def test_normalise(text: str, expected: str, counts: dict[str, int]) -> None:
    assert change("normalise", text) == (expected, counts)
    assert change("normalise", expected) == (expected, {})
    off = dict.fromkeys(("nfc", "line_ends", "control", "zero_width", "mojibake"), False)
    assert change("normalise", text, **off) == (text, {})


@pytest.mark.parametrize("language", TEXTS)
def test_normalise_does_not_touch_good_text(language: str) -> None:
    document = Document("i", TEXTS[language], language, "s")
    assert make_step({"kind": "normalise"}).apply(document) is document


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((text, "latin-1") for text in ("Tür schön groß", "“Smart” – dash…", "à l’été", "日本語の文章です。", "5 €")),
        *((text, "cp1252") for text in ("Tür schön groß", "“Smart – dash…", "à l’été", "3 × 5 €")),
    ],
)
def test_mojibake_is_repaired(text: str, encoding: str) -> None:
    broken = text.encode().decode(encoding)
    assert change("normalise", f"Good line: Grüße\n{broken}\nend") == (
        f"Good line: Grüße\n{text}\nend",
        {"mojibake": 1},
    )


@pytest.mark.parametrize("text", ["Â la carte", "SÃO PAULO, à « Paris »", "naïve Ångström Österreich", "ãé", "Ð and Ñ"])
def test_what_only_looks_like_mojibake(text: str) -> None:
    assert change("normalise", text) == (text, {})


def test_ftfy_is_asked_about_suspects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ftfy, "fix_encoding", lambda line: asked.append(line) or line)
    for text in TEXTS.values():
        change("normalise", text)
    assert not asked and normalise.repaired("a\nschÃ¶n\nb") == ("a\nschÃ¶n\nb", 0) and asked == ["schÃ¶n"]


def test_all_of_the_nasty_characters_come_out_normal() -> None:
    for line in (NASTY / "unicode_zoo.jsonl").read_text(encoding="utf-8").splitlines():
        text, _ = change("normalise", json.loads(line)["text"])
        assert unicodedata.is_normalized("NFC", text) and change("normalise", text) == (text, {})
        assert not any(unicodedata.category(one) == "Cc" for one in text.replace("\n", "").replace("\t", ""))
        assert "Ã" not in text
    assert "\u200d" in change("normalise", "👨\u200d👩\u200d👧")[0]


@pytest.mark.parametrize(
    ("text", "expected", "counts"),
    [
        ("Write to jane.doe+news@mail.acme.co.uk, please.", "Write to email@example.com, please.", {"email": 1}),
        ("Schreiben Sie an (info@rathaus-nord.de).", "Schreiben Sie an (email@example.com).", {"email": 1}),
        ("メールはtaro_s@mail.ne.jpまで。", "メールはemail@example.comまで。", {"email": 1}),
        ("from 81.2.69.142 to 93.184.216.34:443.", "from 192.0.2.1 to 192.0.2.1:443.", {"ipv4": 2}),
        ("http://81.2.69.142/x", "http://81.2.69.142/x".replace("81.2.69.142", "192.0.2.1"), {"ipv4": 1}),
        ("at 2a00:1450:4001:81b::200e now", "at 2001:db8::1 now", {"ipv6": 1}),
        ("Tel.: +49 30 1234567 oder (030) 123456-78", "Tel.: 555-0100 oder 555-0100", {"phone": 2}),
        ("Fax 0049 89 32168 oder 030/1234567", "Fax 555-0100 oder 555-0100", {"phone": 2}),
        ("call (555) 234-4567 or 555-234-4567 now", "call 555-0100 or 555-0100 now", {"phone": 2}),
        ("電話は03-1234-5678、携帯は090-1234-5678です。", "電話は555-0100、携帯は555-0100です。", {"phone": 2}),
        ("IBAN DE89 3704 0044 0532 0130 00, danke", "IBAN XX00 0000 0000 0000 0000 00, danke", {"iban": 1}),
        ("GB82WEST12345698765432", "XX00 0000 0000 0000 0000 00", {"iban": 1}),
    ],
)
def test_pii(text: str, expected: str, counts: dict[str, int]) -> None:
    assert change("pii", text) == (expected, counts)
    assert change("pii", expected) == (expected, {})


@pytest.mark.parametrize(
    "text",
    [
        "version 91.2.3.4, v90.4.3.2, Version 98.8.8.8, release 99.9.9.9, バージョン 88.8.4.4",
        "192.168.1.1, 127.0.0.1, 10.0.0.7, 0.0.0.0, 300.1.1.1, 091.02.03.04, 88.8.8, 88.8.8.8.8",
        "2.2.1.4 Schleifen, Nummer 5.4.2.3 Absatz 1, 1.2.1.13",
        "CAS 0055406-53-6, 0086249-83-4, 50-00-0, 7732-18-5",
        "std::vector a::b dead::beef 12:30:45 00:1b:44:11:3a:b7 ::1 fe80::1 2001:db8::7",
        "2024-01-15, 15.01.2024, 01/02/2024, 01-02-2024, 1999-2005, 20240115",
        "ISBN 978-3-16-148410-0, ISBN 0-306-40615-2, ISBN-13: 978-0306406157, ISSN 0317-8471",
        "3.14159265 1,234,567.89 1 000 000 000 §§ 123-456 RFC 2606 0x7fff 50-100 10-20-30",
        "$555-234-4567 and 2024/03-1234 Art. 12-34",
        "DE89 3704 0044 0532 0130 01, XX89 3704 0044 0532 0130 00, DE893704",  # wrong check digits, no country, cut
        "me@localhost, a@example.com, user@host.example, @handle, a@b, x@1.2",
        "from @decorators import x; 5 @ 3.50",
    ],
)
def test_what_only_looks_like_personal_data(text: str) -> None:
    assert change("pii", text) == (text, {})


@pytest.mark.parametrize("language", TEXTS)
def test_prose_has_no_personal_data(language: str) -> None:
    document = Document("i", TEXTS[language], language, "s")
    assert make_step({"kind": "pii"}).apply(document) is document


def test_pii_options() -> None:
    text = "a@acme.org 88.8.8.8 192.168.0.1 +49 30 1234567"
    assert change("pii", text, kinds=["ip"])[1] == {"ipv4": 1}
    assert change("pii", text, kinds=["ip"], private_addresses=True)[1] == {"ipv4": 2}
    assert change("pii", text, kinds=["email"], masks={"email": "[mail]"})[0].startswith("[mail] 88.8.8.8")
    with pytest.raises(ConfigError, match="kinds"):
        make_step({"kind": "pii", "kinds": ["mail"]})
    with pytest.raises(ConfigError, match="masks"):
        make_step({"kind": "pii", "masks": {"ip": "x"}})
