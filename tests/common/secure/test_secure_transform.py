"""Secure aggregation as a transform: the mean of masked updates is the plain mean, and nothing else can be read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attune.common.errors import UpdateRefused, WireError
from attune.common.exchange.registry import SECURE_SUM, SecureSumSettings, transforms_for
from attune.common.exchange.transform import (
    REACHES,
    SUMMED,
    ArrivalContext,
    Chain,
    Cohort,
    DeviceContext,
    NotASum,
    PartUpdate,
    RoundContext,
    above,
)
from attune.common.secure.secure_sum import ONE, REPORT, SecureSum, decode, encode, masked, sealed_manifest, weight_units
from attune.common.wire.blobs import Buffer, LocalFile
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import Tensors, manifest_of
from tests.common.secure.cohort import NAMES
from tests.common.secure.cohort import Cohort as Devices

SAMPLES = dict(zip(NAMES, (60, 7, 100, 33, 1, 88), strict=True))
CLIP = 0.5
NOTHING: Mapping[str, float] = {}


def settings(**changes: object) -> SecureSumSettings:
    return SecureSumSettings(**({"clip": CLIP, "most_samples": 100} | changes))  # type: ignore[arg-type]


def served() -> Tensors:
    draw = torch.Generator().manual_seed(1)
    return {
        "layer.weight": torch.randn(30, 20, generator=draw),
        "layer.bias": torch.randn(20, generator=draw),
        "norm.num_batches_tracked": torch.tensor(3),
        "scale": torch.tensor(0.5),
    }


def trained(name: str, size: float = 0.1) -> Tensors:
    draw = torch.Generator().manual_seed(NAMES.index(name))
    return {
        key: value + size * torch.randn(value.shape, generator=draw) if value.is_floating_point() else value + 9
        for key, value in served().items()
    }


def on_device(
    name: str, tensors: Tensors, options: SecureSumSettings, change: bool = False, measured: Mapping[str, float] = NOTHING
) -> Tensors:
    context = DeviceContext(name, "shared", 7, "", change, served(), {}, lambda purpose: 5, measured=measured)
    chain = Chain(transforms_for("shared", {SECURE_SUM: options}))
    return dict(chain.on_device(PartUpdate(name, float(SAMPLES[name]), tensors), context).tensors)


def source(folder: Path, name: str, tensors: Tensors) -> TensorFile:
    path = folder / f"{name}.safetensors"
    write_tensors(path, tensors)
    return TensorFile(LocalFile(path))


def summed(folder: Path, vectors: dict[str, Tensors], options: SecureSumSettings, gone: tuple[str, ...] = ()) -> Tensors:
    """Return the mean that the server makes of masked updates, after `gone` have dropped out of the last exchange but one."""
    devices = Devices(NAMES).until("masked")
    for name in NAMES:
        devices.ask(name)
        if name not in gone:
            devices.server.masked(name)
    devices.server.advance()
    devices.until("unmasking").exchange()
    base, transform, updates = source(folder, "served", served()), SecureSum(SECURE_SUM, options), []
    for name in NAMES:
        if name not in gone:
            write_tensors(folder / name, vectors[name])
            blob = masked("shared", folder / name, devices.members[name].seeds(devices.states[name]))
            arrival = ArrivalContext(name, "shared", f"{name}'s update", "", manifest_of(served()), base, True)
            update = Chain([transform]).on_arrival(PartUpdate(name, 0.0, TensorFile(Buffer(name, blob))), arrival)
            with pytest.raises(UpdateRefused, match="is sealed by secure-sum-4"):
                update.tensors["scale"]
            updates.append(update)
    context = RoundContext(
        "shared", 7, lambda client: base, unmasking=devices.server.unmasking(), manifest=manifest_of(served())
    )
    [total] = transform.on_cohort(Cohort("shared", tuple(updates)), context).updates
    return {name: total.tensors[name] for name in served()} | {REPORT: total.facts}  # type: ignore[dict-item]


def plain_mean(tensors: dict[str, Tensors], names: tuple[str, ...], uniform: bool = False) -> Tensors:
    weights = {name: 1.0 if uniform else float(SAMPLES[name]) for name in names}
    total = sum(weights.values())
    return {
        key: sum((weights[name] / total) * tensors[name][key].double() for name in names)  # type: ignore[misc]
        for key in ("layer.weight", "layer.bias", "scale")
    }


@pytest.mark.parametrize("gone", [(), ("bo",), ("flo",)])
@pytest.mark.parametrize("uniform", [False, True])
def test_the_mean_is_the_plain_one_to_1e_5_of_the_clipping_bound(tmp_path: Path, gone: tuple[str, ...], uniform: bool) -> None:
    options = settings(uniform=uniform)
    values = {name: trained(name) for name in NAMES}
    vectors = {name: on_device(name, values[name], options) for name in NAMES}
    result = summed(tmp_path, vectors, options, gone)
    for key, expected in plain_mean(values, tuple(n for n in NAMES if n not in gone), uniform).items():
        torch.testing.assert_close(result[key].double(), expected, atol=1e-5 * CLIP, rtol=1e-7)
    assert result["norm.num_batches_tracked"] == 3


def test_metrics_arrive_as_their_weighted_mean_alone(tmp_path: Path) -> None:
    losses = dict(zip(NAMES, (0.5, 2.0, 100.0, 1.0, 3.0, 0.25), strict=True))
    vectors = {
        name: on_device(
            name, trained(name), settings(), measured={"loss": losses[name]} | ({"accuracy_after": 0.5} if name == "bo" else {})
        )
        for name in NAMES
    }
    means = summed(tmp_path, vectors, settings())[REPORT]
    expected = sum(min(64.0, losses[name]) * SAMPLES[name] for name in NAMES) / sum(SAMPLES.values())
    measured = {"loss": pytest.approx(expected, abs=1e-3), "accuracy_after": pytest.approx(0.5, abs=1e-4)}
    assert {name: value for name, value in means.items() if name in SUMMED} == measured


@pytest.mark.parametrize("norm", [0.0, 0.75])
def test_the_sum_says_how_many_devices_have_changes_above_each_multiple_of_the_bound(tmp_path: Path, norm: float) -> None:
    """Each device changes one number. With the norm bounded to 1.5 times the clipping bound, the larger ones are reduced."""
    changes = dict(zip(NAMES, (0.1, 0.2, 0.9, -1.75, 3.0, 100.0), strict=True))
    vectors = {}
    for name, change in changes.items():
        tensors = served()
        tensors["scale"] = tensors["scale"] + change * CLIP
        vectors[name] = on_device(name, tensors, settings(norm=norm))
    facts = summed(tmp_path, vectors, settings(norm=norm))[REPORT]
    counts = [5, 4, 4, 3, 0, 0, 0] if norm else [5, 4, 4, 3, 2, 1, 1]
    assert facts == {above("shared", reach): count for reach, count in zip(REACHES, counts, strict=True)}


def test_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    vectors = {name: on_device(name, trained(name), settings()) for name in NAMES}
    for place, number in ((-1, 1), (-7, 2), (-7, -len(NAMES))):  # more above 8 than above 4, more than devices, fewer than none
        report = vectors["ada"][REPORT].clone()
        report[place] = report[place] + number
        with pytest.raises(NotASum, match="the reports of the shared updates"):
            summed(tmp_path, vectors | {"ada": vectors["ada"] | {REPORT: report}}, settings())


def test_changes_are_clipped_to_the_bound_and_the_norm() -> None:
    far = {key: value + 100 if value.is_floating_point() else value for key, value in served().items()}
    numbers = on_device("cy", far, settings())
    assert all(int(tensor.abs().max()) == ONE for tensor in numbers.values())
    bounded = on_device("cy", far, settings(norm=0.1))
    lengths = torch.cat([tensor.reshape(-1).double() for name, tensor in bounded.items() if name != REPORT])
    assert abs(float(lengths.norm()) * CLIP / ONE - 0.1) < 1e-4


def test_parts_of_which_changes_are_handed_in() -> None:
    change = {key: torch.full(value.shape, 0.25) for key, value in served().items() if value.is_floating_point()}
    assert int(on_device("cy", change, settings(), change=True)["scale"]) == ONE // 2


def test_a_device_with_too_few_samples_hands_in_nothing() -> None:
    with pytest.raises(UpdateRefused, match=r"eva has 1 training samples.*at least 2 \(privacy.secure_samples\)"):
        on_device("eva", trained("eva"), settings(samples=2))


@pytest.mark.parametrize(("place", "number"), [("scale", torch.inf), ("layer.bias", -torch.inf), ("layer.weight", torch.nan)])
def test_an_update_that_is_not_finite_is_in_no_sum(place: str, number: float) -> None:
    """Nobody could tell it from a large one in the sum."""
    tensors = trained("ada")
    tensors[place].view(-1)[0] = number
    with pytest.raises(UpdateRefused, match=r"ada's update .* not finite"):
        on_device("ada", tensors, settings(norm=1.0))


def test_an_order_that_serves_nothing_is_refused() -> None:
    context = DeviceContext("ada", "shared", 7, "", False, None, {}, lambda purpose: 5)
    with pytest.raises(UpdateRefused, match="serves no shared values"):
        SecureSum(SECURE_SUM, settings()).on_device(PartUpdate("ada", 5.0, trained("ada")), context)


def test_an_update_of_another_form_is_refused(tmp_path: Path) -> None:
    context = ArrivalContext("ada", "shared", "ada's update", "", manifest_of(served()), None, True)
    plain = PartUpdate("ada", 0.0, source(tmp_path, "plain", trained("ada")))
    with pytest.raises(WireError, match="ada's update"):
        SecureSum(SECURE_SUM, settings()).on_arrival(plain, context)


def test_numbers_that_are_no_sum_are_refused(tmp_path: Path) -> None:
    vectors = {name: on_device(name, trained(name), settings()) for name in NAMES}
    vectors["ada"]["layer.weight"] = vectors["ada"]["layer.weight"] * 100
    with pytest.raises(NotASum, match=r"layer\.weight of the shared updates"):
        summed(tmp_path, vectors, settings())
    vectors["ada"][REPORT] = torch.tensor([ONE * 50, *[0] * 13], dtype=torch.int32)
    with pytest.raises(NotASum, match="the reports of the shared updates"):
        summed(tmp_path, vectors, settings())


def test_a_cohort_without_secrets_cannot_be_read(tmp_path: Path) -> None:
    base = source(tmp_path, "served", served())
    context = RoundContext("shared", 7, lambda client: base)
    with pytest.raises(UpdateRefused, match="nothing can unmask"):
        SecureSum(SECURE_SUM, settings()).on_cohort(Cohort("shared", (PartUpdate("ada", 1.0, base),)), context)


class EveryDraw(np.random.PCG64):
    """A source that gives all 2^16 draws in turn."""

    given = 0

    def random_raw(self, size: Any = None, output: Any = True) -> Any:
        draws = np.arange(self.given, self.given + 4 * size).astype(np.uint16)
        self.given += 4 * size
        return draws.view(np.uint64)


@pytest.mark.parametrize("x", [0.0, 0.25, -0.25, 0.5, -0.75, 1 / 3, 1 - 2**-15, 12345.6789, -ONE + 0.125])
def test_the_mean_over_all_draws_is_the_number(x: float) -> None:
    """The middle of the step between two draws is 2^-16 from either."""
    scaled = torch.full((1 << 16,), x, dtype=torch.float64)
    numbers = encode(scaled, ONE, float(ONE), EveryDraw())
    assert float((numbers - scaled).abs().max()) < 1
    assert abs(float(numbers.double().mean()) - x) <= 2**-16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_encoding_and_decoding_leave_their_arguments_as_they_are(dtype: torch.dtype) -> None:
    change, total = torch.tensor([[0.1, -0.2], [0.3, 7.0]], dtype=dtype), torch.tensor([1, -2, 3], dtype=dtype)
    before = change.clone(), total.clone()
    encode(change, ONE, CLIP, np.random.PCG64(0))
    decode(total, ONE, CLIP)
    assert change.equal(before[0]) and total.equal(before[1])


def test_whole_numbers_stay_as_they_are_and_larger_ones_become_the_weight() -> None:
    whole = torch.tensor([0.0, 1.0, -1.0, 2.0, ONE - 1, ONE, -ONE, ONE + 7, -3.0 * ONE]).repeat_interleave(1 << 16)
    numbers = encode(whole, ONE, float(ONE), EveryDraw())
    assert torch.equal(numbers, whole.clamp(-ONE, ONE).int())


@pytest.mark.parametrize(("samples", "units"), [(100, ONE), (50, ONE // 2), (0.0, 1), (1000, ONE)])
def test_weights(samples: float, units: int) -> None:
    assert weight_units(samples, 100) == units


def test_1024_devices_at_the_bound_fit_into_the_sum() -> None:
    assert 1024 * ONE < 1 << 31
    total = torch.full((2,), 1024 * ONE, dtype=torch.int32)
    assert decode(total, 1024 * ONE, CLIP).tolist() == [CLIP, CLIP]


def test_the_sealed_form_has_whole_numbers_of_the_same_shapes() -> None:
    sealed = sealed_manifest(manifest_of(served()))
    assert {name: spec.dtype for name, spec in sealed.items()} == dict.fromkeys(
        ("layer.weight", "layer.bias", "scale", REPORT), "I32"
    )
