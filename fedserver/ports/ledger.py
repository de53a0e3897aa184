"""The ledger: the decisions of a federation, in one store with two interfaces.

`RoundLedger` has settings, plan, record, slots and metrics. `MemberLedger` has devices, certificates, tokens and the audit log.
`Ledger` is both, because `commit_round` changes rounds and members in one transaction. `LedgerReader` is for views: it reads
beside whoever writes.

Every call of a ledger is awaited, so that an implementation may wait for a disk or a network. A change survives a killed
process. What was acknowledged to somebody also survives a power cut: rounds, runs, settings, a pause, enrolments, renewals,
revocations and tokens. Each call may raise LedgerBusy: the caller decides whether to try again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec

from attune.common.plan import Plan
from attune.fedserver.choosing.race_course import Race
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import ResolvedSettings, resolve
from attune.fedserver.core.records import DeviceRecord, Report, Slot

Role = Literal["device", "operator"]


@dataclass(frozen=True)
class Certificate:
    """A certificate that this server issued. Times are unix times. `revoked`: the device that it names was shut out."""

    fingerprint: str
    name: str
    role: Role
    not_after: float
    revoked: bool = False
    public_key: str = ""  # SHA-256 of its key
    issued_at: float = 0.0
    used_at: float | None = None  # when its holder first called with it
    retires_at: float | None = None  # from when on a newer one stands for it


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
    """A caller that was turned away: `count` times for this kind of reason (common.errors), last at unix time `at`."""

    who: str
    kind: str
    text: str
    at: float
    count: int = 1


class AuditHead(msgspec.Struct, frozen=True):
    """The last line of the audit log: its number and its digest."""

    number: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """The whole ledger at one moment, as far as views show it."""

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
    audit_head: AuditHead | None = None  # the last entry of the audit log that the ledger knows; None: it knows none
    race: Race | None = None  # of methods over this fleet (--method auto)
    commitments: Mapping[str, str] = field(default_factory=dict)  # to secrets of this federation, by name
    variants: Mapping[str, str] = field(default_factory=dict)  # of the model, by device; empty if the plan has none
    tags: Mapping[str, str] = field(default_factory=dict)  # of devices and tokens (fedserver.core.tags)

    @cached_property
    def settings(self) -> ResolvedSettings:
        """The overrides over all defaults, typed; parsed once for each snapshot. Raises SettingError.

        If the federation ends early, `round.rounds` is the round at which it does.
        """
        settings, last = resolve(self.overrides or {}), self.record.last
        return replace(settings, round=msgspec.structs.replace(settings.round, rounds=last)) if last else settings

    @property
    def certificate_ends(self) -> dict[str, float]:
        """Unix time at which each device's newest certificate expires, by the device's name."""
        ends: dict[str, float] = {}
        for certificate in self.certificates:
            ends[certificate.name] = max(certificate.not_after, ends.get(certificate.name, 0.0))
        return ends


class AuditEntry(msgspec.Struct, frozen=True):
    """One line of the audit log. `facts` are those of the event, by name."""

    number: int  # from 1
    at: str  # UTC, ISO 8601
    event: str
    by: str
    facts: dict[str, Any]
    previous: str  # SHA-256 of the line before, without its end


class LedgerReader(Protocol):
    """A ledger for views: it only reads, from one thread at a time, and holds up no writer."""

    def snapshot(self, since: int = 0) -> Snapshot:
        """Return what the ledger holds now, with the rows of rounds from `since` on.

        Raises:
            LedgerBusy: The ledger cannot be read now.
            HomeMismatch: The ledger is damaged.
        """

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        """Yield each entry of the audit log with its digest, the oldest first.

        Raises:
            HomeMismatch: A line was changed, taken out or put in.
        """

    def check(self) -> None:
        """Read the whole ledger.

        Raises:
            LedgerBusy: The ledger cannot be read now.
            HomeMismatch: The ledger is damaged.
        """

    def was_served(self) -> bool:
        """Return whether an operator's certificate was ever issued: each start of a server issues one, a simulation none."""

    def close(self) -> None:
        """Let go of the ledger. No other call may follow."""


class RoundLedger(Protocol):
    """Settings, plan, record, slots and metrics of the present run."""

    async def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Bind the federation to these settings."""

    async def put_record(self, record: Record) -> None:
        """Write the record of the round."""

    async def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        """Commit a round: record, state, metrics and the devices' marks become true together, or not at all.

        Args:
            record: The record after the round.
            slots: The slots that have changed.
            rows: Reported metrics of devices.
            marks: device -> {"contributed" or "fetched": round}.
            plan: The plan, where this commit fixes it.
        """

    async def last_evaluations(self, before: int, but: range = range(0)) -> list[Report]:
        """Return each device's latest evaluation of a state before round `before`, by name, without revoked devices.

        Args:
            before: The first round that does not count.
            but: Rounds that do not count either.
        """

    async def begin_run(self, name: str, overrides: Mapping[str, Any]) -> None:
        """Begin a run in the place of the present one: members and a pause stay; plan, record, slots and metrics go.

        Until `end_cleanup`, snapshots say that the blobs of the run before must go too.
        """

    async def end_run(self, record: Record, overrides: Mapping[str, Any]) -> None:
        """End the present run with this record and these settings, in one step."""

    async def set_race(self, race: Race | None) -> None:
        """Keep the race of methods over this fleet; None: there is none."""

    async def set_commitments(self, commitments: Mapping[str, str]) -> None:
        """Keep the commitments to the secrets of this federation, by name, in the place of those before; for all runs."""

    async def note_variants(self, variants: Mapping[str, str]) -> None:
        """Note which variant of the model devices have in this run; empty: the plan's model."""

    async def end_cleanup(self) -> None:
        """Note that the blobs of the run before are gone."""


class MemberLedger(Protocol):
    """Devices, certificates, tokens, and the audit log of decisions about them."""

    async def note_tags(self, tags: Mapping[str, str]) -> None:
        """Note tags of devices and tokens, by the names of fedserver.core.tags; for all runs."""

    async def tags(self) -> dict[str, str]:
        """Return all tags, as they were noted."""

    # --- the audit log

    async def note(self, event: str, by: str, **facts: Any) -> None:
        """Append an entry to the audit log, durably: call it before the decision that it notes.

        Raises:
            DiskFull: There is no space for the entry.
            LedgerBusy: Another process holds the log.
        """

    async def set_audit_head(self, head: AuditHead) -> None:
        """Make this the last entry of the audit log that the ledger knows. `note` does so for its own entries."""

    # --- devices

    async def device(self, name: str) -> DeviceRecord | None:
        """Return the device of this name."""

    async def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        """Return the known devices of `names`, or all devices, by name."""

    async def is_revoked_key(self, public_key: str) -> bool:
        """Return whether a device with this key is revoked."""

    async def update_device(self, name: str, /, **fields: Any) -> None:
        """Change fields of a device. No-op for an unknown one."""

    async def disconnect_all(self, now: float) -> None:
        """Mark all devices as disconnected: a new process has no streams."""

    async def refuse(self, refusal: Refusal, keep: int) -> None:
        """Count a refusal, and keep only the latest `keep` kinds of refusals."""

    # --- certificates and tokens

    async def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        """Add a device with its certificate at unix time `now`; it is a founder if no round is closed yet.

        Args:
            name: The device.
            public_key: SHA-256 of its key.
            certificate: Its first certificate, or a new one.
            now: Unix time.
            token: Fingerprint of the token, of which this takes one use in the same step.
        """

    async def release(self, name: str, other: str) -> None:
        """Move a revoked device with its certificates and reports to another name, under which it stays revoked.

        What the server holds for the name (its value of each part) stays with the name.
        """

    async def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        """Add one more certificate of a device.

        Of the certificates that were never used, the newest `unused` stay. Expired certificates go, and those that have retired
        more than `forget_s` seconds ago.
        """

    async def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        """Make this certificate's key the device's key, and retire the older certificates at `retires_at`.

        Returns:
            The fingerprints of the older certificates.
        """

    async def certificates(self, name: str | None = None) -> list[Certificate]:
        """Return the certificates of one device, or of all by name; the oldest first."""

    async def certificate(self, fingerprint: str) -> Certificate | None:
        """Return the certificate with this fingerprint, as the store has it at this moment."""

    async def replace_operator(self, certificate: Certificate) -> None:
        """Make this the one operator's certificate."""

    async def add_token(self, token: Token, keep: int | None = None) -> None:
        """Add a join token; with `keep`, only the newest `keep` tokens of its origin stay."""

    async def token(self, fingerprint: str) -> Token | None:
        """Return the token with this fingerprint."""

    async def tokens(self) -> list[Token]:
        """Return all tokens, the newest last."""

    async def withdraw(self, id: str, now: float) -> None:
        """Withdraw a token: it admits no device any more."""

    async def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        """Return the bootstrap certificates (PEM) to admit to the handshake.

        Spent ones stay for `keep_s` seconds, so that their holders hear the reason.
        """


class Ledger(RoundLedger, MemberLedger, Protocol):
    """Rounds and members in one store."""

    async def snapshot(self) -> Snapshot:
        """Return what the ledger holds now."""

    async def tried(self) -> None:
        """Write and read once, and leave nothing of it.

        Raises:
            LedgerBusy: The ledger cannot be used now.
        """

    async def close(self) -> None:
        """Let go of the store. No other call may follow."""
