"""Worth of each site's sums to the others, from the state of a run: all for the operator, and for a site its own alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attune.common.wire.files import read_tensors
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.aggregators.closed_form import MEMBERS, OF, TOTAL, worths
from attune.fedserver.ports.blobs import Blobs, blob_of

MOST_CLIENTS, MOST_BYTES = 100, 1 << 29  # whose worth is computed: each pair of clients is left out once
IN_ONE_SUM = "the sums of the clients are known as one"
MOST_TOLD = 20  # clients that are told at the end of a run, who wait for it


def fleet_worths(slots: Sequence[Slot], blobs: Blobs, most: int = MOST_CLIENTS) -> list[tuple[str, float, float, float]] | str:
    """Return the rows of `worths`, or why there are none; empty: clients hand in no sums, or their sums are not pooled yet.

    Args:
        slots: The state.
        blobs: Its files.
        most: Most clients for which it is computed.
    """
    by_key = {slot.key: blob_of(slot) for slot in sorted(slots, key=lambda slot: slot.key)}
    sums = {key.removeprefix(OF): blob for key, blob in by_key.items() if key.startswith(OF)}
    if MEMBERS in by_key:
        return IN_ONE_SUM
    if TOTAL not in by_key or not sums:
        return ""
    if len(sums) > most or sum(blob.size for blob in sums.values()) > MOST_BYTES:
        return f"there are more than {most} clients, or {MOST_BYTES >> 20} MB of sums"
    of_clients = {client: read_tensors(blobs.open(blob)) for client, blob in sums.items()}
    return worths(read_tensors(blobs.open(by_key[TOTAL])), of_clients)


def words_for_sites(slots: Sequence[Slot], blobs: Blobs) -> dict[str, str]:
    """Return what each site is told of its own worth, by name.

    With fewer than three other sites no site is told anything: the number would be about one or two of them.
    """
    rows, form = fleet_worths(slots, blobs, MOST_TOLD), "without your sums the error of the others would change by {}: {}"
    if isinstance(rows, str):
        return {}
    number = "{:+.4f} (95 % {:+.4f} to {:+.4f})"
    what = "squared error as a share of their targets' squares, by the closed form"
    return {client: form.format(number.format(*numbers), what) for client, *numbers in rows if not math.isnan(numbers[1])}
