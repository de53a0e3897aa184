"""The aggregators' state as versioned safetensors files: written beside the old ones, made true by the round's commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from attune.common.wire.files import Blob, TensorFile, TensorWriter
from attune.common.wire.tensors import Manifest
from attune.fedserver.core.records import Slot


class _SlotWriter:
    """A TensorWriter that stages its blob in the vault when the `with` block ends well."""

    def __init__(self, vault: Vault, key: str, path: Path, manifest: Manifest) -> None:
        self._vault, self._key = vault, key
        self._writer = TensorWriter(path, manifest)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._writer.put(name, tensor)

    def __enter__(self) -> _SlotWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._vault.stage(self._key, self._writer.close(durable=True))
        self._writer.__exit__(kind, error, trace)


class Vault:
    """One part's slots. Reads see staged writes at once; `staged_slots` and `settle` belong to the commit.

    `version` names the files to be written: it must be larger than that of any durable slot, so that nothing is overwritten.
    """

    def __init__(self, folder: Path, part: str, slots: Iterable[Slot], version: int) -> None:
        self._folder, self._part = folder, part
        self._blobs = {slot.key: Blob(folder / slot.file, slot.digest, slot.size) for slot in slots if slot.part == part}
        self._staged: dict[str, Blob] = {}
        self._version = version

    def keys(self) -> list[str]:
        return sorted(self._blobs.keys() | self._staged.keys())

    def blob(self, key: str) -> Blob:
        """The file that holds `key`, staged or durable. Errors: KeyError."""
        return self._staged.get(key) or self._blobs[key]

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        return TensorFile(self.blob(key).path)

    def writer(self, key: str, manifest: Manifest) -> _SlotWriter:
        name = f"{self._part}.{key.replace('/', '~')}.{self._version}.safetensors"
        return _SlotWriter(self, key, self._folder / name, manifest)

    def stage(self, key: str, blob: Blob) -> None:
        self._staged[key] = blob

    def staged_slots(self) -> list[Slot]:
        return [Slot(self._part, key, blob.path.name, blob.digest, blob.size) for key, blob in sorted(self._staged.items())]

    def settle(self) -> None:
        """After the commit: what was staged is the state; the files it replaced go. Readers that hold one keep it open."""
        for key, blob in self._staged.items():
            old = self._blobs.get(key)
            if old and old.path != blob.path:
                old.path.unlink(missing_ok=True)
        self._blobs.update(self._staged)
        self._staged = {}
        self._version += 1
