"""`attune.simulate`: a whole federation in this process, whose models have the same bits as over the network."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from attune import seams
from attune.common.config import AUTO, PLAIN, convert
from attune.common.durable import check_folder
from attune.common.errors import SettingError
from attune.common.plan import DataSettings
from attune.common.plugins import installed
from attune.common.text import clean
from attune.fedclient.gate import PrivacyLimits
from attune.fedclient.limits import OrderLimits
from attune.fedclient.options import Baseline, DeviceOptions, DisclosedKind, Evaluate, Hooks, Train
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.work.executor import IN_OTHER_PROCESSES, ExecutorName
from attune.fedserver.ports.lab import NO_VARIANTS
from attune.simulation import arguments
from attune.simulation.arguments import Shards, data_by_name, read_shards
from attune.simulation.auto import race
from attune.simulation.federation import NOWHERE
from attune.simulation.manifest import data_digest
from attune.simulation.over_seeds import SeedResults, run_seeds
from attune.simulation.own_models import model_name
from attune.simulation.progress import ProgressFunction, watcher
from attune.simulation.result import SimulationResult
from attune.simulation.simulated_clock import SimulatedClock
from attune.simulation.simulation_state import MemoryState
from attune.simulation.simulator import Simulator

if TYPE_CHECKING:
    from torch import nn

    from attune.fedclient.data.lazy_shard import LazyShard
    from attune.fedclient.work.executor import Executor
    from attune.simulation.own_models import Factory

AWAKE_BYTES = 2 << 30
NO_SETTINGS: Mapping[str, Any] = {}


@overload
def simulate(
    shards: Shards,
    method: arguments.MethodArgument | None = ...,
    model: str | Factory | nn.Module | None = ...,
    rounds: int | str | None = ...,
    seed: int | None = ...,
    settings: Mapping[str, Any] = ...,
    baseline: Baseline | None = ...,
    home: str | Path | None = ...,
    executor: ExecutorName | Executor | None = ...,
    progress: bool | ProgressFunction | None = ...,
    keep: Literal["best", "personalized"] = ...,
    device: str = ...,
    threads: int = ...,
    awake_bytes: int = ...,
    train: Train | None = ...,
    evaluate: Evaluate | None = ...,
    dashboard: bool | int | str | None = ...,
    label: str = ...,
    task: str = ...,
    table: Mapping[str, Any] = ...,
    workers: int | None = ...,
    config: str | Path | None = ...,
    clock: SimulatedClock | None = ...,
    variants: Mapping[str, str] = ...,
    seeds: None = ...,
) -> SimulationResult: ...


@overload
def simulate(shards: Shards, *args: Any, seeds: Sequence[int], **kwargs: Any) -> SeedResults: ...


def simulate(  # type: ignore[misc]  # the second overload has these arguments too, and Any stands for their types
    shards: Shards,
    method: arguments.MethodArgument | None = None,
    model: str | Factory | nn.Module | None = None,
    rounds: int | str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    baseline: Baseline | None = None,
    home: str | Path | None = None,
    executor: ExecutorName | Executor | None = None,
    progress: bool | ProgressFunction | None = None,
    keep: Literal["best", "personalized"] = "best",
    device: str = "cpu",
    threads: int = 1,
    awake_bytes: int = AWAKE_BYTES,
    train: Train | None = None,
    evaluate: Evaluate | None = None,
    dashboard: bool | int | str | None = None,
    label: str = "",
    task: str = "classes",
    table: Mapping[str, Any] = NO_SETTINGS,
    workers: int | None = None,
    config: str | Path | None = None,
    clock: SimulatedClock | None = None,
    variants: Mapping[str, str] = NO_VARIANTS,
    seeds: Sequence[int] | None = None,
) -> SimulationResult | SeedResults:
    """Train a federation with one device for each shard, from the first round to every device's own model.

    With the same number of threads, the models have the same bits as those of a federation over the network with these
    settings, unless the executor is "stacked".

    Args:
        shards: A pattern ("shards/*"), one or several folders, or a mapping from names to data. Data are arrays (x, y) or
            (train_x, train_y, test_x, test_y), a torch Dataset, or two of them (train, test).
        method: Name of the method, or its settings as in [method] of federation.toml. "auto" compares several methods on the
            way, and goes on with the best (docs/choosing.md); the setting "auto.candidates" names them.
        model: A name, "package.module:factory", a function of a ModelSpec, or a module, whose weights all devices start from.
        rounds: Number of rounds, or "auto" (docs/operations/rounds.md).
        seed: Seed of every random draw.
        settings: Same as in federation.toml, such as {"method.sigma": 50, "round.clients": 5}. `min_clients` is the number
            of devices by default.
        baseline: Same as `fedclient --baseline`; None: "alone", or with the preset "plain" "none".
        home: Folder for all state. To continue an interrupted simulation, call this again with the same folder; it ends with
            the same bits.
        executor: How the devices of a cohort train. "sequential" (default): one after the other. "stacked": together, which
            is faster for small models, and the same to rounding. "processes": each device in one of several processes,
            which is faster for large models, and has the bits of "sequential". "ray": likewise, in the workers of a Ray
            cluster. Or an object that carries out whole cohorts. A home keeps the executor that it was begun with.
        progress: None or True for a bar on a terminal, and lines now and then elsewhere. False for silence. Or a function
            that is called with every new share of the work that is done, 0 to 1.
        keep: Same as `fedclient --keep`.
        device: Torch device that computes, such as "cpu" or "cuda". The server computes there too, unless the setting
            server.device names another one.
        threads: Number of threads of all computations.
        awake_bytes: Most bytes that waiting devices may hold in memory. Others are made again when their turn comes.
        train: Own training of every device, train(model, data, context); see docs/own-training.md.
        evaluate: Own scores of every device, evaluate(model, data).
        dashboard: True, a port or "HOST:PORT": serve a page to watch the simulation in a browser. stderr shows its address.
        label: If shards are tables (.csv, .parquet), the column with the classes.
        task: "regression" if y is numbers, (N,) or (N, K); "multilabel" if y is labels of 0 and 1, (N, K);
            "survival" if y is times and events, (N, 2); see docs/shards.md and docs/tables.md. Folders may say it in their
            meta.json.
        table: Other options of tables, by the names that `fedclient` gives them, such as {"columns": "age,dose"}.
        workers: Number of processes; None: one for each processor.
        config: Path of a federation.toml. The other arguments win over it.
        clock: Time that devices take, or the order of arrivals of an earlier run (attune.simulation.simulated_clock). None:
            no time passes.
        variants: Variant of the model, by name, of each device that has another one than the plan's (setting
            "model.variant": a list with {"name": ..., ...} for each variant).
        seeds: Run a simulation for each of these seeds in place of `seed`. With a home, each has the folder seed-N in it.

    Returns:
        The result, with tables, models and pictures. With "auto" it is that of the chosen method, and `auto` has all scores.
        With `seeds`, a SeedResults with the result of each seed.

    Raises:
        AttuneError: An argument is wrong, or the federation cannot go on.
        KeyboardInterrupt: The user has stopped it. All state is safe.
    """
    if seeds is not None:
        return _once_a_seed(seeds, locals())
    given = data_by_name(shards)
    name = None if model is None else model_name(model, home is not None, executor in IN_OTHER_PROCESSES)
    overrides = arguments.overrides(len(given), method, name, rounds, seed, settings, config)
    members = _members(given, ReadOptions.of(label, **{"task": task, **table}), overrides)
    masked: Sequence[DisclosedKind] = ("masked-statistics",) if overrides.get("privacy", {}).get("secure_aggregation") else ()
    options = DeviceOptions(
        Path(),
        NOWHERE,
        device=device,
        threads=threads,
        keep=keep,
        baseline="none" if baseline is None and overrides.get("method", {}).get("preset") == PLAIN else baseline,
        allow_plugins=installed(),
        disclose=("statistics", "sums", *masked),  # all devices are the caller's own
        privacy=PrivacyLimits(metrics="all"),
        limits=OrderLimits(order_s=math.inf),
        simulated=True,
        hooks=Hooks(train, evaluate),
    )
    digest = data_digest(members)
    if unknown := sorted(variants.keys() - members.keys()):
        raise SettingError(f"variants names {clean(unknown[0])!r}, and there is no such device")
    page = None if dashboard is None or dashboard is False or dashboard == "off" else seams.watch(dashboard)
    simulator = Simulator(members, options, executor, workers, awake_bytes, page, digest, clock, variants)
    shown, folder = watcher(progress), None if home is None else Path(home).expanduser()
    if folder is not None:
        check_folder(folder, "home")
    if overrides.get("method", {}).get("name") == AUTO:
        return race(simulator, overrides, folder, shown)
    return simulator.run(overrides, folder or MemoryState(members), shown)


def _members(given: Mapping[str, Any], options: ReadOptions, overrides: Mapping[str, Any]) -> dict[str, LazyShard]:
    """Read the shards that are not read yet, and say what is strange about them."""
    members = read_shards(given, options, convert(DataSettings, overrides.get("data", {}), "data."))
    for line in arguments.warnings_of({key: shard for key, shard in members.items() if shard is not given[key]}):
        sys.stderr.write(f"{line}\n")
    return members


def _once_a_seed(seeds: Sequence[int], given: Mapping[str, Any]) -> SeedResults:
    """Call `simulate` for each seed with the same other arguments.

    Raises:
        SettingError: A seed is given beside the seeds.
    """
    if given["seed"] is not None or "seed" in given["settings"]:
        raise SettingError("there is a seed and there are seeds: give one of them")
    home = None if given["home"] is None else Path(given["home"]).expanduser()
    by_name = data_by_name(given["shards"])
    overrides = arguments.overrides(len(by_name), None, None, None, None, given["settings"], given["config"])
    members = _members(by_name, ReadOptions.of(given["label"], **{"task": given["task"], **given["table"]}), overrides)
    same = {**given, "shards": members, "seeds": None}
    return run_seeds(seeds, home, lambda seed, place: simulate(**{**same, "seed": seed, "home": place}))
