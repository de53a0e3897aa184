"""`make demo`: the gain of federation. Twenty devices with few, different samples: alone, with a common model, with their own.

Three federations run on the same shards, each with a real server and real devices over mutual TLS: FedTP, FedAvg, and the
closed form, which trains nothing. The devices are hosted in one process, because twenty processes are too many for a small
machine, and their models train together. FedTP's devices also fit ordinary models and train their network alone, as rivals.
FedAvg's model is tuned on each device as well, so that personalization has a fair rival. Every number is measured by the run.
The exit status is 0 only if every process ended well and every device has a model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.split import partition, table, write_shards
from examples.outcome import Outcome, report, write
from examples.processes import Federation, Watch
from examples.tuned import tuned

EPOCHS = 2
WORK = {"fedtp": 1.6, "fedavg": 1.0}  # share of the work of a round, roughly: FedTP's devices train twice, together and alone
NEXT = """
To see more (all files are kept):
  {bin}/fedserver status --home {out}/fedtp/server
  {bin}/fedserver plot --home {out}/fedtp/server --out {out}/pictures
  {bin}/fedclient evaluate --data {shard} --home {home}"""


def shorten(dataset: Dataset, samples: int, seed: int) -> Dataset:
    """Draw at most `samples` training samples, and a third as many for testing, at random; take all if there are fewer."""
    draw = np.random.default_rng(seed)

    def some(count: int, limit: int) -> np.ndarray:
        return np.sort(draw.permutation(count)[:limit])

    train, test = some(len(dataset.train_y), samples), some(len(dataset.test_y), samples // 3)
    return dataset.subset(train, test)


def make_shards(data: str, out: Path, devices: int, samples: int, seed: int) -> list[Path]:
    """Write shards that differ in their classes: Dirichlet 0.3."""
    full = load_dataset(data, seed)
    dataset = shorten(full, samples, seed) if len(full.train_y) > samples else full
    if len(dataset.train_y) < len(full.train_y):
        click.echo(f"using {len(dataset.train_y)} of {len(full.train_y)} training samples (--samples changes that)")
    parts = partition(dataset, "dirichlet", devices, seed, alpha=0.3)
    click.echo(table(parts))
    return write_shards(out, parts)


def outcome_of(shards: Sequence[Path], fedtp: Federation, fedavg: Federation, analytic: Federation) -> list[Outcome]:
    """Return the results of all devices.

    Raises:
        click.ClickException: A device has no model or no accuracy.
    """
    personalized, common, solved = fedtp.clients(), fedavg.clients(), analytic.clients()
    outcomes = []
    for shard in shards:
        client = personalized[shard.name]
        accuracies = {
            "constant": client["accuracy_constant"],
            "alone": client["accuracy_alone"],
            "local": client["accuracy_local"],
            "fedavg": common[shard.name]["accuracy"],
            "fedavg+ft": tuned(shard, fedavg.home(shard)),
            "analytic": solved[shard.name]["accuracy"],
            "fedtp": client["accuracy"],
            "kept": client["accuracy_kept"],
        }
        outcomes.append(
            Outcome(
                name=shard.name,
                samples=client["samples"],
                test_samples=client["test_samples"],
                accuracy={name: value for name, value in accuracies.items() if value is not None},
                home=fedtp.home(shard),
                verdict=client["verdict"],
            )
        )
    return outcomes


@click.command()
@click.option("--data", default="digits", show_default=True, help="digits, or an .npz with train_x, train_y, test_x, test_y.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("demo-out"), show_default=True, help="Folder; it is emptied first."
)
@click.option("--model", default="vit", show_default=True, help="Model of FedTP and FedAvg.")
@click.option("--devices", type=click.IntRange(2), default=20, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--samples", type=click.IntRange(10), default=1500, show_default=True, help="Training samples of all devices.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(data: str, out: Path, model: str, devices: int, rounds: int, samples: int, seed: int) -> None:
    """Run the demo."""
    started = time.monotonic()
    shutil.rmtree(out.resolve(), ignore_errors=True)
    out.mkdir(parents=True)
    shards = make_shards(data, out / "shards", devices, samples, seed)
    watch = Watch(sum(WORK.values()) * rounds)
    runs = {method: Federation(out / method, method, shards, watch.of(method, work)) for method, work in WORK.items()}
    for method, run in runs.items():
        baseline = "alone+local" if method == "fedtp" else "none"
        settings = (f"model.name={model}", f"train.local_epochs={EPOCHS}")
        run.to_the_end(rounds, seed, settings, ("--baseline", baseline))
    analytic = Federation(out / "analytic", "analytic", shards, watch.of("analytic", 0.0))
    analytic.to_the_end(2, seed, (), ("--baseline", "none", "--disclose", "sums"))
    click.echo(f"[fedavg] tuning the common model on each of {len(shards)} devices")
    outcomes = outcome_of(shards, runs["fedtp"], runs["fedavg"], analytic)
    write(outcomes, out / "demo.csv")
    click.echo("")
    for line in report(outcomes):
        click.echo(line)
    for verdict in runs["fedtp"].status()["fleet"]:  # by the evidence of all devices
        click.echo(f"what devices keep {verdict['words']}")
    click.echo(f"\n{rounds} rounds of {EPOCHS} local epochs, {time.monotonic() - started:.0f} s in all")
    click.echo(NEXT.format(bin=Federation.bin(), out=out, shard=shards[0], home=outcomes[0].home))


if __name__ == "__main__":
    main()
