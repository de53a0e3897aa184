"""Segmentation over mutual TLS: from images with masks to a verdict, masks of new images, and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attune.fedclient.data.shard import load_shard
from benchmarks.shapes import site
from tests.e2e.harness import FederationAt

SIDE = 8


def shapes(folder: Path, number: int, pixels: bool = True) -> Path:
    x, y = site(number, 44, side=SIDE)
    folder.mkdir()
    y = y if pixels else y.max(axis=(1, 2))
    np.savez(folder / "train.npz", x=x[:30], y=y[:30])
    np.savez(folder / "test.npz", x=x[30:], y=y[30:])
    return folder


def test_masks_from_the_shard_to_the_predictions(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("masks")
    first, second, third = (shapes(tmp_path / name, number) for number, name in enumerate(("kiel", "ulm", "jena")))
    flags = ("--exit-when-done", "--min-clients", "3", "--rounds", "2", "--set", "model.width=2", "--set", "model.depth=1")
    server = federation.server("--method", "fedper", *flags, "--set", "train.loss=dice", "--set", "train.lr=0.1")
    devices = [federation.device(folder, "--baseline", "alone") for folder in (first, second)]
    federation.await_status(lambda status: len(status["clients"]) == 2)
    odd = federation.device(shapes(tmp_path / "odd", 9, pixels=False))
    server.wait_for("enrolled odd|odd")
    devices.append(federation.device(third, "--baseline", "alone"))
    assert [process.code() for process in (*devices, server)] == [0, 0, 0, 0], server.text
    assert odd.code() != 0 and "a label for every image; this federation expects one for every pixel" in odd.text
    assert "models are scored by Dice: every pixel has a label" in devices[0].text
    assert "The same network, trained here alone, takes their place" in devices[0].text and "Dice 0." in devices[0].text

    status = federation.status()
    kiel = next(client for client in status["clients"] if client["name"] == "kiel")
    assert status["metric"] == "Dice" and kiel["accuracy_local"] is not None and kiel["accuracy_alone"] is None
    assert kiel["verdict"] in ("better", "unclear", "worse") and kiel["test_samples"] == 14
    offline = json.loads(federation.command("fedclient", "evaluate", "--data", str(first), "--json").stdout)
    assert offline["accuracy"] == pytest.approx(kiel["accuracy_kept"]) and offline["metric"] == "Dice"
    assert 0 <= offline["scores"]["IoU"] <= offline["accuracy"]

    where = ("--home", str(federation.model(first).parent))
    for number, image in enumerate((255 * load_shard(first).test_x[:3, :, :, 0].clip(0, 1)).astype(np.uint8)):
        Image.fromarray(image).save(tmp_path / f"new{number}.png")
    out = tmp_path / "masks.npz"
    words = ("predict", "--data", str(tmp_path / "new*.png"), "--out", str(out), "--probabilities", *where)
    assert "3 label images in" in federation.command("fedclient", *words).stdout
    with np.load(out) as masks:
        assert masks["y"].shape == (3, SIDE, SIDE) and Path(masks["names"][0]).name == "new0.png"
        assert np.array_equal(masks["probabilities"].argmax(-1), masks["y"])
    words = ("predict", "--data", str(first / "test.npz"), "--out", str(tmp_path / "masks.csv"), *where)
    assert "is written to an .npz file" in federation.command("fedclient", *words, code=2).stderr
    pictures = federation.command("fedclient", "plot", "--data", str(first), "--out", str(tmp_path / "pictures"), *where)
    assert "areas.png" in pictures.stdout and "Dice" in (tmp_path / "pictures" / "index.html").read_text()
