"""Findings of fuzzers as text: a file for each target, a line of base64 for each input."""

import base64
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).with_name("found")
MOST, LONGEST = 250, 3000  # most inputs of a target, and most bytes of an input: CI reads them all


def kept(target: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    path = FOLDER / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def keep(target: str, inputs: Iterable[bytes]) -> int:
    """Replace the kept inputs, the shortest first, and return their number."""
    chosen = sorted({each for each in inputs if len(each) <= LONGEST}, key=lambda each: (len(each), each))[:MOST]
    (FOLDER / f"{target}.txt").write_text("".join(f"{base64.b64encode(each).decode()}\n" for each in chosen))
    return len(chosen)
