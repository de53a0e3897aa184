"""Over the network, a device whose frozen body differs from the federation's is refused by name before it trains."""

from pathlib import Path

import torch

from attune.common.plan import ModelSpec
from attune.common.wire.files import write_tensors
from tests.e2e.adapted import BODY, table_body
from tests.e2e.harness import tabular_shard

MODEL = "attune.tests.e2e.adapted:layered"


def body(folder: Path, seed: int) -> str:
    """Write the body's weights, and return the path."""
    torch.manual_seed(seed)
    path = folder / f"body{seed}.safetensors"
    write_tensors(path, table_body(ModelSpec(MODEL, "tabular", (6,), 3)).state_dict())
    return str(path)


def test_a_device_with_another_body_is_refused_by_name(federation_at, tmp_path):
    federation = federation_at("bodies")
    anna, ben = (tabular_shard(federation.folder / name, seed=seed, samples=30) for seed, name in enumerate(("anna", "ben")))
    federation.environment[BODY] = body(tmp_path, 1)
    server = federation.server("--method", "fedavg", "--model", MODEL, "--rounds", "1", "--min-clients", "2")
    right = federation.device(anna, "--allow-model", MODEL)
    federation.environment[BODY] = body(tmp_path, 2)
    wrong = federation.device(ben, "--allow-model", MODEL)
    assert wrong.code() == 2
    said = rf"model {MODEL}: the federation trains adapters of a frozen body with the digest sha256:\w+, and the body here has"
    wrong.wait_for(said)
    server.wait_for(f"device=ben ben takes no part: {said}")
    assert "frozen body" in federation.client("ben")["note"]
    assert not list(federation.folder.glob("attune/devices/*/ben-*/orders/*")), "it has not begun to train"
    federation.environment[BODY] = body(tmp_path, 1)
    again = federation.device(ben, "--allow-model", MODEL)
    assert (right.code(), again.code()) == (0, 0)
    assert list(federation.folder.glob("attune/devices/*/ben-*/orders/*"))
