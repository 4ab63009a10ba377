"""Masks e-mail and IP addresses, phone numbers and IBANs.

E-mail and public IP addresses as in FineWeb (Penedo et al. 2024, arXiv:2406.17557, section 3.7 "PII removal"). What
looks like one is checked before it is masked: octets, public address ranges (RFC 6890), the IBAN's check digits (ISO
13616, ISO 7064 MOD 97-10); numbers that are dates, versions, ISBNs or parts of longer ones stay. Names and postal
addresses are not looked for.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document

Kind = Literal["email", "ip", "phone", "iban"]
Mask = Literal["email", "ipv4", "ipv6", "phone", "iban"]

# addresses and numbers that are kept free for examples (RFC 2606, RFC 5737, RFC 3849, 555-01xx)
MASKS: dict[Mask, str] = {
    "email": "email@example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "phone": "555-0100",
    "iban": "XX00 0000 0000 0000 0000 00",
}

# letters are Latin ones: Japanese puts no space around an address
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9_.+%-])[A-Za-z0-9_][A-Za-z0-9_.+%-]{0,63}"
    r"@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.)+[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
_EXAMPLE_HOST = re.compile(r"(?:^|\.)(?:example\.(?:com|net|org)|example|test|invalid|localhost)$", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![A-Za-z0-9_.:-])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![A-Za-z0-9_-]|\.[0-9])")
_FIRST_UNLIKE_SECTION = 32  # 2.2.1.4 is a section; one address in 4,096 has no number of 32 or more
_IPV6 = re.compile(r"(?<![A-Za-z0-9_:.])[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![A-Za-z0-9_:])")
_VERSION = re.compile(
    r"(?:\b(?:v|versions?|versionen|release|rev|ver|section|chapter|abschnitt|kapitel)\.?|バージョン|版|第|§)[ \t]*$",
    re.IGNORECASE,
)
_IBAN = re.compile(
    r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
)
# +49 30 1234567, 0049 ..., (030) 123 456-78, 030/1234567, 03-1234-5678, (555) 123-4567, 555-123-4567
_PHONE = re.compile(
    r"(?<![A-Za-z0-9_.,+/=:#-])(?<![0-9][ \u00a0])"
    r"(?:(?:\+|00)[1-9][0-9]{0,2}[ ./()-]{0,2}(?:[0-9][0-9 ./()-]{5,16})[0-9]"
    r"|\(0[0-9]{1,5}\)[ -]?[0-9][0-9 -]{3,11}[0-9]"
    r"|0[0-9]{1,5}[ ]?[/-][ ]?[0-9][0-9 -]{3,11}[0-9]"
    r"|\([2-9][0-9]{2}\)[ -]?[0-9]{3}-[0-9]{4}"
    r"|[2-9][0-9]{2}-[0-9]{3}-[0-9]{4})"
    r"(?![A-Za-z0-9_@]|[-.,/:][0-9])"
)
_DATE = re.compile(r"^0?\d{1,2}[-/ ]+\d{1,2}[-/ ]+\d{2,4}$|^\d{4}[-/]\d{1,2}[-/]\d{1,2}")
_CAS = re.compile(r"-\d\d-\d(?!\d)")  # numbers of chemical substances, written with leading zeros in some lists
_IBAN_COUNTRIES = {  # by length
    15: "NO",
    16: "BE",
    18: "DK FI NL",
    19: "SI",
    20: "AT EE LT LU",
    21: "CH HR LI LV",
    22: "BG DE GB IE RS",
    23: "AE IL",
    24: "AD CZ ES RO SA SE SK",
    25: "PT",
    26: "IS TR",
    27: "FR GR IT MC SM",
    28: "CY HU PL",
    29: "BR UA",
    31: "MT",
}
_IBAN_LENGTHS = {country: size for size, names in _IBAN_COUNTRIES.items() for country in names.split()}


@config_dataclass
class Pii:
    """Replaces personal data by examples of its kind, so that sentences stay sentences."""

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1, description="what is looked for")] = (
        "email",
        "ip",
        "phone",
        "iban",
    )
    masks: Annotated[
        dict[Mask, str],
        Field(description="what stands there instead; those that are not given are examples of their kind"),
    ] = field(default_factory=dict)
    private_addresses: Annotated[
        bool, Field(description="mask IP addresses that are not public (192.168.0.1, 127.0.0.1) too")
    ] = False

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "pii"

    def apply(self, document: Document) -> Document:
        """The document with masks, and "count:" metadata of how many of each kind."""
        text, counts = document.text, {}
        masks = {kind: self.masks.get(kind, mask) for kind, mask in MASKS.items()}
        # an IBAN first: parts of it look like phone numbers
        for kind, pattern, hints, check in self._searches():
            if any(hint in text for hint in hints):
                text, number = _masked(text, pattern, check, masks[kind])
                if number:
                    counts[f"count:{kind}"] = number
        return replace(document, text=text, metadata={**document.metadata, **counts}) if counts else document

    def _searches(self) -> list[tuple[Mask, re.Pattern[str], str, Callable[[re.Match[str]], bool]]]:
        """(kind, pattern, characters one of which it needs, whether a match is one)."""
        searches: list[tuple[Mask, re.Pattern[str], str, Callable[[re.Match[str]], bool]]] = []
        if "email" in self.kinds:
            searches.append(("email", _EMAIL, "@", _is_email))
        if "iban" in self.kinds:
            searches.append(("iban", _IBAN, "0123456789", _is_iban))
        if "ip" in self.kinds:
            searches.append(("ipv4", _IPV4, ".", self._is_address))
            searches.append(("ipv6", _IPV6, ":", self._is_address))
        if "phone" in self.kinds:
            searches.append(("phone", _PHONE, "0123456789", _is_phone))
        return searches

    def _is_address(self, match: re.Match[str]) -> bool:
        try:
            address = ipaddress.ip_address(match.group().rstrip(":"))
        except ValueError:
            return False  # an octet over 255 or with a leading zero, as in 01.02.03.04
        if address.version == 4 and max(address.packed) < _FIRST_UNLIKE_SECTION:
            return False
        if _VERSION.search(match.string[max(0, match.start() - 16) : match.start()]):
            return False
        return address.is_global or (self.private_addresses and not address.is_unspecified)


def _masked(text: str, pattern: re.Pattern[str], check: Callable[[re.Match[str]], bool], mask: str) -> tuple[str, int]:
    parts, end, count = [], 0, 0
    for match in pattern.finditer(text):
        if match.group() != mask and check(match):
            parts += [text[end : match.start()], mask]
            end, count = match.end(), count + 1
    return ("".join([*parts, text[end:]]), count) if count else (text, 0)


def _is_email(match: re.Match[str]) -> bool:
    local, _, host = match.group().rpartition("@")
    return ".." not in local and not local.endswith(".") and not _EXAMPLE_HOST.search(host)


def _is_iban(match: re.Match[str]) -> bool:
    """Length of its country and check digits: moved to the end, letters as 10 to 35, it is 1 modulo 97."""
    code = re.sub(r"\s", "", match.group())
    if len(code) != _IBAN_LENGTHS.get(code[:2]):
        return False
    return int("".join(str(int(character, 36)) for character in code[4:] + code[:4])) % 97 == 1


def _is_phone(match: re.Match[str]) -> bool:
    number = match.group()
    digits = re.sub(r"\D", "", number)
    if not 7 <= len(digits) <= 15 or _DATE.match(number) or _CAS.search(number) or len(set(digits)) < 3:
        return False
    before = match.string[max(0, match.start() - 24) : match.start()]
    return not re.search(r"(?:ISBN|ISSN|EAN|DOI|RFC|ISO|DIN|\$|€|¥)(?:-1[03])?[:\s]*$", before, re.IGNORECASE)


STEP = Pii
