"""Whatever a peer says, before a person or a log sees it: one line of plain text, of bounded length."""

from __future__ import annotations

LONGEST = 500  # characters; an error of ours is shorter
CUT = "..."


def clean(text: str, longest: int = LONGEST) -> str:
    """`text` with a space for every character that is not printable, and cut to `longest` characters.

    Not printable are controls and escapes (which move cursors), line ends of all kinds (which forge lines), and marks of
    direction (which show other text than there is): the categories C and Z of Unicode, less the space.
    """
    cut = len(text) > longest
    shown = "".join(character if character.isprintable() else " " for character in text[:longest])
    return f"{shown[: longest - len(CUT)]}{CUT}" if cut else shown
