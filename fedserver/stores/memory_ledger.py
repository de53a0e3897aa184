"""A ledger in memory, for federations in one process and for tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from attune.common.plan import Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.race_course import Race
from attune.fedserver.core.records import DeviceRecord, Report, Slot
from attune.fedserver.ports.ledger import AuditEntry, AuditHead, Certificate, Refusal, Snapshot, Token
from attune.fedserver.stores.audit import entries_in, head_of, next_line

WORK_ORDER = {"train": 0, "evaluate": 1}


class MemoryLedger:
    """Implements ports.ledger.Ledger. Values are immutable, so they are handed out as they are."""

    def __init__(self) -> None:
        self._overrides: Mapping[str, Any] | None = None
        self._plan: Plan | None = None
        self._record = Record()
        self._devices: dict[str, DeviceRecord] = {}
        self._certificates: dict[str, Certificate] = {}
        self._tokens: dict[str, Token] = {}
        self._slots: dict[tuple[str, str], Slot] = {}
        self._refusals: dict[tuple[str, str], Refusal] = {}
        self._rows: dict[tuple[int, str, str], Report] = {}
        self._run, self._leaving = "", False
        self._audit: list[bytes] = []
        self._audit_head: AuditHead | None = None
        self._race: Race | None = None
        self._commitments: Mapping[str, str] = {}

    async def tried(self) -> None:
        """No-op: memory can always be used."""

    async def close(self) -> None:
        """No-op: memory holds no file."""

    async def snapshot(self) -> Snapshot:
        return self.seen_from_outside(0)

    def seen_from_outside(self, since: int) -> Snapshot:
        """Return the snapshot of a LedgerReader. It copies each table in one step, so another thread may ask."""
        rows = [row for row in list(self._rows.values()) if row.round >= since]
        rows.sort(key=lambda row: (row.round, WORK_ORDER[row.work], row.client))
        return Snapshot(
            self._overrides,
            self._plan,
            self._record,
            tuple(device for _, device in sorted(self._devices.items())),
            tuple(slot for _, slot in sorted(self._slots.items())),
            tuple(rows),
            tuple(self._certificates_of(None)),
            tuple(self._refusals.values()),
            self._run,
            self._leaving,
            self._audit_head,
            self._race,
            self._commitments,
        )

    def audit_lines(self) -> list[bytes]:
        """Return the lines of the audit log."""
        return list(self._audit)

    def has_operator(self) -> bool:
        """Return whether an operator's certificate was issued."""
        return any(certificate.role == "operator" for certificate in list(self._certificates.values()))

    async def note(self, event: str, by: str, **facts: Any) -> None:
        self._audit.append(next_line(self._audit[-1] if self._audit else b"", event, by, facts))
        self._audit_head = head_of(self._audit[-1])

    async def set_audit_head(self, head: AuditHead) -> None:
        self._audit_head = head

    async def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = msgspec.json.decode(msgspec.json.encode(overrides))

    async def put_record(self, record: Record) -> None:
        self._record = record

    async def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        marked = {name: msgspec.structs.replace(self._devices[name], **marks[name]) for name in marks.keys() & self._devices}
        new_slots = {(slot.part, slot.key): slot for slot in slots}
        new_rows = {(row.round, row.work, row.client): row for row in rows}
        self._record, self._plan = record, plan or self._plan
        self._devices |= marked
        self._slots |= new_slots
        self._rows |= new_rows

    async def begin_run(self, name: str, overrides: Mapping[str, Any]) -> None:
        await self.set_overrides(overrides)
        self._run, self._leaving = name, True
        self._plan, self._record = None, Record(paused=self._record.paused)
        self._slots, self._rows, self._refusals = {}, {}, {}
        for name, one in self._devices.items():
            self._devices[name] = DeviceRecord(
                name, one.public_key, one.enrolled_at, True, one.revoked, since=one.since, token=one.token
            )

    async def end_run(self, record: Record, overrides: Mapping[str, Any]) -> None:
        await self.set_overrides(overrides)
        self._record = record

    async def set_race(self, race: Race | None) -> None:
        self._race = race

    async def set_commitments(self, commitments: Mapping[str, str]) -> None:
        self._commitments = dict(commitments)

    async def end_cleanup(self) -> None:
        self._leaving = False

    async def last_evaluations(self, before: int, but: range = range(0)) -> list[Report]:
        out = {device.name for device in self._devices.values() if device.revoked}
        asked = (row for row in self._rows.values() if row.work == "evaluate" and row.round < before and row.round not in but)
        rows = [row for row in asked if row.client not in out]
        latest = {row.client: row for row in sorted(rows, key=lambda row: row.round)}
        return [latest[name] for name in sorted(latest)]

    async def device(self, name: str) -> DeviceRecord | None:
        return self._devices.get(name)

    async def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        asked = self._devices.keys() if names is None else self._devices.keys() & set(names)
        return [self._devices[name] for name in sorted(asked)]

    async def is_revoked_key(self, public_key: str) -> bool:
        return any(device.revoked and device.public_key == public_key for device in self._devices.values())

    async def update_device(self, name: str, /, **fields: Any) -> None:
        if name in self._devices:
            self._devices[name] = msgspec.structs.replace(self._devices[name], **fields)

    async def refuse(self, refusal: Refusal, keep: int) -> None:
        before = self._refusals.pop((refusal.who, refusal.kind), None)
        count = refusal.count + (before.count if before else 0)
        self._refusals[refusal.who, refusal.kind] = replace(refusal, count=count)
        latest = sorted(self._refusals.items(), key=lambda item: item[1].at, reverse=True)
        self._refusals = dict(latest[:keep])

    async def disconnect_all(self, now: float) -> None:
        for device in await self.devices():
            if device.connected:
                await self.update_device(device.name, connected=False, since=now)

    async def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        if token is not None:
            used = self._tokens[token]
            left = used.uses_left - 1
            self._tokens[token] = replace(used, uses_left=left, used_up_at=now if left <= 0 else None)
        by = "" if token is None else self._tokens[token].id
        founder = self._record.round == 0
        known = self._devices.get(name) or DeviceRecord(name, public_key, enrolled_at=now, founder=founder, token=by)
        self._devices[name] = msgspec.structs.replace(known, public_key=public_key)
        self._certificates[certificate.fingerprint] = certificate

    async def release(self, name: str, other: str) -> None:
        self._devices[other] = msgspec.structs.replace(self._devices.pop(name), name=other, connected=False)
        for certificate in await self.certificates(name):
            self._certificates[certificate.fingerprint] = replace(certificate, name=other)
        for number, work, client in list(self._rows):
            if client == name:
                self._rows[number, work, other] = msgspec.structs.replace(self._rows.pop((number, work, name)), client=other)

    async def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        name, forget = certificate.name, now - forget_s
        self._certificates[certificate.fingerprint] = certificate
        of_device = await self.certificates(name)
        gone = [one for one in of_device if one.not_after < now or (one.retires_at is not None and one.retires_at < forget)]
        gone += [one for one in of_device if one.used_at is None][:-unused]
        for one in gone:
            self._certificates.pop(one.fingerprint, None)

    async def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        if fingerprint not in self._certificates:
            return []
        used = replace(self._certificates[fingerprint], used_at=now)
        others = [one for one in await self.certificates(used.name) if one.fingerprint != fingerprint]
        retiring = [one for one in others if one.issued_at <= used.issued_at and one.retires_at is None]
        self._certificates[fingerprint] = used
        for one in retiring:
            self._certificates[one.fingerprint] = replace(one, retires_at=retires_at)
        if used.public_key:
            await self.update_device(used.name, public_key=used.public_key)
        return [one.fingerprint for one in retiring]

    async def certificates(self, name: str | None = None) -> list[Certificate]:
        return self._certificates_of(name)

    def _certificates_of(self, name: str | None) -> list[Certificate]:
        of_devices = [one for one in list(self._certificates.values()) if one.role == "device" and name in (None, one.name)]
        return sorted(of_devices, key=lambda one: (one.name, one.issued_at))

    async def certificate(self, fingerprint: str) -> Certificate | None:
        known = self._certificates.get(fingerprint)
        device = self._devices.get(known.name) if known is not None and known.role == "device" else None
        return replace(known, revoked=device.revoked) if known is not None and device is not None else known

    async def replace_operator(self, certificate: Certificate) -> None:
        kept = {key: one for key, one in self._certificates.items() if one.role != "operator"}
        self._certificates = kept | {certificate.fingerprint: certificate}

    async def add_token(self, token: Token, keep: int | None = None) -> None:
        self._tokens[token.fingerprint] = token
        if keep is not None:
            of_origin = [fingerprint for fingerprint, one in self._tokens.items() if one.origin == token.origin]
            for fingerprint in of_origin[:-keep]:
                del self._tokens[fingerprint]

    async def token(self, fingerprint: str) -> Token | None:
        return self._tokens.get(fingerprint)

    async def tokens(self) -> list[Token]:
        return list(self._tokens.values())

    async def withdraw(self, id: str, now: float) -> None:
        for fingerprint, token in self._tokens.items():
            if token.id == id and token.withdrawn_at is None:
                self._tokens[fingerprint] = replace(token, withdrawn_at=now, used_up_at=token.used_up_at or now)

    async def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        return [
            token.bootstrap_pem
            for _, token in sorted(self._tokens.items())
            if min(token.expires_at, token.used_up_at or token.expires_at) > now - keep_s
        ]


class MemoryReader:
    """Implements ports.ledger.LedgerReader, for any one thread."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    def snapshot(self, since: int = 0) -> Snapshot:
        return self._ledger.seen_from_outside(since)

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        return entries_in(self._ledger.audit_lines(), "the audit log in memory")

    def check(self) -> None:
        """No-op: memory is not checked."""

    def was_served(self) -> bool:
        return self._ledger.has_operator()

    def close(self) -> None:
        """No-op: memory holds no file."""
