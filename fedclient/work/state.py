"""What a device keeps between orders: one folder per carried-out order, made by a single rename.

The rename commits the private state and the update to send together, so a device that dies at any moment either has done
the order or has not. The folder with the highest sequence number is the current state.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from attune.common.durable import PUBLIC, committed_folder, sweep, write_file
from attune.common.errors import HomeMismatch, WireError
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedclient.messages import Part, Result

Tensors = dict[str, Tensor]
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_STATE = "state"


def check_order_id(order_id: str) -> str:
    """`order_id` if it can name a folder. Errors: WireError."""
    if not _ID.fullmatch(order_id):
        raise WireError(f"the server sent an order with the impossible id {order_id[:80]!r}")
    return order_id


class Orders:
    """The folders under `path`. One process at a time (the home's lock ensures it)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self) -> Result | None:
        """The current state's result. Sweeps up what a crash left behind. Errors: HomeMismatch if it is damaged."""
        sweep(self.path)
        found = [self._result(folder) for folder in sorted(self.path.glob("*/"))]
        newest = max(found, key=lambda result: result.sequence, default=None)
        for folder in self.path.glob("*/"):
            if newest is None or folder.name != newest.order_id:
                shutil.rmtree(folder)
        return newest

    def state(self, result: Result) -> Tensors:
        """All tensors of the model after this order."""
        return read_tensors(self.path / result.order_id / f"{_STATE}.safetensors")

    def beside(self, result: Result, what: str) -> Tensors | None:
        """The tensors committed under this name beside the model's, or None."""
        path = self.path / result.order_id / f"{what}.safetensors"
        return read_tensors(path) if path.exists() else None

    def blob(self, order_id: str, part: str) -> Path:
        """The file with the bytes of one part of the update."""
        return self.path / order_id / f"{part}.safetensors"

    def commit(
        self,
        result: Result,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> Result:
        """Makes everything durable, then deletes older orders; returns `result` with its parts. Errors: DiskFull.

        beside: further sets of tensors that stay on the device, under names that no part has.
        """
        final = self.path / check_order_id(result.order_id)
        blobs = []
        with committed_folder(final) as folder:
            for name, tensors in parts.items():
                blob = write_tensors(folder / f"{name}.safetensors", tensors, durable=True)
                blobs.append(Part(name, blob.digest, blob.size, result.versions.get(name, 0)))
            _write_or_link(
                folder / f"{_STATE}.safetensors", state, [(folder / f"{name}.safetensors", parts[name]) for name in parts]
            )
            for what, tensors in beside.items():
                write_tensors(folder / f"{what}.safetensors", tensors, durable=True)
            result = msgspec.structs.replace(result, parts=tuple(blobs), bytes_up=sum(blob.size for blob in blobs))
            write_file(folder / "update.json", msgspec.json.format(msgspec.json.encode(result)), PUBLIC)
        for other in self.path.glob("*/"):
            if other != final:
                shutil.rmtree(other, ignore_errors=True)
        return result

    def _result(self, folder: Path) -> Result:
        path = folder / "update.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Result)
        except (OSError, msgspec.DecodeError) as error:
            raise HomeMismatch(
                f"{path} is damaged ({error}); restore {self.path} from a backup, or delete it to lose the private state"
            ) from None


def _write_or_link(path: Path, tensors: Mapping[str, Tensor], written: list[tuple[Path, Mapping[str, Tensor]]]) -> None:
    """Writes `tensors`, unless one of the `written` files holds exactly these: a second name for it halves what is written."""
    for other, held in written:
        if held.keys() == tensors.keys() and all(held[name] is tensors[name] for name in held):
            # Not every file system has second names.
            with contextlib.suppress(OSError):
                os.link(other, path)
                return
    write_tensors(path, tensors, durable=True)
