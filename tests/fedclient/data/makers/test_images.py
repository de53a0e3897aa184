"""Images as people have them: which files of a folder are read, and that pixels are those that a viewer shows."""

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.errors import ShardError
from attune.fedclient.cli import main
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.makers.pixels import decode_images
from attune.fedclient.data.shard import Shard
from attune.fedclient.read_options import PLAIN

Image = pytest.importorskip("PIL.Image")
ORIENTATION = 0x0112


def photo(path: Path, shade: int = 100, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 6), shade, np.uint8)).save(path, **options)
    return path


def photos(root: Path, count: int = 24, inner: str = "") -> None:
    """Write so many images of the classes 0 and 1."""
    for at in range(count):
        photo(root / str(at % 2) / inner / f"{at:02d}.png", 50 + 100 * (at % 2) + at)


def made(root: Path, **options: Any) -> Shard:
    return make(root, MakeOptions(PLAIN, **options), root.with_name(root.name + "-shard"))


def count(shard: Shard) -> int:
    return len(shard.train_x) + len(shard.test_x)


def values(path: Path, grey: bool = True, size: tuple[int, int] | None = None) -> np.ndarray:
    return decode_images([path], [path.name], MakeOptions(PLAIN, grey=grey, size=size)).x[0]


# --- which files


@pytest.mark.parametrize("folder", [".ipynb_checkpoints", "__MACOSX", ".thumbnails/0", "@eaDir"])
def test_hidden_folders_are_no_classes(tmp_path: Path, folder: str) -> None:
    photos(tmp_path / "in")
    photo(tmp_path / "in" / folder / "00.png")
    shard = made(tmp_path / "in")
    assert shard.labels == ["0", "1"] and count(shard) == 24
    assert any("left out: 1 hidden files" in note for note in shard.warnings)


@pytest.mark.parametrize("name", ["._01.png", ".DS_Store", "Thumbs.db", "desktop.ini", ".hidden.jpg"])
def test_hidden_files_are_left_out_and_said(tmp_path: Path, name: str) -> None:
    photos(tmp_path / "in")
    (tmp_path / "in" / "1" / name).write_bytes(b"\0\5\x16\7" + bytes(100))
    shard = made(tmp_path / "in")
    assert count(shard) == 24 and any(f"hidden files (1/{name})" in note for note in shard.warnings)


def test_images_in_deeper_folders_belong_to_the_class(tmp_path: Path) -> None:
    photos(tmp_path / "in")
    photo(tmp_path / "in" / "0" / "patient 7" / "left" / "a.png")
    photo(tmp_path / "in" / "1" / "patient 8" / "b.png")
    shard = made(tmp_path / "in")
    assert count(shard) == 26 and shard.labels == ["0", "1"]
    assert any("(0/patient 7/left, 1/patient 8)" in note for note in shard.warnings)


@pytest.mark.parametrize("folders", [("photos/cat", "photos/dog"), ("kiel/cat", "kiel/dog", "ulm/cat", "ulm/dog")])
def test_classes_that_lie_deeper_are_asked_for(tmp_path: Path, folders: tuple[str, ...]) -> None:
    for folder in folders:
        photo(tmp_path / "in" / folder / "a.png")
    with pytest.raises(ShardError, match=r"are the classes of .* or cat, dog\?.*Give a folder whose folders are the classes"):
        made(tmp_path / "in")


@pytest.mark.parametrize("suffix", ["jfif", "JPG", "jpe", "Png", "jp2", "TIFF", "bmp", "pbm", "webp", "tga"])
def test_suffixes_of_images(tmp_path: Path, suffix: str) -> None:
    photos(tmp_path / "in", 4)
    form = {"jfif": "jpeg", "jpe": "jpeg", "jp2": "jpeg2000", "pbm": "ppm", "jpg": "jpeg"}.get(suffix.lower(), suffix.lower())
    photo(tmp_path / "in" / "0" / f"more.{suffix}", format=form)
    assert count(made(tmp_path / "in")) == 5


def test_files_without_a_suffix_of_images_are_said(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    (tmp_path / "in" / "0" / "scan.HEIC").write_bytes(b"x")
    (tmp_path / "in" / "notes.txt").write_text("x")
    (tmp_path / "in" / "empty").mkdir()
    photo(tmp_path / "in" / "logo.png")
    note = next(note for note in made(tmp_path / "in").warnings if note.startswith("left out"))
    assert "2 files that have no suffix of images (.txt: 1, .heic: 1)" in note
    assert "1 images outside the folders of classes (logo.png)" in note and "folders without an image (empty)" in note


@pytest.mark.parametrize(("training", "testing"), [("train", "test"), ("Training", "TEST"), ("train", "testing")])
@pytest.mark.parametrize("word", ["val", "valid", "Validation", "dev"])
def test_a_part_for_validation_is_training(tmp_path: Path, training: str, testing: str, word: str) -> None:
    for part, number in ((training, 8), (word, 4), (testing, 2)):
        photos(tmp_path / "in" / part, number)
    photo(tmp_path / "in" / "extra" / "0" / "x.png")
    shard = made(tmp_path / "in")
    assert (len(shard.train_x), len(shard.test_x)) == (12, 2) and shard.labels == ["0", "1"]
    assert any(f"{word} counts as training" in note for note in shard.warnings)
    assert any("1 files beside the parts for training and testing (extra)" in note for note in shard.warnings)


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        for at in range(3):
            photo(tmp_path / "in" / name / f"{at}.png", 10 * at)
    assert made(tmp_path / "in").labels == ["bus", "train"]


def test_links_are_followed_and_end(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    photos(tmp_path / "elsewhere", 6)
    (tmp_path / "in" / "0" / "more").symlink_to(tmp_path / "elsewhere" / "0")
    (tmp_path / "in" / "1" / "around").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "1" / "one.png").symlink_to(tmp_path / "elsewhere" / "1" / "01.png")
    shard = made(tmp_path / "in")
    assert count(shard) == 4 + 3 + 1 and shard.labels == ["0", "1"]


def test_names_of_classes_are_composed(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    photo(tmp_path / "in" / "Mu\u0308nchen" / "a.png")
    photo(tmp_path / "in" / "M\u00fcnchen" / "b.png")
    assert made(tmp_path / "in").labels == ["0", "1", "M\u00fcnchen"]


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n and then nothing", b"text"])
def test_all_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes) -> None:
    photos(tmp_path / "in", 4)
    for name in ("a.png", "b.png"):
        (tmp_path / "in" / "0" / name).write_bytes(content)
    with pytest.raises(ShardError, match=r"0/a.png is no image that can be read.*\n.*0/b.png") as refused:
        made(tmp_path / "in")
    assert ("empty" in str(refused.value)) == (not content) and not (tmp_path / "in-shard").exists()


def test_a_truncated_photo_is_refused(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    path = tmp_path / "in" / "0" / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ShardError, match=r"cut.jpg is no image that can be read: .*truncated"):
        made(tmp_path / "in", size=(6, 6))


def test_the_command_says_what_was_left_out(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    (tmp_path / "in" / "0" / "scan.heic").write_bytes(b"x")
    done = CliRunner().invoke(main, ["shard", str(tmp_path / "in"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "left out: 1 files that have no suffix of images (.heic: 1)" in done.output


# --- pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_orientations_are_applied(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = np.zeros((4, 6, 3), np.uint8)
    upright[0, :3], upright[3, 5] = 255, 128  # differs in every turn
    turn = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        8: lambda x: np.rot90(x, -1),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"a.{suffix}"
    extra = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(np.ascontiguousarray(turn(upright))).save(path, exif=exif, **extra)
    assert np.array_equal(values(path, grey=False), upright)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_grey_images_of_16_bits_keep_their_values(tmp_path: Path, suffix: str, orientation: int) -> None:
    x = np.arange(600, 3400, 100, dtype=np.uint16).reshape(4, 7)
    exif, path = Image.Exif(), tmp_path / f"a.{suffix}"
    exif[ORIENTATION] = orientation
    Image.fromarray(x).save(path, exif=exif)
    turned = {1: x, 3: x[::-1, ::-1], 6: np.rot90(x, -1)}[orientation]
    found = decode_images([path], ["a"], MakeOptions(PLAIN))
    assert found.x.dtype == np.float32 and found.x.shape[-1] == 3
    assert np.allclose(found.x[0, ..., 1], turned / 65535, atol=1e-7)
    assert any("more than 8 bits" in note for note in found.notes) and any("dark" in note for note in found.notes)


def test_images_of_8_and_16_bits_have_one_scale(tmp_path: Path) -> None:
    deep, plain = tmp_path / "deep.png", tmp_path / "plain.png"
    Image.fromarray(np.full((2, 2), 257 * 100, np.uint16)).save(deep)
    Image.fromarray(np.full((2, 2), 100, np.uint8)).save(plain)
    x = decode_images([deep, plain], ["deep", "plain"], MakeOptions(PLAIN, grey=True)).x
    assert x.dtype == np.float32 and np.allclose(x, 100 / 255)


def test_float_images_of_0_to_1_are_taken_and_others_refused(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 16, dtype="f4").reshape(4, 4)
    Image.fromarray(x).save(tmp_path / "a.tif")
    assert np.allclose(values(tmp_path / "a.tif")[..., 0], x)
    for name, bad in (("b", 100 * x), ("c", x - 0.5), ("d", np.where(x > 0.5, np.nan, x).astype("f4"))):
        Image.fromarray(bad).save(tmp_path / f"{name}.tif")
        with pytest.raises(ShardError, match=rf"{name}.tif is an image of floats .*0 to 1 is needed"):
            values(tmp_path / f"{name}.tif")
    Image.fromarray((x * 1e6).astype("i4")).save(tmp_path / "e.tif")
    with pytest.raises(ShardError, match=r"e.tif is an image of 32 bits with values from 0 to 1e\+06; 0 to 65535"):
        values(tmp_path / "e.tif")


def test_16_bits_are_resized_within_their_scale(tmp_path: Path) -> None:
    x = np.zeros((8, 8), np.uint16)
    x[:, 4:] = 65535
    Image.fromarray(x).save(tmp_path / "a.png")
    found = values(tmp_path / "a.png", size=(5, 5))
    assert found.shape == (5, 5, 1) and found.min() == 0 and found.max() == 1


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "PA", "tRNS"])
@pytest.mark.parametrize("grey", [True, False])
def test_transparent_parts_become_white(tmp_path: Path, mode: str, grey: bool) -> None:
    layers = Image.new("RGBA", (4, 4), (0, 0, 0, 255))
    layers.paste((0, 0, 0, 0), (0, 0, 4, 2))
    path = tmp_path / ("a.tif" if mode == "PA" else "a.png")
    if mode == "tRNS":
        pixels = np.zeros((4, 4, 3), np.uint8)
        pixels[:2] = 9
        Image.fromarray(pixels).save(path, transparency=(9, 9, 9))
    elif mode == "P":
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([9, 9, 9, 0, 0, 0])
        palette.paste(0, (0, 0, 4, 2))
        palette.save(path, transparency=0)
    elif mode == "PA":
        (tmp_path / "a.png").unlink(missing_ok=True)
        path = tmp_path / "a.png"
        layers.quantize().convert("PA").convert("RGBA").save(path)
    else:
        layers.convert(mode).save(path)
    found = decode_images([path], ["a"], MakeOptions(PLAIN, grey=grey))
    assert (found.x[0, :2] == 255).all() and (found.x[0, 2:] == 0).all()
    assert any("transparent" in note for note in found.notes)


def test_an_opaque_alpha_changes_nothing(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 4), np.uint8)
    pixels[..., 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = decode_images([tmp_path / "a.png"], ["a"], MakeOptions(PLAIN))
    assert np.array_equal(found.x[0], pixels[..., :3]) and not found.notes


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "YCbCr", "L"])
def test_other_modes_show_what_they_are(tmp_path: Path, mode: str) -> None:
    dark_light = Image.new("RGB", (8, 8), "white")
    dark_light.paste("black", (0, 0, 8, 4))
    path = tmp_path / ("a.png" if mode in ("1", "P", "L") else "a.tif")
    dark_light.convert(mode).save(path)
    found = values(path, grey=False)
    assert found[:4].max() < 10 and found[4:].min() > 245


def test_of_several_pictures_the_first_is_taken_and_said(tmp_path: Path) -> None:
    frames = [Image.new("L", (4, 4), shade) for shade in (10, 200)]
    for name in ("a.gif", "a.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        found = decode_images([tmp_path / name], [name], MakeOptions(PLAIN, grey=True))
        assert (found.x == 10).all() and found.notes == (
            "1 of 1 images hold several pictures, of which only the first is taken",
        )


def test_images_that_are_all_equal_are_refused(tmp_path: Path) -> None:
    for at in range(8):
        photo(tmp_path / "in" / str(at % 2) / f"{at}.png", 7)
    with pytest.raises(ShardError, match=r"all 8 images of .* are equal"):
        made(tmp_path / "in")
    with pytest.raises(ShardError, match="all 8 images of kiel are equal"):
        shard_of("kiel", (np.full((8, 4, 4), 255, np.uint8), np.arange(8) % 2))


def test_no_warning_of_a_library_reaches_the_user(tmp_path: Path) -> None:
    photos(tmp_path / "in", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(tmp_path / "in")


def png_of_16_bits(path: Path, pixels: np.ndarray) -> None:
    """Write a PNG of 16 bits for each of its channels, which Pillow cannot."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@pytest.mark.parametrize(("form", "channels"), [("png", 3), ("png", 4), ("ppm", 3)])
def test_colours_of_16_bits_lose_bits_and_this_is_said(tmp_path: Path, form: str, channels: int) -> None:
    rng = np.random.default_rng(0)
    for at in range(8):
        path, pixels = tmp_path / "p" / str(at % 2) / f"{at}.{form}", rng.integers(0, 4096, (6, 6, channels))
        if form == "png":
            png_of_16_bits(path, pixels)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"P6\n6 6\n65535\n" + pixels.astype(">u2").tobytes())
    notes = " ".join(made(tmp_path / "p").warnings)
    assert "8 of 8 images have colours of more than 8 bits" in notes
    assert channels == 4 or "dark" in notes


def test_dark_images_of_8_bits_are_said(tmp_path: Path) -> None:
    for at in range(8):
        photo(tmp_path / "p" / str(at % 2) / f"{at}.png", at)
    assert any("the largest value" in note and "dark" in note for note in made(tmp_path / "p").warnings)
