"""The examples are short, and they work."""

import importlib
import socket
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("first_simulation", "own_model", "over_the_network", "regression")


@pytest.mark.parametrize("name", SHORT)
def test_an_example_has_at_most_thirty_lines(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 30


def test_first_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("examples.first_simulation").main(rounds=1)
    tables = capsys.readouterr().out.split("\n\n")
    for method, column, table in zip(("fedtp", "fedavg"), (4, 3), tables, strict=True):
        lines = table.strip().splitlines()
        assert lines[0] == method
        assert [line.split()[0] for line in lines[2:]] == [*(f"device{n}" for n in range(5)), "mean"]
        assert all(line.split()[column] != "-" for line in lines[2:7])


def test_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("examples.own_model").main(rounds=6)
    lines = capsys.readouterr().out.splitlines()
    accuracies = [float(line.split()[4]) for line in lines[1:5]]
    assert sum(accuracies) / 4 > 0.9, "chance is a half"
    assert set(lines[-1]) <= set("[01, ]")


def test_over_the_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    importlib.import_module("examples.over_the_network").main(rounds=1, port=port)
    assert capsys.readouterr().out.splitlines()[-2:] == ["device0 True", "device1 True"]


def test_regression(capsys: pytest.CaptureFixture[str]) -> None:
    result = importlib.import_module("examples.regression").main(rounds=2)
    assert result.table().mean("personalized") > result.table().mean("common")
    last = capsys.readouterr().out.splitlines()[-1].replace(",", "").split()
    assert last[0] == "predicted" and abs(float(last[1]) - float(last[4])) < 30
