"""Reading of data files and of named arrays in .npz files, within limits: a file that is too large is refused, not read.

Every fault of a file becomes a ShardError that names the file.
"""

from __future__ import annotations

import gzip
import math
import numbers
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.durable import replaced
from attune.common.errors import ShardError
from attune.common.text import listed

MAX_BINARY_BYTES = 8 << 30  # of one file, unpacked
MAX_TEXT_BYTES = 1 << 30
MAX_FILES = 10_000
_GIB = 1 << 30
_MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, without a `.gz` at the end."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz.

    Raises:
        ShardError: The file cannot be read, or holds more than `limit` bytes.
    """
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                data = file.read(limit + 1)
        else:
            with path.open("rb") as plain:
                data = plain.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise ShardError(f"{path} does not fit into memory; cut it into smaller files") from None
    if len(data) > limit:
        raise ShardError(f"{path} holds more than {limit / _GIB:g} GiB, the limit; cut it into smaller files")
    return data


def read_text(path: Path, limit: int | None = None, strict: bool = False) -> str:
    """Return the content of a text file, with line feeds alone as line ends.

    The file is UTF-8, or UTF-16 or UTF-32 with its mark. Otherwise it is refused if `strict`, and else read as Latin-1.

    Raises:
        ShardError: The file cannot be read, is in another encoding, or holds more than `limit` bytes (default: MAX_TEXT_BYTES).
    """
    data = read_bytes(path, MAX_TEXT_BYTES if limit is None else limit)
    marked = any(data.startswith(mark) for mark, _ in _MARKS)
    if strict and not marked and b"\0" in data:
        raise _not_utf_8(path, "it holds zero bytes, as UTF-16 without a mark does", _wide(data))
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8-sig")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if strict:
            raise _not_utf_8(path, f"byte {error.start + 1} is {data[error.start]:#04x}") from None
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _wide(data: bytes) -> str:
    """Return the name of the encoding of text with zero bytes. Line ends and delimiters show where the zeros stand."""
    places = [data[first::4].count(0) for first in range(4)]
    if min(places[:2]) * 2 > len(data) // 4:
        return "UTF-32BE"
    if min(places[2:]) * 2 > len(data) // 4:
        return "UTF-32LE"
    return "UTF-16BE" if places[0] + places[2] > places[1] + places[3] else "UTF-16LE"


def _not_utf_8(path: Path, why: str, encoding: str = "WINDOWS-1252") -> ShardError:
    return ShardError(
        f"{path} is not in the encoding UTF-8 ({why}), so letters would be read wrongly: save it as UTF-8 (spreadsheet "
        f"programs call it 'CSV UTF-8'), or convert it from its encoding, such as {encoding}: iconv -f {encoding} -t UTF-8 "
        f"{path.name} > utf8-{path.name}"
    )


def files_in(folder: Path) -> list[Path]:
    """Return the files that lie directly in a folder, sorted by name.

    Raises:
        ShardError: The folder cannot be read, or holds more than MAX_FILES files.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ShardError(f"cannot read {folder}: {error.strerror}") from None
    if len(files) > MAX_FILES:
        raise ShardError(f"{folder} holds {len(files)} files, more than {MAX_FILES}; point --dataset at one data set")
    return files


Array = npt.NDArray[Any]
MOST_ARRAYS = 1000  # of an .npz file; simulated clients have a few each


def plain_array(values: Any, where: str, classes: bool = False) -> Array:
    """Return what a user gave, such as a list, a tensor or a frame, as an array of numbers, text or booleans.

    Tensors may take gradients, be of bfloat16, sparse or quantized. None becomes NaN.

    Args:
        values: Values from the user.
        where: Name of the array in messages.
        classes: These are labels. Objects and bytes stay as they are: fedclient.data.labels reads them.

    Raises:
        ShardError: Values are neither numbers nor text, or lists have different lengths.
    """
    if hasattr(values, "get_mask"):
        raise ShardError(f"{where} is a masked tensor: leave samples with hidden values out, and give get_data() of the others")
    if isinstance(values, list | tuple) and any(map(_is_tensor, values)):
        values = [plain_array(value, where, classes) for value in values]
    try:
        array = np.asarray(_of_tensor(values) if _is_tensor(values) else values)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ShardError(f"{where} cannot be made an array: {error}; give samples of one shape") from None
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.name != f"void{8 * array.itemsize}":
        array = array.astype(np.float32)  # bfloat16 and smaller floats of other packages
    if classes and array.dtype.kind in "biufUSTO":
        return array
    if array.dtype.kind == "O":
        array = _of_objects(array, where)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "replace")
    if array.dtype.kind == "T":
        array = array.astype(str)
    if array.dtype.kind not in "biufU":
        remedy = {"c": "give real and imaginary parts as two features", "M": "give dates as numbers"}
        raise ShardError(f"{where} is of type {array.dtype}; {remedy.get(array.dtype.kind, 'give numbers or text')}")
    return array


def _is_tensor(values: Any) -> bool:
    return hasattr(values, "detach") and hasattr(values, "cpu")


def _of_tensor(tensor: Any) -> Array:
    import torch

    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return np.asarray(tensor.resolve_conj().resolve_neg().numpy())


def _of_objects(array: Array, where: str) -> Array:
    """Return an array of Python objects with the type that its values have.

    Raises:
        ShardError: Values are of several kinds, or neither numbers nor text.
    """
    values = [value.item() if isinstance(value, np.generic) else value for value in array.ravel().tolist()]
    present = [value for value in values if not _is_missing(value)]
    numeric = all(isinstance(value, numbers.Real | Decimal) for value in present)
    if all(isinstance(value, str) for value in present) and present:
        if len(present) < len(values):
            raise ShardError(f"{where} lacks {len(values) - len(present)} of {len(values)} values; leave those samples out")
        return array.astype(str)
    if not numeric:
        kinds = sorted({type(value).__name__ for value in present})
        raise ShardError(f"{where} holds values of the types {', '.join(kinds)}; give numbers alone or text alone")
    if len(present) == len(values) and all(isinstance(value, bool) for value in values):
        return array.astype(bool)
    if len(present) == len(values) and all(isinstance(value, int) for value in values):
        try:
            return np.array(values, dtype=np.int64).reshape(array.shape)
        except OverflowError:
            raise ShardError(f"{where} holds whole numbers that do not fit into 64 bits; use text") from None
    floats = [math.nan if _is_missing(value) else float(value) for value in values]
    return np.array(floats, dtype=np.float64).reshape(array.shape)


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file as a whole. An error leaves the name as it was.

    Raises:
        DiskFull: There is no space; other OSErrors pass.
    """
    with replaced(path, durable=False) as beside, beside.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the first name for an option


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in the .npz file at `path`, sorted.

    Raises:
        ShardError: The file cannot be read.
    """
    return sorted(_open(path, lambda archive: {name: name for name in archive.files}))


def read_arrays(path: Path, names: Sequence[str]) -> list[Array]:
    """Return the arrays with these names, in this order, without reading the others.

    Raises:
        ShardError: The file cannot be read, or lacks one of the names.
    """

    def read(archive: Any) -> dict[str, Array]:
        missing = [name for name in names if name not in archive.files]
        if missing:
            held = listed(archive.files) or "nothing"
            raise ShardError(f"{path} lacks {' and '.join(missing)}; it holds {held}, and {', '.join(names)} are needed")
        return {name: _plain(archive, name, path) for name in names}

    arrays = _open(path, read)
    return [arrays[name] for name in names]


def _plain(archive: Any, name: str, path: Path) -> Array:
    try:
        return np.asarray(archive[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        message = f"{name} in {path} holds Python objects, which are never read; save it as numbers, or labels as text"
        raise ShardError(message) from None


def _open(path: Path, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ShardError(f"{path} is not an .npz file; write it with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            if len(archive.files) > MOST_ARRAYS:
                raise ShardError(f"{path} holds {len(archive.files)} arrays, more than {MOST_ARRAYS}: is it a data set?")
            return read(archive)
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror or error}") from None
    except MemoryError:
        raise ShardError(f"{path} does not fit into memory; cut it into smaller shards") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ShardError(f"{path} is damaged or not an .npz file of plain arrays: {error}") from None
