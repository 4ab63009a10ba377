"""C4's rules: lines about JavaScript and cookies, citation marks, pages of placeholder text, code or too few sentences.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (JMLR 21;
arXiv:1910.10683), section 2.2. The paper's rule on lines without a final mark is off by default, as in FineWeb
(arXiv:2406.17557, section 3.5: it alone removes 30 % of the tokens), and so is its rule on braces, which takes
everything that shows code. Its list of bad words is yours to give. Phrases are looked for in English, German and
Japanese.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.line_ends import CLOSING_MARKS, SENTENCE_ENDS, ends_sentence
from megafp8.corpus.words import Words, words_of

POLICY_PHRASES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
    "nutzungsbedingungen", "datenschutzerklärung", "datenschutzrichtlinie", "cookie-richtlinie", "verwendet cookies",
    "verwendung von cookies", "利用規約", "プライバシーポリシー", "クッキーを使用", "cookieを使用", "cookie を使用",
)  # fmt: skip
_JAVASCRIPT = re.compile("javascript", re.IGNORECASE)
_POLICY_HINTS = (
    "ookie", "OOKIE", "erms of use", "erms Of Use", "ERMS OF USE", "olicy", "OLICY", "utzungsbed", "UTZUNGSBED",
    "atenschutz", "ATENSCHUTZ", "利用規約", "ポリシー", "クッキー",
)  # fmt: skip  # one is in each phrase, whatever its capitals: plain search is ten times faster than the pattern
_CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed|Bearbeiten|要出典|編集)\]")
_SENTENCE = re.compile(f"[{re.escape(SENTENCE_ENDS)}][{re.escape(CLOSING_MARKS)}]*")


@config_dataclass
class C4:
    """Removes lines, then drops documents of which too little is left."""

    min_sentences: Annotated[int, Field(ge=0, description="fewer sentences are dropped")] = 3
    min_line_words: Annotated[int, Field(ge=0, description="lines of fewer words are removed; the paper's is 5")] = 0
    max_word_length: Annotated[int, Field(ge=0, description="lines with a longer word are removed; 0: no limit")] = 1000
    final_mark: Annotated[bool, Field(description="remove lines that do not end a sentence")] = False
    javascript: Annotated[bool, Field(description="remove lines that say JavaScript in few words")] = True
    policy_phrases: Annotated[
        tuple[str, ...], Field(description="remove lines of few words with one of these; any capitals")
    ] = POLICY_PHRASES
    max_notice_words: Annotated[int, Field(ge=0, description="longer lines are no notices on scripts or policies")] = 30
    citations: Annotated[bool, Field(description="take out [1], [edit], [citation needed]")] = True
    placeholder: Annotated[bool, Field(description='drop documents with "lorem ipsum"')] = True
    braces: Annotated[bool, Field(description="drop documents with {")] = False
    bad_words: Annotated[tuple[str, ...], Field(description="drop documents with one of these words")] = ()

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "c4"

    def apply(self, document: Document) -> Document | Dropped:
        """The document without the lines that are removed, or why it is dropped."""
        text = document.text
        if self.placeholder and _has(text, "lorem ipsum", "orem"):
            return Dropped("lorem ipsum")
        if self.braces and "{" in text:
            return Dropped("brace")
        if self.bad_words and (found := _bad_words(self.bad_words).search(text)):
            return Dropped("bad word", found.group())
        counts: dict[str, int] = {}
        if self.citations and "[" in text:
            text, number = _CITATION.subn("", text)
            counts["count:citations"] = number
        bad = self._bad_lines(words_of(text))
        text, counts["count:lines"] = without_lines(text, bad), len(bad)
        sentences = _count_up_to(text, self.min_sentences)
        if sentences < self.min_sentences:
            return Dropped("few sentences", f"{sentences} left")
        counts = {key: number for key, number in counts.items() if number}
        return replace(document, text=text, metadata={**document.metadata, **counts}) if counts else document

    def _bad_lines(self, words: Words) -> np.ndarray:
        lines = words.lines
        bad = np.zeros(len(lines), bool)
        if self.final_mark:
            bad |= ~ends_sentence(words)
        if self.min_line_words:
            bad |= lines.num_words < self.min_line_words
        if self.max_word_length and words.num_words and words.lengths.max() > self.max_word_length:
            long = words.starts[words.lengths > self.max_word_length]
            bad[np.searchsorted(lines.starts, long, side="right") - 1] = True
        for place in self._notices(words.text):
            number = int(np.searchsorted(lines.starts, place, side="right")) - 1
            bad[number] |= bool(lines.num_words[number] <= self.max_notice_words)
        return lines.numbers[bad]

    def _notices(self, text: str) -> list[int]:
        """Where scripts or policies are spoken of, in characters."""
        places = []
        if self.javascript and ("avascript" in text or "avaScript" in text or "AVASCRIPT" in text):
            places += [found.start() for found in _JAVASCRIPT.finditer(text)]
        known = self.policy_phrases == POLICY_PHRASES
        if self.policy_phrases and (not known or any(hint in text for hint in _POLICY_HINTS)):
            places += _occurrences(text, self.policy_phrases)
        return places


def without_lines(text: str, numbers: np.ndarray) -> str:
    """The text without the lines of these numbers, counted from 0."""
    if not len(numbers):
        return text
    gone = set(numbers.tolist())
    return "\n".join(line for number, line in enumerate(text.split("\n")) if number not in gone)


def _count_up_to(text: str, enough: int) -> int:
    number = 0
    for number, _ in enumerate(_SENTENCE.finditer(text), start=1):
        if number >= enough:
            break
    return number


def _has(text: str, words: str, hint: str) -> bool:
    return hint in text and words in text.lower()


def _occurrences(text: str, phrases: tuple[str, ...]) -> list[int]:
    """Where phrases begin, whatever their capitals."""
    small = text.lower()
    if len(small) != len(text) or "\u017f" in text:  # places differ; the long s, which is no capital, counts as one
        return [found.start() for found in _any_of(phrases).finditer(text)]
    places = []
    for phrase in phrases:  # plain search is ten times faster than the pattern
        at = small.find(phrase.lower())
        while at >= 0:
            places.append(at)
            at = small.find(phrase.lower(), at + 1)
    return places


@functools.lru_cache(maxsize=8)
def _any_of(phrases: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, phrases)), re.IGNORECASE)


@functools.lru_cache(maxsize=8)
def _bad_words(words: tuple[str, ...]) -> re.Pattern[str]:
    """Latin words as wholes; those of other scripts anywhere, since no space parts them."""
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" if word < "\u0370" else re.escape(word) for word in words),
        re.IGNORECASE,
    )


STEP = C4
