"""Rounds to parity: after how many rounds are devices that join a finished federation as good as the others (FedTP, Figure 8).

`python -m benchmarks.newcomers --out benchmarks/results/newcomers.csv` runs a real server, a hosted fleet to the end, and then
a fleet of newcomers. By default these are eight and two devices with two of ten digits each; --data, --partition, --new and
--set change the task. A row is a method with a way of adapting, written as its federation ends;
a row that is there is not run again.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from attune.common.methods.registry import get
from benchmarks.federation import Home
from benchmarks.result_file import Results

PARTITION = "--scheme pathological --clients 10 --classes-per-client 2"
NAMED = ("model.name=vit", "train.local_epochs=5")  # for images; `--set` overrides them
MARGIN = 0.02  # points of accuracy: parity is this near to the old devices' mean
CASES = (
    ("fedtp", "embedding"),
    ("fedtp", "hypernetwork"),
    ("vanilla-personalized", "personal"),
    ("fedrod", "personal"),
    ("fedmcsa", "personal"),
    ("fedper", "personal"),
)


def course(rows: list[dict[str, str]], client: str, trained: bool) -> list[float]:
    """Return a newcomer's accuracy with its first model, and after each of its rounds.

    Args:
        rows: Rows of metrics.csv.
        client: The client's name.
        trained: Whether models are judged after local training. Otherwise they are judged as served at the beginning of the
            next round, or at the end.
    """
    own = [row for row in rows if row["client"] == client]
    before = [float(row["accuracy_before"]) for row in own]
    after = [float(row["accuracy_after"]) for row in own if row["work"] == "train"]
    return before[:1] + (after if trained else before[1:])


def case(shards: Path, method: str, adapt: str, rounds: int, adapt_rounds: int, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run one federation to its end, then the newcomers to theirs."""
    folder = Path(tempfile.mkdtemp(prefix="attune-newcomers-"))
    home, started = Home(folder), time.monotonic()
    parts = {part: sorted(path.name for path in (shards / part).iterdir()) for part in ("old", "new")}
    settings = [
        word
        for text in (f"round.adapt={adapt}", f"round.adapt_rounds={adapt_rounds}", *NAMED, *flags)
        for word in ("--set", text)
    ]
    try:
        old = ("--method", method, "--rounds", rounds, "--min-clients", len(parts["old"]), *settings)
        with home.server(*old) as (address, _):
            home.run("fedclient", "--data", f"{shards}/old/*", "--name", "old", "--server", address)
            parity = home.status()["accuracy"]["mean_over_clients"]
            home.run("fedclient", "--data", f"{shards}/new/*", "--name", "new", "--server", address)
            rows = home.metrics()
    finally:
        shutil.rmtree(folder)
    courses = [course(rows, f"new-{name}", get(method).evaluate == "trained") for name in parts["new"]]
    means = [fmean(values) for values in zip(*courses, strict=True)]
    reached = next((number for number, mean in enumerate(means) if mean >= parity - MARGIN), None)
    return {
        "method": method,
        "adapt": adapt,
        "rounds": rounds,
        "old_mean": round(parity, 4),
        "first_model": round(means[0], 4),
        "rounds_to_parity": f"not within {adapt_rounds}" if reached is None else reached,
        **{f"after_{number}": round(mean, 4) for number, mean in enumerate(means[1:], start=1)},
        "seconds": round(time.monotonic() - started, 1),
    }


def cut(folder: Path, data: str, partition: str, new: int, seed: int) -> None:
    """Cut shards as `fedclient partition` does, and set the last `new` shards apart.

    Raises:
        click.UsageError: No shards are left.
    """
    Home(folder).run(
        "fedclient", "partition", "--dataset", data, *shlex.split(partition), "--seed", seed, "--out", folder / "all"
    )
    shards = sorted(path for path in (folder / "all").iterdir() if path.is_dir())
    if len(shards) <= new:
        raise click.UsageError(f"--new {new} leaves none of {len(shards)} devices to train first")
    for number, shard in enumerate(shards):
        target = folder / ("old" if number < len(shards) - new else "new") / shard.name
        target.parent.mkdir(exist_ok=True)
        shard.rename(target)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--data", default="digits", show_default=True, help="As `fedclient partition --dataset`: digits, or a file.")
@click.option("--partition", default=PARTITION, show_default=True, help="Further options of `fedclient partition`.")
@click.option("--new", type=click.IntRange(1), default=2, show_default=True, help="Number of devices that join after the end.")
@click.option("--case", "chosen", multiple=True, help="Only these cases, as METHOD:ADAPT (default: all).")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--adapt-rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--set", "flags", multiple=True, help="Further settings, as for fedserver.")
def main(
    out: Path, data: str, partition: str, new: int, chosen: tuple[str, ...], rounds: int, adapt_rounds: int, seed: int,
    flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Run the cases that are left, one after the other."""
    columns = ["method", "adapt", "rounds", "seed", "old_mean", "first_model", "rounds_to_parity"]
    columns += [*(f"after_{number}" for number in range(1, adapt_rounds + 1)), "seconds"]
    with tempfile.TemporaryDirectory() as folder:
        cut(Path(folder), data, partition, new, seed)
        results = Results(out, columns)
        done = {tuple(row[name] for name in ("method", "adapt", "rounds", "seed")) for row in results.rows()}
        for method, adapt in [one.split(":") for one in chosen] or CASES:
            if (method, adapt, str(rounds), str(seed)) in done:
                continue
            row = case(Path(folder), method, adapt, rounds, adapt_rounds, (f"seed={seed}", *flags))
            results.add([row | {"seed": seed}])
            click.echo(row)


if __name__ == "__main__":
    main()
