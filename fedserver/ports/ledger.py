"""The ledger: what a federation must not forget (settings, plan, record, members, certificates, tokens, slots, metrics).

Every call is awaited, so that an implementation may wait for a disk or a network. What a call has changed survives a killed
process; what `commit_round` has changed also survives a power cut. An error that can pass is LedgerBusy: the caller decides
whether to try again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from attune.common.plan import Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import ResolvedSettings, resolve
from attune.fedserver.core.records import DeviceRecord, Report, Slot

Role = Literal["device", "operator"]


@dataclass(frozen=True)
class Certificate:
    """A certificate that this server issued. Times are unix times. revoked: the device that it names was shut out."""

    fingerprint: str
    name: str
    role: Role
    not_after: float
    revoked: bool = False
    public_key: str = ""  # SHA-256 of its key
    issued_at: float = 0.0
    used_at: float | None = None  # when its holder first called with it
    retires_at: float | None = None  # from when on a newer one stands for it

    @property
    def ends_at(self) -> float:
        return self.not_after if self.retires_at is None else min(self.not_after, self.retires_at)


@dataclass(frozen=True)
class Token:
    """A join token, by the fingerprint of the bootstrap certificate that follows from it. Times are unix times."""

    fingerprint: str
    bootstrap_pem: bytes
    uses_left: int
    expires_at: float
    origin: str
    used_up_at: float | None = None
    id: str = ""  # as common.identity.token names it; no secret
    uses: int = 1
    made_at: float = 0.0
    only_for: str = ""  # the enrolled device that may use it, and no other; empty: new devices
    withdrawn_at: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Who was turned away, most lately at unix time `at`, and how often for this kind of reason (common.errors)."""

    who: str
    kind: str
    text: str
    at: float
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    """All that people are shown, as it was at one moment."""

    overrides: Mapping[str, Any] | None  # of the settings, as set; None: no server has served this federation yet
    plan: Plan | None
    record: Record
    devices: tuple[DeviceRecord, ...]  # by name
    slots: tuple[Slot, ...]  # by part and key
    rows: tuple[Report, ...]  # in the order of time: rounds, in each training before evaluation, in each the clients by name
    certificates: tuple[Certificate, ...] = ()  # of devices, by name; of each the oldest first
    refusals: tuple[Refusal, ...] = ()  # the latest first
    run: str = ""  # of several over one fleet; empty: the first
    leaving: bool = False  # blobs of the run before are still to be removed

    @cached_property
    def settings(self) -> ResolvedSettings:
        """The overrides over all defaults, typed; parsed once for each snapshot. Errors: SettingError."""
        return resolve(self.overrides or {})


@dataclass(frozen=True)
class Look:
    """A snapshot with the rows of some rounds alone, and when the devices' newest certificates expire (unix times)."""

    found: Snapshot
    expires: Mapping[str, float]


class Reader(Protocol):
    """Looks at a ledger again and again, from any one thread, beside whoever writes it."""

    def look(self, since: int) -> Look:
        """Rows: those of rounds from `since` on. Errors: LedgerBusy; HomeMismatch for a damaged file."""

    def close(self) -> None: ...


class Ledger(Protocol):
    async def close(self) -> None:
        """Nothing is called afterwards."""

    async def check(self) -> None:
        """Looks the whole ledger over. Errors: HomeMismatch if it is damaged."""

    # --- settings, plan and record

    async def snapshot(self) -> Snapshot: ...

    async def set_overrides(self, overrides: Mapping[str, Any]) -> None: ...

    async def put_record(self, record: Record) -> None: ...

    async def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        """The one commit point of a round: record, state, metrics and the devices' `marks` become true together, or not at all.

        marks: device -> {"contributed" or "fetched": round}.
        """

    async def last_evaluations(self, before: int, but: int = 0) -> list[Report]:
        """Of each device that is not revoked, by name: what it reported of the latest state before this round's.

        but: a round whose state is left out.
        """

    # --- members

    async def device(self, name: str) -> DeviceRecord | None: ...

    async def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        """Those of `names` that are known, or all; by name."""

    async def update_device(self, name: str, **fields: Any) -> None:
        """Changes fields of core.records.DeviceRecord. Nothing happens if there is no such device."""

    async def disconnect_all(self, now: float) -> None:
        """At start: a new process has no streams."""

    async def refuse(self, refusal: Refusal, keep: int) -> None:
        """Somebody was turned away, `count` times since this was last called; only the latest `keep` stay."""

    # --- certificates and tokens

    async def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        """A device with its certificate at unix time `now`; a founder if no round is closed yet.

        `token` (a fingerprint) is used once by it, in the same step.
        """

    async def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        """One more certificate of a device. Of those that were never used the newest `unused` stay; gone are those that have
        expired, and those that have retired more than `forget_s` ago.
        """

    async def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        """A device has moved over to this certificate: its key is the device's key, and older ones retire at `retires_at`.

        Returns their fingerprints.
        """

    async def certificates(self, name: str | None = None) -> list[Certificate]:
        """Of this device, or of all by name; of each the oldest first."""

    async def certificate(self, fingerprint: str) -> Certificate | None: ...

    async def served(self) -> bool:
        """Whether an operator's certificate was ever issued: every start of a server issues one, and a simulation none."""

    async def replace_operator(self, certificate: Certificate) -> None:
        """The one operator's certificate from now on."""

    async def add_token(self, token: Token, keep: int | None = None) -> None:
        """keep: only so many of this origin stay, the newest."""

    async def token(self, fingerprint: str) -> Token | None: ...

    async def tokens(self) -> list[Token]:
        """All that are kept, the newest last."""

    async def withdraw(self, id: str, now: float) -> None:
        """This token admits nobody any more."""

    async def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        """Bootstrap certificates to admit to the handshake; spent ones for `keep_s` longer, so that they hear the reason."""
