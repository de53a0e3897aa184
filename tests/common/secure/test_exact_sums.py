"""Sums over samples behind masks: exact to 2^-80 for each device, whatever the split, and with nothing of one device."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import UpdateRefused, WireError
from attune.common.exchange.registry import SECURE_SUM, SecureSumSettings
from attune.common.exchange.transform import ArrivalContext, Chain, Cohort, DeviceContext, PartUpdate, RoundContext
from attune.common.protocol import MOST_MEMBERS
from attune.common.secure.masked_sums import added
from attune.common.secure.secure_sum import EXACT, EXACT_BYTES, SecureSum, decode_exactly, encode_exactly, masked
from attune.common.wire.blobs import Buffer
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import Tensors
from tests.common.secure.cohort import NAMES
from tests.common.secure.cohort import Cohort as Devices

LARGEST = math.nextafter(2.0**38, 0)
MANIFEST: Manifest = {"gram": TensorSpec("F64", (3,)), "cross": TensorSpec("F64", (2, 2)), "errors": TensorSpec("F64", ())}
TRANSFORM = SecureSum(SECURE_SUM, SecureSumSettings(most_samples=100, exact=True))
numbers = st.floats(-LARGEST, LARGEST, allow_nan=False)


def whole(value: float) -> bytes:
    return encode_exactly(torch.tensor([value], dtype=torch.float64)).numpy().tobytes()


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0**-80, -(2.0**-80), 0.1, -12345.678, LARGEST, -LARGEST])
def test_a_number_is_written_in_units_of_2_to_minus_80_above_the_lowest_one(value: float) -> None:
    written = int.from_bytes(whole(value), "little")
    assert len(whole(value)) == EXACT_BYTES
    assert written == math.trunc(Fraction(value) * 2**80) + 2**118


@given(st.lists(numbers, min_size=1, max_size=MOST_MEMBERS))
def test_the_sum_is_that_of_the_numbers(values: list[float]) -> None:
    total = bytes(EXACT_BYTES)
    for value in values:
        total = added(total, whole(value))
    exact, [given_back] = sum(map(Fraction, values)), decode_exactly(total, len(values)).tolist()
    error = abs(Fraction(given_back) - exact)
    assert error <= len(values) * Fraction(1, 2**80) + Fraction(math.ulp(float(exact))), (given_back, float(exact))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**38, -(2.0**38)])
def test_what_does_not_fit_is_refused(value: float) -> None:
    with pytest.raises(UpdateRefused, match="not finite or too large: scale its data"):
        whole(value)


def given_by(name: str, size: float = 1.0) -> Tensors:
    draw = torch.Generator().manual_seed(NAMES.index(name))
    return {key: size * torch.randn(spec.shape, generator=draw, dtype=torch.float64) for key, spec in MANIFEST.items()}


def on_device(name: str, tensors: Tensors) -> Tensors:
    context = DeviceContext(name, "attended", 1, "", False, None, {}, lambda purpose: 5)
    return dict(Chain([TRANSFORM]).on_device(PartUpdate(name, 10.0, tensors), context).tensors)


def arrived(name: str, blob: bytes | bytearray) -> PartUpdate:
    arrival = ArrivalContext(name, "attended", f"{name}'s update", "", MANIFEST, None, True)
    return Chain([TRANSFORM]).on_arrival(PartUpdate(name, 0.0, TensorFile(Buffer(name, blob))), arrival)


@pytest.mark.parametrize("gone", [(), ("bo",)])
def test_the_server_reads_the_sum_alone(tmp_path: Path, gone: tuple[str, ...]) -> None:
    """A device that drops out after it has shared its secrets is not in the sum; the others take its masks off."""
    devices = Devices(NAMES).until("masked")
    updates = []
    for name in NAMES:
        devices.ask(name)
        if name in gone:
            continue
        devices.server.masked(name)
        write_tensors(tmp_path / name, on_device(name, given_by(name)))
        blob = masked("attended", tmp_path / name, devices.members[name].seeds(devices.states[name]))
        updates.append(arrived(name, blob))
        behind = TensorFile(Buffer(name, blob))[EXACT]
        plain = TensorFile(Buffer(name, (tmp_path / name).read_bytes()))[EXACT]
        assert not (behind == plain).any(), "each number of 32 bits is hidden"
        with pytest.raises(UpdateRefused, match="is sealed by secure-sum-4"):
            updates[-1].tensors[EXACT]
    devices.server.advance()
    devices.until("unmasking").exchange()
    context = RoundContext("attended", 1, lambda client: None, unmasking=devices.server.unmasking(), manifest=MANIFEST)
    [total] = TRANSFORM.on_cohort(Cohort("attended", tuple(updates)), context).updates
    stay = tuple(name for name in NAMES if name not in gone)
    assert total.members == stay
    for key in MANIFEST:
        exact = sum(given_by(name)[key] for name in stay)
        torch.testing.assert_close(total.tensors[key], exact, rtol=1e-15, atol=1e-15)


def test_an_update_of_another_size_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ada", on_device("ada", given_by("ada") | {"gram": torch.zeros(4, dtype=torch.float64)}))
    with pytest.raises(WireError, match="ada's update"):
        arrived("ada", (tmp_path / "ada").read_bytes())
