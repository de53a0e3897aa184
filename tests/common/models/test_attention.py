"""Attention and positions against a hand-written float64 oracle."""

import math

import numpy as np
import pytest
import torch

from attune.common.models import registry
from attune.common.models.blocks import SelfAttention, TransformerBlock
from attune.common.models.transformer import sinusoids


def oracle(layer: SelfAttention, x_TD: np.ndarray, causal: bool) -> np.ndarray:
    """Compute one sample, with loops where they make it clearer."""
    weight = layer.to_qkv.weight.detach().numpy()
    inner = layer.heads * layer.head_dim
    q, k, v = (x_TD @ weight[i * inner : (i + 1) * inner].T for i in range(3))
    out = np.zeros((len(x_TD), inner))
    for head in range(layer.heads):
        part = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        for t in range(len(x_TD)):
            seen = t + 1 if causal else len(x_TD)
            score = np.array([q[t, part] @ k[s, part] / math.sqrt(layer.head_dim) for s in range(seen)])
            share = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
            out[t, part] = share @ v[:seen, part]
    return out @ layer.to_out.weight.detach().numpy().T + layer.to_out.bias.detach().numpy()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "heads", "head_dim", "steps"), [(8, 2, 4, 5), (6, 3, 5, 7), (4, 1, 4, 1)])
def test_attention_equals_the_oracle(causal, width, heads, head_dim, steps):
    torch.manual_seed(0)
    layer = SelfAttention(width, heads, head_dim, 0.0, causal).double()
    x = torch.randn(3, steps, width, dtype=torch.float64) * 2
    expected = np.stack([oracle(layer, sample.numpy(), causal) for sample in x])
    assert np.abs(layer(x).detach().numpy() - expected).max() < 1e-12


def test_attention_has_second_derivatives():
    torch.manual_seed(0)
    block = TransformerBlock(4, 2, 2, 8, 0.0).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: block(x).square().sum(), (x,))


def test_same_bits_twice():
    model = registry.build(registry.default_spec("images", (28, 28, 1), 10, 0, "vit", {}), 0)
    x = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    runs = []
    for _ in range(2):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        runs.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_tokens_are_read_at_the_last_position_and_order_counts():
    model = registry.build(registry.default_spec("tokens", (5,), 3, 9, None, {}), 0).eval()
    one, two = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 1, 3, 4, 5]])
    assert not torch.allclose(model(one), model(two))
    assert not torch.allclose(model(one), model(torch.tensor([[1, 2, 3, 4, 6]])))


@pytest.mark.parametrize(("kind", "shape"), [("tokens", (5,)), ("series", (5, 2))])
def test_any_length(kind, shape):
    model = registry.build(registry.default_spec(kind, shape, 3, 9, "transformer", {}), 0)
    for steps in (1, 5, 40):
        x = torch.zeros(2, steps, dtype=torch.int64) if kind == "tokens" else torch.zeros(2, steps, 2)
        assert model(x).shape == (2, 3)


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids(width):
    table = sinusoids(50, width)
    for t in (0, 3, 49):
        for column in range(width):
            angle = t / 10000 ** ((column // 2) * 2 / width)
            assert table[t, column].item() == pytest.approx(math.sin(angle) if column % 2 == 0 else math.cos(angle), abs=1e-6)
