"""Devices that the operator has shut out, as this process knows them: what they have begun ends at its next step."""

from __future__ import annotations

from attune.common.errors import AttuneError


class Barred:
    """By name, each with the error that it hears. Nobody comes back; a new process refuses them by their certificates."""

    def __init__(self) -> None:
        self._errors: dict[str, AttuneError] = {}

    def __repr__(self) -> str:
        return f"Barred({sorted(self._errors)})"

    def add(self, name: str, error: AttuneError) -> bool:
        """Whether it was not barred before."""
        return self._errors.setdefault(name, error) is error

    def check(self, name: str) -> None:
        """Errors: the one that it was barred with."""
        if name in self._errors:
            raise self._errors[name]
