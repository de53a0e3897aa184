"""Table of attacks: each is a function that returns the server's answer, which is compared with the expected one.

A function's docstring is the attack in words. It takes the victim and returns the answer: the kind of error that the server
named, or the status of gRPC if no handler was reached, or something else.
"""

from __future__ import annotations

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

    @property
    def what(self) -> str:
        return (self.run.__doc__ or "").splitlines()[0].rstrip(".")


ATTACKS: dict[str, Attack] = {}


def attack(answer: str) -> Callable[[Run], Run]:
    """Enter a function into the table, under its own name."""

    def enter(run: Run) -> Run:
        assert run.__name__ not in ATTACKS, f"{run.__name__} is there already"
        ATTACKS[run.__name__] = Attack(run, answer)
        return run

    return enter


def answer_to(call: Callable[[], Any]) -> str:
    """Return the answer to a call, in a word."""
    try:
        found = call()
    except grpc.RpcError as error:
        known: Any = error
        return str(dict(known.trailing_metadata() or ()).get("attune-error") or known.code().name)
    return f"got {found!r}"
