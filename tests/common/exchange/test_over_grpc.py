"""A package's transforms over the network: devices that allow the package run it, and one without it is refused by name."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from tests.e2e.harness import Federation, FederationAt, run_to_the_end, tabular_shard

NAMES = ("ann", "bob")
FLAGS = ("--method", "fedavg", "--set", "method.bound_change=0", "--model", "mlr", "--rounds", "2")


@pytest.fixture(scope="module")
def federation_at(package: Path, federation_at: FederationAt) -> FederationAt:
    """Make federations in which the package is installed for all processes."""

    def make(name: str) -> Federation:
        federation = federation_at(name)
        path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
        federation.environment |= {"PYTHONPATH": path}
        return federation

    return make


def shards(federation: Federation) -> list[Path]:
    return [tabular_shard(federation.folder / name, seed) for seed, name in enumerate(NAMES)]


def trained(federation: Federation, flags: Sequence[str]) -> dict[str, np.ndarray]:
    """Run the federation to the end, and return its shared tensors."""
    run_to_the_end(federation, shards(federation), *FLAGS, *flags, device_flags=("--allow-plugin", "toy"))
    return load(federation.export(allowed=("toy",))["shared.safetensors"])


@pytest.fixture(scope="module")
def plain(federation_at: FederationAt) -> dict[str, np.ndarray]:
    return trained(federation_at("plain"), [])


@pytest.mark.parametrize("transform", ["scale", "mask"])
@pytest.mark.usefixtures("toys")  # the export of the state happens in this process
def test_devices_that_allow_the_package_transform_their_updates(
    transform: str, plain: dict[str, np.ndarray], federation_at: FederationAt
) -> None:
    transformed = trained(federation_at(transform), ["--set", f"transforms.{transform}={{}}"])
    for name, tensor in plain.items():
        if transform == "scale":
            assert np.array_equal(transformed[name], tensor), "what devices did is taken back to the bit"
        else:
            np.testing.assert_allclose(transformed[name], tensor, rtol=1e-4, atol=1e-4)


def test_a_device_that_has_not_allowed_the_package_takes_no_part(federation_at: FederationAt) -> None:
    federation = federation_at("refused")
    server = federation.server("--exit-when-done", "--min-clients", "2", *FLAGS, "--set", "transforms.scale={}")
    for device in federation.devices(shards(federation)):
        assert device.code() != 0
        assert "code of the plug-in toy 1.0" in device.text and "--allow-plugin toy" in device.text
    server.kill()
