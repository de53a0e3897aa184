"""Comparison of the ledger with the audit log, and its repair.

Each decision about trust is in the audit log before it is in the ledger, and the ledger knows the head of the log. After a
power cut, a lost write-ahead log or an older backup the ledger may lack the latest decisions. They are applied again from the
log, or named.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import msgspec

from attune.common.errors import SettingError
from attune.fedserver.identity.admin import BY_OPERATOR, user
from attune.fedserver.identity.registrar import FORGET_S, RELEASED, UNUSED
from attune.fedserver.ports.ledger import AuditEntry, AuditHead, Certificate, Ledger, LedgerReader, Snapshot
from attune.fedserver.ports.storage import Storage

REPAIRED, CUT, READMITTED = "repaired from the audit log", "audit log cut", "device readmitted"
LOST_ENROLMENT = (
    "{0} was enrolled, and the database does not know it: make a token for it (`fedserver token --for {0}`), and start the "
    "device once with --token-file"
)
Log = Sequence[tuple[AuditEntry, str]]


@dataclass
class Differences:
    """Decisions that the audit log tells and the ledger lacks.

    Attributes:
        head: The last entry of the log; None if the log is empty.
        revoked: Names of devices to revoke.
        released: The name that each revoked device has now, by the name that it had.
        enrolled: The certificate of each device that the ledger does not know, by the device's name.
        renewed: Certificates of known devices.
        tokens: Id of the token with which each device enrolled, by the device's name.
        withdrawn: Unix time at which each token was withdrawn, by its id.
        paused: Whether the federation is to be paused; None: as it is.
        lines: A line for each difference, for people.
        is_cut: The log lacks entries that the ledger knows.
    """

    head: AuditHead | None = None
    revoked: list[str] = field(default_factory=list)
    released: dict[str, str] = field(default_factory=dict)
    enrolled: dict[str, Certificate] = field(default_factory=dict)
    renewed: list[Certificate] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    withdrawn: dict[str, float] = field(default_factory=dict)
    paused: bool | None = None
    lines: list[str] = field(default_factory=list)
    is_cut: bool = False


def compare(snapshot: Snapshot, log: Log) -> Differences:
    """Return what all entries of the audit log tell and the ledger lacks."""
    differences = Differences(AuditHead(log[-1][0].number, log[-1][1]) if log else None)
    later = _later(snapshot.audit_head, log, differences)
    known = {device.name: device for device in snapshot.devices}
    issued = {certificate.fingerprint for certificate in snapshot.certificates}
    for entry in later:
        _take(entry, snapshot.record.paused, known, issued, differences)
    for name in revoked_in(log):
        if (name in known and not known[name].revoked) or name in differences.enrolled:
            differences.revoked.append(name)
            differences.lines.append(f"{name} was revoked, and the database does not know it")
    if differences.paused is not None:
        word = "paused" if differences.paused else "resumed"
        differences.lines.append(f"the federation was {word}, and the database does not know it")
    return differences


def revoked_in(log: Log) -> list[str]:
    """Return the devices that stand as revoked at the end of a log, by name."""
    revoked = set[str]()
    for entry, _ in log:
        if entry.event == "device revoked":
            revoked.add(str(entry.facts.get("name", "")))
        elif entry.event in (READMITTED, RELEASED):
            revoked.discard(str(entry.facts.get("name", "")))
    return sorted(revoked)


def _later(head: AuditHead | None, log: Log, differences: Differences) -> list[AuditEntry]:
    """Return the entries after the head that the ledger knows. Where it knows none, as in older homes, all count as known."""
    if head is None or head.number == 0:
        return []
    if len(log) < head.number or log[head.number - 1][1] != head.digest:
        differences.is_cut = True
        differences.lines.append(
            f"the audit log lacks entry {head.number} ({head.digest}), which the database knows: the log was cut or replaced"
        )
        return []
    return [entry for entry, _ in log[head.number :]]


def _take(entry: AuditEntry, paused: bool, known: Collection[str], issued: Collection[str], differences: Differences) -> None:
    """Add the difference that one entry makes."""
    facts, name = entry.facts, str(entry.facts.get("name", ""))
    match entry.event:
        case "enrolled" | "renewed" if facts.get("certificate") not in issued:
            certificate = _certificate(entry)
            if certificate is None:
                if name not in known:
                    differences.lines.append(LOST_ENROLMENT.format(name))
            elif (name in known and name not in differences.released) or name in differences.enrolled:
                differences.renewed.append(certificate)
                differences.lines.append(f"{name} has a newer certificate, and the database does not know it")
            else:
                differences.enrolled[name] = certificate
                differences.tokens[name] = str(facts.get("token", ""))
                differences.lines.append(f"{name} was enrolled, and the database does not know it")
        case event if event == RELEASED:
            _release(name, str(facts.get("revoked_as", "")), differences)
            differences.lines.append(f"the name {name} was given to another device, and the database does not know it")
        case "paused" | "resumed":
            on = entry.event == "paused"
            differences.paused = None if on is paused else on
        case "token withdrawn":
            differences.withdrawn[str(facts.get("id"))] = _time_of(entry)
            differences.lines.append(f"the token {facts.get('id')} was withdrawn, and the database does not know it")
        case "token made" if facts.get("origin") == BY_OPERATOR:
            differences.lines.append(
                f"the database may lack the token {facts.get('id')}: if a device is refused, make another one"
            )
        case "run begun" | "run stopped":
            differences.lines.append(f"the database does not know entry {entry.number} of the audit log: {entry.event}")


def _release(name: str, other: str, differences: Differences) -> None:
    """Keep what the revoked device got under the name that it has now."""
    differences.renewed = [
        replace(certificate, name=other) if certificate.name == name else certificate for certificate in differences.renewed
    ]
    if name in differences.enrolled:
        differences.enrolled[other] = replace(differences.enrolled.pop(name), name=other)
        differences.tokens[other] = differences.tokens.pop(name)
        differences.revoked.append(other)
    else:
        differences.released[name] = other


def _certificate(entry: AuditEntry) -> Certificate | None:
    """Return the certificate of an entry; None where an earlier version wrote it, without key and end."""
    facts = entry.facts
    try:
        return Certificate(
            str(facts["certificate"]), str(facts["name"]), "device", float(facts["not_after"]), public_key=str(facts["key"]),
            issued_at=_time_of(entry),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError):
        return None


def _time_of(entry: AuditEntry) -> float:
    return datetime.fromisoformat(entry.at).timestamp()


def differences_in(reader: LedgerReader) -> Differences:
    """Compare a ledger with its audit log.

    Raises:
        HomeMismatch, LedgerBusy: One of them is damaged, or cannot be read now.
    """
    snapshot = reader.snapshot()
    return compare(snapshot, list(reader.audit()))


async def settle(storage: Storage, readmitted: Collection[str] = ()) -> list[str]:
    """Apply again what the ledger lacks, at the start of a server or in a restored home, and return a line for each difference.

    Args:
        storage: The ledger and its audit log.
        readmitted: Devices that were revoked since, and that are let in all the same.

    Raises:
        SettingError: A device of `readmitted` was not revoked since.
        HomeMismatch, LedgerBusy: As for `differences_in`.
    """
    with contextlib.closing(storage.reader()) as reader:
        log = await asyncio.to_thread(lambda: list(reader.audit()))
    differences = compare(await storage.ledger.snapshot(), log)
    if others := sorted(set(readmitted) - set(differences.revoked)):
        raise SettingError(f"{others[0]} was not revoked after the backup was made: --readmit cannot let it in")
    if differences.lines:
        differences.revoked = [name for name in differences.revoked if name not in readmitted]
        await repair(storage.ledger, differences)
    for name in readmitted:
        await storage.ledger.note(READMITTED, f"operator {user()}", name=name)
    return differences.lines


async def repair(ledger: Ledger, differences: Differences) -> None:
    """Apply what the ledger lacks, and note it: then the end of the log is the head that the ledger knows."""
    by_id = {token.id: token for token in await ledger.tokens()}
    known = {device.name for device in await ledger.devices()}
    for name, other in differences.released.items():
        if name in known:
            await ledger.update_device(name, revoked=True)
            await ledger.release(name, other)
    for name, certificate in differences.enrolled.items():
        token = by_id.get(differences.tokens[name])
        used = token.fingerprint if token is not None and token.uses_left > 0 else None
        await ledger.enrol(name, certificate.public_key, certificate, certificate.issued_at, used)
    for certificate in differences.renewed:
        await ledger.renew(certificate, certificate.issued_at, UNUSED, FORGET_S)
    for id, at in differences.withdrawn.items():
        await ledger.withdraw(id, at)
    for name in differences.revoked:
        await ledger.update_device(name, revoked=True)
    if differences.paused is not None:
        record = (await ledger.snapshot()).record
        await ledger.put_record(msgspec.structs.replace(record, paused=differences.paused))
    if differences.is_cut:
        await ledger.set_audit_head(differences.head or AuditHead(0, ""))
    await ledger.note(CUT if differences.is_cut else REPAIRED, "server", differences=differences.lines)
