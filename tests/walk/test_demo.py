"""`make demo` in small: it prints the results of its federations, and the commands that it shows work."""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common.methods.settings.objectives import FineTuneSettings
from examples import demo as program
from examples import processes
from examples.outcome import COLUMNS, Outcome, report
from examples.processes import Federation, Watch
from examples.tuned import tuned
from tests import forked


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked.instead_of_subprocess(processes):
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "out"
    small = ("--devices", "3", "--rounds", "2", "--samples", "90", "--seed", "1")
    done = CliRunner().invoke(program.main, ["--out", str(out), *small], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out, done.output


def test_the_table_is_what_the_federations_came_to(demo: tuple[Path, str]) -> None:
    out, said = demo
    table = said.partition("accuracy on each device's own test data")[2]
    rows = {words[0]: words[1:-1] for words in map(str.split, table.splitlines()) if "".join(words[:1]).startswith("shard")}
    shards = [out / "shards" / f"shard{i}" for i in range(3)]
    fedtp, fedavg, solved = (
        Federation(out / method, method, shards, lambda *_: None) for method in ("fedtp", "fedavg", "analytic")
    )
    for shard in shards:
        own, common = fedtp.clients()[shard.name], fedavg.clients()[shard.name]
        alone = [own["accuracy_constant"], own["accuracy_alone"], own["accuracy_local"]]
        found = [*alone, common["accuracy"], tuned(shard, fedavg.home(shard)), solved.clients()[shard.name]["accuracy"]]
        found += [own["accuracy"], own["accuracy_kept"]]
        assert rows[shard.name] == [
            str(own["samples"]),
            str(own["test_samples"]),
            *(f"{value:.3f}" for value in found if value is not None),
        ]
    assert rows.keys() == {shard.name for shard in shards}
    verdicts = [f"what devices keep {verdict['words']}" for verdict in fedtp.status()["fleet"]]
    assert len(verdicts) >= 2 and set(verdicts) <= set(said.splitlines())
    assert re.search(r"\[fedavg\] round 2/2: .*; about 0 s left", said)


def test_both_means_and_who_is_best_by_hand() -> None:
    def device(name: str, test_samples: int, verdict: str, *accuracy: float) -> Outcome:
        return Outcome(name, 30, test_samples, dict(zip(COLUMNS, accuracy, strict=True)), Path(), verdict)

    a = device("a", 10, "worse", 0.9, 0.2, 0.1, 0.2, 0.3, 0.35, 0.8, 0.4)
    b = device("b", 30, "unclear", 0.5, 0.8, 0.5, 0.6, 0.7, 0.65, 0.7, 0.7)
    lines = list(report([a, b]))
    shares = ["0.900", "0.200", "0.100", "0.200", "0.300", "0.350", "0.800", "0.400"]
    assert lines[1].split()[3:] == ["constant", "alone", "Local", "FedAvg", "tuned", "analytic", "FedTP", "kept", "best"]
    assert lines[2].split() == ["a", "30", "10", *shares, "kept"], "no rivals: a constant, and a part of what is kept"
    assert lines[3].split()[-1] == "alone"
    assert lines[4].split()[3:] == ["0.700", "0.500", "0.300", "0.400", "0.500", "0.500", "0.750", "0.550"]
    assert lines[5].split()[4:] == ["60", "40", "0.600", "0.650", "0.400", "0.500", "0.600", "0.575", "0.725", "0.625"]
    assert lines[6] == "finds most labels: kept on 1 devices, alone on 1 devices"
    assert lines[7] == "what is kept is ahead of alone on 1 devices, behind on 1 (sign test, p = 1)"
    assert lines[10] == "what is kept is ahead of tuned on 1 devices, behind on 0 (sign test, p = 1)"
    assert lines[11] == "what is kept is ahead of analytic on 2 devices, behind on 0 (sign test, p = 0.5)"
    assert lines[12].endswith("better on 0, worse (harmed) on 1, too close to tell on 1")
    earlier = list(
        report([replace(one, accuracy={key: v for key, v in one.accuracy.items() if key != "alone"}) for one in (a, b)])
    )
    assert "alone" not in earlier[1].split() and not any(line.startswith("alone: ") for line in earlier)


def test_the_commands_that_it_offers_can_be_run(demo: tuple[Path, str]) -> None:
    out, said = demo
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  ")]
    assert [command[0].rpartition("/")[2] for command in commands] == ["fedserver", "fedserver", "fedclient"]
    done = [forked.run(command, os.environ | forked.STEADY, 120.0) for command in commands]
    assert [each.returncode for each in done] == [0, 0, 0], done
    status, _, evaluated = (each.stdout for each in done)
    assert "done: round 2/2 of fedtp" in status and "demo-shard0 (fedtp" in evaluated
    assert (out / "pictures" / "accuracy.png").is_file()


def test_a_tuned_model_is_what_fedavg_with_fine_tuning_serves(demo: tuple[Path, str], tmp_path: Path) -> None:
    """Compare with the accuracies of a federation that tunes at its end, with equal names and seeds; one answer may differ."""
    out, _ = demo
    shards = [out / "shards" / f"shard{i}" for i in range(3)]
    tuning = FineTuneSettings(tune_epochs=3, alpha=0.2)
    expected = Federation(tmp_path / "ft", "fedavg+ft", shards, Watch(2.0).of("fedavg+ft", 1.0))
    expected.to_the_end(2, 1, ("model.name=vit", "train.local_epochs=2", "method.tune_epochs=3", "method.alpha=0.2"))
    before = Federation(out / "fedavg", "fedavg", shards, lambda *_: None)
    for shard in shards:
        ended = expected.clients()[shard.name]
        assert tuned(shard, before.home(shard), tuning) == pytest.approx(ended["accuracy"], abs=1.01 / ended["test_samples"])
