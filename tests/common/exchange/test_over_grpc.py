"""A package's transforms over the network: devices that allow the package run it, and one without it is refused by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from tests.e2e.harness import Federation, Process, Server, tabular_shard

NAMES = ("ann", "bob")
FLAGS = (
    "--method",
    "fedavg",
    "--set",
    "method.bound_change=0",
    "--model",
    "mlr",
    "--min-clients",
    "2",
    "--rounds",
    "2",
)


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


def run(federation: Federation, package: Path, flags: Sequence[str], device_flags: Sequence[str]) -> list[Process]:
    """Run a server and its devices to the end; the package is installed for all of them."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    environment = federation.environment | {"PYTHONPATH": path}
    command = [
        script("fedserver"),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dashboard",
        "off",
        "--exit-when-done",
        *FLAGS,
        *flags,
    ]
    server = Server(command, federation.folder / "server.log", environment, federation.home, fresh=True)
    federation.port = server.port
    federation.processes.append(server)
    for seed, name in enumerate(NAMES):
        shard = tabular_shard(federation.folder / name, seed)
        command = [script("fedclient"), "--data", str(shard), "--device", "cpu", "--server", f"localhost:{server.port}"]
        command += ["--name", name, *device_flags]
        federation.processes.append(Process(command, federation.folder / f"{name}.log", environment, fresh=True))
    return federation.processes


@pytest.mark.parametrize("transform", ["scale", "mask"])
@pytest.mark.usefixtures("toys")  # the export of the state happens in this process
def test_devices_that_allow_the_package_transform_their_updates(transform: str, tmp_path: Path, package: Path) -> None:
    exported = []
    for flags in ([], ["--set", f"transforms.{transform}={{}}"]):
        federation = Federation(tmp_path / (transform if flags else "plain"))
        try:
            processes = run(federation, package, flags, ["--allow-plugin", "toy"])
            codes = [process.code() for process in processes]
            assert not any(codes), "\n".join(process.text for process in processes)
            exported.append(load(federation.export()["shared.safetensors"]))
        finally:
            federation.close()
    plain, transformed = exported
    for name, tensor in plain.items():
        if transform == "scale":
            assert np.array_equal(transformed[name], tensor), "what devices did is taken back to the bit"
        else:
            np.testing.assert_allclose(transformed[name], tensor, rtol=1e-4, atol=1e-4)


def test_a_device_that_has_not_allowed_the_package_takes_no_part(federation: Federation, package: Path) -> None:
    server, *devices = run(federation, package, ["--set", "transforms.scale={}"], [])
    for device in devices:
        assert device.code() != 0
        assert "code of the plug-in toy 1.0" in device.text and "--allow-plugin toy" in device.text
    server.kill()
