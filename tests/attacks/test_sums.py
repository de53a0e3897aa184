"""Sums of `--method analytic`: what they tell of single samples, and sums by which a device would harm all others."""

from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from attune.common.errors import UpdateRefused
from attune.common.exchange.registry import SECURE_SUM, SecureSumSettings
from attune.common.exchange.transform import ArrivalContext, Chain, Cohort, DeviceContext, PartUpdate, RoundContext
from attune.common.methods.ridge import CROSS, ERRORS, STRENGTHS, nothing_solved, sums_manifest, sums_of, targets_of
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.common.models.closed_form import PIXELS, ClosedForm
from attune.common.models.registry import build, default_spec
from attune.common.secure.secure_sum import SecureSum, decode_exactly, encode_exactly, masked
from attune.common.wire.blobs import Buffer
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import TensorSource, manifest_of
from attune.fedserver.lab.aggregators.base import MemoryVault, write
from attune.fedserver.lab.aggregators.closed_form import OF, ClosedFormSums
from attune.fedserver.lab.checks import read_through
from attune.fedserver.lab.groups import chain_of
from tests.common.secure.cohort import NAMES
from tests.common.secure.cohort import Cohort as Devices

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
    made = sums_of(model.features(digits, torch.float64), targets_of(LABELS, 3), [model.head.in_features])
    return {**made, ERRORS: torch.zeros(1, len(STRENGTHS), dtype=torch.float64)}


def test_a_class_with_one_sample_shows_that_sample(
    model: ClosedForm, digits: torch.Tensor, sums: dict[str, torch.Tensor]
) -> None:
    """docs/security.md says so, and so devices hand in sums only where their owner allows it, or behind masks."""
    np.testing.assert_allclose(inverted(model, sums[CROSS]), digits[0].flatten().numpy(), atol=1e-3)


def inverted(model: ClosedForm, cross: torch.Tensor) -> np.ndarray:
    """Return the image whose features the column of B of class 0 would be, if the class had one sample.

    The column of B is z(x). Each cosine gives its angle up to the sign, the nearest one to the known phase is taken, and
    Gauss-Newton steps end at x.
    """
    random_R = cross[:-1, 0].numpy() / np.sqrt(2 / 500)
    F, p = model.frequency.double().numpy(), model.phase.double().numpy()
    turns = np.arccos(np.clip(random_R, -1, 1))
    angles = np.stack([turns, 2 * np.pi - turns, turns + 2 * np.pi, -turns])
    x = np.linalg.lstsq(F.T, angles[np.abs(angles - p).argmin(axis=0), np.arange(500)] - p, rcond=None)[0]
    for _ in range(12):
        angle = x @ F + p
        x = x + np.linalg.lstsq(-np.sin(angle)[:, None] * F.T, random_R - np.cos(angle), rcond=None)[0]
    return np.asarray(x * PIXELS[1] + PIXELS[0])


# --- behind masks


class Read(NamedTuple):
    """Finished round 1 behind masks: all numbers that have reached the server, and the sums that devices have."""

    sent: list[np.ndarray]
    served: dict[str, torch.Tensor]
    given: dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def read(model: ClosedForm, tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Let six devices sum behind masks. The one sample of class 0 of the first device is the image that is looked for."""
    folder, images = tmp_path_factory.mktemp("masked"), torch.from_numpy(load_digits().images[:36, None].astype("f4") / 16)
    transform, manifest = (
        SecureSum(SECURE_SUM, SecureSumSettings(most_samples=6, exact=True)),
        sums_manifest(3, [501], one_sum=True),
    )
    devices, updates, sent, given = Devices(NAMES).until("masked"), [], [], {}
    for place, name in enumerate(NAMES):
        devices.ask(name)
        devices.server.masked(name)
        made = sums_of(model.features(images[6 * place :][:6], torch.float64), targets_of(LABELS, 3), [model.head.in_features])
        given[name] = {**made, ERRORS: torch.zeros(manifest[ERRORS].shape, dtype=torch.float64)}
        context = DeviceContext(name, "attended", 1, "", False, None, {}, lambda purpose: 5)
        write_tensors(folder / name, transform.on_device(PartUpdate(name, 6.0, given[name]), context).tensors)
        blob = masked("attended", folder / name, devices.members[name].seeds(devices.states[name]))
        arrival = ArrivalContext(name, "attended", f"{name}'s update", "", manifest, None, True)
        file = TensorFile(Buffer(name, blob))
        sent.append(file["+sums"].numpy().view(np.uint32).copy())
        updates.append(Chain([transform]).on_arrival(PartUpdate(name, 0.0, file), arrival))
    devices.server.advance()
    devices.until("unmasking").exchange()
    context = RoundContext("attended", 1, lambda client: None, unmasking=devices.server.unmasking(), manifest=manifest)
    cohort = transform.on_cohort(Cohort("attended", tuple(updates)), context)
    vault = MemoryVault()
    aggregator = ClosedFormSums(ClosedFormSettings(), vault, 0, {})
    aggregator.start(nothing_solved(3, [501]))
    aggregator.close_round(cohort.updates)
    return Read(sent, dict(vault.read("members")), given)


def test_what_the_server_sees_behind_masks_does_not_show_the_sample(
    model: ClosedForm, digits: torch.Tensor, read: Read
) -> None:
    """Neither the numbers that a device sends, nor the sum, in which six samples are added."""
    for sent in read.sent:
        digits_N4 = sent.reshape(-1, 4)
        assert abs(np.unpackbits(sent.view(np.uint8)).mean() - 0.5) < 0.01
        assert not set(map(bytes, digits_N4)) & set(map(bytes, plain_digits(read)))
    as_read = decode_exactly(read.sent[0].tobytes(), 1)[: 501 * 3].view(501, 3)  # cross is the first of the names
    assert np.abs(inverted(model, as_read) - digits[0].flatten().numpy()).max() > 0.3
    assert np.abs(inverted(model, read.served[CROSS]) - digits[0].flatten().numpy()).max() > 0.3


def plain_digits(read: Read) -> np.ndarray:
    """Return the numbers of the first device without masks, as it would send them; no number is 0."""
    B_N = read.given["ada"][CROSS].reshape(-1)
    return encode_exactly(B_N[B_N != 0]).numpy().view(np.uint32).reshape(-1, 4)


def test_all_other_devices_together_see_the_sample(model: ClosedForm, digits: torch.Tensor, read: Read) -> None:
    """Expect what docs/security.md says of every sum. One honest device among the others prevents it."""
    others = [name for name in NAMES if name != "ada"]
    left = read.served[CROSS] - sum(read.given[name][CROSS] for name in others)
    np.testing.assert_allclose(inverted(model, left), digits[0].flatten().numpy(), atol=1e-3)
    one_honest = read.served[CROSS] - sum(read.given[name][CROSS] for name in others[1:])
    assert np.abs(inverted(model, one_honest) - digits[0].flatten().numpy()).max() > 0.3


def test_a_class_of_one_device_alone_shows_in_the_sum(model: ClosedForm, digits: torch.Tensor, read: Read) -> None:
    """Masks hide who gave what, and nobody else gave anything to this column: docs/methods/analytic.md says so."""
    others = torch.from_numpy(load_digits().images[6:36, None].astype("f4") / 16)
    rest = sums_of(
        model.features(others, torch.float64), targets_of(LABELS.clamp(min=1).repeat(5), 3), [model.head.in_features]
    )
    total = read.given["ada"][CROSS] + rest[CROSS]
    np.testing.assert_allclose(inverted(model, total), digits[0].flatten().numpy(), atol=1e-3)


class Held(TensorSource):
    """Tensors of a peer, in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


def arrived(sums: dict[str, torch.Tensor], vault: MemoryVault | None = None) -> None:
    """Let the server take in these sums of eve."""
    context = ArrivalContext("eve", "attended", "eve's attended update", "", sums_manifest(3, [501]), None, True)
    chain = chain_of("attended", ClosedFormSettings(), {}, None, "classes", nothing_solved(3, [501]), vault or MemoryVault())
    update = chain.on_arrival(PartUpdate("eve", 6.0, Held(sums)), context)
    read_through(update.source)
    context.end()


def test_honest_sums_arrive(sums: dict[str, torch.Tensor]) -> None:
    arrived(sums)


def test_only_sums_that_the_server_holds_are_spared_a_check(sums: dict[str, torch.Tensor]) -> None:
    """The same name, and sums that differ in one bit, do not do."""
    vault, wrong = MemoryVault(), sums["gram"].clone()
    write(vault, f"{OF}eve", sums)
    with patch.object(torch.linalg, "cholesky_ex") as factor:
        arrived({**sums, ERRORS: sums[ERRORS] + 1}, vault)
    assert not factor.called
    wrong[1] *= 100
    with pytest.raises(UpdateRefused, match="not positive semi-definite"):
        arrived({**sums, "gram": wrong}, vault)


@pytest.mark.parametrize("factor", [-10.0, -1.0, 1.5, 100.0])
def test_sums_of_no_samples_are_refused_when_they_arrive(sums: dict[str, torch.Tensor], factor: float) -> None:
    """With G alone checked, three of ten such devices took a common model from 97.1 to 32.0 %."""
    for changed in (CROSS, "gram", "squares"):
        with pytest.raises(UpdateRefused, match="eve's attended update has sums that no samples can have"):
            arrived({**sums, changed: factor * sums[changed]})
