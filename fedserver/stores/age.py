"""Whether ledger and blobs are of one time: under an older ledger newer state would be swept away as the remains of a crash."""

from __future__ import annotations

import re

from attune.common.errors import HomeMismatch
from attune.fedserver.ports.blobs import INBOX, STATE, Blobs

_ROUND = re.compile(rf"{STATE}(?:.*\.)?(\d+)\.(?:safetensors|json)|{INBOX}(?:train|evaluate)-(\d+)-.*")


def is_later(name: str, closed: int) -> bool:
    """Whether a blob is of a later round than the one after `closed`."""
    found = _ROUND.fullmatch(name)
    return found is not None and int(found[1] or found[2]) > closed + 1


def check_age(blobs: Blobs, closed: int) -> None:
    """closed: rounds that the ledger counts. A killed server leaves blobs of one more at most.

    Errors: HomeMismatch where there are blobs of later ones; nothing is changed.
    """
    for name in (*blobs.names(STATE), *blobs.names(INBOX)):
        if is_later(name, closed):
            raise HomeMismatch(
                f"the database (state.sqlite) counts {closed} closed rounds, but {name} is of a later one: the database is "
                "damaged, or an old copy. Restore it, or the whole home from one backup; nothing was changed"
            )
