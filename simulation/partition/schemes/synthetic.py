"""Scheme Synthetic(alpha, beta) with power-law sizes (Li et al., 'Federated Optimization in Heterogeneous Networks', 2020).

FedMCSA uses it too. Client i has u_i ~ N(0, alpha) and B_i ~ N(0, beta), with standard deviations alpha and beta. Its model is
W_i, b_i ~ N(u_i, 1); its features x ~ N(v_i, diag(j^-1.2)) with v_i ~ N(B_i, 1) per coordinate and variances in the diagonal;
y = argmax(W_i^T x + b_i). Features are used as they are: a common model can distinguish the clients by their values.

alpha has no effect on the labels, as in the published generator (erratum E8): u_i adds the same number to the scores of all
classes. So the clients' labellings differ by their own draws of W_i and b_i alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Counts, Cut, generator, legacy, stratified
from attune.simulation.partition.schemes.scheme_settings import SyntheticSettings


def sizes(clients: int, seed: int) -> Counts:
    """Return the number of samples of each client, both parts together, (N,).

    It is (int(lognormal(4, 2)) + 50) * 5, drawn with the stream of the published code.
    """
    return np.asarray((legacy(seed).lognormal(4, 2, clients).astype(np.int64) + 50) * 5)


def synthetic(source: None, clients: int, settings: SyntheticSettings, seed: int) -> Cut:
    """Draw the samples of every client."""
    xs, ys, train, test = [], [], list[Positions](), list[Positions]()
    start = 0
    for client, size in enumerate(map(int, sizes(clients, seed))):
        rng = generator(seed, "synthetic", client)
        x, y = samples(size, settings, rng)
        held = stratified(y, settings.test, rng)
        here = np.arange(start, start + size)
        train.append(here[~held])
        test.append(here[held])
        xs.append(x.astype(np.float32))
        ys.append(y)
        start += size
    x_nF, y_n = np.concatenate(xs), np.concatenate(ys)
    name = f"synthetic({settings.alpha:g}, {settings.beta:g})"
    made = Dataset(name, "tabular", x_nF, y_n, x_nF[:0], y_n[:0], list(range(settings.classes)), 0, standardise=False)
    return Cut(made, tuple(train), tuple(test))


def samples(
    size: int, settings: SyntheticSettings, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return x (n, F) and y (n,) of one client."""
    u, b = rng.normal(0, settings.alpha), rng.normal(0, settings.beta)
    W_FC = rng.normal(u, 1, (settings.features, settings.classes))
    b_C = rng.normal(u, 1, settings.classes)
    v_F = rng.normal(b, 1, settings.features)
    std_F = np.arange(1, settings.features + 1) ** -0.6
    x_nF = v_F + std_F * rng.standard_normal((size, settings.features))
    return x_nF, (x_nF @ W_FC + b_C).argmax(axis=1)
