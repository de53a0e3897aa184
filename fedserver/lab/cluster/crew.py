"""What the lab needs of a cluster: workers that are hired, asked and replaced."""

from __future__ import annotations

from typing import Any, Protocol


class Gone(Exception):
    """A worker has ended, or is out of reach, before it answered. The text says how."""


class Unavailable(Exception):
    """No worker can do it: the cluster is gone, or the work fails wherever it is done. The text says why."""


class Ticket(Protocol):
    """A call that is under way."""

    def answer(self) -> Any:
        """Waits for it, as long as its worker gives signs of life. Errors: Gone, Unavailable."""
        ...


class Worker(Protocol):
    def ask(self, method: str, *arguments: Any) -> Ticket:
        """Calls a method of its Hand, after what was asked of it before. Errors: Unavailable."""
        ...

    def end(self) -> None:
        """It is not asked again: what looked dead may only be out of reach. Errors: Unavailable."""
        ...


class Crew(Protocol):
    size: int  # how many workers there are to be

    def hire(self) -> Worker:
        """One that holds nothing. Errors: Unavailable."""
        ...

    def close(self) -> None:
        """Lets all go. Raises nothing."""
        ...
