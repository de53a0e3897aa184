"""Orders that follow each other in one step are opened together; other effects stay as they are."""

from __future__ import annotations

from attune.fedserver.core.messages import Aggregate, Effect, Open, PassOver, together


def test_orders_for_the_same_work_and_round_are_opened_as_one() -> None:
    effects = [Open("train", 3, ("a",)), Open("train", 3, ("b", "c")), Open("evaluate", 3, ("d",)), Open("evaluate", 4, ("e",))]
    assert together(effects) == [Open("train", 3, ("a", "b", "c")), *effects[2:]]


def test_what_happens_between_two_orders_keeps_its_place() -> None:
    effects: list[Effect] = [Open("train", 3, ("a",)), PassOver(("z",)), Open("train", 3, ("b",)), Aggregate(3, ("a",))]
    assert together(effects) == effects
    assert together([]) == []
