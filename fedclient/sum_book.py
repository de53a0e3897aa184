"""Sums that a device has answered in the whole life of its home, whatever the run: from one start it is in one sum alone.

Sums of the same updates over other devices, subtracted, are single updates. So a device that was in a sum from a start is in
another one only with exactly the same survivors. A server can still change the last bit of a start: `privacy.same_cohort`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
from typing_extensions import Self

from attune.common.protocol import OTHER_COHORT, SAMPLES_BEFORE, SUMMED_BEFORE

MOST_STARTS = 1000  # the newest, which are remembered
OF_SAMPLES = "samples:"  # begins the start of sums over samples, before what the device hands in


class SumBook(msgspec.Struct, frozen=True):
    """Sums of a device, without their numbers.

    Attributes:
        starts: Digest of a start -> digest of the survivors of the sum from it, the newest last.
        cohorts: The survivors of sums under `privacy.same_cohort`, each once, the newest last.
        samples: Digest of the one sum over samples, of its survivors and of what the device handed in; empty: there was none.
    """

    starts: dict[str, str] = {}
    cohorts: tuple[tuple[str, ...], ...] = ()
    samples: str = ""

    def refuses(self, start: str, names: Collection[str], same_cohort: bool) -> str:
        """Explain why the device takes no part in a sum over these devices; empty if it does.

        Args:
            start: Digest of what its training began from; empty: its update follows from none.
            names: The devices among which the survivors will be, or the survivors.
            same_cohort: Whether the plan has `privacy.same_cohort`.
        """
        if same_cohort and self.cohorts and set(names) != set(self.cohorts[-1]):
            for cohort in self.cohorts:
                lost, least = len(set(cohort) - set(names)), len(cohort) // 2 + 1
                if lost < least:
                    return (
                        f"{OTHER_COHORT} (privacy.same_cohort), and another cohort must have lost at least {least} of these "
                        f"{len(cohort)}, not {lost}"
                    )
        if start.startswith(OF_SAMPLES):
            return SAMPLES_BEFORE if self.samples not in ("", digest_of_names([start, *names])) else ""
        if start and self.starts.get(start, digest_of_names(names)) != digest_of_names(names):
            return f"{SUMMED_BEFORE}; it waits for another start"
        return ""

    def noting(self, start: str, survivors: Collection[str], same_cohort: bool) -> Self:
        """Return the book with a sum that the device is about to answer."""
        starts = {known: digest for known, digest in self.starts.items() if known != start}
        starts = dict([*starts.items(), *([(start, digest_of_names(survivors))] if start else [])][-MOST_STARTS:])
        if start.startswith(OF_SAMPLES):
            return msgspec.structs.replace(self, samples=digest_of_names([start, *survivors]))
        names = tuple(sorted(survivors))
        cohorts = (*(cohort for cohort in self.cohorts if cohort != names), names) if same_cohort else self.cohorts
        return msgspec.structs.replace(self, starts=starts, cohorts=cohorts)


def digest_of_names(names: Collection[str]) -> str:
    """Return a digest of a set of devices."""
    return digest_of_text(msgspec.json.encode(sorted(names)))


def digest_of_text(text: bytes) -> str:
    """Return a digest that is short enough to be kept many times."""
    return hashlib.sha256(text).hexdigest()[:32]
