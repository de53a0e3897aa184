"""Attention rollout: by hand, against an independent NumPy oracle, and models without rollout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attune.common.errors import SettingError
from attune.common.models.registry import build, default_spec
from attune.fedclient.model.rollout import attentions, over_patches, rollout


def vit(shape=(4, 6, 1), **options):
    options = {"width": 8, "heads": 2, "depth": 2, "patch": 2, **options}
    return build(default_spec("images", shape, 3, 0, "vit", options), seed=1).eval()


def test_two_layers_and_two_heads_by_hand():
    """Compute T = 2, so that each layer has 4 weights, of which int(0.3 * 4) = 1 is dropped.

    Layer 1: maximum of [[.9 .1] [.4 .6]] and [[.5 .5] [.2 .8]] = [[.9 .5] [.4 .8]]; .4 goes: [[.9 .5] [0 .8]]; with the
    identity [[1.9 .5] [0 1.8]]; normalised [[1.9/2.4 .5/2.4] [0 1]].
    Layer 2: maximum of [[.3 .7] [.5 .5]] and [[.6 .4] [.5 .5]] = [[.6 .7] [.5 .5]]; the first .5 goes: [[.6 .7] [0 .5]];
    with the identity [[1.6 .7] [0 1.5]]; normalised [[1.6/2.3 .7/2.3] [0 1]].
    """
    one = [[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]]
    two = [[[0.3, 0.7], [0.5, 0.5]], [[0.6, 0.4], [0.5, 0.5]]]
    found = rollout([torch.tensor([one], dtype=torch.float64), torch.tensor([two], dtype=torch.float64)])
    a, b, c, d = 1.9 / 2.4, 0.5 / 2.4, 1.6 / 2.3, 0.7 / 2.3
    assert np.allclose(found, [[[c * a, c * b + d], [0.0, 1.0]]], rtol=0, atol=1e-15)


def oracle(layers, discarded):
    """Compute in plain loops: fuse, drop, add the identity, normalise, multiply from the left."""
    result = []
    for image in range(len(layers[0])):
        steps = layers[0].shape[-1]
        rolled = np.eye(steps)
        for weights in layers:
            fused = np.array([[max(head[i, j] for head in weights[image]) for j in range(steps)] for i in range(steps)])
            ranked = sorted((fused[i, j], i, j) for i in range(steps) for j in range(steps))
            for _, i, j in ranked[: int(discarded * steps**2)]:
                fused[i, j] = 0.0
            for i in range(steps):
                fused[i, i] += 1.0
                fused[i] /= sum(fused[i])
            rolled = fused @ rolled
        result.append(rolled)
    return np.array(result)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    images=st.integers(1, 3),
    heads=st.integers(1, 3),
    steps=st.integers(1, 6),
    depth=st.integers(1, 4),
    discarded=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_against_the_oracle(images, heads, steps, depth, discarded, seed):
    draw = np.random.default_rng(seed)
    layers = [draw.dirichlet(np.ones(steps), size=(images, heads, steps)) for _ in range(depth)]
    found = rollout([torch.from_numpy(layer) for layer in layers], discarded)
    assert np.allclose(found, oracle(layers, discarded), rtol=0, atol=1e-12)
    assert np.allclose(found.sum(dim=-1), 1.0)


def test_the_weights_are_those_of_the_forward_pass():
    """Compute softmax(q k^T / sqrt(E)) of each head by hand, block by block, from the projections of each block's input."""
    model = vit()
    x = torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    entered = []
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda module, inputs, out: entered.append(out.detach()))
    with torch.no_grad():
        found = attentions(model, lambda: model(x))
    assert [tuple(weights.shape) for weights in found] == [(3, 2, 7, 7)] * 2
    for block, h_BTD, weights in zip(model.blocks, entered, found, strict=True):
        w_q, w_k, _ = block.attention.to_qkv.weight.detach().double().chunk(3)
        for head in range(2):
            rows = slice(4 * head, 4 * head + 4)
            scores = (h_BTD.double() @ w_q[rows].T) @ (h_BTD.double() @ w_k[rows].T).transpose(1, 2) / 2.0
            assert torch.allclose(weights[:, head].double(), scores.softmax(dim=-1), atol=1e-6)


def test_a_map_has_a_row_for_each_row_of_patches_and_leaves_the_model_as_it_was():
    model = vit(shape=(5, 6, 1))
    x = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        map_Bhw = over_patches(model, 5, 6, lambda: model(x))
        rolled = rollout(attentions(model, lambda: model(x)))
    assert map_Bhw.shape == (2, 3, 3), "5 rows of pixels are padded to three patches"
    assert torch.equal(map_Bhw[1].flatten(), rolled[1, 0, 1:])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_attention_says_so():
    model = build(default_spec("images", (8, 8, 1), 3, 0, "mlr", {}), seed=1)
    with pytest.raises(SettingError, match="has no attention: a rollout needs a Transformer"):
        attentions(model, lambda: None)


def test_attention_without_a_class_token_or_of_another_kind_says_so():
    series = build(default_spec("series", (4, 2), 3, 0, "transformer", {"width": 8, "heads": 2}), seed=1)
    with pytest.raises(SettingError, match="no class token"):
        over_patches(series, 4, 4, lambda: series(torch.zeros(1, 4, 2)))
    foreign = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2, enable_nested_tensor=False)
    with pytest.raises(SettingError, match="attention of an unknown kind"):
        attentions(foreign, lambda: None)
