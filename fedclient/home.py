"""One device's folder: who it is, what it belongs to, and that only one process uses it."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from attune.common import homes
from attune.common.durable import PUBLIC, check_folder, committed_folder, disk_errors, sweep, sweep_files, sync, write_file
from attune.common.errors import CertificateRefused, HomeBusy, HomeMismatch, NoModel, SettingError
from attune.common.identity.credential import Credential, check_common_name
from attune.common.identity.signed_files import files_in, sign
from attune.common.plan import Plan, run_name
from attune.common.text import clean, from_json
from attune.fedclient.address import ServerAddress
from attune.fedclient.disclosure_log import moved

FORMAT_FILE, FORMAT = "format", 1  # of all files of the home; higher if an older fedclient must not use it
ORDERS_DONE = "orders-done"  # a number in the folder of a run that was put aside


class DeviceInfo(msgspec.Struct, frozen=True):
    """device.json: for people, and to find the home again."""

    name: str
    server: str
    data: str | None = None


@dataclass(frozen=True)
class Identity:
    """Identity of a device: its name, its key and certificate, and the only authority it trusts (PEM)."""

    name: str
    credential: Credential
    ca_pem: bytes


class ShardRecord(msgspec.Struct, frozen=True):
    """shard.json: the data at the device's first start, to see whether they have changed."""

    samples: int  # for training and for testing
    digest: str
    held: list[str] = []  # hashes of the rows of a table that are held out. They stay held out
    check: str = ""  # digest of the file without it, so that a changed byte is noticed; homes of older versions have none


class DeviceHome:
    """The layout of a device's folder. `locked` creates the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity_folder = path / "identity"
        self.orders = path / "orders"
        self.model = path / "model"
        self.plan = path / "plan.json"
        self.statistics = path / "statistics.json"
        self.sums = path / "sums.json"
        self.runs = path / "runs"  # earlier ones of this federation, each with its plan, orders and model

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home's lock during the block.

        Raises:
            HomeBusy: Another live process has it.
            SettingError: This user cannot write there.
            DiskFull: The disk has no space.
        """
        check_folder(self.path, "--home")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise HomeBusy(
                f"another fedclient is running on {self.path}; stop it, or give this device a home of its own with --home"
            ) from None
        try:
            self._take_over()
            self._sweep()
            yield
        finally:
            lock.release()

    def _take_over(self) -> None:
        """Note the version of the home's files. A home without one is of 0.2 or before, and is read as it is.

        Raises:
            HomeMismatch: A newer version of fedclient wrote it.
        """
        path = self.path / FORMAT_FILE
        noted = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
        if noted.isascii() and noted.isdigit() and int(noted) > FORMAT:
            raise HomeMismatch(
                f"{self.path} has files of format {int(noted)}, and this fedclient reads formats up to {FORMAT}: update it"
            )
        if noted != str(FORMAT):
            write_file(path, f"{FORMAT}\n".encode(), PUBLIC)

    def _sweep(self) -> None:
        """Remove unfinished files of a killed process. A model that was about to be replaced is put back."""
        for folder in (self.path, self.identity_folder):
            sweep_files(folder)
        sweep(self.path)
        old = self.path / f"{self.model.name}.old"
        if self.model.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(self.model)

    def record(self) -> DeviceInfo | None:
        """Return the content of device.json, or None.

        Raises:
            HomeMismatch: It is damaged.
        """
        path = self.path / "device.json"
        try:
            return from_json(path.read_bytes(), DeviceInfo)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise HomeMismatch(f"{path} is damaged ({error}); restore it, or use another --home") from None

    def remember(self, record: DeviceInfo) -> None:
        if record != self.record():
            write_file(self.path / "device.json", msgspec.json.format(msgspec.json.encode(record)), PUBLIC)

    def shard_record(self) -> ShardRecord | None:
        """Return the content of shard.json, or None.

        Raises:
            HomeMismatch: It is damaged.
        """
        path = self.path / "shard.json"
        try:
            record = from_json(path.read_bytes(), ShardRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.DecodeError as error:
            raise HomeMismatch(f"{path} is damaged ({error}); restore it, or use another --home") from None
        if record.check and record.check != _check_of(path.read_bytes()):
            raise HomeMismatch(f"{path} is damaged (its content has another digest); restore it, or use another --home")
        return record

    def held_rows(self) -> list[str]:
        """Return the hashes of the rows that were held out at the first start."""
        record = self.shard_record()
        return record.held if record else []

    def compare_shard(self, now: ShardRecord) -> str:
        """Return how the data differ from those of the first start, for the user; empty if they do not.

        At the first start the data are recorded.
        """
        before = self.shard_record()
        if before is None:
            now = msgspec.structs.replace(now, check=_check_of(msgspec.json.encode(now)))
            write_file(self.path / "shard.json", msgspec.json.encode(now), PUBLIC)
            return ""
        if before.digest == now.digest:
            return ""
        changed = f"the data have changed since this device began: {before.samples} samples then, {now.samples} now"
        if before.held or now.held:
            gone = len(set(before.held) - set(now.held))
            return f"{changed}. Rows that were held out stay so" + (f"; {gone} of them are gone" if gone else "")
        return (
            f"{changed}. Samples for testing may be among those that were trained on before, so accuracy may look too good: "
            "begin with a new --home"
        )

    def put_aside(self, run: str, orders: int, keeps_model: bool = False) -> Path:
        """Move model, orders and plan of a run to a separate folder, and return it.

        The plan goes last: until then the run counts.

        Args:
            run: The run's name.
            orders: How many orders were carried out in it.
            keeps_model: Whether the device goes on predicting with its model: a copy goes to the folder.

        Raises:
            DiskFull: The disk has no room.
            HomeMismatch: What a killed process left is damaged.
        """
        place = _unused(self.runs / run)
        with disk_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            moved_before = _orders_in(place)  # by a process that was killed here
            write_file(place / ORDERS_DONE, str(max(orders, moved_before)).encode(), PUBLIC)
            if keeps_model and self.model.exists() and not (place / self.model.name).exists():
                with committed_folder(place / self.model.name) as copy:
                    shutil.copytree(self.model, copy, dirs_exist_ok=True)
            for path in (*(() if keeps_model else (self.model,)), self.orders, self.plan):
                if path.exists():
                    path.rename(place / path.name)
            for folder in (place, place.parent, self.path):
                sync(folder)
        return place

    def take_back(self, plan: Plan) -> Path | None:
        """Move what was put aside under this plan back, because the server goes on with its run.

        The plan goes first: from then on the run counts. A killed process leaves a folder without a plan, be it here or in
        `put_aside`; the next call for the same run goes on with it.

        Returns:
            The folder where it was; None if there is none.

        Raises:
            DiskFull: The disk has no room.
        """
        place = self._place_of(plan)
        if place is not None:
            with disk_errors(place):
                for path in (self.plan, self.orders, self.model):
                    if (place / path.name).exists():
                        (place / path.name).rename(path)
                        sync(self.path)
                shutil.rmtree(place)
        return place

    def _place_of(self, plan: Plan) -> Path | None:
        """Return the folder of the run with this plan, or what is left of it if the plan is here; None if there is none."""
        if self.plan.exists():
            left = _unused(self.runs / run_name(plan.run))
            return left if left.exists() else None
        for place in sorted(self.runs.glob(f"{run_name(plan.run)}*"), reverse=True):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
                if from_json((place / self.plan.name).read_bytes(), Plan) == plan:
                    return place
        return None

    def spent(self) -> int:
        """Return how many orders were carried out in runs that were put aside.

        Raises:
            HomeMismatch: The record is damaged.
        """
        return sum(map(_orders_in, self.runs.glob("*/")))

    def identity(self) -> Identity | None:
        """Return the enrolled identity, or None before enrolment.

        Raises:
            HomeMismatch: It is damaged.
        """
        ca = self.identity_folder / "ca.pem"
        record = self.record()
        if record is None or not ca.exists() or not (self.identity_folder / "device.pem").exists():
            return None
        identity = Identity(record.name, Credential.load(self.identity_folder), ca.read_bytes())
        try:
            check_common_name(identity.credential.certificate_pem, record.name)
        except CertificateRefused:
            raise HomeMismatch(
                f"{self.path / 'device.json'} is damaged: it names {clean(record.name)!r}, and the certificate another device. "
                "Restore it from a backup, or write the certificate's name into it"
            ) from None
        if not identity.credential.issued_by(identity.ca_pem):
            raise HomeMismatch(
                f"{ca} is damaged, or of another federation: it did not sign this device's certificate. Restore it from a "
                "backup, or enrol anew with another home and name"
            )
        return identity

    def sign(self, place: Path) -> str:
        """Sign the files of a folder, or a file, as this device, and return its name; empty: it is not enrolled."""
        identity = self.identity()
        if identity is None:
            return ""
        sign(place, files_in(place), identity.credential, identity.ca_pem, identity.name)
        return identity.name

    def keep(self, identity: Identity) -> None:
        """Write a new or renewed identity durably. The credential, which makes it valid, is written last."""
        write_file(self.identity_folder / "ca.pem", identity.ca_pem, PUBLIC)
        identity.credential.save(self.identity_folder)

    def adopt(self, joined: DeviceHome, record: DeviceInfo) -> bool:
        """Take over the identity that `fedclient join` stored. Return False if there is none."""
        if joined.identity() is None:
            return False
        old = joined.record()
        self.remember(DeviceInfo(old.name if old else record.name, record.server, record.data))
        try:
            # One rename, so that of two devices started at once only one gets it.
            joined.identity_folder.rename(self.identity_folder)
        except OSError:
            return False
        (joined.path / "device.json").unlink(missing_ok=True)
        moved(joined.path, self.path)
        return True


def _check_of(text: bytes) -> str:
    """Return the digest of shard.json without its check. Another version may know other fields, so the text decides."""
    bare = msgspec.json.encode(msgspec.json.decode(text) | {"check": ""})
    return hashlib.blake2b(bare, digest_size=16).hexdigest()


def _unused(place: Path) -> Path:
    """Return a folder for a run. A run that was put aside completely keeps its folder; an incomplete one is continued."""
    number = 2
    folder = place
    while (folder / "plan.json").exists():
        folder, number = place.with_name(f"{place.name}.{number}"), number + 1
    return folder


def _orders_in(place: Path) -> int:
    """Return how many orders were carried out in a run that was put aside here.

    Raises:
        HomeMismatch: The record is damaged.
    """
    path = place / ORDERS_DONE
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except ValueError:
        raise HomeMismatch(f"{path} is damaged; restore it, or use another --home") from None


def check_asked_name(home: DeviceHome, asked: str | None, identity: Identity) -> None:
    """Check that --name is the name of this home's device.

    Raises:
        HomeMismatch: It is another name.
    """
    if asked is not None and asked != identity.name:
        raise HomeMismatch(
            f"{home.path} belongs to device {identity.name!r}, not {asked!r}; drop --name, or use another --home"
        )


def local_token(address: ServerAddress) -> str | None:
    """Return the join token that a server of this user on this machine left for its devices, or None."""
    if not address.is_this_machine:
        return None
    folder = homes.server_home()
    try:
        served = msgspec.json.decode((folder / "server.json").read_bytes())
        if not isinstance(served, dict) or served.get("port") != address.port:
            return None
        return (folder / "local-token").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def device_folders(address: ServerAddress | None) -> list[Path]:
    """Return the folders in which devices of this user have their homes by default: those for a server, or all."""
    server = homes.address_folder(address.host, address.port) if address else "*"
    return sorted(homes.devices_home().glob(f"{server}/*"))


def with_model(home: Path | None, address: ServerAddress | None, shard: Path | None, only_own: bool = False) -> DeviceHome:
    """Return the home of the finished model: --home, else the shard's, else (without `only_own`) the only one.

    Raises:
        NoModel: There is no model.
        SettingError: Several homes have one.
    """
    if home is not None:
        candidates = [home]
    else:
        everywhere = device_folders(address)
        of_shard = [path for path in everywhere if shard is not None and path.name == homes.shard_folder(shard)]
        candidates = of_shard if of_shard or only_own else everywhere
    ready = [path for path in candidates if (path / "model" / "model.json").exists()]
    if len(ready) == 1:
        return DeviceHome(ready[0])
    if ready:
        raise SettingError(
            "several devices have a model here; choose one with --home:\n" + "\n".join(f"  {path}" for path in ready)
        )
    where = f"in {home}" if home else f"of {shard}" if only_own else f"under {homes.devices_home()}"
    raise NoModel(f"there is no finished model {where}; run fedclient --data ... --server ... until the federation is done")
