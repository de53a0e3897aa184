"""Reader of images: a folder with a folder for each class, or encoded files in a table.

N samples, H height, W width, C channels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.files import MAX_BINARY_BYTES
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.source import DataSource

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_PARTS = ("train", "test")


def recognises(path: Path) -> bool:
    """Return whether `path` is a folder of folders with images, perhaps below `train` and `test`."""
    if not path.is_dir():
        return False
    below = path / "train" if (path / "train").is_dir() else path
    return any(_images(folder) for folder in _folders(below))


def read(path: Path, options: MakeOptions) -> DataSource:
    """Read all images. The class of an image is the name of its folder.

    Raises:
        ShardError: A file is not a readable image, or sizes differ and `options.size` is not given.
        SettingError: Pillow is not installed.
    """
    if (path / "train").is_dir():
        train = _part(path / "train", options)
        test = _part(path / "test", options) if (path / "test").is_dir() else None
    else:
        train, test = _part(path, options), None
    return DataSource(train, test, Meta(kind="images", channels="last"))


def decode_images(files: Sequence[Path | bytes], where: Sequence[str], options: MakeOptions) -> Array:
    """Return encoded images as an array, (N, H, W, C) uint8.

    Args:
        files: Paths or contents of image files.
        where: Name of each image in messages.
        options: Size and channels of the images.

    Raises:
        ShardError: A file is not a readable image, or sizes differ and `options.size` is not given.
        SettingError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise SettingError("images are read by Pillow: pip install 'attune-fl[images]'") from None
    images: list[Array] = []
    for file, name in zip(files, where, strict=True):
        try:
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                plain = image.convert("L" if options.grey else "RGB")
                if options.size is not None:
                    plain = plain.resize((options.size[1], options.size[0]))
                images.append(np.asarray(plain, dtype=np.uint8).reshape(plain.height, plain.width, -1))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ShardError(f"{name} is no image that can be read: {error}") from None
        if images[-1].shape != images[0].shape:
            raise ShardError(
                f"{name} has {images[-1].shape[0]} x {images[-1].shape[1]} pixels, but {where[0]} has {images[0].shape[0]} x "
                f"{images[0].shape[1]}: say --size, such as --size 32x32, and all get that size"
            )
        if len(images) * images[0].nbytes > MAX_BINARY_BYTES:
            raise ShardError(f"the images hold more than {MAX_BINARY_BYTES >> 30} GiB, the limit; choose a smaller --size")
    return np.stack(images)


def _part(path: Path, options: MakeOptions) -> tuple[Array, Array]:
    files = [(image, folder.name) for folder in _folders(path) for image in _images(folder)]
    if not files:
        raise ShardError(f"{path} holds no folder with images; each class needs a folder of its own, named like it")
    paths = [image for image, _ in files]
    return decode_images(paths, [str(image) for image in paths], options), np.array([name for _, name in files])


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror}") from None


def _images(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ShardError(f"cannot read {folder}: {error.strerror}") from None
