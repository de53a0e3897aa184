"""Two clients, two rounds: each method against the same computation in numpy, written from the papers' equations.

X (N, D), Y one-hot (N, C), W (C, D), H the head (C, K), B the body (K, D); everything in float64, full batches.
"""

from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.methods.registry import get, method_from_options
from attune.common.models.feature_mean import MEAN, add_feature_mean
from attune.common.seeds import derive
from attune.contrib.gp.method import ProcessSettings
from attune.contrib.gp.process import gibbs
from attune.fedclient.work.objectives.base import PERSONAL
from attune.fedclient.work.objectives.descent import batches
from attune.fedclient.work.objectives.mixed_models import WEIGHT
from attune.fedclient.work.objectives.two_heads import SHIFT

W0 = np.array([[0.1, -0.2], [0.3, 0.0], [-0.1, 0.2]])
B0 = np.array([[0.5, -0.3], [0.2, 0.7]])
SHARDS = {
    "a": (np.array([[1.0, 2.0], [-0.5, 1.0], [0.3, -1.2]]), np.array([0, 1, 1])),
    "b": (np.array([[2.0, -1.0], [0.4, 0.9]]), np.array([2, 2])),
}
SHARE = {"a": 0.6, "b": 0.4}  # 3 and 2 samples
LR, EPOCHS = 0.5, 2
TRAIN = TrainSettings(lr=LR, momentum=0.0, batch_size=100, local_epochs=EPOCHS, clip_norm=0.0)


def linear_model():
    model = nn.Sequential(OrderedDict(head=nn.Linear(2, 3, bias=False))).double()
    model.load_state_dict({"head.weight": torch.from_numpy(W0)})
    return model


def two_layers():
    model = nn.Sequential(OrderedDict(body=nn.Linear(2, 2, bias=False), head=nn.Linear(2, 3, bias=False))).double()
    model.load_state_dict({"body.weight": torch.from_numpy(B0), "head.weight": torch.from_numpy(W0)})
    return model


def play(federation, name, model, rounds=2, **options):
    played = federation(get(name), model, SHARDS, options, TRAIN)
    for _ in range(rounds):
        played.round()
    return played


def softmax(Z):
    E = np.exp(Z - Z.max(axis=1, keepdims=True))
    return E / E.sum(axis=1, keepdims=True)


def one_hot(y):
    return np.eye(3)[y]


def cross_entropy(B, V, client):
    X, y = SHARDS[client]
    return -np.log(softmax(X @ B.T @ V.T)[np.arange(len(y)), y]).mean()


def grad(W, client):
    """Return the gradient of the mean cross-entropy of softmax(X W^T)."""
    X, y = SHARDS[client]
    return (softmax(X @ W.T) - one_hot(y)).T @ X / len(y)


def steps(W, client, lr=LR, number=EPOCHS, mu=0.0):
    """Take full-batch steps from the value W, with a pull towards it."""
    V = W
    for _ in range(number):
        V = V - lr * (grad(V, client) + mu * (V - W))
    return V


def mean(values):
    return sum(SHARE[client] * value for client, value in values.items())


def same(tensor, array):
    np.testing.assert_allclose(tensor.numpy(), array, rtol=0, atol=1e-12)


def test_per_fedavg(federation):
    alpha, beta = 0.4, 0.2
    played = play(federation, "per-fedavg", linear_model(), alpha=alpha, beta=beta)
    W = W0
    for _ in range(2):
        ends = {}
        for client in SHARDS:
            V = W
            for _ in range(EPOCHS):
                V = V - beta * grad(V - alpha * grad(V, client), client)
            ends[client] = V
        W = mean(ends)
    same(played.served("a")["head.weight"], W)
    for client in SHARDS:
        same(played.prepared(client)["head.weight"], W - alpha * grad(W, client))


def test_per_fedavg_takes_alpha_from_the_training_settings(federation):
    played = play(federation, "per-fedavg", linear_model(), rounds=0)
    same(played.prepared("b")["head.weight"], W0 - LR * grad(W0, "b"))


def pfedme_locally(w, client, mu, steps, personal_lr):
    theta = w
    for _ in range(EPOCHS):
        for _ in range(steps):
            theta = theta - personal_lr * (grad(theta, client) + mu * (theta - w))
        w = w - mu * LR * (w - theta)
    return w, theta


@pytest.mark.parametrize("beta", [1.0, 0.25, 2.0])
def test_pfedme(federation, beta):
    mu, steps, personal_lr = 1.5, 3, 0.1
    options = {"mu": mu, "inner_steps": steps, "personal_lr": personal_lr, "server_mix": beta}
    played = play(federation, "pfedme", linear_model(), **options)
    W = W0
    for _ in range(2):
        ends = {client: pfedme_locally(W, client, mu, steps, personal_lr) for client in SHARDS}
        W = (1 - beta) * W + beta * mean({client: w for client, (w, _) in ends.items()})
    same(played.served("a")["head.weight"], W)
    for client, (w, theta) in ends.items():
        same(played.state[client]["head.weight"], w)
        same(played.state[client][PERSONAL + "head.weight"], theta)
        same(played.prepared(client, served=False)["head.weight"], theta)


def test_pfedmes_global_model_is_a_row_of_ones_own(federation):
    row = {"name": "custom", "parts": {"*": "shared"}, "objective": "moreau"}
    options = {**row, "mu": 1.5, "inner_steps": 3, "personal_lr": 0.1}
    played = federation(method_from_options(options), linear_model(), SHARDS, options, TRAIN)
    played.round()
    W = mean({client: pfedme_locally(W0, client, 1.5, 3, 0.1)[0] for client in SHARDS})
    assert played.method.evaluate == "served"
    same(played.prepared("a")["head.weight"], W)


def test_pfedme_with_mcsa(federation):
    mu, steps, personal_lr, sigma = 1.5, 3, 0.1, 4.0
    options = {"mu": mu, "inner_steps": steps, "personal_lr": personal_lr, "sigma": sigma}
    played = play(federation, "pfedme+mcsa", linear_model(), **options)
    W = {"a": W0, "b": W0}
    for _ in range(2):
        ends = {client: pfedme_locally(W[client], client, mu, steps, personal_lr) for client in SHARDS}
        X = np.stack([ends[client][0].ravel() for client in "ab"])
        U = X / np.linalg.norm(X, axis=1, keepdims=True)
        mixed = softmax(sigma * (U @ U.T)) @ X
        W = {client: mixed[row].reshape(3, 2) for row, client in enumerate("ab")}
    assert np.abs(W["a"] - W["b"]).max() > 1e-3
    for client, (_, theta) in ends.items():
        np.testing.assert_allclose(played.served(client)["head.weight"].numpy(), W[client], rtol=0, atol=1e-9)
        np.testing.assert_allclose(played.prepared(client, served=False)["head.weight"].numpy(), theta, rtol=0, atol=1e-9)


def test_ditto(federation):
    mu = 0.7
    played = play(federation, "ditto", linear_model(), mu=mu)
    W, own = W0, {"a": W0, "b": W0}
    for _ in range(2):
        for client in SHARDS:
            for _ in range(EPOCHS):
                own[client] = own[client] - LR * (grad(own[client], client) + mu * (own[client] - W))
        W = mean({client: steps(W, client) for client in SHARDS})
    same(played.served("b")["head.weight"], W)
    for client in SHARDS:
        same(played.state[client][PERSONAL + "head.weight"], own[client])
        same(played.prepared(client, served=False)["head.weight"], own[client])


def test_mr_mtl(federation):
    """Each device's own model is pulled towards the mean of those that were handed in."""
    mu = 0.7
    played = play(federation, "mr-mtl", linear_model(), rounds=3, mu=mu)
    W, own = W0, {"a": W0, "b": W0}
    for _ in range(3):
        for client in SHARDS:
            V = own[client]
            for _ in range(EPOCHS):
                V = V - LR * (grad(V, client) + mu * (V - W))
            own[client] = V
        W = mean(own)
    same(played.served("b")["head.weight"], W)
    for client in SHARDS:
        same(played.prepared(client, served=False)["head.weight"], own[client])


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_apfl(federation, decay):
    """Algorithm 1: w by its own gradient; v and the share by the gradient at the mixture, all from the same point.

    Weight decay pulls both models, and not the share.
    """
    played = federation(get("apfl"), linear_model(), SHARDS, {"share": 0.3}, msgspec.structs.replace(TRAIN, weight_decay=decay))
    for _ in range(3):
        played.round()
    W, own, share = W0, {"a": W0, "b": W0}, {"a": 0.3, "b": 0.3}
    mixed = {}
    for _ in range(3):
        ends = {}
        for client in SHARDS:
            w, v, a = W, own[client], share[client]
            for _ in range(EPOCHS):
                g = grad(a * v + (1 - a) * w, client)
                a, v, w = (
                    float(np.clip(a - LR * ((v - w) * g).sum(), 0, 1)),
                    v - LR * (a * g + decay * v),
                    w - LR * (grad(w, client) + decay * w),
                )
            ends[client], own[client], share[client] = w, v, a
            mixed[client] = a * v + (1 - a) * w
        W = mean(ends)
    assert share["a"] != 0.3 != share["b"]
    same(played.served("b")["head.weight"], W)
    for client in SHARDS:
        same(played.state[client][PERSONAL + "share"], np.array([share[client]]))
        same(played.prepared(client, served=False)["head.weight"], mixed[client])


def both_gradients(B, V, client):
    """Return the gradients of the loss by the body B (K, D) and by the head V (C, K) over it."""
    X, y = SHARDS[client]
    error = softmax(X @ B.T @ V.T) - one_hot(y)
    return (error @ V).T @ X / len(y), error.T @ (X @ B.T) / len(y)


def test_fedala(federation):
    """The head begins between the own and the served one from round 2 on; there its weights are learned by some passes."""
    played = play(federation, "fedala", two_layers(), rounds=3, weight_lr=0.8, sampled=1.0)
    served = (B0, W0)
    own, weight = {}, {client: np.ones_like(W0) for client in SHARDS}
    for number in range(3):
        ends = {}
        for client in SHARDS:
            B, V = served
            if number:
                gap = V - own[client][1]
                losses = []
                for _ in range(50 if number == 1 else 1):
                    at = own[client][1] + weight[client] * gap
                    losses.append(cross_entropy(B, at, client))
                    weight[client] = np.clip(weight[client] - 0.8 * both_gradients(B, at, client)[1] * gap, 0, 1)
                    if len(losses) > 10 and np.std(losses[-10:], ddof=1) < 0.1:
                        break
                V = own[client][1] + weight[client] * gap
            for _ in range(EPOCHS):
                of_body, of_head = both_gradients(B, V, client)
                B, V = B - LR * of_body, V - LR * of_head
            ends[client] = own[client] = (B, V)
        served = tuple(mean({client: ends[client][part] for client in SHARDS}) for part in range(2))
    assert min(weight["a"].min(), weight["b"].min()) < 1
    same(played.served("a")["body.weight"], served[0])
    same(played.served("a")["head.weight"], served[1])
    for client in SHARDS:
        same(played.state[client][WEIGHT + "head.weight"], weight[client])
        same(played.prepared(client, served=False)["head.weight"], own[client][1])


def biased_layers():
    model = nn.Sequential(OrderedDict(body=nn.Linear(2, 2, bias=False), head=nn.Linear(2, 3))).double()
    start = {"body.weight": torch.from_numpy(B0), "head.weight": torch.from_numpy(W0), "head.bias": torch.zeros(3)}
    model.load_state_dict(start)
    add_feature_mean(model, "test")
    return model


def test_feddbe(federation):
    """The first round measures M after local training alone; later ones train body, head and b with the pull to M."""
    kappa, momentum = 0.8, 0.4
    played = play(federation, "feddbe", biased_layers(), rounds=3, kappa=kappa, feature_momentum=momentum)
    means = {}
    for client, (X, y) in SHARDS.items():
        B, H, c = B0, W0, np.zeros(3)
        for _ in range(EPOCHS):
            E = (softmax(X @ B.T @ H.T + c) - one_hot(y)) / len(y)
            B, H, c = B - LR * (E @ H).T @ X, H - LR * E.T @ (X @ B.T), c - LR * E.sum(axis=0)
        means[client] = (X @ B.T).mean(axis=0)
    M = mean(means)
    assert np.abs(means["a"] - means["b"]).max() > 1e-2
    served, shift = (B0, W0, np.zeros(3)), {client: np.zeros(2) for client in SHARDS}
    for _ in range(2):
        ends = {}
        for client, (X, y) in SHARDS.items():
            (B, H, c), b, m = served, shift[client], np.zeros(2)
            for _ in range(EPOCHS):
                F = X @ B.T
                E = (softmax((F + b) @ H.T + c) - one_hot(y)) / len(y)
                m = (1 - momentum) * m + momentum * F.mean(axis=0)
                of_features = E @ H + kappa * momentum * (m - M) / 2 / len(y)  # two features, and len(y) samples in the mean
                b, c, H, B = (
                    b - LR * (E @ H).sum(axis=0),
                    c - LR * E.sum(axis=0),
                    H - LR * E.T @ (F + b),
                    B - LR * of_features.T @ X,
                )
            ends[client], shift[client] = (B, H, c), b
        served = tuple(mean({client: ends[client][part] for client in SHARDS}) for part in range(3))
    for name, value in zip(("body.weight", "head.weight", "head.bias", MEAN), (*served, M), strict=True):
        same(played.served("a")[name], value)
    for client in SHARDS:
        same(played.state[client][SHIFT], shift[client])
        prepared = played.prepared(client)
        same(prepared["head.bias"], served[2] + served[1] @ shift[client])


def test_fedbabu(federation):
    """The head stays as it was while the body is averaged; before prediction both are fine-tuned."""
    played = play(federation, "fedbabu", two_layers(), tune_epochs=2, alpha=0.2)
    B = B0
    for _ in range(2):
        ends = {}
        for client in SHARDS:
            V = B
            for _ in range(EPOCHS):
                V = V - LR * both_gradients(V, W0, client)[0]
            ends[client] = V
        B = mean(ends)
    same(played.served("a")["body.weight"], B)
    for client in SHARDS:
        V, H = B, W0
        for _ in range(2):
            of_body, of_head = both_gradients(V, H, client)
            V, H = V - 0.2 * of_body, H - 0.2 * of_head
        prepared = played.prepared(client)
        same(prepared["body.weight"], V)
        same(prepared["head.weight"], H)


def test_fedrep(federation):
    played = play(federation, "fedrep", two_layers(), head_epochs=3, body_epochs=2)
    B, H = B0, {"a": W0, "b": W0}
    for _ in range(2):
        ends = {}
        for client in SHARDS:
            for _ in range(3):
                H[client] = H[client] - LR * both_gradients(B, H[client], client)[1]
            V = B
            for _ in range(2):
                V = V - LR * both_gradients(V, H[client], client)[0]
            ends[client] = V
        B = mean(ends)
    for client in SHARDS:
        prepared = played.prepared(client)
        same(prepared["body.weight"], B)
        same(prepared["head.weight"], H[client])


def test_fedavg_with_fine_tuning(federation):
    played = play(federation, "fedavg+ft", linear_model(), tune_epochs=3, alpha=0.2)
    W = W0
    for _ in range(2):
        W = mean({client: steps(W, client) for client in SHARDS})
    same(played.served("a")["head.weight"], W)
    for client in SHARDS:
        same(played.prepared(client)["head.weight"], steps(W, client, lr=0.2, number=3))
    same(played.served("a")["head.weight"], W)


def test_fedrod(federation):
    """Let client a lack class 2, and b have only class 2: their softmax is over the classes that they have."""
    played = play(federation, "fedrod", two_layers())
    B, H = B0, W0
    P = {"a": np.zeros((3, 2)), "b": np.zeros((3, 2))}
    present = {"a": np.array([1 / 3, 2 / 3, 0]), "b": np.array([0, 0, 1.0])}
    for _ in range(2):
        bodies, heads = {}, {}
        for client, (X, y) in SHARDS.items():
            b, h = B, H
            for _ in range(EPOCHS):
                Z = X @ b.T
                balanced = present[client] * np.exp(Z @ h.T)
                E = balanced / balanced.sum(axis=1, keepdims=True) - one_hot(y)
                R = softmax(Z @ h.T + Z @ P[client].T) - one_hot(y)
                b, h = b - LR * (E @ h).T @ X / len(y), h - LR * E.T @ Z / len(y)
                P[client] = P[client] - LR * R.T @ Z / len(y)
            bodies[client], heads[client] = b, h
        B, H = mean(bodies), mean(heads)
    same(played.served("a")["body.weight"], B)
    same(played.served("a")["head.weight"], H)
    for client in SHARDS:
        same(played.state[client][PERSONAL + "head.weight"], P[client])
        prepared = played.prepared(client)
        X = SHARDS[client][0]
        features = X @ B.T
        logits = played.predictor.logits(played.network, prepared, torch.from_numpy(X))
        same(logits.detach(), features @ H.T + features @ P[client].T)


def test_fedtp_with_fedrod(federation, models):
    """Compare one full-batch step on a real ViT with gradients of torch, without the product's code between."""
    torch.manual_seed(0)
    model = models["vit"]().double()
    rng = np.random.default_rng(0)
    shards = {client: (rng.normal(size=(4, 1, 8, 8)), np.array([k, k, 1, 2])) for k, client in enumerate("ab")}
    train = TrainSettings(lr=0.1, momentum=0.0, batch_size=100, local_epochs=1, clip_norm=0.0)
    played = federation(get("fedtp+fedrod"), model, shards, {"hidden": 8}, train)
    assert set(played.kinds.values()) == {"generated", "shared"}
    starts = {client: played.served(client) for client in shards}
    played.round()
    for client, (x, y) in shards.items():
        model.load_state_dict(starts[client])
        model.eval().zero_grad()
        head, model.head = model.head, nn.Identity()
        features = model(torch.from_numpy(x)).detach().numpy()
        model.head = head
        logits = model(torch.from_numpy(x))
        share = np.bincount(y, minlength=10) / len(y)
        masked = logits.masked_fill(torch.from_numpy(share == 0), -1e300) + torch.from_numpy(np.log(np.maximum(share, 1e-300)))
        nn.functional.cross_entropy(masked, torch.from_numpy(y)).backward()
        for name, parameter in model.named_parameters():
            expected = starts[client][name] - 0.1 * parameter.grad
            np.testing.assert_allclose(played.state[client][name].numpy(), expected.numpy(), rtol=0, atol=1e-12)
        residual = softmax(logits.detach().numpy()) - np.eye(10)[y]
        same(played.state[client][PERSONAL + "head.weight"], -0.1 * residual.T @ features / 4)
        same(played.state[client][PERSONAL + "head.bias"], -0.1 * residual.mean(axis=0))
    after = {client: played.served(client) for client in shards}
    half = (played.state["a"]["head.weight"] + played.state["b"]["head.weight"]) / 2
    same(after["a"]["head.weight"], half.numpy())
    assert not any(name.startswith(PERSONAL) for name in after["a"])


def rbf(A, Z, length, a2):
    return a2 * np.exp(-((A[:, None] - Z) ** 2).sum(axis=-1) / (2 * A.shape[1] * length * length))


def evidence_gradient(Z, sign, omegas, length, a2):
    """Return the gradient in Z (N, K) of -mean over chains of log N(kappa / omega | 0, K + 1/omega), per point."""
    own = rbf(Z, Z, length, a2)
    G = np.zeros_like(own)
    for omega in omegas:
        A = np.linalg.inv(own + 1e-6 * a2 * np.eye(len(Z)) + np.diag(1 / omega))
        v = A @ (sign / 2 / omega)
        G -= (np.outer(v, v) - A) / 2 / len(omegas) / len(Z)
    P = G * own / (Z.shape[1] * length * length)
    return 2 * (P @ Z - P.sum(axis=1, keepdims=True) * Z)


def test_pfedgp(federation):
    """Let client a separate its classes 0 and 1; b has one class, and its body stays. tests/gp checks `gibbs`."""
    length, a2 = 0.6, 3.0
    kernel = ProcessSettings(length_scale=length, output_scale=a2, gibbs_draws=4)
    played = play(federation, "pfedgp", two_layers(), length_scale=length, output_scale=a2, gibbs_draws=4)
    (X, y), B = SHARDS["a"], B0
    for number in (1, 2):
        V, generator = B, torch.Generator().manual_seed(derive(0, "a", number, "gibbs"))
        for order in batches(3, TRAIN, derive(0, "a", number, "batches")):
            x, sign = X[order.numpy()], np.where(y[order.numpy()] == 0, 1.0, -1.0)
            own = rbf(x @ V.T, x @ V.T, length, a2) + 1e-6 * a2 * np.eye(3)
            omegas = gibbs(kernel, torch.from_numpy(own), torch.from_numpy(sign), generator).numpy()
            V = V - LR * evidence_gradient(x @ V.T, sign, omegas, length, a2).T @ x
        B = mean({"a": V, "b": B})
    assert np.abs(B - B0).max() > 1e-3
    np.testing.assert_allclose(played.served("b")["body.weight"].numpy(), B, rtol=0, atol=1e-9)
    for client in SHARDS:
        same(played.state[client]["head.weight"], W0)
    query = torch.tensor([[0.4, 0.9], [-1.0, 2.0]], dtype=torch.float64)
    prepared = {client: played.prepared(client) for client in SHARDS}
    assert played.predictor.logits(played.network, prepared["b"], query).argmax(dim=1).tolist() == [2, 2]
    Z, Q, expected = X @ B.T, query.numpy() @ B.T, np.zeros(2)
    np.testing.assert_allclose(prepared["a"]["memory.features"].numpy(), Z, atol=1e-6)
    u = np.linspace(-9, 9, 20_001)
    for omega in prepared["a"]["memory.omega"][0].double().numpy():
        A = np.linalg.inv(rbf(Z, Z, length, a2) + 1e-6 * a2 * np.eye(3) + np.diag(1 / omega))
        cross = rbf(Z, Q, length, a2)
        center = cross.T @ A @ (np.where(y == 0, 0.5, -0.5) / omega)
        spread = np.sqrt(a2 - np.einsum("nq,nk,kq->q", cross, A, cross))
        f = center[:, None] + spread[:, None] * u
        expected += np.trapezoid(np.exp(-u * u / 2) / np.sqrt(2 * np.pi) / (1 + np.exp(-f)), u, axis=1) / 4
    found = played.predictor.logits(played.network, prepared["a"], query).exp().numpy()
    np.testing.assert_allclose(found[:, :2], np.stack([expected, 1 - expected], axis=1), atol=1e-5)
