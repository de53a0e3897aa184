"""Every attack of the table gets its expected answer, and leaves the federation's state unchanged."""

from collections.abc import Callable

import pytest

from tests.attacks import attacks
from tests.attacks.conftest import Victim
from tests.attacks.table import ATTACKS

assert attacks.__doc__  # the import fills the table


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(victim: Victim, name: str, record_property: Callable[[str, object], None]) -> None:
    found = ATTACKS[name].run(victim)
    record_property("attack", (name, ATTACKS[name].answer, found))
    assert found == ATTACKS[name].answer
