"""FedTP with sampling: founders keep their own embeddings until they are trained, through kill -9; late ones start between."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from attune.common.seeds import derive
from tests.e2e.harness import FederationAt, digit_shards

SEED = 4
FLAGS = (
    *("--method", "fedtp", "--seed", str(SEED), "--rounds", "2", "--min-clients", "3", "--clients-per-round", "1"),
    *("--set", "train.local_epochs=1", "--set", "round.evaluate_every=1", "--set", "round.adapt_rounds=0"),
    *("--set", "method.embedding_dim=6", "--set", "method.embedding_lr=0.5"),
)


def weights_of(phi: Mapping[str, np.ndarray], z: np.ndarray) -> np.ndarray:
    """Return all that the hypernetwork generates, h(phi; z), in float64, head after head."""
    hidden = z.astype(float)
    for layer in range(sum(name.startswith("mlp.") and name.endswith(".weight") for name in phi)):
        hidden = np.maximum(hidden, 0) if layer else hidden
        hidden = phi[f"mlp.{layer}.weight"].astype(float) @ hidden + phi[f"mlp.{layer}.bias"]
    heads = sorted(name.removesuffix(".weight") for name in phi if name.startswith("head.") and name.endswith(".weight"))
    return np.concatenate([phi[f"{head}.weight"].astype(float) @ hidden + phi[f"{head}.bias"] for head in heads])


def draw(name: str) -> np.ndarray:
    """Return the embedding that a founder of this name begins with."""
    generator = torch.Generator().manual_seed(derive(SEED, "embedding", name))
    return torch.randn(6, generator=generator, dtype=torch.float64).float().numpy()


def test_founders_keep_their_draws_until_trained_and_a_late_one_is_near_their_mean(
    federation_at: FederationAt, tmp_path: Path
) -> None:
    federation = federation_at("founders")
    *founders, late = digit_shards(tmp_path / "shards", 4, 60, 20)
    server = federation.server(*FLAGS, fault="server:2:aggregated=hang")
    devices = federation.devices(founders)
    server.await_fault()
    server.kill()
    federation.server()
    assert [device.code() for device in devices] == [0, 0, 0], [device.text for device in devices]
    assert federation.device(late).code() == 0

    exported = federation.export()
    network = load(exported["server.safetensors"])
    steps = dict(zip(_names(network), network["embedding.step"], strict=True))
    values = dict(zip(_names(network), network["embedding.value"], strict=True))
    trained = sorted(name for name, count in steps.items() if count)
    never = sorted({shard.name for shard in founders} - set(trained))
    assert trained and never, "two rounds with one device each leave one that was never sampled"
    served = {name: _flat(load(exported[f"clients/{name}.safetensors"])) for name in (*steps, late.name)}
    for name in steps:
        z = draw(name) if name in never else values[name]
        assert served[name] == pytest.approx(weights_of(network, z), abs=1e-5), name
    mean = np.mean([served[name] for name in trained], axis=0)
    of_mean_embedding = weights_of(network, np.mean([values[name] for name in trained], axis=0))
    assert len(trained) == 2, "of one trained device both means are the same"
    assert np.linalg.norm(served[late.name] - mean) < 0.95 * np.linalg.norm(of_mean_embedding - mean)


def _flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[key].ravel() for key in sorted(tensors)])


def _names(network: Mapping[str, np.ndarray]) -> list[str]:
    found: list[str] = json.loads(network["embedding.clients"].tobytes())
    return found
