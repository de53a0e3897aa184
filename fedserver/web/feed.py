"""The last warnings and errors of the server's log, for the page's list of refusals and faults."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from attune.common.peer_text import clean
from attune.fedserver.web.facts import Fault

KEPT = 200


class Feed(logging.Handler):
    """Whatever the server says at WARNING or above; `totals` counts what is no longer kept too, by level."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._faults: deque[Fault] = deque(maxlen=KEPT)
        self.totals: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        self.totals[level] += 1
        self._faults.append(Fault(record.created, level, clean(record.getMessage())))

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._faults)


@contextmanager
def listening(logger: str = "fedserver") -> Iterator[Feed]:
    feed = Feed()
    logging.getLogger(logger).addHandler(feed)
    try:
        yield feed
    finally:
        logging.getLogger(logger).removeHandler(feed)
