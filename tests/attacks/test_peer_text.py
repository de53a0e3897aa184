"""`clean` on any text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attune.common.text import clean


@given(st.text(st.characters(), max_size=80), st.integers(10, 60))
def test_any_text_becomes_one_printable_line_of_bounded_length(text: str, longest: int) -> None:
    shown = clean(text, longest)
    assert shown.isprintable()
    assert len(shown) <= longest
    assert len(shown.splitlines()) <= 1
    assert clean(shown, longest) == shown


def test_what_people_write_stays_as_it_is() -> None:
    said = "Gerät 7 (Zürich): 温度が高い, disk 93 % full [see /var/log]"
    assert clean(said) == said
    assert clean("round 1\nround 2\tx") == "round 1 round 2 x"
    assert clean("abcdefghijkl", 10) == "abcdefg..."
