"""Checks of a device: whether it can take part (`fedclient doctor`), and whether its home is whole (`fedclient verify`)."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from attune import DISTRIBUTION
from attune.common import aio, homes
from attune.common.errors import NEEDS_TORCH, AttuneError, NoModel, SettingError, ShardError, Unreachable
from attune.common.identity.credential import not_after
from attune.common.plan import Plan, Profile
from attune.common.protocol import HAS_TORCH
from attune.common.schema import difference
from attune.common.text import from_json
from attune.fedclient import shards
from attune.fedclient.address import Proxy, ServerAddress
from attune.fedclient.home import DeviceHome, Identity, device_folders
from attune.fedclient.read_options import ReadOptions

if TYPE_CHECKING:
    from attune.fedclient.data.shard import Shard

LITTLE_DISK_BYTES, LITTLE_MEMORY_BYTES = 1 << 30, 1 << 30
SOON = timedelta(days=14)
PROBE_S = 10.0


class CheckResult(msgspec.Struct, frozen=True):
    """Result of one check. FAIL prevents the device from taking part; warn may do so later."""

    verdict: Literal["ok", "warn", "FAIL"]
    what: str
    text: str


def examine(
    given: Sequence[str], server: str | None, home: Path | None, table: ReadOptions, proxy: Proxy | None = None
) -> Iterator[CheckResult]:
    """Yield the results of all checks. The checks only read: they make no home and do not enrol the device.

    Args:
        given: The shards, as paths and patterns. Several of them are also compared with each other, and their homes are not
            checked.
        server: The server's address.
        home: The device's home.
        table: The task, and how tables are read.
        proxy: The device's proxy.
    """
    address, wrong = None, ""
    try:
        address = ServerAddress.parse(server).by(proxy) if server else None
    except SettingError as error:
        wrong = str(error)
    yield from machine()
    if shards.is_fleet(given):
        try:
            yield from several(shards.expand(given), table)
        except ShardError as error:
            yield CheckResult("FAIL", "data", str(error))
    data = Path(given[0]) if given and not shards.is_fleet(given) else None
    if data is not None:
        yield shard(data, table)[0]
    place = home or default_place(address, data)
    yield disk(place or homes.devices_home())
    if place is not None:
        yield from membership(DeviceHome(place), address, proxy)
    elif address is not None:
        yield reachable(address)
    if wrong:
        yield CheckResult("FAIL", "server", wrong)


def default_place(address: ServerAddress | None, data: Path | None) -> Path | None:
    """Return the home that a device would use, or in which `join` left its identity; None if that is not known."""
    candidates = device_folders(address)
    if data is not None:
        candidates = [path for path in candidates if path.name in (homes.shard_folder(data), homes.JOINED)]
        candidates.sort(key=lambda path: path.name == homes.JOINED)  # the shard's own home comes first
    enrolled = [path for path in candidates if (path / "identity" / "device.pem").exists()]
    if enrolled and (data is not None or len(enrolled) == 1):
        return enrolled[0]
    return homes.device_home(address.host, address.port, data) if address is not None and data is not None else None


def machine() -> Iterator[CheckResult]:
    """Check Python, torch, processor and memory."""
    python = f"Python {platform.python_version()}, {platform.machine()}, attune {version(DISTRIBUTION)}"
    yield CheckResult("ok", "software", python)
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        light = CheckResult("ok", "torch", f"not installed: a light device, for the closed form of tables ({NEEDS_TORCH})")
        yield CheckResult("FAIL", "torch", f"cannot be loaded ({error}): install attune anew") if HAS_TORCH else light
        return
    processor = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} processors"
    accelerator = (
        "an NVIDIA GPU" if torch.cuda.is_available() else "MPS" if torch.backends.mps.is_available() else "no accelerator"
    )
    yield CheckResult("ok", "torch", f"{torch.__version__}, {processor}, {accelerator}")
    free = available_memory()
    if free is not None:
        enough = free >= LITTLE_MEMORY_BYTES
        yield CheckResult(
            "ok" if enough else "warn", "memory", f"{_gib(free)} available{'' if enough else '; training may not fit'}"
        )


def available_memory() -> int | None:
    """Return the bytes of memory that a new process could have; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def shard(path: Path, table: ReadOptions, what: str = "data") -> tuple[CheckResult, Shard | None]:
    """Check that the data can be read and trained on; return them too, if they can be read."""
    from attune.fedclient.data.shard import load_shard

    try:
        loaded = load_shard(path, options=table, held=())
    except AttuneError as error:
        return CheckResult("FAIL", what, str(error)), None
    if loaded.warnings:
        return CheckResult("warn", what, "; ".join(loaded.warnings)), loaded
    if not len(loaded.test_x):
        text = f"{len(loaded.train_x)} samples and no test part: it will not be known whether the model helps here"
        return CheckResult("warn", what, text), loaded
    return CheckResult("ok", what, f"{loaded.kind}, {len(loaded.train_x)} samples, {len(loaded.test_x)} to test on"), loaded


def several(paths: Sequence[Path], table: ReadOptions) -> Iterator[CheckResult]:
    """Check each of several shards, and that it has the form that most of them have."""
    results: dict[str, CheckResult] = {}
    profiles: dict[str, Profile] = {}
    for name, path in zip(shards.labels(paths), paths, strict=True):
        results[name], loaded = shard(path, table, f"data {name}")
        if loaded is not None:
            profiles[name] = loaded.profile()
    forms = {name: (profile.kind, profile.shape, tuple(profile.column_names)) for name, profile in profiles.items()}
    usual = Counter(forms.values()).most_common(1)[0][0] if forms else None
    for name, result in results.items():
        if name in forms and usual is not None and forms[name] != usual:
            kind, shape, columns = usual
            unlike = difference(profiles[name].column_names, columns) if profiles[name].kind == kind else ""
            here = f"holds {profiles[name].kind} of shape {profiles[name].shape}, and others hold {kind} of shape {shape}"
            if unlike or forms[name][:2] != usual[:2]:
                fits = profiles[name].kind == kind in ("images", "series")
                more = ". It takes part where the plan lets samples be fitted (data.fit)" if fits else ""
                yield CheckResult("warn" if fits else "FAIL", result.what, f"the shard of {name} {unlike or here}{more}")
                continue
        yield result


def disk(place: Path) -> CheckResult:
    """Check that the home can be written and has space."""
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return CheckResult("FAIL", "disk", f"{there} cannot be written by this user: choose another --home")
    free = shutil.disk_usage(there).free
    if free < LITTLE_DISK_BYTES:
        return CheckResult("warn", "disk", f"only {_gib(free)} free for {place}: a few models may fill it")
    return CheckResult("ok", "disk", f"{_gib(free)} free for {place}")


def membership(home: DeviceHome, address: ServerAddress | None, proxy: Proxy | None = None) -> Iterator[CheckResult]:
    """Check the home's identity, and whether the server accepts it."""
    try:
        identity = home.identity()
    except (AttuneError, OSError) as error:
        yield CheckResult("FAIL", "identity", str(error))
        if address is not None:
            yield reachable(address)
        return
    if identity is None:
        yield CheckResult(
            "warn", "identity", f"{home.path} is not enrolled yet: a token of the server is needed at the first start"
        )
        if address is not None:
            yield reachable(address)
        return
    ends, now = not_after(identity.credential.certificate_pem), datetime.now(timezone.utc)
    words = f"{identity.name}, certificate until {ends:%Y-%m-%d %H:%M} UTC"
    if now >= ends:
        yield CheckResult(
            "FAIL", "identity", f"{words}: expired. `fedserver token --for {identity.name}` on the server, then --token-file"
        )
    else:
        yield CheckResult("warn" if ends - now < SOON else "ok", "identity", words)
    record = home.record()
    if address is None and record is not None and record.server:
        address = ServerAddress.parse(record.server).by(proxy)
    if address is not None:
        yield _judged(address, identity)


def _judged(address: ServerAddress, identity: Identity) -> CheckResult:
    """Check whether the server accepts the identity, by a call: a handshake without a call looks to it like a stranger's."""
    from attune.fedclient.link.diagnose import diagnose
    from attune.fedclient.link.enrol import refusal_of

    refusal = aio.run(refusal_of(identity, address))
    if refusal is None:
        return CheckResult("ok", "server", f"{address} lets {identity.name} in{_through(address)}")
    if isinstance(refusal, Unreachable):
        refusal = diagnose(address.host, address.port, identity.ca_pem, identity.credential, PROBE_S, proxy=address.way)
    return CheckResult("FAIL", "server", str(refusal))


def reachable(address: ServerAddress) -> CheckResult:
    """Check that a process listens at the address."""
    try:
        if address.way is not None:
            address.way.connect(address, PROBE_S).close()
        else:
            socket.create_connection((address.host, address.port), timeout=PROBE_S).close()
    except Unreachable as error:
        return CheckResult("FAIL", "server", str(error))
    except OSError as error:
        return CheckResult(
            "FAIL", "server", f"{address} cannot be reached ({error.strerror or error}): check address, network, firewall"
        )
    text = f"a process listens at {address}{_through(address)}; enrolment will show whether it is the right server"
    return CheckResult("ok", "server", text)


def _through(address: ServerAddress) -> str:
    return "" if address.way is None else f", through the proxy {address.way}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def damages(home: DeviceHome) -> Iterator[str]:
    """Yield a line for each thing that is damaged: identity, data, plan, orders, finished model."""
    try:
        identity = home.identity()
        if identity is not None and not identity.credential.fits():
            yield f"{home.identity_folder} is damaged: restore it from a backup, or enrol again"
    except AttuneError as error:
        yield f"{home.identity_folder} is damaged ({error})"
    try:
        home.shard_record()
    except AttuneError as error:
        yield str(error)
    if home.plan.exists():
        try:
            from_json(home.plan.read_bytes(), Plan)
        except msgspec.DecodeError as error:
            yield f"{home.plan} is damaged ({error}): delete it, the server sends it again"
    from attune.fedclient.work.state import FolderOrders

    yield from FolderOrders(home.orders).damaged()
    if home.model.exists():
        yield from _model(home)


def _model(home: DeviceHome) -> Iterator[str]:
    from attune.fedclient.model.model_info import read_info
    from attune.fedclient.work.state import damaged_files

    try:
        for line in damaged_files(home.model, read_info(home.model).files):
            yield f"{line}: start fedclient again to fetch the model"
    except AttuneError as error:
        yield f"{home.model} is damaged ({error}): start fedclient again to fetch the model"


def meant(home: Path | None, server: str | None, data: Sequence[str]) -> list[DeviceHome]:
    """Return the homes that are meant: --home (or all in it), else those of the shards, of the server, or of this user.

    Raises:
        NoModel: There is no home.
        SettingError: The address is wrong.
        ShardError: A pattern matches no shard.
    """
    if home is not None:
        homes_found = [home, *sorted(home.glob("*/"))]
    else:
        everywhere = device_folders(ServerAddress.parse(server) if server else None)
        wanted = {homes.shard_folder(path) for path in shards.expand(data)} if data else None
        homes_found = [path for path in everywhere if wanted is None or path.name in wanted]
    ready = [DeviceHome(path) for path in homes_found if (path / "device.json").exists()]
    if not ready:
        raise NoModel(f"there is no device's home {f'in {home}' if home else f'under {homes.devices_home()}'}")
    return ready
