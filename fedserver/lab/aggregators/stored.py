"""Stored values of aggregators for people, read without torch: attention matrices, and embeddings of clients.

Shapes: S clients of a cohort, N clients with an embedding, E numbers of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
Matrix = npt.NDArray[np.float64]

MATRICES, NETWORK = "matrices", "network"  # keys in the vault
CLIENTS, MEAN, UNIT = "clients", "mean", "unit/"  # of the matrices
EMBEDDED, EMBEDDING, STEPS = "embedding.clients", "embedding.value", "embedding.step"
DESCRIBED, DESCRIPTION = "description.clients", "description.value"  # of NETWORK too, where clients have told of their data


def names_in(saved_B: npt.NDArray[np.uint8]) -> list[str]:
    """Return the names that `matrices.names_to_tensor` was given."""
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
