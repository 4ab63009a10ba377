"""P9: versions with known faults are not allowed, and what is pinned is above them."""

from __future__ import annotations

import re

from tests.architecture.sources import ROOT

FLOORS = {"torch": (2, 10), "transformers": (5, 3), "sentencepiece": (0, 2, 1)}


def parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_floors_are_asked_for_and_the_lock_is_above_them():
    asked = (ROOT / "setup.py").read_text(encoding="utf-8")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for name, floor in FLOORS.items():
        (found,) = re.findall(rf'"{name}>=([\d.]+)"', asked)
        assert parsed(found) >= floor
        pins = re.findall(rf"(?m)^{name}==([\w.]+)", lock)
        assert pins and all(parsed(pin) >= floor for pin in pins), (name, pins)


def test_every_line_of_the_lock_pins_one_version():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert not line or line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.\[\]-]+==[\w.+!]+(; .+)?", line), line


def test_security_md_says_every_promise():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for number in range(1, 11):
        assert f"P{number} " in text
    for name in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
