"""`--real` runs also the commands that install, and the demo; otherwise this environment is used."""

import pytest

from attune.fedclient.work.portfolio import fitting
from attune.fedserver.core import training_length


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what tests/conftest.py makes smaller its usual size again: examples run as users run them."""
    monkeypatch.setattr(fitting, "TREES", 100)
    monkeypatch.setattr(training_length, "MOST_USUAL_EPOCHS", 25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help="install into a new environment, and run the demo: some ten minutes")
