"""`attune.Client`: a device as an object, of which the command `fedclient` is made, and the run of a device from its home.

A run enrols if needed, then takes part over the network until the federation is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from attune.common import homes
from attune.common.aio import StopSwitch, run_blocking
from attune.common.errors import NotEnrolled, SettingError
from attune.common.identity.names import check_name
from attune.common.plan import MAIN
from attune.common.protocol import HAS_TORCH
from attune.common.supervisor import supervised
from attune.fedclient.address import CONNECT_TIMEOUT_S, Proxy, ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.data import findings
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.data.shard import load_shard
from attune.fedclient.device import Device
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.gate import NO_DEMANDS, PrivacyLimits
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, ShardRecord, check_asked_name, local_token
from attune.fedclient.limits import DEFAULT_LIMITS, OrderLimits
from attune.fedclient.link.enrol import enrol, stay_enrolled
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.options import Baseline, DeviceOptions, DisclosedKind, Evaluate, Hooks, Train, variant_here
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.resource_limits import NO_BOUNDS, Allowance, ResourceLimits
from attune.fedclient.store import FolderStore
from attune.fedclient.work.worker import Worker

if TYPE_CHECKING:
    from attune.fedclient.model.light_model import FinishedModel


def run(options: DeviceOptions, console: Console, shard: LazyShard | None = None, switch: StopSwitch | None = None) -> Path:
    """Run one device until its federation is over, and return the path of the finished model.

    Args:
        options: The device's options.
        console: Console for its output.
        shard: Its data; None: those of the options.
        switch: Ends it from another thread.

    Raises:
        AttuneError: The error that ended it.
        CancelledError: It was stopped.
    """
    home = home_of(options)
    if shard is None and options.table.proposes:
        shard = LazyShard.on_disk(options.data, options.table, home.held_rows())
    shard = shard or LazyShard.in_memory(load_shard(options.data, options=options.table, held=home.held_rows()))
    untouched: Callable[[], AbstractContextManager[None]] = nullcontext
    if HAS_TORCH:
        from attune.common.torch_state import plain_torch as untouched
    with home.locked(), untouched(), Worker() as worker:
        life = _supervised(live(options, shard, home, console, worker), console)
        try:
            return run_blocking(switch.over(life) if switch else life)
        except asyncio.CancelledError:
            worker.finish()  # before another process may have the home
            raise CancelledError("this device was stopped; finished work is saved, run it again to go on") from None


def home_of(options: DeviceOptions) -> DeviceHome:
    """Return the home of a device that is alone in its process."""
    return DeviceHome(options.home or homes.device_home(options.server.host, options.server.port, options.data))


async def _supervised(life: Coroutine[Any, Any, Path], console: Console) -> Path:
    async with supervised(lambda: console.last_line):
        return await life


async def live(options: DeviceOptions, shard: LazyShard, home: DeviceHome, console: Console, worker: Worker) -> Path:
    """Run a device whose home is locked. Other devices may share the worker. Errors are those of `run`."""
    console.say(shard.read)
    changed = home.compare_shard(
        ShardRecord(shard.profile.samples + shard.profile.test_samples, shard.digest, list(shard.held_hashes))
    )
    for line in findings.lines({"": [*shard.warnings, *filter(None, [changed])]}):
        console.say(line)
    identity = await identity_of(options, home, console.say)
    home.remember(DeviceInfo(identity.name, str(options.server), str(options.data.expanduser().resolve())))
    allowance = Allowance(options.resources.bytes_per_s)
    log = DisclosureLog(home.path)
    link = GrpcLink(options.server, identity, home.keep, allowance, log=log, process=options.process)
    await Device(options, shard, FolderStore(home), link, console, worker).run()
    return home.model


async def identity_of(options: DeviceOptions, home: DeviceHome, say: Callable[[str], None]) -> Identity:
    """Return the device's identity, and enrol it if it has none.

    The first of these is taken: the identity in this home; the one that `join` stored; a new one, with the given token or the
    token that a server on this machine left. An enrolled device ignores the token, unless its certificate has expired.

    Raises:
        HomeMismatch: --name is not the home's device.
        NotEnrolled: There is no token.
        AttuneError: As in `enrol`.
    """
    address = options.server
    record = DeviceInfo(options.name or "", str(address), str(options.data.expanduser().resolve()))
    identity = home.identity()
    if identity is None and options.home is None and options.token is None:
        joined = DeviceHome(homes.joined_home(address.host, address.port))
        if (waiting := joined.identity()) is not None:
            check_asked_name(joined, options.name, waiting)
        if home.adopt(joined, record):
            identity = home.identity()
    if identity is not None:
        check_asked_name(home, options.name, identity)
        return await stay_enrolled(home, identity, address, options.token, options.connect_timeout_s, say)
    token = options.token or local_token(address)
    if token is None:
        raise NotEnrolled(
            f"this device is not enrolled with {address}: run `fedserver token` there, then here "
            f"`fedclient join --server {address} --token TOKEN`"
        )
    identity = await enrol(home, record, address, token, options.connect_timeout_s, say)
    say(f"enrolled as {identity.name}")
    return identity


NO_OPTIONS: Mapping[str, Any] = {}
Factory = str | Callable[..., Any]


class Client:
    """Device of a federation over the network. Other arguments are those of `fedclient`.

    Args:
        server: HOST:PORT.
        data: A shard's folder or file; or arrays or torch data sets as for `attune.simulate`, and then `name` names the device.
        model: Code of the federation that may run here: "package.module:factory", the function, or several of them.
        train: The user's training loop, train(model, data, context): docs/own-training.md.
        evaluate: The user's scores, evaluate(model, data).
        label: The column with the classes, if `data` is a table (.csv, .parquet).
        table: Its other options, by the names that `fedclient` gives them, such as {"columns": "age,dose"}.
        task: Same as for `attune.simulate`.
        limits: Bounds on what the server may ask of this device.
        privacy: Demands on the privacy of this device's samples.
        stay: Wait for the federation's next run instead of returning.
        resources: Parts of the machine that it may use, and when. Priority and memory apply to the process:
            `resources.apply()`.
        plugins: Names of installed packages whose code the federation may run here.
        disclose: "statistics" lets the server know sums of columns and targets, and the score of a constant answer;
            "masked-statistics" lets it know such sums over at least 5 devices alone; "model" is `fedclient --share-model`.
        authority: Certificate of an authority, not the server's, that has certified the devices for secure aggregation.
        signer: File with this device's key and its certificate of that authority.
        proxy: HTTP proxy through which the server and S3 stores are reached, HOST:PORT; "env": that of the environment.
        proxy_credentials: File with USER:PASSWORD for it.
        variant: Variant of the federation's model, such as a smaller one for this device; "light": the closed form alone.
        tag: Tag of this device, to which the operator may limit rounds; empty: none.
        kind: "tokens" if arrays of whole numbers (N, T) are tokens; otherwise they are features.

    Raises:
        SettingError: An option is wrong.
        ShardError: The data cannot be read.
    """

    def __init__(
        self,
        server: str,
        data: Any,
        model: Factory | Sequence[Factory] = (),
        home: str | Path | None = None,
        name: str | None = None,
        token: str | None = None,
        device: str = "auto",
        threads: int = 1,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keep: Literal["best", "personalized"] = "best",
        baseline: Baseline | None = None,
        train: Train | None = None,
        evaluate: Evaluate | None = None,
        label: str = "",
        task: str = "classes",
        table: Mapping[str, Any] = NO_OPTIONS,
        limits: OrderLimits = DEFAULT_LIMITS,
        privacy: PrivacyLimits = NO_DEMANDS,
        stay: bool = False,
        resources: ResourceLimits = NO_BOUNDS,
        plugins: Sequence[str] = (),
        authority: str | Path | None = None,
        signer: str | Path | None = None,
        kind: Literal["tokens"] | None = None,
        disclose: Sequence[str] = (),
        units: Literal["all", "none"] = "all",
        proxy: str | None = None,
        proxy_credentials: str | Path | None = None,
        variant: str = MAIN,
        tag: str = "",
    ) -> None:
        if unknown := [word for word in disclose if word not in get_args(DisclosedKind)]:
            raise SettingError(f"disclose={unknown[0]!r} is not known; known: {', '.join(get_args(DisclosedKind))}")
        self._switch = StopSwitch()
        through = Proxy.parse(proxy, Path(proxy_credentials) if proxy_credentials else None)
        address, reading = ServerAddress.parse(server).by(through), ReadOptions.of(label, **{"task": task, **table})
        self._shard: LazyShard | None
        place = Path(home).expanduser() if home is not None else None
        if isinstance(data, (str, Path)):
            path, self._shard = Path(data), None
        else:
            if name is None:
                raise SettingError("data that lie in no file have no name: give the device one, such as name='kiel'")
            path, self._shard = Path(check_name(name)), shard_of(name, data, reading, kind == "tokens")
            place = place or homes.devices_home() / homes.address_folder(address.host, address.port) / name
        self.options = DeviceOptions(
            data=path,
            server=address,
            home=place,
            name=name,
            token=token,
            device=device,
            threads=threads,
            connect_timeout_s=connect_timeout_s,
            keep=keep,
            baseline=baseline,
            limits=limits,
            privacy=privacy,
            stay=stay,
            disclose=cast(tuple[DisclosedKind, ...], tuple(disclose)),
            authority=Path(authority) if authority else None,
            signer=Path(signer) if signer else None,
            resources=resources,
            hooks=Hooks(train, evaluate),
            table=reading,
            units=units,
            variant=variant_here(variant),
            tag=tag,
            allow_plugins=tuple(plugins),
            allow_models=tuple(map(_name_of, [model] if isinstance(model, str) or callable(model) else model)),
        )

    def __repr__(self) -> str:
        return f"<Client on {self.options.data} for {self.options.server}>"

    def run(self, console: Console | None = None) -> FinishedModel:
        """Take part until the federation is over, and return the device's finished model.

        An interruption loses no finished work: call it again.

        Args:
            console: Receives the lines that the command would print.

        Raises:
            AttuneError: The error that ended it.
            concurrent.futures.CancelledError: `stop` was called.
        """
        from attune.fedclient.model.light_model import load_model

        return load_model(self.take_part(console or Console()), allow_models=self.options.allow_models)

    def take_part(self, console: Console) -> Path:
        """Take part as in `run`, and return the path of the finished model."""
        return run(self.options, console, self._shard, self._switch)

    def stop(self) -> None:
        """End `run` from another thread: it raises CancelledError after the batch at hand. Without one, the next `run` ends.

        This returns at once. What is finished is saved, and a later `run` goes on with the same bits.
        """
        self._switch.stop()


def _name_of(model: Factory) -> str:
    return model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
