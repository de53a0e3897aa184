"""Expectation of one kind of the errors that share a class."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attune.common.wire.malformed import Kind, Malformed


@contextmanager
def malformed(kind: Kind, match: str | None = None) -> Iterator[None]:
    """Check, like pytest.raises, that the block raises Malformed of this very kind."""
    with pytest.raises(Malformed, match=match) as caught:
        yield
    assert caught.value.kind == kind
