"""`pytest --processor-time`: the processor time of each folder and of the dearest test functions, with all their processes.

A function's time is the sum over its cases. Functions that are not in slow.txt have a star.

The cost of a fixture counts for the test that used it first. Processes that still run are counted on Linux only.
"""

import io
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEAREST = 40  # number of functions in the list
PROPERTY = "processor_s"
TICKS = os.sysconf("SC_CLK_TCK")
OPEN = io.open  # kept here, because tests replace the usual one


def spent() -> float:
    """Return the processor seconds of this process, of children that it has waited for, and of running descendants."""
    return sum(os.times()[:4]) + sum(map(_spent_by, _children(os.getpid())))


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(word) for thread in threads for word in _read(f"{thread}/children").split()]


def _spent_by(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS + sum(map(_spent_by, _children(pid)))


def _read(path: str) -> str:
    """Read a file of a process or thread, or return "" if it has just ended."""
    try:
        with OPEN(path) as file:
            return file.read()
    except OSError:
        return ""


class Meter:
    def __init__(self) -> None:
        self._last = spent()
        self._found: dict[str, float] = defaultdict(float)

    def pytest_collection_finish(self) -> None:
        """Leave out what collection took; the first test would pay for it."""
        self._last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Record the time once each for setup, call and teardown, where the test runs."""
        report: Any = yield
        now = spent()
        report.user_properties = [*report.user_properties, (PROPERTY, now - self._last)]
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect all results; with pytest-xdist this is another process."""
        self._found[report.nodeid] += sum(value for key, value in report.user_properties if key == PROPERTY)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slow = Path(__file__).with_name("slow.txt").read_text().split()
        folders: dict[str, float] = defaultdict(float)
        functions: dict[str, float] = defaultdict(float)
        for name, seconds in self._found.items():
            folders[name.partition("::")[0].rpartition("/")[0]] += seconds
            functions[name.partition("[")[0]] += seconds
        terminalreporter.section("processor time in seconds")
        for name, seconds in _largest(folders):
            terminalreporter.write_line(f"{seconds:8.2f}  {name}")
        for name, seconds in _largest(functions)[:DEAREST]:
            terminalreporter.write_line(f"{seconds:8.2f} {' ' if name in slow else '*'}{name}")
        terminalreporter.write_line(f"{sum(folders.values()):8.2f}  all tests, without imports and collection")


def _largest(found: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(found.items(), key=lambda item: -item[1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", action="store_true", help="Say what each folder and the dearest tests cost.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--processor-time"):
        config.pluginmanager.register(Meter())
