"""A federation whose devices have images of other sizes and channels, over mutual TLS, with kills, and what they predict."""

import json
from pathlib import Path

import numpy as np
import pytest

import attune
from attune.common.config import load_settings
from attune.fedclient.model.artifact import Model
from tests.e2e.harness import IN_AGGREGATION, IN_TRAINING, Federation, FederationAt

FORMS = {"colour": (8, 8, 3), "grey": (12, 10, 1), "large": (16, 16, 4), "late": (5, 8, 1)}
SETTINGS = (
    "method.name=fedavg+ft", "data.fit=true", "data.shape=[8,8,3]", "round.rounds=2", "round.min_clients=3", "round.quorum=3",
    "round.replace_after_s=-1", "round.adapt_rounds=1", "train.local_epochs=10", "train.lr=0.1", "server.threads=1",
)  # fmt: skip
FLAGS = [word for setting in SETTINGS for word in ("--set", setting)]


def shard(folder: Path, shape: tuple[int, ...], seed: int) -> Path:
    """Write images whose upper half is bright in one of two classes."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, 44)
    x = draw.integers(0, 90, (44, *shape))
    x[y == 1, : shape[0] // 2] += 90
    folder.mkdir()
    for part, rows in (("train", slice(32)), ("test", slice(32, None))):
        np.savez(folder / f"{part}.npz", x=x[rows].astype(np.uint8), y=y[rows])
    return folder


def whole_run(federation: Federation, sites: dict[str, Path], killed: bool) -> tuple[dict[str, bytes], str]:
    """Run three founders and a newcomer; return the tensors of all finished models, and what the grey device has said."""
    server = federation.server(*FLAGS, fault=IN_AGGREGATION if killed else "")
    devices = {name: federation.device(sites[name]) for name in ("colour", "large")}
    devices["grey"] = federation.device(sites["grey"], fault=IN_TRAINING if killed else "")
    if killed:
        devices["grey"].await_fault()
        devices["grey"].kill()
        devices["grey"] = federation.device(sites["grey"])
        server.await_fault()
        server.kill()
        server = federation.server()
    assert [device.code() for device in devices.values()] == [0] * 3, [device.text for device in devices.values()]
    federation.await_status(lambda status: status["state"] == "done")
    late = federation.device(sites["late"])
    assert late.code() == 0 and "images of 5 x 8 are resized to 8 x 8" in late.text
    assert "left out: alpha" in devices["large"].text and "resized" not in devices["colour"].text
    federation.await_status(lambda status: status["state"] == "done")
    assert server.stop() == 0
    return {name: (federation.model(sites[name]) / "model.safetensors").read_bytes() for name in sites}, devices["grey"].text


def test_kills_change_no_bit_and_finished_models_take_any_size(federation_at: FederationAt, tmp_path: Path) -> None:
    sites = {name: shard(tmp_path / name, shape, seed) for seed, (name, shape) in enumerate(FORMS.items())}
    calm, killed = federation_at("calm"), federation_at("killed")
    members = {name: sites[name] for name in ("colour", "grey", "large")}
    expected, said = whole_run(calm, sites, killed=False)
    assert whole_run(killed, sites, killed=True)[0] == expected
    assert "images of 12 x 10 are resized to 8 x 8; grey stands for red and green and blue" in said
    model, test = Model.load(calm.model(sites["grey"])), np.load(sites["grey"] / "test.npz")
    x, y = test["x"], test["y"]
    assert model.info.model.channels == ["red", "green", "blue"] and (np.array(model.predict(x)) == y).mean() > 0.9
    assert model.predict(np.repeat(x, 3, axis=3)) == model.predict(x[..., 0]) == model.predict(x)
    where, out = ("--home", str(calm.model(sites["grey"]).parent)), tmp_path / "labels.csv"
    calm.command("fedclient", "predict", "--data", str(sites["large"] / "test.npz"), "--out", str(out), *where)
    assert len(out.read_text().splitlines()) == 13
    told = calm.command("fedclient", "evaluate", "--data", str(sites["grey"]), "--json").stdout
    assert json.loads(told)["accuracy"] == pytest.approx(calm.client("grey")["accuracy_kept"])
    checked = calm.command("fedclient", "doctor", *(f"--data={sites[name]}" for name in members), code=None).stdout
    assert "It takes part where the plan lets samples be fitted (data.fit)" in checked
    settings = load_settings(None, (*SETTINGS, "round.adapt_rounds=0"), {})
    result = attune.simulate(members, settings=settings, executor="processes", progress=False)  # type: ignore[call-overload]
    result.save(tmp_path / "simulated")
    for name in members:
        assert (tmp_path / "simulated" / "models" / name / "model.safetensors").read_bytes() == expected[name]
