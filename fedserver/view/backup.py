"""`fedserver backup`, `restore` and `verify`: a copy of a home, a home made of a copy, and a check of all its bytes.

The database is copied first, at one moment, and the files that it names are linked aside at once. If a round was committed in
between and removed one of them, everything begins anew. Then the links are copied. A check only reads, also beside a running
server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from attune.common import aio
from attune.common.durable import PRIVATE, disk_errors, sync, write_file
from attune.common.errors import AttuneError, DiskFull, HomeMismatch, LedgerBusy
from attune.common.estimate import with_estimate
from attune.common.text import clean, from_json, newer_format
from attune.fedserver.consent import check_consent
from attune.fedserver.home import LEFT_ASIDE, ServerHome
from attune.fedserver.identity.authority import CERTIFICATE_FILE, KEY_FILE, Authority
from attune.fedserver.identity.trust import differences_in, settle
from attune.fedserver.lab.vault import kept_slots, name_of, recipes_of
from attune.fedserver.ports.blobs import MASKED_STATISTICS, NOISE_SECRET, Blobs, blob_of
from attune.fedserver.ports.ledger import LedgerReader, Snapshot
from attune.fedserver.stores.audit import entries
from attune.fedserver.stores.folder import link
from attune.fedserver.stores.inbox import Inbox, check_age
from attune.fedserver.stores.sqlite import AUDIT_FILE

MANIFEST = "MANIFEST.json"
VERSION = 1
TRIES, PAUSE_S = 100, 0.05
SETTLED_S = 1.0
LONGEST_MANIFEST = 1 << 28


class CopiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and SHA-256 of one file of a backup."""

    size: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True):
    """The list of a backup's files. It is written last: a folder without one is no backup."""

    version: int
    made_at: float  # unix time
    round: int  # closed rounds
    files: dict[str, CopiedFile]  # by path below the folder
    home: str = ""  # the folder of which it was made; empty: an earlier version made it


def back_up(home: ServerHome, out: Path) -> Iterator[str]:
    """Copy a home into the new folder `out`, and yield lines that say what was done.

    Raises:
        HomeMismatch: `out` is there already.
        LedgerBusy: Rounds close faster than their state can be set aside.
        DiskFull: There is no space for the copy.
    """
    if out.exists():
        raise HomeMismatch(f"{out} is there already: name a new folder for each backup")
    aside = home.path / f"{LEFT_ASIDE}{secrets.token_hex(6)}"
    try:
        snapshot = _taken_aside(home, aside)
        with disk_errors(out):
            files = _copied(aside, out)
            whole = BackupManifest(VERSION, time.time(), snapshot.record.round, files, str(home.path.absolute()))
            write_file(out / MANIFEST, msgspec.json.format(msgspec.json.encode(whole), indent=1))
            sync(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size = sum(file.size for file in files.values())
    yield f"{len(files)} files, {size} bytes, after {snapshot.record.round} closed rounds, in {out}"
    yield "it holds the key of the federation's authority: keep it like a password"


def _taken_aside(home: ServerHome, aside: Path) -> Snapshot:
    """Link or copy what is there at one moment into the folder `aside`.

    Raises:
        LedgerBusy: Rounds close faster than their state can be linked.
    """
    storage = home.open()
    for _ in range(TRIES):
        shutil.rmtree(aside, ignore_errors=True)
        try:
            snapshot = storage.set_aside(aside, lambda taken: _state_of(storage.blobs, taken))
        except FileNotFoundError:  # a round was committed meanwhile
            time.sleep(PAUSE_S)
            continue
        for path in (home.authority / KEY_FILE, home.authority / CERTIFICATE_FILE, home.path / "server.json"):
            if path.exists():
                link(path, aside / path.relative_to(home.path))
        return snapshot
    raise LedgerBusy("rounds close faster than their state can be set aside: pause the federation (`fedserver pause`) for this")


def _state_of(blobs: Blobs, snapshot: Snapshot) -> list[str]:
    """Return the names of the blobs of the state, and of what is kept to make them again."""
    recipes = recipes_of(blobs, snapshot.record.round)
    state = [*(blob_of(slot).name for slot in kept_slots(snapshot.slots, recipes)), *(made.name for made in recipes)]
    return sorted([*state, *blobs.names(NOISE_SECRET), *blobs.names(MASKED_STATISTICS)])


def _copied(source: Path, out: Path) -> dict[str, CopiedFile]:
    out.mkdir(mode=0o700, parents=True)
    files = {}
    for path in with_estimate(sorted(path for path in source.rglob("*") if path.is_file()), "files copied"):
        name = path.relative_to(source).as_posix()
        files[name] = _copy(path, out / name)
    return files


def _copy(path: Path, to: Path) -> CopiedFile:
    """Copy one file durably, closed to other users, and return what was written."""
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("rb") as source, os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as target:
        for block in _blocks(source):
            digest.update(block)
            target.write(block)
        size = target.tell()
    sync(to)
    return CopiedFile(size, digest.hexdigest())


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block


def restore_to(
    source: Path, home: ServerHome, newer_log: Path | None, readmitted: Collection[str], allowed: Collection[str] = ()
) -> Iterator[str]:
    """Make a home of a backup, and yield lines that say what was done.

    Decisions about trust that were made after the backup are taken from the newer audit log, so that a device that was revoked
    since stays revoked.

    Args:
        source: The backup.
        home: The new home.
        newer_log: The audit log of the home that is replaced, if there is one. None is looked for, because a backup may be a
            stranger's.
        readmitted: Devices that were revoked since and are let in all the same.
        allowed: Code of its own that the backup may bring, by name.

    Raises:
        HomeMismatch: The backup is damaged, the home is there already, or the newer log does not continue the backup's.
        SettingError: A device of `readmitted` was not revoked since, or the backup names code without consent.
        DiskFull: There is no space for the home.
    """
    if home.path.exists() and any(home.path.iterdir()):
        raise HomeMismatch(f"{home.path} is there already and not empty: restore into a new --home")
    manifest = _verified(source)
    filling = home.path.with_name(f".{home.path.name}.{secrets.token_hex(6)}.filling")
    try:
        with disk_errors(home.path):
            for name, wanted in with_estimate(list(manifest.files.items()), "files copied"):
                if _copy(source / name, filling / name) != wanted:
                    raise HomeMismatch(f"{source / name} has changed while it was read: restore again")
            lines = list(_brought_up(ServerHome(filling), manifest, newer_log, readmitted))
            check_consent(ServerHome(filling), ServerHome(filling).snapshot(), allowed, source)
            if home.path.exists():
                home.path.rmdir()
            filling.rename(home.path)
            sync(home.path.parent)
    finally:
        shutil.rmtree(filling, ignore_errors=True)
    if damage := list(damages(home)):
        raise HomeMismatch(f"the backup was made of a damaged home: {'; '.join(damage)}")
    yield from lines
    yield f"{home.path} is whole, after {manifest.round} closed rounds"
    yield "start it with `fedserver --home` and that folder; let no other server run on the old home, for devices take either"


def _brought_up(
    home: ServerHome, manifest: BackupManifest, newer_log: Path | None, readmitted: Collection[str]
) -> Iterator[str]:
    """Take the decisions that were made since from the newer audit log, and yield a line for each."""
    if newer_log is not None:
        kept, newer = list(entries(home.path / AUDIT_FILE)), list(entries(newer_log))
        if newer[: len(kept)] != kept:
            raise HomeMismatch(f"{newer_log} does not continue the audit log of the backup: it is of another home, or older")
        write_file(home.path / AUDIT_FILE, newer_log.read_bytes().rpartition(b"\n")[0] + b"\n")
    else:
        made_at = datetime.fromtimestamp(manifest.made_at, timezone.utc).isoformat(sep=" ", timespec="minutes")
        log = shlex.quote(clean(str(Path(manifest.home, AUDIT_FILE))))  # the backup names it, and the operator may copy it
        yield (
            f"no newer audit log was given: a device that was revoked after {made_at} is let in again. Revoke it anew, or "
            f"restore with the log of the home that this one replaces: --audit-log {log}"
        )

    async def work() -> list[str]:
        async with home.open() as storage:
            return await settle(storage, readmitted)

    yield from (f"since the backup: {line}; taken over" for line in aio.run(work()))
    yield from aio.run(_charged(home))
    yield from (f"{name} is readmitted" for name in readmitted)


async def _charged(home: ServerHome) -> list[str]:
    """Charge all noisy sums that the lost home may have released since the backup, and return a line about it.

    Nobody knows how many those were, so each round that was left is counted.
    """
    async with home.open() as storage:
        snapshot = await storage.ledger.snapshot()
        record, settings = snapshot.record, snapshot.settings
        left = settings.round.rounds - record.round
        if not settings.privacy.on_server or snapshot.plan is None or left <= 0:
            return []
        await storage.ledger.put_record(msgspec.structs.replace(record, releases=record.releases + left))
        return [f"{left} rounds after the backup are charged to the privacy ledger: the lost home may have released them"]


def _verified(source: Path) -> BackupManifest:
    """Compare each file of a backup with its manifest, and return the manifest.

    Raises:
        HomeMismatch: A file is damaged, missing, or not of this backup; the error names it.
    """
    there = _files_below(source)
    try:
        with (source / MANIFEST).open("rb") as file:
            text = file.read(LONGEST_MANIFEST)
        if newer := newer_format(text, source / MANIFEST, "fedserver"):
            raise HomeMismatch(newer)
        manifest = from_json(text, BackupManifest)
    except FileNotFoundError:
        raise HomeMismatch(f"{source} is no backup, or one that was not finished: {MANIFEST} is missing") from None
    except msgspec.MsgspecError as error:
        raise HomeMismatch(f"{source / MANIFEST} is damaged ({error}): use another backup") from None
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise HomeMismatch(f"{source / MANIFEST} names {clean(name)}, which lies outside of the backup: use another one")
    if odd := sorted(there ^ manifest.files.keys()):
        raise HomeMismatch(f"{source / odd[0]} is missing, or is not of this backup: use another one")
    for name, wanted in with_estimate(list(manifest.files.items()), "files verified"):
        digest = hashlib.sha256()
        with (source / name).open("rb") as file:
            for block in _blocks(file):
                digest.update(block)
        if CopiedFile((source / name).stat().st_size, digest.hexdigest()) != wanted:
            raise HomeMismatch(f"{source / name} is damaged: use another backup")
    return manifest


def _files_below(source: Path) -> set[str]:
    """Return the paths of all files of a backup but its manifest.

    Raises:
        HomeMismatch: There is something else than a regular file: a link leads to a file that is not the backup's, and a pipe
            has no end.
    """
    files = set[str]()
    for folder, folders, names in os.walk(source):
        for path in (Path(folder, name) for name in (*folders, *names)):
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode):
                continue
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
                what = (
                    "a symbolic link" if stat.S_ISLNK(facts.st_mode)
                    else "not a regular file" if not stat.S_ISREG(facts.st_mode)
                    else "a file with another name elsewhere (a hard link)"
                )  # fmt: skip
                raise HomeMismatch(f"{path} is {what}: a backup has plain files of its own. Use another one, or a copy of it")
            files.add(path.relative_to(source).as_posix())
    return files - {MANIFEST}


def damages(home: ServerHome) -> Iterator[str]:
    """Yield a line for each thing that is damaged: authority, audit log, address, database, state, inbox, uploads.

    A running server replaces blobs between the looks at the ledger and at the blobs, and notes a decision just before it takes
    effect. So a difference counts only if a second look, a moment later, finds it too.

    Raises:
        LedgerBusy, DiskFull: A store cannot be used now, so nothing is known of it.
    """
    if differences := list(_differences(home)):
        time.sleep(SETTLED_S)
        still = set(_differences(home))
        yield from (line for line in differences if line in still)


def _differences(home: ServerHome) -> Iterator[str]:
    storage = home.open()
    with contextlib.closing(storage.reader()) as reader:
        yield from _fault(lambda: _authority(home, reader))
        broken = list(_fault(lambda: list(reader.audit())))
        yield from broken
        yield from _fault(home.address)
        unreadable = list(_fault(reader.check))
        yield from unreadable
        if not unreadable:
            yield from _state(home, storage.blobs, reader.snapshot())
            yield from _fault(lambda: check_age(storage.blobs, reader.snapshot().record.round))
            if not broken:
                lines = differences_in(reader).lines
                yield from (f"{line} (the next start of the server repairs it)" for line in lines)
    yield from Inbox(storage.blobs).damaged()
    for blob in storage.spool.all_sealed():
        yield from _fault(partial(storage.blobs.check, blob))


def _fault(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except (LedgerBusy, DiskFull):
        raise
    except AttuneError as error:
        yield str(error)


def _authority(home: ServerHome, reader: LedgerReader) -> None:
    """Load the authority. A home that was never served over the network, as a simulation's, needs none."""
    if home.authority.exists() or reader.was_served():
        Authority.load(home.authority)


def _state(home: ServerHome, blobs: Blobs, snapshot: Snapshot) -> Iterator[str]:
    """Check the slots, and what is kept to make them again."""
    closed = snapshot.record.round
    recipes = recipes_of(blobs, closed)
    if not recipes and blobs.names(name_of(closed)):
        yield f"{home.path / name_of(closed)} is damaged: delete it, or close another round"
    for slot in with_estimate(kept_slots(snapshot.slots, recipes), "files of the state verified"):
        yield from _fault(partial(blobs.check, blob_of(slot)))
