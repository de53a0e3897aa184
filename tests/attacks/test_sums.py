"""Sums of `--method analytic`: what they tell of single samples, and sums by which a device would harm all others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from attune.common.errors import UpdateRefused
from attune.common.exchange.transform import ArrivalContext, PartUpdate
from attune.common.methods.ridge import CROSS, ERRORS, STRENGTHS, sums_manifest, sums_of, targets_of
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.common.models.closed_form import PIXELS, ClosedForm
from attune.common.models.registry import build, default_spec
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import TensorSource, manifest_of
from attune.fedserver.lab.chains import chain_of
from attune.fedserver.lab.checks import read_through

LABELS = torch.tensor([0, 1, 1, 2, 2, 2])  # class 0 has a single sample


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    return torch.from_numpy(load_digits().images[:6, None].astype("f4") / 16)


@pytest.fixture(scope="module")
def model() -> ClosedForm:
    made = build(default_spec("images", (8, 8, 1), 3, 0, "closed-form", {}), seed=0)
    assert isinstance(made, ClosedForm)
    return made


@pytest.fixture
def sums(model: ClosedForm, digits: torch.Tensor) -> dict[str, torch.Tensor]:
    made = sums_of(model.features(digits, torch.float64), targets_of(LABELS, 3))
    return {**made, ERRORS: torch.zeros(len(STRENGTHS), dtype=torch.float64)}


def test_a_class_with_one_sample_shows_that_sample(
    model: ClosedForm, digits: torch.Tensor, sums: dict[str, torch.Tensor]
) -> None:
    """docs/security.md says so, and so devices hand in sums only where their owner allows it.

    The column of B is z(x). Each cosine gives its angle up to the sign, the nearest one to the known phase is taken, and
    Gauss-Newton steps end at x.
    """
    random_R = sums[CROSS][:-1, 0].numpy() / np.sqrt(2 / 500)
    F, p = model.frequency.double().numpy(), model.phase.double().numpy()
    turns = np.arccos(np.clip(random_R, -1, 1))
    angles = np.stack([turns, 2 * np.pi - turns, turns + 2 * np.pi, -turns])
    x = np.linalg.lstsq(F.T, angles[np.abs(angles - p).argmin(axis=0), np.arange(500)] - p, rcond=None)[0]
    for _ in range(50):
        angle = x @ F + p
        x = x + np.linalg.lstsq(-np.sin(angle)[:, None] * F.T, random_R - np.cos(angle), rcond=None)[0]
    np.testing.assert_allclose(x * PIXELS[1] + PIXELS[0], digits[0].flatten().numpy(), atol=1e-3)


class Held(TensorSource):
    """Tensors of a peer, in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


def arrived(sums: dict[str, torch.Tensor]) -> None:
    """Let the server take in these sums of eve."""
    context = ArrivalContext("eve", "attended", "eve's attended update", "", sums_manifest(3, 501), None, True)
    update = chain_of("attended", ClosedFormSettings(), {}, None).on_arrival(PartUpdate("eve", 6.0, Held(sums)), context)
    read_through(update.source)
    context.end()


def test_honest_sums_arrive(sums: dict[str, torch.Tensor]) -> None:
    arrived(sums)


@pytest.mark.parametrize("factor", [-10.0, -1.0, 1.5, 100.0])
def test_sums_of_no_samples_are_refused_when_they_arrive(sums: dict[str, torch.Tensor], factor: float) -> None:
    """With G alone checked, three of ten such devices took a common model from 97.1 to 32.0 %."""
    for changed in (CROSS, "gram", "squares"):
        with pytest.raises(UpdateRefused, match="eve's attended update has sums that no samples can have"):
            arrived({**sums, changed: factor * sums[changed]})
