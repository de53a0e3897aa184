"""The method auto: candidates are trained from rung to rung without a repeated round, and their scores choose one."""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import attune
from attune.common import faults
from attune.common.errors import FederationFailed, SettingError
from attune.fedserver.choosing.candidates import USUAL
from attune.fedserver.choosing.racing import at_end, at_rung
from attune.fedserver.cli import cli
from attune.simulation import simulator
from attune.simulation.federation import CountingConsole
from attune.simulation.result import SimulationResult
from tests.e2e.harness import tabular_shard
from tests.forked import STEADY, Forked

ROUNDS, RUNGS = 5, (1, 2)
SETTINGS: dict[str, Any] = {"train.local_epochs": 1, "train.lr": 0.05, "seed": 3}


def cloud(turn: int, seed: int, samples: int = 60, noise: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return three clouds of four features that overlap, turned by an angle; `noise`: the labels say nothing."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    x = (np.roll(np.eye(4), turn, axis=1)[y] * 2 + rng.normal(size=(samples, 4))).astype(np.float32)
    return x, rng.permutation(y) if noise else y


CLOUDS = {f"site{n}": cloud(n % 3, n) for n in range(4)}


def run(data: Any = CLOUDS, settings: dict[str, Any] | None = None, **more: Any) -> SimulationResult:
    more = {"rounds": ROUNDS, "progress": False, **more}
    return attune.simulate(data, "auto", settings={**SETTINGS, **(settings or {})}, **more)


@pytest.fixture(scope="module")
def chosen() -> SimulationResult:
    return run()


@pytest.fixture(scope="module")
def again() -> tuple[SimulationResult, Counter[int]]:
    """Run the same race again. Return its result, and how many devices trained in each round, over all candidates."""
    done: Counter[int] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingConsole, "result", lambda self, result: done.update([result.round] if result.trained else []))
        return run(), done


def test_the_course_is_that_of_the_decisions_from_the_scores(chosen: SimulationResult) -> None:
    race = chosen.auto
    assert race is not None
    assert [rung.round for rung in race.rungs] == [*RUNGS, ROUNDS]
    first, second, last = race.rungs
    assert list(first.scores) == ["local", "fedavg", "fedper", "fedmcsa"]
    assert race.left_out == {
        "closed-form": "devices have no common scale: it takes --standardise federation and --disclose statistics",
        "fedtp": "the usual model for tabular, dnn, has no qkv, which method fedtp needs",
    }
    for number, rung in enumerate((first, second)):
        assert rung.decision == at_rung(number, {name: of for name, of in rung.scores.items() if name != "local"})
    assert list(second.scores) == ["local", *first.decision.kept]
    assert list(last.scores) == ["local", *second.decision.kept]
    assert last.decision == at_end(last.scores, [first.scores, second.scores], 3)
    assert chosen.status["method"] == race.chosen == last.decision.kept[0]
    assert set(chosen.rivals) == set(last.scores) - {race.chosen}
    assert all(set(of) == set(CLOUDS) for rung in race.rungs for of in rung.scores.values())


def test_the_same_seed_makes_the_same_choice_with_the_same_bits(
    chosen: SimulationResult, again: tuple[SimulationResult, Counter[int]]
) -> None:
    other, _ = again
    assert other.auto is not None and chosen.auto is not None
    assert other.auto.report() == chosen.auto.report() and other.digests == chosen.digests


def test_a_pause_at_a_rung_changes_no_bit_and_repeats_no_round(
    chosen: SimulationResult, again: tuple[SimulationResult, Counter[int]]
) -> None:
    race = chosen.auto
    assert race is not None
    settings = {**SETTINGS, "train.score_after": [*RUNGS, ROUNDS]}
    for name, result in {race.chosen: chosen, **chosen.rivals}.items():
        options = USUAL.get(name, {})
        whole = attune.simulate(CLOUDS, {"name": name, **options}, rounds=ROUNDS, settings=settings, progress=False)
        assert whole.digests == result.digests and list(whole.table()) == list(result.table())
    _, done = again
    entrants = [len(race.rungs[0].scores), len(race.rungs[1].scores), *[len(race.rungs[2].scores)] * (ROUNDS - 2)]
    assert [done[number] for number in range(1, ROUNDS + 1)] == [len(CLOUDS) * many for many in entrants]


def test_progress_rises_to_the_end() -> None:
    shares: list[float] = []
    run(progress=shares.append, settings={"auto.candidates": ["fedavg"]})
    assert shares == sorted(shares) and shares[-1] == 1.0 and shares[0] < 0.2


def test_a_user_names_candidates_and_their_settings() -> None:
    result = run(settings={"auto": {"candidates": {"fedprox": {"mu": 0.5}, "fedavg": {}}}}, rounds=3)
    assert result.auto is not None
    assert list(result.auto.rungs[0].scores) == ["local", "fedprox", "fedavg"] and not result.auto.left_out


def test_where_labels_contradict_each_other_training_alone_wins() -> None:
    """Every device has other names for the same clouds, so that one model for all is worse than none."""
    rng = np.random.default_rng(0)
    x, y = cloud(0, 1, 600)
    data = {f"site{n}": (x[n::4], rng.permutation(3)[y[n::4]]) for n in range(4)}
    result = run(data, {"auto.candidates": ["fedavg"], "train.local_epochs": 5})
    assert result.auto is not None and not result.auto.pays
    assert result.status["method"] == "local" and "fedavg" in result.rivals
    assert "no evidence that federating pays here" in result.auto.words()[-1]


def test_a_candidate_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulator.Simulator.run

    def failing(self: Any, overrides: Any, *rest: Any) -> SimulationResult:
        if overrides["method"]["name"] == "fedper":
            raise FederationFailed("site1: the loss is not finite")
        return plain(self, overrides, *rest)

    monkeypatch.setattr(simulator.Simulator, "run", failing)
    result = run(settings={"auto.candidates": ["fedper", "fedavg"]})
    assert result.auto is not None
    assert result.auto.left_out == {"fedper": "it failed before round 1 was over: site1: the loss is not finite"}
    assert list(result.auto.rungs[0].scores) == ["local", "fedavg"]
    alone = run(settings={"auto.candidates": ["fedper"]})
    assert alone.auto is not None and alone.auto.chosen == "local" and [rung.round for rung in alone.auto.rungs] == [ROUNDS]


@pytest.mark.parametrize(
    ("settings", "rounds", "words"),
    [
        ({}, 2, "needs 3 rounds at least"),
        ({"train.validation": 0.0}, 5, "no device holds samples out"),
        ({"privacy.unit": "example", "privacy.epsilon": 3.0}, 5, "every candidate would spend a budget"),
        ({"method.mu": 1.0}, 5, "method.mu cannot be set for all candidates"),
        ({"auto.candidates": ["fedavgg"]}, 5, "unknown method 'fedavgg'"),
        ({"auto.candidates": ["local"]}, 5, "names no method beside local"),
        ({"auto.candidates": ["auto"]}, 5, "auto"),
        ({"auto.candidate": ["fedavg"]}, 5, r"unknown setting auto\.candidate"),
        ({"auto.candidates": {"fedavg": {"sigma": 3}}}, 5, "sigma"),
        ({"auto.candidates": "fedavg,fedper"}, 5, r"auto\.candidates: .* a list is \['a', 'b'\]"),
    ],
)
def test_mistakes_are_named_before_anything_trains(settings: dict[str, Any], rounds: int, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        run(settings=settings, rounds=rounds)


def test_methods_that_an_own_training_loop_does_not_fit_are_left_out() -> None:
    def train(model: Any, data: Any, context: Any) -> float:
        optimizer = torch.optim.SGD(context.parameters(), lr=0.01)
        for x, y in data.batches(32):
            loss = torch.nn.functional.cross_entropy(model(x), y) + context.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    result = run(train=train, settings={"auto.candidates": ["fedavg", "pfedme"]}, rounds=3)
    assert result.auto is not None
    assert list(result.auto.rungs[0].scores) == ["local", "fedavg"] and "pfedme" in result.auto.left_out


def test_devices_with_few_samples_cannot_choose() -> None:
    with pytest.raises(SettingError, match="no device holds samples out"):
        run({f"site{n}": cloud(0, n, 15) for n in range(3)})


def in_home(home: Path) -> SimulationResult:
    return run(home=home, settings={"auto.candidates": ["fedavg", "fedper"]})


def to_be_killed() -> None:
    """Run in the process that the test below kills."""
    in_home(Path(sys.argv[0]))


def test_a_killed_race_goes_on_and_chooses_the_same(tmp_path: Path) -> None:
    whole = run(settings={"auto.candidates": ["fedavg", "fedper"]})
    for fault in ("server:1:evaluation-committed=kill", "site1:2:order-committed=kill", "server:5:committed=kill"):
        environment = os.environ | STEADY | {faults.VARIABLE: fault}
        with (tmp_path / "log").open("ab") as log:
            process = Forked([str(tmp_path / "home")], log, log, environment, f"{__name__}:to_be_killed")
        assert process.wait(120) == -signal.SIGKILL, fault
    for _ in range(2):  # the second time, all of it is over
        result = in_home(tmp_path / "home")
        assert result.auto is not None and whole.auto is not None
        assert result.auto.report() == whole.auto.report() and result.digests == whole.digests


def test_the_command_prints_the_table_and_the_race_and_writes_the_scores(tmp_path: Path) -> None:
    for n in range(3):
        tabular_shard(tmp_path / "shards" / f"site{n}", seed=n, samples=40)
    words = ("--data", str(tmp_path / "shards" / "*"), "--method", "auto", "--rounds", "3", "--out", str(tmp_path / "out"))
    quick = ("--set", "train.local_epochs=1", "--set", "auto.candidates=['fedavg']")
    done = CliRunner().invoke(cli, ["simulate", *words, *quick], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "after round 3: " in done.stdout and "auto" in done.stdout.splitlines()[-1]
    assert any(line.split()[:1] == ["mean"] and "local" in line for line in done.stdout.splitlines())
    report = json.loads((tmp_path / "out" / "auto" / "auto.json").read_bytes())
    assert [rung["round"] for rung in report["rungs"]] == [1, 2, 3]
    assert report["chosen"] in ("fedavg", "local") and set(report["rungs"][0]["scores"]) == {"local", "fedavg"}
    refused = CliRunner().invoke(cli, ["simulate", *words[:2], "--method", "auto,fedavg"])
    assert refused.exit_code == 2 and "give it alone" in refused.output
    refused = CliRunner().invoke(cli, ["simulate", *words[:4], "--set", "fedavg:train.lr=0.1"])
    assert refused.exit_code == 2 and "fedavg:train.lr=0.1" in refused.output and "auto.candidates=" in refused.output


def test_the_command_races_with_several_seeds_and_settings_of_a_grid(tmp_path: Path) -> None:
    for n in range(3):
        tabular_shard(tmp_path / "shards" / f"site{n}", seed=n, samples=40)
    words = ("--data", str(tmp_path / "shards" / "*"), "--method", "auto", "--rounds", "3", "--out", str(tmp_path / "out"))
    quick = ("--set", "train.local_epochs=1", "--set", "auto.candidates=['fedprox']")
    grid = ("--grid", "train.lr=0.000001,0.1", "--grid", "method.mu=0.1")
    done = CliRunner().invoke(cli, ["simulate", *words, *quick, *grid, "--seeds", "0,1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "fedprox: train.lr=0.1 method.mu=0.1, the best of 2 on validation parts" in done.stdout
    for seed in (0, 1):
        assert f"seed {seed}: auto" in done.stdout
        report = json.loads((tmp_path / "out" / "auto" / f"seed-{seed}" / "auto.json").read_bytes())
        assert set(report["rungs"][0]["scores"]) == {"local", "fedprox"}
    assert (tmp_path / "out" / "grid.csv").read_text().count("local,") == 2


def test_a_candidate_has_settings_of_all_sections() -> None:
    candidates = {"fedprox": {"mu": 0.5, "train.lr": 0.25}, "local": {"train.lr": 0.125}}
    result = run(settings={"auto": {"candidates": candidates}}, rounds=3)
    plans = [of._outcome.snapshot.plan for of in (result, *result.rivals.values())]
    assert {plan.method: plan.train.lr for plan in plans if plan} == {"fedprox": 0.25, "local": 0.125}


def test_a_run_over_an_old_fleet_is_no_race(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", "new", "second", "--home", str(tmp_path), "--method", "auto"])
    with pytest.raises(SettingError, match="new home"):
        raise done.exception or AssertionError(done.output)
