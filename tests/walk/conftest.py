"""`--real` runs also the commands that install, and the demo; otherwise this environment is used."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real", action="store_true", help="install into a new environment, and run the demo: some ten minutes")
