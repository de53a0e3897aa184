"""Table of attacks: each returns the server's answer, which is compared with the expected one.

The answer is the kind of error that the server named, or the status of gRPC if no handler was reached, or something else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tests.attacks.conftest import Victim

Run = Callable[[Victim], str]


@dataclass(frozen=True)
class Attack:
    run: Run
    answer: str


ATTACKS: dict[str, Attack] = {}


def enter(what: str, run: Run, answer: str) -> None:
    assert what not in ATTACKS, f"{what} is there already"
    ATTACKS[what] = Attack(run, answer)


def attack(answer: str) -> Callable[[Run], Run]:
    """Enter a function into the table, under its own name."""

    def take(run: Run) -> Run:
        enter(run.__name__.replace("_", " "), run, answer)
        return run

    return take


def attacks(tried: Callable[[Victim, Any], str], rows: dict[str, tuple[str, Any]]) -> None:
    """Enter attacks of one kind into the table: what each is, the expected answer, and what is tried with it."""
    for what, (answer, value) in rows.items():
        enter(what, lambda victim, value=value: tried(victim, value), answer)


def answer_to(call: Callable[[], Any]) -> str:
    """Return the answer to a call, in a word."""
    try:
        found = call()
    except grpc.RpcError as error:
        known: Any = error
        return str(dict(known.trailing_metadata() or ()).get("attune-error") or known.code().name)
    return f"got {found!r}"
