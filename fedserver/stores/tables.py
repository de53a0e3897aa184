"""The ledger as tables of a database: plain calls that wait for it. Ledgers give them a thread.

All statements are here, in the SQL that SQLite and PostgreSQL share. A `Database` is one of the two, with what differs.
Commands (`status`, `token`, `revoke`, `export`) read and write the tables beside a running server. Ordinary writes survive a
killed process. What was acknowledged to somebody (`synced`) also survives a power cut: rounds, runs, settings, a pause,
enrolments, renewals, revocations and tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import msgspec

from attune.common.metrics import within_bounds
from attune.common.plan import Plan
from attune.common.text import converted, from_json
from attune.fedserver.choosing.race_course import Race
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import DeviceRecord, Report, Slot
from attune.fedserver.ports.ledger import AuditHead, Certificate, Refusal, Snapshot, Token
from attune.fedserver.stores.database import Database, begins, put_value, value_in, words_in

VARIANT, TAG = "variant ", "tag "  # beginnings of keys of `meta`, each with a name
TOKEN, DEVICE = ", ".join(Token.__dataclass_fields__), ", ".join(DeviceRecord.__struct_fields__)  # columns
CERTIFICATE = ", ".join(name for name in Certificate.__dataclass_fields__ if name != "revoked")  # that is known of the device


class Tables:
    """The ledger's methods over one connection, as plain calls. Errors of the database pass through."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._paused: bool | None = None  # as this process has written it; None: not yet

    def close(self) -> None:
        self._db.close()

    def tried(self) -> None:
        with self._db.transaction():
            put_value(self._db, "tried", 0)
            self._db.execute("DELETE FROM meta WHERE key = 'tried'")

    # --- settings, plan and record: JSON values

    def snapshot(self) -> Snapshot:
        with self._db.moment():
            return snapshot_in(self._db)

    def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        with self._db.synced():
            put_value(self._db, "overrides", overrides)

    def put_record(self, record: Record) -> None:
        with nullcontext() if record.paused is self._paused else self._db.synced():
            put_value(self._db, "record", record)
        self._paused = record.paused

    def set_audit_head(self, head: AuditHead) -> None:
        with self._db.synced():
            put_value(self._db, "audit", head)

    def follow_audit(self, head: AuditHead) -> None:
        """Make this the head of the audit log, unless another process has noted a later one meanwhile."""
        with self._db.transaction():
            known = value_in(self._db, "audit", AuditHead)
            if known is None or known.number < head.number:
                put_value(self._db, "audit", head)

    # --- runs, while no server runs

    def begin_run(self, name: str, overrides: Mapping[str, Any]) -> None:
        with self._db.synced(), self._db.transaction():
            paused = (value_in(self._db, "record", Record) or Record()).paused
            self._db.execute(f"DELETE FROM meta WHERE key = 'plan' OR {begins(VARIANT)}")  # noqa: S608 - a constant
            for table in ("slots", "metrics", "refusals"):
                self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - names of tables
            self._db.execute(
                "UPDATE devices SET founder = 1, connected = 0, samples = NULL, contributed = 0, fetched = -1, progress = 0, "
                "note = '', labels = ''"
            )
            for key, value in {"run": name, "overrides": overrides, "leaving": True, "record": Record(paused=paused)}.items():
                put_value(self._db, key, value)

    def end_run(self, record: Record, overrides: Mapping[str, Any]) -> None:
        with self._db.synced(), self._db.transaction():
            put_value(self._db, "record", record)
            put_value(self._db, "overrides", overrides)

    def set_race(self, race: Race | None) -> None:
        with self._db.synced():
            if race is None:
                self._db.execute("DELETE FROM meta WHERE key = 'race'")
            else:
                put_value(self._db, "race", race)

    def set_commitments(self, commitments: Mapping[str, str]) -> None:
        with self._db.synced():
            put_value(self._db, "commitments", commitments)

    def note_variants(self, variants: Mapping[str, str]) -> None:
        for name, variant in variants.items():
            put_value(self._db, f"{VARIANT}{name}", variant)

    def note_tags(self, tags: Mapping[str, str]) -> None:
        for name, tag in tags.items():
            put_value(self._db, f"{TAG}{name}", tag)

    def tags(self) -> dict[str, str]:
        return words_in(self._db, TAG)

    def end_cleanup(self) -> None:
        self._db.execute("DELETE FROM meta WHERE key = 'leaving'")

    def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        with self._db.synced():
            with self._db.transaction():
                put_value(self._db, "record", record)
                if plan is not None:
                    put_value(self._db, "plan", plan)
                for name, fields in marks.items():
                    self.update_device(name, **fields)
                for slot in slots:
                    self._db.execute(
                        "INSERT INTO slots (part, key, file, digest, size) VALUES (?, ?, ?, ?, ?) ON CONFLICT (part, key) "
                        "DO UPDATE SET file = excluded.file, digest = excluded.digest, size = excluded.size",
                        msgspec.structs.astuple(slot),
                    )
                for row in rows:
                    self._db.execute(
                        "INSERT INTO metrics (round, work, client, row) VALUES (?, ?, ?, ?) "
                        "ON CONFLICT (round, work, client) DO UPDATE SET row = excluded.row",
                        (row.round, row.work, row.client, msgspec.json.encode(row)),
                    )
            if plan is not None:
                self._db.settle()

    def last_evaluations(self, before: int, but: range = range(0)) -> list[Report]:
        rows = self._db.execute(
            "SELECT row FROM (SELECT client, row, ROW_NUMBER() OVER (PARTITION BY client ORDER BY round DESC) AS place "
            "FROM metrics WHERE work = 'evaluate' AND round < ? AND (round < ? OR round >= ?) "
            "AND client NOT IN (SELECT name FROM devices WHERE revoked = 1)) AS placed WHERE place = 1 ORDER BY client",
            (before, but.start, but.stop),
        )
        return [within_bounds(from_json(row[0], Report)) for row in rows]

    # --- members

    def device(self, name: str) -> DeviceRecord | None:
        return next(iter(devices_in(self._db, (name,))), None)

    def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        return devices_in(self._db, names)

    def is_revoked_key(self, public_key: str) -> bool:
        asked = "SELECT 1 FROM devices WHERE revoked = 1 AND public_key = ? LIMIT 1"
        return self._db.execute(asked, (public_key,)).fetchone() is not None

    def update_device(self, name: str, /, **fields: Any) -> None:
        assignments = ", ".join([f"{column} = ?" for column in fields])
        with self._db.synced() if "revoked" in fields else nullcontext():
            self._db.execute(f"UPDATE devices SET {assignments} WHERE name = ?", (*fields.values(), name))  # noqa: S608

    def refuse(self, refusal: Refusal, keep: int) -> None:
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO refusals (who, kind, text, at, count) VALUES (:who, :kind, :text, :at, :count) "
                "ON CONFLICT (who, kind) DO UPDATE SET "
                "text = excluded.text, at = excluded.at, count = refusals.count + excluded.count",
                asdict(refusal),
            )
            self._db.execute(
                "DELETE FROM refusals WHERE (who, kind) NOT IN (SELECT who, kind FROM refusals ORDER BY at DESC LIMIT ?)",
                (keep,),
            )

    def disconnect_all(self, now: float) -> None:
        self._db.execute("UPDATE devices SET connected = 0, since = ? WHERE connected = 1", (now,))

    # --- certificates and tokens

    def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        with self._db.synced(), self._db.transaction():
            if token is not None:
                self._db.execute(
                    "UPDATE tokens SET uses_left = uses_left - 1, used_up_at = CASE WHEN uses_left <= 1 THEN ? END "
                    "WHERE fingerprint = ?",
                    (now, token),
                )
            founder = (value_in(self._db, "record", Record) or Record()).round == 0
            self._db.execute(
                "INSERT INTO devices (name, public_key, enrolled_at, founder, token) "
                "VALUES (?, ?, ?, ?, COALESCE((SELECT id FROM tokens WHERE fingerprint = ?), '')) "
                "ON CONFLICT (name) DO UPDATE SET public_key = excluded.public_key",
                (name, public_key, now, founder, token),
            )
            self._add_certificate(certificate)

    def _add_certificate(self, certificate: Certificate) -> None:
        values = asdict(certificate)
        del values["revoked"]  # is known of the device
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        changes = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._db.execute(
            f"INSERT INTO certificates ({columns}) VALUES ({marks}) ON CONFLICT (fingerprint) DO UPDATE SET {changes}",  # noqa: S608
            values,
        )

    def release(self, name: str, other: str) -> None:
        with self._db.synced(), self._db.transaction():
            self._db.execute("UPDATE devices SET name = ?, connected = 0 WHERE name = ?", (other, name))
            self._db.execute("UPDATE certificates SET name = ? WHERE name = ? AND role = 'device'", (other, name))
            self._db.execute("UPDATE meta SET key = ? WHERE key = ?", (f"{VARIANT}{other}", f"{VARIANT}{name}"))
            rows = self._db.execute("SELECT row FROM metrics WHERE client = ?", (name,)).fetchall()
            for row in (msgspec.structs.replace(from_json(row[0], Report), client=other) for row in rows):
                self._db.execute(
                    "UPDATE metrics SET client = ?, row = ? WHERE round = ? AND work = ? AND client = ?",
                    (other, msgspec.json.encode(row), row.round, row.work, name),
                )

    def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        name, of_device = certificate.name, "role = 'device' AND name = ?"
        with self._db.synced(), self._db.transaction():
            self._add_certificate(certificate)
            self._db.execute(
                f"DELETE FROM certificates WHERE {of_device} AND (not_after < ? OR COALESCE(retires_at, ?) < ?)",  # noqa: S608
                (name, now, now, now - forget_s),
            )
            self._db.execute(
                f"DELETE FROM certificates WHERE {of_device} AND used_at IS NULL AND fingerprint NOT IN "  # noqa: S608
                f"(SELECT fingerprint FROM certificates WHERE {of_device} AND used_at IS NULL ORDER BY issued_at DESC LIMIT ?)",
                (name, name, unused),
            )

    def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        older = "name = ? AND role = 'device' AND fingerprint != ? AND issued_at <= ? AND retires_at IS NULL"
        with self._db.transaction():
            used = self._db.execute(
                "UPDATE certificates SET used_at = ? WHERE fingerprint = ? RETURNING name, issued_at, public_key",
                (now, fingerprint),
            ).fetchall()
            if not used:
                return []
            name, issued_at, public_key = used[0]
            if public_key:
                self._db.execute("UPDATE devices SET public_key = ? WHERE name = ?", (public_key, name))
            retired = self._db.execute(
                f"UPDATE certificates SET retires_at = ? WHERE {older} RETURNING fingerprint",  # noqa: S608
                (retires_at, name, fingerprint, issued_at),
            )
            return [row[0] for row in retired.fetchall()]

    def certificates(self, name: str | None = None) -> list[Certificate]:
        return certificates_in(self._db, name)

    def certificate(self, fingerprint: str) -> Certificate | None:
        return certificate_in(self._db, fingerprint)

    def replace_operator(self, certificate: Certificate) -> None:
        with self._db.transaction():
            self._db.execute("DELETE FROM certificates WHERE role = 'operator'")
            self._add_certificate(certificate)

    def add_token(self, token: Token, keep: int | None = None) -> None:
        values = asdict(token)
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self._db.synced(), self._db.transaction():
            self._db.execute(f"INSERT INTO tokens ({columns}) VALUES ({marks})", values)  # noqa: S608 - names of fields
            if keep is not None:
                self._db.execute(
                    "DELETE FROM tokens WHERE origin = ? AND rowid NOT IN "
                    "(SELECT rowid FROM tokens WHERE origin = ? ORDER BY rowid DESC LIMIT ?)",
                    (token.origin, token.origin, keep),
                )

    def token(self, fingerprint: str) -> Token | None:
        row = self._db.execute(f"SELECT {TOKEN} FROM tokens WHERE fingerprint = ?", (fingerprint,)).fetchone()  # noqa: S608
        return Token(*row) if row else None

    def tokens(self) -> list[Token]:
        return [Token(*row) for row in self._db.execute(f"SELECT {TOKEN} FROM tokens ORDER BY rowid")]  # noqa: S608

    def withdraw(self, id: str, now: float) -> None:
        change = "withdrawn_at = ?, used_up_at = COALESCE(used_up_at, ?)"
        with self._db.synced():
            self._db.execute(f"UPDATE tokens SET {change} WHERE id = ? AND withdrawn_at IS NULL", (now, now, id))  # noqa: S608

    def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        rows = self._db.execute(
            "SELECT bootstrap_pem FROM tokens WHERE expires_at > ? AND COALESCE(used_up_at, expires_at) > ? "
            "ORDER BY fingerprint",
            (now - keep_s, now - keep_s),
        )
        return [row[0] for row in rows]


def devices_in(db: Database, names: Collection[str] | None = None) -> list[DeviceRecord]:
    """Return the devices of these names, or all; by name."""
    if names is None:
        rows = db.execute(f"SELECT {DEVICE} FROM devices ORDER BY name")  # noqa: S608 - columns
    else:  # as one value: the number of a statement's variables is bounded
        asked = msgspec.json.encode(sorted(names)).decode()
        rows = db.execute(f"SELECT {DEVICE} FROM devices WHERE name IN ({db.strings}) ORDER BY name", (asked,))  # noqa: S608
    named = (dict(zip(DeviceRecord.__struct_fields__, row, strict=True)) for row in rows)
    return [converted(row, DeviceRecord, strict=False) for row in named]


def certificates_in(db: Database, name: str | None = None) -> list[Certificate]:
    """Return the certificates of devices, or of one device."""
    of_devices = "c.role = 'device' AND c.name = COALESCE(?, c.name)"
    return [_certificate(row) for row in db.execute(f"{CERTIFICATES} WHERE {of_devices} ORDER BY c.name, c.issued_at", (name,))]


def snapshot_in(db: Database, since: int = 0) -> Snapshot:
    """Return what the ledger holds, with the rows of rounds from `since` on. Call it within a transaction."""
    slots = db.execute("SELECT part, key, file, digest, size FROM slots ORDER BY part, key")
    rows = db.execute("SELECT row FROM metrics WHERE round >= ? ORDER BY round, work DESC, client", (since,))
    refusals = db.execute("SELECT who, kind, text, at, count FROM refusals ORDER BY at DESC, who, kind")
    return Snapshot(
        value_in(db, "overrides", dict),
        value_in(db, "plan", Plan),
        value_in(db, "record", Record) or Record(),
        tuple(devices_in(db)),
        tuple(Slot(*row) for row in slots),
        tuple(within_bounds(from_json(row[0], Report)) for row in rows),
        tuple(certificates_in(db)),
        tuple(Refusal(*row) for row in refusals),
        value_in(db, "run", str) or "",
        bool(value_in(db, "leaving", bool)),
        value_in(db, "audit", AuditHead),
        value_in(db, "race", Race),
        value_in(db, "commitments", dict[str, str]) or {},
        words_in(db, VARIANT),
        words_in(db, TAG),
    )


def certificate_in(db: Database, fingerprint: str) -> Certificate | None:
    """Return the certificate with this fingerprint as the file has it at this moment."""
    row = db.execute(f"{CERTIFICATES} WHERE c.fingerprint = ?", (fingerprint,)).fetchone()
    return _certificate(row) if row else None


CERTIFICATES = (
    "SELECT c.fingerprint, c.name, c.role, c.not_after, COALESCE(d.revoked, 0), c.public_key, c.issued_at, c.used_at, "
    "c.retires_at FROM certificates c LEFT JOIN devices d ON d.name = c.name AND c.role = 'device'"
)


def _certificate(row: Sequence[Any]) -> Certificate:
    fingerprint, name, role, not_after, revoked, *others = row
    return Certificate(fingerprint, name, role, not_after, bool(revoked), *others)
