"""State of a device between orders: one folder for each carried-out order, made by a single rename.

The rename commits the private state and the update to send together. So a device that dies at any moment has done the order
completely or not at all. The folder with the highest sequence number is the current state. A tensor that is both state and
handed in unchanged lies only in the file of its part. `update.json` has the digest of every file beside it, and of itself,
which are checked when they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from attune.common.durable import PUBLIC, committed_folder, discard_folder, sweep, write_file
from attune.common.errors import HomeMismatch, WireError
from attune.common.faults import fail_at
from attune.common.identity.names import has_letters_of_names
from attune.common.protocol import HAS_TORCH
from attune.common.text import from_json
from attune.common.wire.blobs import LocalFile, digest_in
from attune.common.wire.digest import check_of, file_name, from_file_name
from attune.fedclient.messages import OrderResult, Part
from attune.fedclient.work.orders import SECRET_BYTES

if TYPE_CHECKING or HAS_TORCH:
    from attune.common.wire.files import read_tensors, write_tensors
else:
    from attune.fedclient.light_blobs import read_tensors, write_tensors
if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
_LONGEST_ID = 128  # characters
_STATE = "state"
UPDATE, SECURE, SECRET = "update.json", "secure.json", "secret"


def check_order_id(order_id: str) -> str:
    """Return `order_id` if it can name a folder.

    Raises:
        WireError: The id has characters that a folder's name cannot have.
    """
    if not 1 <= len(order_id) <= _LONGEST_ID or order_id[0] in ".-" or not has_letters_of_names(order_id):
        raise WireError(f"the server sent an order with the impossible id {order_id[:80]!r}")
    return order_id


class FolderOrders:
    """The folders under `path` of the device `who`. One process at a time (the home's lock sees to it).

    Beside the newest order the one before it is kept, until the next is committed: should a file of the newest be damaged,
    the device goes on from there.
    """

    def __init__(self, path: Path, who: str = "") -> None:
        self.path, self.who, self.model = path, who, path.parent / "model"
        self.damage: list[str] = []  # what was found damaged, and given up because there is an older order to go on from
        self._present: str | None = None  # the newest order
        self._fitted = path.parent / "fitted"  # it stays from run to run

    @property
    def where(self) -> str:
        """Name of the folder in errors."""
        return str(self.path)

    def newest(self) -> OrderResult | None:
        """Return the current state's result if all its files are whole. Files that a crash left are removed.

        Raises:
            HomeMismatch: All orders are damaged; then no file is changed.
        """
        sweep(self.path)
        readable, damage = self._results()
        for result in list(readable):
            lines = list(damaged_files(self.path / result.order_id, result.files))
            if not lines:
                break
            damage += lines
            readable.remove(result)
        if damage and not readable:
            raise HomeMismatch(
                f"{'; '.join(damage)}: restore {self.path} from a backup, or delete it to lose the private state"
            )
        self._present = readable[0].order_id if readable else None
        if self._present is not None:
            self.damage = [f"{line}: going on from {self._present}, the order before it" for line in damage]
        self._keep({result.order_id for result in readable[:2]})
        return readable[0] if readable else None

    def damaged(self) -> list[str]:
        """Return a line for each file whose bytes are not the written ones, without changing a file."""
        readable, damage = self._results()
        return damage + [line for result in readable for line in damaged_files(self.path / result.order_id, result.files)]

    def state(self, result: OrderResult) -> Tensors:
        """Return all tensors of the model after this order."""
        tensors: Tensors = {}
        for name in (_STATE, *result.state_parts):
            tensors |= self.beside(result, name) or {}
        return tensors

    def beside(self, result: OrderResult, what: str) -> Tensors | None:
        """Return the tensors committed under this name beside the model's, or None."""
        path = self.path / result.order_id / f"{what}.safetensors"
        return read_tensors(path) if path.exists() else None

    def blob(self, order_id: str, part: str) -> Path:
        """Return the file with the bytes of one part of the update."""
        return self.path / order_id / f"{part}.safetensors"

    def commit(
        self,
        result: OrderResult,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> OrderResult:
        """Write everything durably, delete older orders except the last, and return `result` with its parts.

        `beside` has further sets of tensors that stay on the device, under names that no part has.

        Raises:
            DiskFull: The disk has no room.
        """
        final = self.path / check_order_id(result.order_id)
        if final.exists():
            discard_folder(final)  # of an older order with this id: a server that was restored from a backup issues it again
        handed_in: list[Part] = []
        digests: dict[str, str] = {}
        with committed_folder(final) as folder:
            for name, tensors in parts.items():
                blob = write_tensors(folder / f"{name}.safetensors", tensors)
                handed_in.append(Part(name, blob.digest, blob.size, result.versions.get(name, 0)))
                digests[blob.name] = blob.digest
            held = tuple(name for name, tensors in parts.items() if _held(tensors, state))
            rest = {name: tensor for name, tensor in state.items() if not any(name in parts[part] for part in held)}
            for what, tensors in (({_STATE: rest} if rest else {}) | dict(beside)).items():
                blob = write_tensors(folder / f"{what}.safetensors", tensors)
                digests[blob.name] = blob.digest
            bytes_up = sum(part.size for part in handed_in)
            result = msgspec.structs.replace(result, parts=tuple(handed_in), bytes_up=bytes_up, files=digests, state_parts=held)
            result = msgspec.structs.replace(result, check=check_of(msgspec.json.encode(result)))
            write_file(folder / UPDATE, msgspec.json.format(msgspec.json.encode(result)), PUBLIC, durable=False)
            fail_at(self.who, result.round, "state-written")
        self._keep({result.order_id, self._present})
        self._present = result.order_id
        return result

    def secret(self) -> bytes:
        """Return the content of secret, which is made at the first call, and which only this user can read.

        Raises:
            DiskFull: The disk has no room.
            HomeMismatch: It has another length than was written.
        """
        path = self.path / SECRET
        if not path.exists():
            write_file(path, os.urandom(SECRET_BYTES))
        if len(secret := path.read_bytes()) != SECRET_BYTES:
            raise HomeMismatch(f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}: restore it from a backup")
        return secret

    def secure_state(self) -> bytes:
        """Return the content of secure.json; empty without it."""
        path = self.path / SECURE
        return path.read_bytes() if path.exists() else b""

    def keep_secure_state(self, state: bytes) -> None:
        """Write secure.json, which only this user can read.

        Raises:
            DiskFull: The disk has no room.
        """
        write_file(self.path / SECURE, state)

    def fitted(self, digest: str) -> Tensors | None:
        """Return the models that were fitted on the data with this digest, or None. Damaged ones are fitted again."""
        for path in (self._fitted / digest).glob("*.safetensors"):
            with suppress(WireError, OSError):
                return read_tensors(path, digest=from_file_name(path.stem))
        return None

    def keep_fitted(self, digest: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep models that were fitted on the data with this digest, in place of those of other data.

        The file has the digest of its bytes for a name.

        Raises:
            DiskFull: The disk has no room.
        """
        for folder in self._fitted.glob("*/"):
            discard_folder(folder)
        with committed_folder(self._fitted / digest) as folder:
            blob = write_tensors(folder / "models", tensors)
            (folder / "models").rename(folder / f"{file_name(blob.digest)}.safetensors")

    def adopt(self, other: FolderOrders) -> None:
        """Continue from a copy, as OrderStore.adopt; the files are in the folder already."""
        self.damage, self._present = other.damage, other._present

    def _keep(self, order_ids: Collection[str | None]) -> None:
        for folder in self.path.glob("*/"):
            if folder.name not in order_ids:
                discard_folder(folder)

    def _results(self) -> tuple[list[OrderResult], list[str]]:
        """Return the readable results, newest first, and a line for each that cannot be read."""
        readable: list[OrderResult] = []
        damage: list[str] = []
        for folder in sorted(self.path.glob("*/")):
            path = folder / UPDATE
            try:
                text = path.read_bytes()
                result = from_json(text, OrderResult)
                # Homes of older versions have no check.
                if result.order_id != folder.name or (result.check and result.check != check_of(text)):
                    raise HomeMismatch("its text is not what was written")
                readable.append(result)
            except (OSError, msgspec.DecodeError, HomeMismatch) as error:
                damage.append(f"{path} is damaged ({error})")
        return sorted(readable, key=lambda result: result.sequence, reverse=True), damage


def damaged_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of these files in `folder` (name -> digest) whose bytes are not the written ones."""
    for name, digest in files.items():
        try:
            with LocalFile(folder / name) as file:
                if digest_in(file) != digest:
                    yield f"{folder / name} is damaged"
        except OSError as error:
            yield f"{folder / name} cannot be read ({error.strerror})"


def _held(part: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Return whether a part is handed in exactly as it is in the state."""
    return all(state.get(name) is tensor for name, tensor in part.items())
