"""The same seeds give the same bits in one process as over mutual TLS: every slot of the server, every device's model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import attune
from attune.common.config import merge
from attune.common.protocol import ENCODINGS
from attune.fedclient.model.artifact import read_info
from tests.e2e.hosted import host

SMALL = {"seed": 3, "round": {"rounds": 2}, "train": {"local_epochs": 1, "local_steps": 0, "batch_size": 8}}
VIT = {"width": 8, "heads": 2, "depth": 1, "patch": 4}
SAMPLED = {"round": {"clients": 2, "rounds": 3}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedtp": ("digits", {"method": {"name": "fedtp"}, "model": VIT}),
    "fedavg, bf16": ("clouds", {"method": {"name": "fedavg"}, "round": {"encoding": "bf16", "rounds": 2}}),
    "fedmcsa, int8": ("clouds", {"method": {"name": "fedmcsa"}, "round": {"encoding": "int8"}}),
    "fedtp, int8": ("digits", {"method": {"name": "fedtp"}, "model": VIT, "round": {"encoding": "int8"}}),
    "fedtp, part by part": (
        "digits",
        {"method": {"name": "fedtp"}, "model": VIT, "round": {"encoding": "int8", "encodings": {"shared": "bf16"}}},
    ),
    "fedmcsa, sampled": ("clouds", merge(SAMPLED, {"method": {"name": "fedmcsa"}, "round": {"train": "all"}})),
    "fedmcsa, dialled": (
        "clouds",
        {"method": {"name": "fedmcsa", "dial": True}, "round": {"clients": 2, "rounds": 2, "evaluate_every": 1}},
    ),
    "fedper, sampled": ("clouds", merge(SAMPLED, {"method": {"name": "fedper"}})),
    "pfedme, sampled": ("clouds", merge(SAMPLED, {"method": {"name": "pfedme"}, "round": {"evaluate_every": 1}})),
    "fedtp+mcsa, sampled": ("digits", merge(SAMPLED, {"method": {"name": "fedtp+mcsa"}, "model": VIT})),
}
IN_CONFORMANCE = {"fedtp"}  # tests/conformance has all methods in their plain form


@dataclass(frozen=True)
class Simulated:
    """Simulation of a case: its digests, and the files of its devices' models."""

    members: dict[str, Path]
    settings: dict[str, Any]
    digests: dict[str, str]
    models: dict[str, Any]


@pytest.fixture(scope="module")
def simulated(clouds: dict[str, Path], digits: dict[str, Path], tmp_path_factory) -> Callable[[str], Simulated]:
    """Return a function that simulates a case once."""

    @cache
    def simulate(case: str) -> Simulated:
        which, given = CASES[case]
        members, settings = {"clouds": clouds, "digits": digits}[which], merge(SMALL, given)
        result = attune.simulate(members, settings=settings)
        saved = result.save(tmp_path_factory.mktemp("saved") / "out") / "models"
        return Simulated(members, settings, result.digests, {name: read_info(saved / name).files for name in members})

    return simulate


@pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")
@pytest.mark.parametrize(
    ("case", "setting"),
    [("fedmcsa, sampled", "encoding"), ("fedtp", "encoding"), ("fedtp, int8", "served"), ("fedavg, bf16", "served")],
)
def test_without_loss_no_bit_changes(
    case: str, setting: str, simulated: Callable[[str], Simulated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compress in both directions over the network. Some devices start from their own state, without a base for changes."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    plain = simulated(case)
    packed = merge(plain.settings, {"round": {setting: "zstd"}})
    network = host(tmp_path, plain.members, packed)
    assert network.digests == plain.digests == attune.simulate(plain.members, settings=packed).digests
    assert {name: read_info(network.model(name)).files for name in plain.members} == plain.models


@pytest.mark.parametrize("case", sorted(CASES.keys() - IN_CONFORMANCE))
def test_a_simulation_has_the_bits_of_the_network(
    case: str, simulated: Callable[[str], Simulated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    plain = simulated(case)
    network = host(tmp_path, plain.members, plain.settings)
    assert network.digests == plain.digests
    assert {name: read_info(network.model(name)).files for name in plain.members} == plain.models
    assert len(set(map(str, plain.models.values()))) > 1 or case.startswith("fedavg"), "every device has its own model"
