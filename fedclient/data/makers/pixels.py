"""Pixels of image files as viewers show them: turned upright, on a white ground, without loss of depth.

N samples, H height, W width, C channels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array
from attune.fedclient.data.makers.make_options import MakeOptions

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = "png apng jpg jpeg jpe jfif jif jp2 j2k jpx bmp dib gif webp avif tif tiff ppm pgm pbm pnm pfm tga"
SUFFIXES = frozenset(f".{name}" for name in _SUFFIXES.split())
OPAQUE = 255
DEEPEST = 65535  # largest value of an image of 16 bits
DARK = 0.25  # images whose largest value is below this get a note
_SHOWN = 8
_ORIENTATION = 0x0112
# Exceptions of Pillow for damaged files
_DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    struct.error,
)
_FACTS = {
    "deep": "{} have more than 8 bits: their values become 0 to 1 (65535 becomes 1)",
    "colours": "{} have colours of more than 8 bits, of which the first 8 are taken",
    "turned": "{} were turned upright, as their EXIF orientation says",
    "transparent": "{} have transparent parts, which become white",
    "frames": "{} hold several pictures, of which only the first is taken",
}


@dataclass(frozen=True)
class DecodedImages:
    """Pixels of several images.

    Attributes:
        x: (N, H, W, C) uint8, or float32 from 0 to 1 if an image has more than 8 bits.
        sizes: (H, W) of each image in its file, upright.
        notes: What the user should know about the reading.
    """

    x: Array
    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Picture:
    pixels: Array  # (H, W, C) uint8, or float32 from 0 to 1
    size: tuple[int, int]
    facts: tuple[str, ...]  # keys of _FACTS


def decode_images(files: Sequence[Path | bytes], where: Sequence[str], options: MakeOptions) -> DecodedImages:
    """Return the pixels of encoded images.

    An image is turned as its EXIF orientation says. Transparent parts become white. Images of more than 8 bits become floats
    from 0 to 1, so that 65535 is 1, as 255 is for the others.

    Args:
        files: Paths or contents of image files.
        where: Name of each image in messages.
        options: Size and channels of the images.

    Raises:
        ShardError: Files are not readable images (all are named), values have no known scale, or sizes differ and
            `options.size` is not given.
        SettingError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise SettingError("images are read by Pillow: pip install 'attune-fl[images]'") from None
    pictures: list[_Picture] = []
    wrong: list[str] = []
    for file, name in zip(files, where, strict=True):
        try:
            picture = _picture(file, name, options)
        except ShardError as error:
            wrong.append(str(error))
            continue
        pictures.append(picture)
        if not wrong:
            _check_size(picture, name, pictures[0], where[0])
            if len(files) * pictures[0].pixels.nbytes > MAX_BINARY_BYTES:
                raise ShardError(f"the images hold more than {MAX_BINARY_BYTES >> 30} GiB, the limit; choose a smaller --size")
    if wrong:
        more = f"\n{len(wrong) - _SHOWN} more images cannot be read" if len(wrong) > _SHOWN else ""
        raise ShardError("\n".join(wrong[:_SHOWN]) + more)
    x = same_depth([picture.pixels for picture in pictures])
    return DecodedImages(np.stack(x), tuple(picture.size for picture in pictures), _notes(pictures, x))


def same_depth(parts: Sequence[Array]) -> list[Array]:
    """Return arrays of pixels with one type: float32 from 0 to 1 if one of them is so, else uint8."""
    if all(part.dtype == np.uint8 for part in parts):
        return list(parts)
    return [part.astype(np.float32) / np.float32(255) if part.dtype == np.uint8 else part for part in parts]


def _check_size(picture: _Picture, name: str, first: _Picture, name_of_first: str) -> None:
    if picture.pixels.shape != first.pixels.shape:
        raise ShardError(
            f"{name} has {picture.pixels.shape[0]} x {picture.pixels.shape[1]} pixels, but {name_of_first} has "
            f"{first.pixels.shape[0]} x {first.pixels.shape[1]}: say --size, such as --size 32x32, and all get that size"
        )


def _notes(pictures: Sequence[_Picture], x: Sequence[Array]) -> tuple[str, ...]:
    notes = []
    for fact, text in _FACTS.items():
        if count := sum(fact in picture.facts for picture in pictures):
            notes.append(text.format(f"{count} of {len(pictures)} images"))
    for kind, chosen in (("images with more than 8 bits", True), ("images of 8 bits", False)):
        parts = [part for picture, part in zip(pictures, x, strict=True) if ("deep" in picture.facts) == chosen]
        largest = max((float(part.max()) / (OPAQUE if part.dtype == np.uint8 else 1) for part in parts), default=1)
        if largest < DARK and (chosen or len(parts) > 1):
            notes.append(
                f"the largest value of {kind} is {largest:.3g} of 1, so all of them are dark; multiply their values by the "
                "same number at all sites"
            )
    return tuple(notes)


def _picture(file: Path | bytes, name: str, options: MakeOptions) -> _Picture:
    """Read one image.

    Raises:
        ShardError: The file is not a readable image, or its values have no known scale.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        # From memory: Pillow 13 maps the file of a turned grey TIFF, and mixes its rows up.
        with Image.open(io.BytesIO(file if isinstance(file, bytes) else file.read_bytes())) as image:
            facts = ["frames"] if getattr(image, "n_frames", 1) > 1 else []
            image.seek(0)
            facts += ["colours"] if _has_deep_colours(image) else []
            image.load()
            upright = _upright(image)
            facts += ["turned"] if upright is not image else []
            size = (upright.height, upright.width)
            if upright.mode == "F" or upright.mode.startswith("I"):
                return _Picture(_deep(upright, options), size, ("deep", *facts))
            plain, transparent = _on_white(upright)
            facts += ["transparent"] if transparent else []
            plain = plain.convert("L" if options.grey else "RGB")
            if options.size is not None:
                plain = plain.resize((options.size[1], options.size[0]))
            return _Picture(np.asarray(plain, dtype=np.uint8).reshape(plain.height, plain.width, -1), size, tuple(facts))
    except ShardError as error:
        raise ShardError(f"{name} {error}") from None
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        empty = not len(file) if isinstance(file, bytes) else file.is_file() and not file.stat().st_size
        why = getattr(error, "strerror", None) or ("unknown form" if isinstance(error, UnidentifiedImageError) else error)
        raise ShardError(f"{name} is no image that can be read: {'the file is empty' if empty else why}") from None
    except MemoryError:
        raise ShardError(f"{name} does not fit into memory") from None


def _has_deep_colours(image: Image) -> bool:
    """Return whether an image in colours, which is not loaded yet, has more than 8 bits for each of them."""
    forms = [tile.args for tile in getattr(image, "tile", ())]
    deep = any(";16" in str(form) or (image.format == "PPM" and isinstance(form, tuple) and form[1] > OPAQUE) for form in forms)
    return deep and len(image.getbands()) > 1


def _upright(image: Image) -> Image:
    """Return the image turned as its EXIF orientation says, or the same object if it says nothing."""
    from PIL import ImageOps

    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except _DAMAGED:
        return image  # viewers, too, show an image with damaged metadata as it is
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _on_white(image: Image) -> tuple[Image, bool]:
    """Return (the image without transparency, whether a part of it was transparent)."""
    from PIL import Image as Images

    if not image.has_transparency_data:
        return image, False
    layers = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    least = layers.getchannel("A").getextrema()[0]
    if least == OPAQUE:
        return image, False
    return Images.alpha_composite(Images.new("RGBA", layers.size, "white"), layers), True


def _deep(image: Image, options: MakeOptions) -> Array:
    """Return an image of more than 8 bits, which has one channel, as (H, W, C) float32 from 0 to 1.

    Raises:
        ShardError: Values are outside the scale. The message lacks the image's name.
    """
    from PIL import Image as Images

    values = np.asarray(image).astype(np.float64)
    largest = 1 if image.mode == "F" else DEEPEST
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > largest:
        kind = "an image of floats" if image.mode == "F" else "an image of 32 bits"
        raise ShardError(
            f"is {kind} with values from {values.min():g} to {values.max():g}; 0 to {largest} is needed: scale the images of "
            "all sites in the same way"
        )
    grey = Images.fromarray((values / largest).astype(np.float32))
    if options.size is not None:
        grey = grey.resize((options.size[1], options.size[0]))
    return np.repeat(np.asarray(grey).clip(0, 1)[..., np.newaxis], 1 if options.grey else 3, axis=2)
