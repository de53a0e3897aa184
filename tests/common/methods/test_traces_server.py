"""Two clients, two rounds: methods with their idea on the server, and kNN, against the same computation in numpy.

X (N, D), y (N,), W (C, D) the model of three classes, z an embedding; everything in float64, full batches.
"""

import math
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch

from attune.common.methods.method import assign
from attune.common.methods.registry import get, method_from_options
from attune.common.models.structure import tensors_of
from tests.common.methods.test_traces import SHARDS, SHARE, TRAIN, W0, linear_model, steps
from tests.common.methods.test_traces_parts import HYPER

MU = 0.3


def check(played, expected, tolerance=1e-12):
    for client, W in expected.items():
        assert np.allclose(played.served(client)["head.weight"].numpy(), W, rtol=0, atol=tolerance)


def test_heurfedamp(federation):
    """Use two clients: the other one has all of 1 - a."""
    played = federation(get("heurfedamp"), linear_model(), SHARDS, {"mu": MU, "self_weight": 0.7}, TRAIN)
    W = {"a": W0, "b": W0}
    for _ in range(2):
        played.round()
        theta = {client: steps(W[client], client, mu=MU) for client in SHARDS}
        W = {"a": 0.7 * theta["a"] + 0.3 * theta["b"], "b": 0.7 * theta["b"] + 0.3 * theta["a"]}
        check(played, W)


@pytest.mark.parametrize(("sigma", "step"), [(0.8, 1.0), ("auto", 0.6)])
def test_fedamp(federation, sigma, step):
    """Expect a weight of step/2 * exp(-d^2 / sigma) for the other; the only distance is the median, so that auto gives e^-1."""
    played = federation(get("fedamp"), linear_model(), SHARDS, {"mu": MU, "sigma": sigma, "step": step}, TRAIN)
    W = {"a": W0, "b": W0}
    for _ in range(2):
        played.round()
        theta = {client: steps(W[client], client, mu=MU) for client in SHARDS}
        square = ((theta["a"] - theta["b"]) ** 2).sum()
        other = step / 2 * math.exp(-1 if sigma == "auto" else -square / sigma)
        W = {c: (1 - other) * theta[c] + other * theta[d] for c, d in (("a", "b"), ("b", "a"))}
        check(played, W)


def test_pfedhn(federation):
    """Compute h(z) = H (M z + m) + h by hand: phi and z descend along -Delta, weighted by the shares (errata E2)."""
    played = federation(get("pfedhn"), linear_model(), SHARDS, HYPER | {"server_lr": 0.2}, TRAIN)
    played.aggregators["generated"].close_round([])
    aggregator = played.aggregators["generated"]
    saved = {name: tensor.numpy().copy() for name, tensor in aggregator._load().network.items()}
    M, m, H, h = (saved[name] for name in ("mlp.0.weight", "mlp.0.bias", "head.head.weight", "head.head.bias"))
    z = dict(zip("ab", aggregator._load().embeddings.values(["a", "b"]).numpy().copy(), strict=True))
    for _ in range(2):
        F = {client: M @ z[client] + m for client in SHARDS}
        W = {client: (H @ F[client] + h).reshape(3, 2) for client in SHARDS}
        check(played, W)
        G = {client: -SHARE[client] * (steps(W[client], client) - W[client]).ravel() for client in SHARDS}
        dF = {client: H.T @ G[client] for client in SHARDS}
        dz = {client: M.T @ dF[client] for client in SHARDS}
        H = H - 0.2 * sum(np.outer(G[client], F[client]) for client in SHARDS)
        h = h - 0.2 * sum(G.values())
        M, m = M - 0.2 * sum(np.outer(dF[client], z[client]) for client in SHARDS), m - 0.2 * sum(dF.values())
        z = {client: z[client] - 0.2 * dz[client] for client in SHARDS}
        played.round()
    check(played, {client: (H @ (M @ z[client] + m) + h).reshape(3, 2) for client in SHARDS})


def test_knn(federation):
    """Compare predictions after FedAvg rounds: 0.6 of a device's two nearest samples and 0.4 of the mean model."""
    method = method_from_options({"name": "custom", "parts": {"*": "shared"}, "predictor": "knn"})
    played = federation(method, linear_model(), SHARDS, {"name": "custom", "parts": {"*": "shared"}, "neighbours": 2}, TRAIN)
    W = W0
    for _ in range(2):
        played.round()
        W = sum(SHARE[client] * steps(W, client) for client in SHARDS)
    query = np.array([0.5, 0.5])  # d^2 to a's samples: 2.5, 1.25, 2.93
    similar = np.exp(-np.array([2.5, 1.25]) / 2)
    neighbours = np.array([similar[0], similar[1], 0.0]) / similar.sum()
    model = np.exp(W @ query) / np.exp(W @ query).sum()
    with torch.no_grad():
        found = played.predictor.logits(played.network, played.prepared("a"), torch.from_numpy(query)[None])
    assert np.allclose(found.exp().numpy()[0], 0.6 * neighbours + 0.4 * model, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("fedtp-mlp", ["blocks.*.mlp.*"]),
        ("fedtp-norm", ["blocks.*.norm?.*", "norm.*"]),
        ("fedtp-encoder", ["blocks.*"]),
        ("pfedhn", ["*"]),
        ("fedtp+knn", ["blocks.*.to_qkv.weight"]),
    ],
)
def test_what_is_generated(models, name, patterns):
    """Use FedTP's table V: MLP layers, normalisation layers, all of the blocks."""
    model = models["vit"]()
    for tensor, kind in assign(get(name), model).items():
        expected = "generated" if any(fnmatchcase(tensor, pattern) for pattern in patterns) else "shared"
        assert kind == expected, tensor
    assert any(kind == "generated" for kind in assign(get(name), model).values()) and len(tensors_of(model)) > 20
