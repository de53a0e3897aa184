"""Rules for every test: one thread for tensors, any time for an example. `--processor-time` prints the time of each test.

Devices fit no ordinary models, unless a test asks for them (`--baseline alone`) or starts a new interpreter: hundreds of
federations would take twice as long. Forests have 20 trees. Devices with few samples train for 5 epochs, and not for
up to 25, where nobody sets the number.

The test functions of slow.txt get the marker `slow`.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Set before torch and numpy are imported. The tensors here are small: more threads cost processor time and save none.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

from attune.common import aio
from attune.fedclient import options
from attune.fedclient.work.portfolio import fitting
from attune.fedserver.core import training_length

settings.register_profile("attune", deadline=None, max_examples=50)  # a slow example on a busy machine is no failure
settings.load_profile("attune")
options.DEFAULT_BASELINE, fitting.TREES, training_length.MOST_USUAL_EPOCHS = "none", 20, 5

pytest_plugins = ["tests.processor_time"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    aio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True


@pytest.fixture(scope="module")
def federation_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a function that makes federations of real processes, each in a folder of its own. All end with the module."""
    from tests.e2e.harness import Federation

    with ExitStack() as made:
        yield lambda name: made.enter_context(closing(Federation(tmp_path_factory.mktemp(name))))


SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text().split())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW:
            item.add_marker("slow")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the process that forks servers and devices, before threads start. A process of pytest-xdist needs it soon."""
    if hasattr(session.config, "workerinput"):
        from tests.forked import fork_zygote

        fork_zygote()
