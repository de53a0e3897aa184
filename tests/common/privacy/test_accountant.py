"""The accountant against published figures, and the noise that it sets."""

import builtins
import json
import math

import pytest
from click.testing import CliRunner

from attune.common.errors import SettingError
from attune.common.privacy import accountant
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for
from attune.fedserver.cli.root import cli

# (devices, drawn for a round, rounds, noise, delta, epsilon)
TABLE = [
    (100, 20, 100, 1, None, 8.97),
    (100, 20, 100, 2, None, 2.88),
    (1000, 50, 200, 1, 0.0005, 3.42),
    (1000, 50, 200, 2, None, 1.10),
    (10_000, 50, 200, 1, None, 0.356),
    (20, 20, 30, 5, 1e-3, 3.51),
    (20, 20, 30, 10, 1e-3, 1.51),
]


def planned(*arguments: object) -> dict[str, float]:
    done = CliRunner().invoke(cli, ["privacy", "plan", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, float] = json.loads(done.output)
    return answer


@pytest.mark.parametrize(("devices", "drawn", "rounds", "noise", "delta", "epsilon"), TABLE)
def test_the_command_reproduces_the_table(
    devices: int, drawn: int, rounds: int, noise: float, delta: float | None, epsilon: float
) -> None:
    given = ["--unit", "client", "--devices", devices, "--per-round", drawn, "--rounds", rounds, "--noise", noise]
    answer = planned(*given, *(["--delta", delta] if delta else []))
    assert answer["epsilon"] == pytest.approx(epsilon, rel=0.01)
    assert answer["delta"] == (delta or 1 / (2 * devices))
    assert ("no amplification" in str(answer["sampling"])) == (drawn == devices)


def test_noise_from_epsilon_is_the_least_and_keeps_to_it() -> None:
    answer = planned("--unit", "example", "--samples", 500, "--batch", 32, "--epochs", 40, "--epsilon", 4, "--delta", 1e-5)
    assert (answer["steps"], answer["rate"], answer["adjacency"]) == (640, 0.064, "zero-out")
    spent = epsilon_of([NoisySteps(0.064, answer["noise"], 640)], 1e-5)
    assert 3.98 < spent <= 4
    back = planned("--unit", "example", "--samples", 500, "--batch", 32, "--epochs", 40, "--noise", 2, "--delta", 1e-5)
    assert back["epsilon"] == epsilon_of([NoisySteps(0.064, 2, 640)], 1e-5)


def test_replacing_a_unit_costs_more_than_leaving_it_out() -> None:
    given = ("--unit", "client", "--devices", 100, "--per-round", 20, "--rounds", 100, "--noise", 1)
    assert planned(*given, "--adjacency", "replace-one")["epsilon"] == pytest.approx(16.5, rel=0.01)


def test_what_was_spent_leaves_less_and_in_the_end_nothing() -> None:
    spent = (NoisySteps(0.1, 2.0, 100), NoisySteps(0.2, 3.0, 50))
    alone, after = noise_for(4, 1e-5, 0.1, 100), noise_for(4, 1e-5, 0.1, 100, spent)
    assert after > alone
    assert epsilon_of([*spent, NoisySteps(0.1, after, 100)], 1e-5) <= 4
    with pytest.raises(SettingError, match="is spent already"):
        noise_for(1, 1e-5, 0.1, 100, spent)


def test_without_noise_there_is_no_guarantee_and_without_steps_no_cost() -> None:
    assert epsilon_of([NoisySteps(0.1, 0, 1)], 1e-5) == math.inf
    assert epsilon_of([NoisySteps(0.1, 0, 0), NoisySteps(0, 1, 5)], 1e-5) == 0
    without = planned("--unit", "client", "--devices", 9, "--per-round", 9, "--rounds", 2, "--noise", 0)
    assert without["epsilon"] is None


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--unit", "client", "--noise", "1"], "--unit client needs --devices, --per-round, --rounds"),
        (["--unit", "example", "--samples", "5", "--batch", "2", "--epochs", "1"], "say --noise or --epsilon"),
    ],
)
def test_what_is_not_said_is_asked_for(arguments: list[str], answer: str) -> None:
    done = CliRunner().invoke(cli, ["privacy", "plan", *arguments])
    assert done.exit_code == 2 and answer in done.output


def test_without_its_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: object, **named: object) -> object:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return imported(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    accountant._epsilon.cache_clear()
    with pytest.raises(SettingError, match=r"pip install 'attune-fl\[privacy\]'"):
        epsilon_of([NoisySteps(0.3, 1.5, 3)], 1e-4)
