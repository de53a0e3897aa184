"""Tensors as NumPy arrays for views, because importing torch would take seconds, and what aggregators store for people.

That is attention matrices, and embeddings of clients.

Shapes: S clients of a cohort, N clients with an embedding, E numbers of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.wire.header import Opened
from attune.common.wire.malformed import Malformed

Arrays = Mapping[str, npt.NDArray[Any]]
Matrix = npt.NDArray[np.float64]

MATRICES, NETWORK = "matrices", "network"  # keys in the vault
CLIENTS, MEAN, UNIT = "clients", "mean", "unit/"  # of the matrices
EMBEDDED, EMBEDDING, STEPS = "embedding.clients", "embedding.value", "embedding.step"
DESCRIBED, DESCRIPTION = "description.clients", "description.value"  # of NETWORK too, where clients have told of their data


def names_in(saved_B: npt.NDArray[np.uint8]) -> list[str]:
    """Return the names that `mixing.names_to_tensor` was given."""
    names: list[str] = json.loads(saved_B.tobytes())
    return names


def read_matrices(saved: Arrays) -> tuple[list[str], dict[str, Matrix]]:
    """Return the value under MATRICES: the cohort's names in the order of rows and columns; MEAN, then unit -> A (S, S)."""
    mean = {MEAN: saved[MEAN]} if MEAN in saved else {}
    units = {name.removeprefix(UNIT): saved[name] for name in saved if name.startswith(UNIT)}
    return names_in(saved[CLIENTS]), {name: A_SS.astype(np.float64) for name, A_SS in (mean | units).items()}


def read_embeddings(saved: Arrays) -> tuple[list[str], Matrix]:
    """Return the value under NETWORK: names and embeddings (N, E) of the clients whose embedding was trained."""
    trained_N = saved[STEPS] > 0
    names = names_in(saved[EMBEDDED])
    return [name for name, known in zip(names, trained_N, strict=True) if known], saved[EMBEDDING][trained_N].astype(np.float64)


Array = npt.NDArray[Any]

DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4",
    "U16": "u2", "U8": "u1", "BOOL": "u1", "BF16": "u2",
}  # fmt: skip


class ArrayFile(Opened[Array]):
    """A blob of tensors. Each access reads one anew. bfloat16, which NumPy lacks, is returned as float32."""

    def __getitem__(self, name: str) -> Array:
        """Return a new array.

        Raises:
            KeyError: There is no tensor of that name.
            Truncated: The source ends too early.
            Malformed: not-boolean.
        """
        spec = self.manifest[name]
        array = np.empty(spec.shape, dtype="<" + DTYPES[spec.dtype])
        if array.size:
            self._source.read_into(array.reshape(-1).view(np.uint8).data, self._layout.spans[name][0])
        if spec.dtype == "BF16":
            return np.asarray(array.astype("<u4") << 16).view("<f4")
        if spec.dtype == "BOOL":
            if array.size and array.max() > 1:
                raise Malformed("not-boolean", f"{self._name}: {name!r} is BOOL and has bytes other than 0 and 1")
            return array.astype(bool)
        return array
