"""Removes lines of a site and not of a page: menus, logins, cookie banners, share buttons, copyright notices.

Such a line is short and, but for marks, digits and names around them, says one of a list of phrases, in English,
German or Japanese. The idea of line-wise correction is RefinedWeb's (Penedo et al. 2023, arXiv:2306.01116, appendix
G.2), which also removes counters ("3 likes") and lines of one word.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped

PHRASES = (
    # whole lines, give or take marks at their ends
    "home", "menu", "skip to (?:main )?content", "(?:sign|log) ?(?:in|out|up)", "register", "subscribe(?: now)?",
    "share(?: this(?: page| article| post)?)?(?: on .*)?", "tweet", "follow us(?: on .*)?", "read more", "show more",
    "load more", "back to top", "next(?: page)?", "previous(?: page)?", "advertisement", "sponsored(?: content)?",
    "accept(?: all)?(?: cookies)?", "(?:we|this (?:web)?site) uses? cookies.*", r"all rights reserved\.?",
    "print this page", "leave a (?:comment|reply)", "related (?:articles|posts)",
    r"[\d,.]+ (?:likes?|shares?|comments?|views?)", r"(?:copyright|©|\(c\)) ?.*(?:\d{4}|all rights reserved).*",
    "startseite", "menü", "zum (?:haupt)?inhalt(?: springen)?", "anmelden", "abmelden", "einloggen", "registrieren",
    "teilen(?: auf .*)?", "weiterlesen", "mehr (?:lesen|erfahren|anzeigen)", "nach oben", "zurück(?: zur .*)?",
    "weiter", "anzeige", "werbung", "alle akzeptieren",
    "(?:diese (?:web)?seite|wir) (?:verwendet|verwenden|nutzt|nutzen) cookies.*", r"alle rechte vorbehalten\.?",
    "impressum", "datenschutz", "kommentar (?:schreiben|hinterlassen)", "ähnliche (?:artikel|beiträge)",
    r"[\d.]+ (?:kommentare?|aufrufe)", "newsletter(?: abonnieren)?", "ホーム", "メニュー", "ログイン", "ログアウト",
    "新規登録", "会員登録", "(?:本文|コンテンツ)へ(?:スキップ|移動)", "続きを読む", "もっと見る", "シェア(?:する)?",
    "ツイート(?:する)?", "フォロー(?:する)?", "トップ(?:ページ)?(?:へ戻る|に戻る)?",
    "ページの?(?:先頭|トップ)へ(?:戻る)?", "次(?:へ|のページ)", "前(?:へ|のページ)", "広告", "スポンサーリンク",
    "関連記事", "コメント(?:する|を残す)", "お問い合わせ", "利用規約", "プライバシーポリシー",
    "無断(?:転載|複製)(?:を)?(?:禁止|禁じます)", "(?:当|本)?サイトでは(?:cookie|クッキー)を使用.*",
)  # fmt: skip
# no full stop: a wrapped sentence may end in such a word
_MARKS = r"[ \t\u00a0\u3000\-–—|•·»›>«‹<→←▲▼△▽►▶◀★☆※*#:：/\[\]【】()（）「」…、!！]*"


@config_dataclass
class Boilerplate:
    """Removes lines of boilerplate, and drops documents that are mostly that."""

    max_line_characters: Annotated[int, Field(gt=0, description="longer lines are kept, whatever they say")] = 120
    phrases: Annotated[
        tuple[str, ...], Field(description="regular expressions of whole lines, besides those that are built in")
    ] = ()
    max_share: Annotated[
        float, Field(ge=0, le=1, description="documents are dropped if more of their characters is boilerplate")
    ] = 0.5

    version = 1

    def __post_init__(self) -> None:
        for phrase in self.phrases:
            try:
                re.compile(phrase)
            except re.error as error:
                raise ValueError(f"phrases: {phrase!r} is no regular expression: {error}") from None

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "boilerplate"

    def apply(self, document: Document) -> Document | Dropped:
        """The document without such lines, or that there were too many."""
        found = list(_pattern(self.phrases, self.max_line_characters).finditer(document.text))
        if not found:
            return document
        removed = sum(len(one.group().strip()) for one in found)
        if removed > self.max_share * max(1, len(document.text.strip())):
            return Dropped("mostly boilerplate", f"{len(found)} lines")
        text = _pattern(self.phrases, self.max_line_characters).sub("", document.text)
        metadata = {**document.metadata, "count:lines": len(found)}
        return replace(document, text=text, metadata=metadata)


@functools.lru_cache(maxsize=8)
def _pattern(phrases: tuple[str, ...], limit: int) -> re.Pattern[str]:
    either = "|".join(f"(?:{phrase})" for phrase in (*PHRASES, *phrases))
    line = rf"^(?=.{{1,{limit}}}$){_MARKS}(?=[^\W_]|©|\()(?:{either})(?:\.\.+)?{_MARKS}$\n?"
    return re.compile(line, re.IGNORECASE | re.MULTILINE)


STEP = Boilerplate
