"""Text over the network: a label for every position from the shard to the predictions, and the leaky model with its warning."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import FederationAt

STEPS = 6


def text_shard(folder: Path, per_position: bool = True) -> Path:
    """Write windows of letters that count from a to e again and again; the labels are the next letters, as text."""
    letters = np.array(list("abcde"))
    start = np.random.default_rng(3).integers(0, 5, 40)
    whole = (start[:, None] + np.arange(STEPS + 1)) % 5
    folder.mkdir()
    y = letters[whole[:, 1:]] if per_position else letters[whole[:, -1]]
    (folder / "meta.json").write_text('{"kind": "tokens"}')
    np.savez(folder / "train.npz", x=whole[:30, :-1], y=y[:30])
    np.savez(folder / "test.npz", x=whole[30:, :-1], y=y[30:])
    return folder


def test_every_position_is_labelled_from_the_shard_to_the_predictions(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("text")
    first, second = text_shard(tmp_path / "hamlet"), text_shard(tmp_path / "ophelia")
    flags = ("--exit-when-done", "--min-clients", "2", "--rounds", "1", "--set", "model.leaky_targets=true")
    server = federation.server("--method", "fedavg", *flags)
    warned = r"warning: model\.leaky_targets is on: every position of the model sees the next token"
    server.wait_for(warned)
    device = federation.device(first)
    federation.await_status(lambda status: status["clients"] and status["clients"][0]["state"] != "offline")
    odd = federation.device(text_shard(tmp_path / "yorick", per_position=False))
    server.wait_for("no majority of the devices has data of one form")
    other = federation.device(second)  # a majority of two
    assert odd.code() == 9, odd.text
    assert "has a label for every sequence; this federation expects one for every position" in odd.text
    assert [process.code() for process in (device, other, server)] == [0, 0, 0], server.text
    device.wait_for(warned)

    said = {client["name"]: client for client in federation.status()["clients"]}
    offline = json.loads(federation.command("fedclient", "evaluate", "--data", str(first), "--json").stdout)
    assert offline["accuracy"] == pytest.approx(said["hamlet"]["accuracy"]) and offline["samples"] == 10
    with np.load(first / "test.npz") as test:
        np.savez(tmp_path / "new.npz", x=test["x"])
        expected = test["y"]
    home = str(federation.model(first).parent)
    words = ("predict", "--data", str(tmp_path / "new.npz"), "--out", str(tmp_path / "labels.csv"), "--home", home)
    assert "10 labelled sequences" in federation.command("fedclient", *words).stdout
    with (tmp_path / "labels.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["index"], row["position"]) for row in rows] == [(str(n), str(t)) for n in range(10) for t in range(STEPS)]
    found = np.array([row["label"] for row in rows]).reshape(10, STEPS)
    assert float((found == expected).mean()) == pytest.approx(offline["accuracy"])
