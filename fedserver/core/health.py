"""Whether the devices show that the last round has spoiled the state: their losses exploded, or most of them cannot train."""

from __future__ import annotations

from statistics import median_low

from attune.fedserver.core.state import Round

FLOOR = 1.0  # of the loss that others are compared with: near 0 a multiple of a loss says nothing


def spoiled(state: Round, multiple: float, *, complete: bool) -> str:
    """Why the state before the last round is to be the state again; empty: it is not, or it is not known any more.

    multiple: of the last good median loss, at which losses have exploded; 0: never. complete: whether the answers are all
    there; a median of some of them says nothing yet. A minority of devices decides nothing of this.
    """
    record = state.record
    if not multiple or not record.kept or record.adapting:
        return ""
    last, troubled = f"the state after round {record.round} was taken back", len(state.troubled)
    if 2 * troubled > len(record.devices):
        return f"{last}: {troubled} of {len(record.devices)} devices could not work with it"
    median = median_of(state) if complete else None
    if median is None or record.loss is None or median <= multiple * max(record.loss, FLOOR):
        return ""
    return f"{last}: the median of the devices' losses went from {record.loss:.3g} to {median:.3g}"


def median_of(state: Round) -> float | None:
    """Of the losses of the cohort whose updates are there, the lower of the two in the middle; None without any."""
    losses = [state.losses[name] for name in sorted(state.updates) if name in state.losses]
    return median_low(losses) if losses else None
