"""`pytest --processor-time`: the processor time of each folder and of the dearest tests, with all processes that they started.

What a fixture costs counts for the test that asked for it first. Processes that run on are counted on Linux only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEAREST = 40  # tests that are listed
PROPERTY = "processor_s"
TICKS = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Seconds of this process, of those that it has waited for, and of its descendants that run."""
    return sum(os.times()[:4]) + sum(map(_spent_by, _children(os.getpid())))


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:  # a thread that has ended meanwhile
            continue
    return found


def _spent_by(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(_spent_by, _children(pid)))


class Meter:
    def __init__(self) -> None:
        self._last = spent()
        self._found: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Once for setup, call and teardown each, where the test runs."""
        report: Any = yield
        now = spent()
        report.user_properties = [*report.user_properties, (PROPERTY, now - self._last)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where all results come together: with pytest-xdist another process."""
        self._found[report.nodeid] += sum(value for key, value in report.user_properties if key == PROPERTY)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        for name, seconds in self._found.items():
            folders[name.partition("::")[0].rpartition("/")[0]] += seconds
        terminalreporter.section("processor time in seconds")
        for listed in (folders, dict(_largest(self._found)[:DEAREST])):
            for name, seconds in _largest(listed):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")
        terminalreporter.write_line(f"{sum(folders.values()):8.2f}  all tests, without imports and collection")


def _largest(found: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(found.items(), key=lambda item: -item[1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", action="store_true", help="Say what each folder and the dearest tests cost.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--processor-time"):
        config.pluginmanager.register(Meter())
