"""The stacked LSTM against its equations, and its layers as components."""

import numpy as np
import pytest
import torch

from attune.common.models import registry
from attune.common.models.structure import components, roles, tensors_of


def build(kind: str, shape: tuple[int, ...], **options: int) -> torch.nn.Module:
    return registry.build(registry.default_spec(kind, shape, 5, 100, "lstm", options), 0)


def oracle(tensors: dict[str, np.ndarray], x_TD: np.ndarray, depth: int) -> np.ndarray:
    """Compute Hochreiter and Schmidhuber with a forget gate; gates are stacked as input, forget, cell, output."""

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    for layer in range(depth):
        w_ih, w_hh, b_ih, b_hh = (tensors[f"layers.{layer}.{p}_l0"] for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        hidden = cell = np.zeros(w_hh.shape[1])
        states = []
        for x_D in x_TD:
            i, f, g, o = np.split(w_ih @ x_D + b_ih + w_hh @ hidden + b_hh, 4)
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(cell)
            states.append(hidden)
        x_TD = np.stack(states)
    return tensors["head.weight"] @ x_TD[-1] + tensors["head.bias"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_series_equals_the_oracle(depth):
    model = build("series", (7, 3), width=6, depth=depth).double()
    x_BTC = torch.randn(4, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensors = {name: tensor.numpy() for name, tensor in tensors_of(model).items()}
    expected = np.stack([oracle(tensors, x_TC.numpy(), depth) for x_TC in x_BTC])
    assert np.abs(model(x_BTC).detach().numpy() - expected).max() < 1e-12


def test_tokens_are_embedded():
    model = build("tokens", (4,), width=6).double()
    x_T = torch.tensor([3, 99, 0, 3])
    tensors = {name: tensor.numpy() for name, tensor in tensors_of(model).items()}
    expected = oracle(tensors, tensors["embed.weight"][x_T.numpy()], 2)
    assert np.abs(model(x_T[None])[0].detach().numpy() - expected).max() < 1e-12


def test_the_papers_sizes():
    """Expect an embedding of 8 for 100 characters, two layers of 256, and linear to the classes."""
    assert (
        sum(map(torch.numel, tensors_of(build("tokens", (5,))).values()))
        == 800 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (512 + 2) + 5 * 257
    )


def test_any_length():
    for kind, x in (("tokens", torch.zeros(2, 1, dtype=torch.int64)), ("series", torch.zeros(2, 9, 1))):
        assert build(kind, (5,) if kind == "tokens" else (5, 1), width=4)(x).shape == (2, 5)


def test_each_layer_is_a_component():
    model = build("tokens", (5,), width=4)
    assert list(components(model)) == ["embed", "layers.0", "layers.1", "head"]
    assert components(model)["layers.1"] == [f"layers.1.{p}_l0" for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    assert {name for name, has in roles(model).items() if has} == {"head.weight", "head.bias"}
    assert "embed" not in components(build("series", (5, 2), width=4))


def test_the_forget_gate_starts_open_and_the_recurrence_orthogonal():
    for layer in build("series", (5, 2), width=4).layers:
        assert (layer.bias_ih_l0 + layer.bias_hh_l0).tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
        for gate in layer.weight_hh_l0.detach().chunk(4):
            assert torch.allclose(gate @ gate.T, torch.eye(4), atol=1e-5)
