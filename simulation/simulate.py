"""`attune.simulate`: a whole federation in this process, with the same bits as over the network."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attune.common.aio import Stopped, run_alone
from attune.common.plugins import installed
from attune.fedclient.hooks import Evaluate, Hooks, Train
from attune.fedclient.options import DeviceOptions
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.work.processes.pool import Pool
from attune.simulation import settings as given_settings
from attune.simulation.executor_names import SPREAD
from attune.simulation.executors import executor_of
from attune.simulation.federation import NOWHERE, Federation
from attune.simulation.garbage import seldom_collected
from attune.simulation.own_models import name_of
from attune.simulation.progress import Tell, watcher
from attune.simulation.result import Result
from attune.simulation.shards import Shards, named
from attune.simulation.watching import Shown, place_of
from attune.simulation.worlds import world

if TYPE_CHECKING:
    from torch import nn

    from attune.fedclient.work.inline import Executor
    from attune.simulation.own_models import Factory

AWAKE_BYTES = 2 << 30
NO_SETTINGS: Mapping[str, Any] = {}


def simulate(
    shards: Shards,
    method: given_settings.Method | None = None,
    model: str | Factory | nn.Module | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    baseline: Literal["local"] | None = None,
    home: str | Path | None = None,
    executor: Literal["sequential", "stacked", "auto", "processes", "ray"] | Executor | None = None,
    progress: bool | Tell | None = None,
    keep: Literal["best", "personalized"] = "best",
    device: str = "cpu",
    threads: int = 1,
    awake_bytes: int = AWAKE_BYTES,
    train: Train | None = None,
    evaluate: Evaluate | None = None,
    dashboard: Shown = None,
    label: str = "",
    task: str = "classes",
    table: Mapping[str, Any] = NO_SETTINGS,
    workers: int | None = None,
    config: str | Path | None = None,
) -> Result:
    """Trains a federation of one device a shard, from the first round to every device's own model.

    shards: a pattern ("shards/*"), a folder or several, or name -> (x, y) arrays, (train_x, train_y, test_x, test_y), a torch
    Dataset or (train, test) of those. method: a name, or a description as in [method] of federation.toml. model: a name,
    "package.module:factory", a function of a ModelSpec, or a module, whose weights everybody starts from.
    settings: as in federation.toml, such as {"method.sigma": 50, "round.clients": 5}; `min_clients` is all devices. config: a
    federation.toml, below all that is given here.
    baseline: "local" also trains a model on each device alone, to compare with. keep: as `fedclient --keep`.
    home: a folder for all state: an interrupted simulation is gone on with by calling this again, and ends with the same bits.
    executor: how the orders of a cohort are carried out: "sequential" (one after the other, the default), "stacked" (side by
    side: faster for small models, and the same to rounding), "auto" (tries both, and stays with the faster one),
    "processes" (each device in one of several processes: faster for large models, the bits of "sequential"), "ray" (the same
    in workers of a Ray cluster), or an object
    that is given all of them. A home keeps the one that it was begun with. workers: how many processes; None: one for each
    processor.
    progress: None or True for a bar on a terminal and lines now and then elsewhere, False for silence, or a function that is
    told each share done.
    train(model, data, context), evaluate(model, data): every device's own training and scores (docs/own-training.md).
    label: where shards are tables (.csv, .parquet), the column with the classes; table: their other options, by the names that
    `fedclient` gives them, such as {"columns": "age,dose"}.
    task: "regression" or "multilabel" where y is numbers (N,) or (N, K), or labels (N, K) of 0 and 1 (docs/shards.md). Folders
    may say it in their meta.json.
    awake_bytes: what devices that wait may hold in memory; others are made again when their turn comes.
    dashboard: True, a port or "HOST:PORT": a page to watch in a browser while it runs; its address is said on stderr.
    threads: of all computations. Thread counts alike, the bits are those of a federation over the network with these settings.

    Errors: AttuneError; KeyboardInterrupt once everything has ended in order.
    """
    members = named(shards, ReadOptions.of(label, **{"task": task, **table}))
    name = None if model is None else name_of(model, home is not None, executor in SPREAD)
    overrides = given_settings.overrides(len(members), method, name, rounds, seed, settings, config)
    common = DeviceOptions(
        Path(),
        NOWHERE,
        device=device,
        threads=threads,
        keep=keep,
        baseline=baseline,
        allow_models=tuple(filter(None, [overrides.get("model", {}).get("name")])),  # our own caller names it
        allow_plugins=installed(),
        hooks=Hooks(train, evaluate),
    )
    page = place_of(dashboard)
    seen, folder = watcher(progress), None if home is None else Path(home).expanduser()
    with world(members, folder) as place:
        how = executor_of(executor, folder, workers)

        async def run(stopped: Stopped) -> Result:
            ended = await Federation(members, overrides, common, place, seen, stopped, how, awake_bytes, page).run()
            return Result(ended, place, how)

        with how if isinstance(how, Pool) else nullcontext(), seldom_collected():
            return run_alone(run)
