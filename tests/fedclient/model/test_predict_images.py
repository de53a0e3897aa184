"""Predictions for image files, folders of them, and tables that name them: each answer is that of the pixels themselves."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from attune.common.config import TrainSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.fedclient.cli import main
from attune.fedclient.model import artifact
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.model_info import ModelInfo

Image = pytest.importorskip("PIL.Image")
HEIGHT, WIDTH = 8, 6
NAMES = ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]


def model_in(home: Path, channels: int = 3, kind: Any = "images", columns: tuple[str, ...] = ()) -> Model:
    """Write a finished model with random weights into a home."""
    shape = (HEIGHT, WIDTH, channels) if kind == "images" else (len(columns),)
    spec, draw = default_spec(kind, shape, 3, 0, "mlr", {}), torch.Generator().manual_seed(3)
    info = ModelInfo("kiel", "f", "fedavg", {}, spec, ["x", "y", "z"], TrainSettings(), column_names=list(columns))
    tensors = {name: torch.randn(values.shape, generator=draw) for name, values in tensors_of(build(spec, 3)).items()}
    return Model.load(artifact.save(home / "model", info, {"personalized": tensors}))


def pictures(folder: Path, names: list[str] = NAMES, channels: int = 3, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    """Write random pictures, and return their pixels (N, H, W, C)."""
    pixels = np.random.default_rng(5).integers(0, 256, (len(names), *size, channels), dtype=np.uint8)
    for name, picture in zip(names, pixels, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.squeeze()).save(folder / name)
    return pixels


def predict(home: Path, *data: Path | str) -> Result:
    words = [word for path in data for word in ("--data", str(path))]
    return CliRunner().invoke(main, ["predict", *words, "--home", str(home), "--out", str(home / "labels.csv")])


def rows(home: Path) -> list[list[str]]:
    with (home / "labels.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_images_gets_a_label_and_its_name_for_each(tmp_path: Path, channels: int) -> None:
    model, pixels = model_in(tmp_path, channels), pictures(tmp_path / "photos", channels=channels)
    done = predict(tmp_path, tmp_path / "photos")
    assert done.exit_code == 0, done.output
    labels = model.predict(pixels)
    assert len(set(labels)) > 1, "else a constant would pass"
    assert rows(tmp_path) == [["index", "label", "file"], *([str(n), labels[n], NAMES[n]] for n in range(len(NAMES)))]


def test_one_file_several_files_and_a_pattern(tmp_path: Path) -> None:
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos")
    labels, photos = model.predict(pixels), tmp_path / "photos"
    for given, expected in (
        ([photos / "c.png"], [2]),
        ([photos / "c.png", photos / "a.png"], [2, 0]),
        ([photos / "[bd].png"], [1, 3]),
    ):
        done = predict(tmp_path, *given)
        assert done.exit_code == 0, done.output
        assert rows(tmp_path)[1:] == [[str(n), labels[at], str(photos / NAMES[at])] for n, at in enumerate(expected)]


def test_nested_folders_are_read_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    names = ["monday/1.png", "monday/ward 2/2.PNG", "tuesday/3.bmp"]
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos", names)
    pictures(tmp_path / "photos", [".thumbnails/4.png", "__MACOSX/5.png"])
    (tmp_path / "photos" / "notes.txt").write_text("hello")
    done = predict(tmp_path, tmp_path / "photos")
    assert done.exit_code == 0, done.output
    assert [row[1:] for row in rows(tmp_path)[1:]] == [list(pair) for pair in zip(model.predict(pixels), names, strict=True)]
    assert "left out: 3 files" in done.output and "notes.txt" in done.output


def test_images_of_another_size_are_resized_and_that_is_said(tmp_path: Path) -> None:
    model_in(tmp_path)
    pictures(tmp_path / "photos", ["a.png"], size=(20, 20))
    pictures(tmp_path / "photos", ["b.png"])
    done = predict(tmp_path, tmp_path / "photos")
    assert done.exit_code == 0 and len(rows(tmp_path)) == 3
    assert "1 of 2 images" in done.output and "8 x 6" in done.output and "a.png (20 x 20)" in done.output


def test_grey_images_for_a_colour_model_and_the_reverse(tmp_path: Path) -> None:
    colour, grey_pixels = model_in(tmp_path / "colour"), pictures(tmp_path / "grey", channels=1)
    assert predict(tmp_path / "colour", tmp_path / "grey").exit_code == 0
    assert [row[1] for row in rows(tmp_path / "colour")[1:]] == colour.predict(np.repeat(grey_pixels, 3, axis=3))
    grey, pixels = model_in(tmp_path / "plain", 1), pictures(tmp_path / "photos")
    assert predict(tmp_path / "plain", tmp_path / "photos").exit_code == 0
    as_grey = np.stack([np.asarray(Image.fromarray(picture).convert("L")) for picture in pixels])[..., None]
    assert [row[1] for row in rows(tmp_path / "plain")[1:]] == grey.predict(as_grey)


def test_a_table_that_names_image_files(tmp_path: Path) -> None:
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos")
    (tmp_path / "list.csv").write_text("patient,photo\n7,photos/b.png\n9,photos/a.png\n")
    done = predict(tmp_path, tmp_path / "list.csv")
    assert done.exit_code == 0, done.output
    labels = model.predict(pixels)
    assert rows(tmp_path)[1:] == [["0", labels[1], "photos/b.png"], ["1", labels[0], "photos/a.png"]]


def test_what_cannot_be_read_is_named_all_at_once(tmp_path: Path) -> None:
    model_in(tmp_path)
    pictures(tmp_path / "photos")
    (tmp_path / "photos" / "cut.png").write_bytes((tmp_path / "photos" / "a.png").read_bytes()[:60])
    (tmp_path / "photos" / "text.jpg").write_text("no image")
    done = predict(tmp_path, tmp_path / "photos")
    assert done.exit_code == 6
    assert "cut.png" in done.output and "text.jpg" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize("given", ["nothing", "empty", "list.csv", "a.txt"])
def test_what_holds_no_images_is_refused_with_the_way_out(tmp_path: Path, given: str) -> None:
    model_in(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a.txt").write_text("hello")
    done = predict(tmp_path, tmp_path / given)
    assert done.exit_code == 6 and "image" in done.output and given in done.output, done.output


def test_a_model_of_columns_takes_no_images(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("age", "dose"))
    pictures(tmp_path / "photos")
    for path in (tmp_path / "photos", tmp_path / "photos" / "a.png"):
        done = predict(tmp_path, path)
        assert done.exit_code == 9 and "tabular" in done.output and "image" in done.output, done.output


def test_a_model_with_four_channels_says_that_image_files_have_three(tmp_path: Path) -> None:
    model_in(tmp_path, channels=4)
    pictures(tmp_path / "photos")
    done = predict(tmp_path, tmp_path / "photos")
    assert done.exit_code == 9 and "4 channels" in done.output and ".npz" in done.output, done.output


def test_all_columns_that_a_table_lacks_are_named(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("age", "dose", "weight"))
    (tmp_path / "new.csv").write_text("Age,dose\n1,2\n")
    done = predict(tmp_path, tmp_path / "new.csv")
    assert done.exit_code == 2 and "'age'" in done.output and "'weight'" in done.output and "'Age'" in done.output, done.output
