"""Two clients, two rounds on a small ViT: methods with a rule for each tensor, against an oracle of the four rules.

The oracle knows only the names of tensors, and computes in float64 with autograd and numpy. It shares the model's forward pass
and the hypernetwork's first weights with the product.
"""

from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from attune.common.config import TrainSettings
from attune.common.methods.registry import get
from attune.common.models.body import settle
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from tests.common.methods.rows import ADAPTED
from tests.e2e.adapted import Lora

LR, EPOCHS, MU, SIGMA, SERVER_LR = 0.2, 2, 0.3, 4.0, 0.1
TRAIN = TrainSettings(lr=LR, momentum=0.0, batch_size=100, local_epochs=EPOCHS, clip_norm=0.0)
QKV, HEAD, NORM = "blocks.*.to_qkv.weight", "head.*", "*norm*"
HYPER = {
    "layers": 1, "hidden": 3, "embedding_dim": 2, "server_optimiser": "sgd", "server_lr": SERVER_LR,
    "server_momentum": 0.0, "server_weight_decay": 0.0,
}  # fmt: skip
CASES = {
    "local": ({"*": "private"}, {}),
    "fedavg": ({"*": "shared"}, {}),
    "fedprox": ({"*": "shared"}, {"mu": MU}),
    "fedper": ({HEAD: "private", "*": "shared"}, {}),
    "fedbn": ({NORM: "private", "*": "shared"}, {}),
    "vanilla-personalized": ({QKV: "private", "*": "shared"}, {}),
    "fedtp": ({QKV: "generated", "*": "shared"}, HYPER),
    "fedtp+fedper": ({QKV: "generated", HEAD: "private", "*": "shared"}, HYPER),
    "fedtp+mcsa": ({QKV: "generated", "*": "attended"}, HYPER | {"sigma": SIGMA}),
    "fedmcsa": ({"*": "attended"}, {"mu": MU, "sigma": SIGMA}),
    "fedmcsa-mcsa": ({"*": "uniform"}, {"mu": MU}),
    "fedavg+mcsa": ({"*": "attended"}, {"sigma": SIGMA}),
    "fedsa-lora": ({"*.lora_A.*": "shared", "*": "private"}, {}),
    "fedtp-lora": ({"*.lora_[AB].*": "generated", "*": "shared"}, HYPER),
}


def model(method=""):
    """Return a small ViT; for methods of adapters all is frozen but an adapter on its projections, and the head."""
    spec = default_spec("images", (4, 4, 1), 3, 0, "vit", {"width": 4, "depth": 1, "heads": 2, "dropout": 0.0})
    made = build(spec, seed=3)
    if method in ADAPTED:
        made.requires_grad_(False).head.requires_grad_(True)
        torch.manual_seed(4)
        for block in made.blocks:
            block.attention.to_qkv = Lora(block.attention.to_qkv)
        settle(made.double(), spec)
    return made.double()


def shards():
    rng = np.random.default_rng(5)
    return {client: (rng.normal(size=(n, 1, 4, 4)), rng.integers(0, 3, n)) for client, n in (("a", 5), ("b", 3))}


class Oracle:
    """The papers' rules. A tensor's `rule` is that of the first pattern that its name matches."""

    def __init__(self, module, patterns, data, mu, hypernetwork):
        self.module, self.data, self.mu = module, data, mu
        first = {name: tensor.clone() for name, tensor in tensors_of(self.module).items()}
        self.rule = {name: next(rule for pattern, rule in patterns.items() if fnmatchcase(name, pattern)) for name in first}
        self.theta = {client: dict(first) for client in data}
        total = sum(len(y) for _, y in data.values())
        self.share = {client: len(y) / total for client, (_, y) in data.items()}
        self.hyper = hypernetwork  # M, m, H, h and z of each client
        for client in data if hypernetwork else ():
            self.theta[client] |= self.generated(client)

    def generated(self, client):
        names = [name for name, rule in self.rule.items() if rule == "generated"]
        M, m, H, h = (self.hyper[key] for key in "MmHh")
        flat = H @ (M @ self.hyper[client] + m) + h
        each = flat.split([self.theta[client][name].numel() for name in names])
        return {name: numbers.view(self.theta[client][name].shape) for name, numbers in zip(names, each, strict=True)}

    def locally(self, client):
        """Take EPOCHS full-batch steps on the mean loss and mu/2 of the squared distance to the served value."""
        x, y = (torch.from_numpy(part) for part in self.data[client])
        start = {name: tensor.detach() for name, tensor in self.theta[client].items()}
        theta = dict(start)
        for _ in range(EPOCHS):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
            loss = cross_entropy(functional_call(self.module, leaves, (x,)), y)
            for name, tensor in leaves.items():
                loss = loss + self.mu / 2 * ((tensor - start[name]) ** 2).sum()
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            theta = {name: theta[name] - LR * slope for name, slope in zip(theta, slopes, strict=True)}
        return theta

    def round(self):
        ends = {client: self.locally(client) for client in self.data}
        weights = {rule: self.weights(rule, ends) for rule in ("shared", "uniform", "attended")}
        if self.hyper:
            self.descend({client: self.changes(client, ends[client]) for client in ends})
        for client in self.data:
            for name, rule in self.rule.items():
                if rule == "generated":
                    self.theta[client] |= self.generated(client)
                elif rule == "private":
                    self.theta[client][name] = ends[client][name]
                else:
                    A = weights[rule](client, name)
                    self.theta[client][name] = sum(A[other] * ends[other][name] for other in ends)

    def weights(self, rule, ends):
        if rule == "shared":
            return lambda client, name: self.share
        if rule == "uniform":
            return lambda client, name: {other: 1 / len(ends) for other in ends}

        def attention(client, name):
            """Return the softmax of sigma times the cosine of the layers (weight and bias together) that `name` belongs to."""
            layer = [n for n in self.rule if "." in name and n.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]] or [name]
            flat = {c: np.concatenate([ends[c][n].numpy().ravel() for n in layer if self.rule[n] == rule]) for c in ends}
            norm = {c: np.sqrt(flat[c] @ flat[c]) for c in ends}
            cosine = {c: flat[client] @ flat[c] / (norm[client] * norm[c]) for c in ends}
            scores = {c: np.exp(SIGMA * cosine[c]) for c in ends}
            return {c: score / sum(scores.values()) for c, score in scores.items()}

        return attention

    def changes(self, client, end):
        return {name: end[name] - self.theta[client][name].detach() for name, rule in self.rule.items() if rule == "generated"}

    def descend(self, changes):
        """Take one step of phi and z on sum_i (m_i / M) <W_i, -Delta_i>, by autograd (FedTP eq. 7-10, errata E2)."""
        self.hyper = {key: tensor.detach().requires_grad_() for key, tensor in self.hyper.items()}
        surrogate = sum(
            -self.share[client] * (self.generated(client)[name] * delta).sum()
            for client, found in changes.items()
            for name, delta in found.items()
        )
        slopes = torch.autograd.grad(surrogate, list(self.hyper.values()))
        stepped = zip(self.hyper.items(), slopes, strict=True)
        self.hyper = {key: (tensor - SERVER_LR * slope).detach() for (key, tensor), slope in stepped}


def first_hypernetwork(played):
    """Return M, m, H, h and each client's z, as the product drew them."""
    if "generated" not in played.aggregators:
        return None
    state = played.aggregators["generated"]._load()
    (head,) = [name.removesuffix(".weight") for name in state.network if name.startswith("head.") and name.endswith(".weight")]
    names = {"M": "mlp.0.weight", "m": "mlp.0.bias", "H": f"{head}.weight", "h": f"{head}.bias"}
    drawn = {key: state.network[name].clone() for key, name in names.items()}
    clients = sorted(played.shards)
    return drawn | dict(zip(clients, state.embeddings.values(clients).clone(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_rounds_are_those_of_the_oracle(federation, name):
    patterns, options = CASES[name]
    data = shards()
    played = federation(get(name), model(name), data, options, TRAIN)
    oracle = Oracle(model(name), patterns, data, options.get("mu", 0.0), first_hypernetwork(played))
    before = {client: dict(theta) for client, theta in oracle.theta.items()}
    for number in (1, 2):
        played.round()
        oracle.round()
        for client in data:
            mine = played.state[client] | played.served(client)
            for tensor, expected in oracle.theta[client].items():
                np.testing.assert_allclose(
                    mine[tensor].numpy(), expected.detach().numpy(), rtol=0, atol=1e-9,
                    err_msg=f"round {number}, {client}, {tensor}",
                )  # fmt: skip
    for client in data:
        moved = [tensor for tensor in before[client] if not torch.equal(before[client][tensor], oracle.theta[client][tensor])]
        assert len(moved) == len(before[client]), "every tensor has moved, so every rule was seen at work"
    apart = {tensor for tensor in oracle.theta["a"] if not torch.equal(oracle.theta["a"][tensor], oracle.theta["b"][tensor])}
    assert apart == {tensor for tensor, rule in oracle.rule.items() if rule not in ("shared", "uniform")}


def test_fedtp_lora_starts_from_the_first_factors(federation):
    """The heads' biases are A and B as the model has them. B is 0, so that every device begins with the body's outputs."""
    played = federation(get("fedtp-lora"), model("fedtp-lora"), shards(), HYPER, TRAIN)
    first, network = tensors_of(played.model), first_hypernetwork(played)
    factors = [f"blocks.0.attention.to_qkv.lora_{factor}.weight" for factor in "AB"]
    assert torch.equal(network["h"], torch.cat([first[name].flatten() for name in factors]))
    for client in played.shards:
        served = played.served(client)
        assert not served[factors[1]].any() and not torch.equal(served[factors[0]], first[factors[0]])
