"""Faults in tests, whose steps must be those of docs/fault_points.py: a misspelt one would never strike."""

from attune.common import faults
from docs.fault_points import DEVICE_STEPS, SERVER_STEPS


def checked(text: str) -> str:
    """Return the faults for ATTUNE_FAIL_AT, after a check that every step exists."""
    for entry in filter(None, text.split(",")):
        step = entry.partition("=")[0].rpartition(":")[2]
        assert step in SERVER_STEPS | DEVICE_STEPS, f"no fault strikes at {step!r}: docs/fault_points.py lists the steps"
    return text


def arm(text: str) -> None:
    """Set the faults of this process, in place of those before; none for an empty text."""
    faults.arm(checked(text))
