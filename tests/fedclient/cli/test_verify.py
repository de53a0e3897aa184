"""`fedclient verify`: a line for each damaged file of a device's home. A start removes leftovers."""

from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from attune.common import homes
from attune.common.config import TrainSettings
from attune.common.metrics import Choice
from attune.common.plan import ModelSpec, Plan
from attune.fedclient.cli import main
from attune.fedclient.home import DeviceHome, DeviceInfo
from attune.fedclient.messages import OrderResult
from attune.fedclient.model.artifact import save
from attune.fedclient.model.model_info import ModelInfo
from attune.fedclient.work.state import FolderOrders

SPEC = ModelSpec("mlr", "tabular", (2,), 2)
W = {"w": torch.ones(3)}


def fill(home: DeviceHome) -> Path:
    home.remember(DeviceInfo("kiel", "localhost:50051"))
    home.plan.write_bytes(msgspec.json.encode(Plan("f", 0, SPEC, [0, 1], "fedavg", {}, TrainSettings())))
    orders = FolderOrders(home.orders)
    for number in (1, 2):
        result = OrderResult(order_id=f"train-{number}-kiel", round=number, trained=True, samples=1, sequence=number)
        orders.commit(result, {"v": torch.zeros(2)}, {}, {"shared": W})
    weights: dict[Choice, float] = {"personalized": 0.7, "common": 0.3}
    info = ModelInfo("kiel", "f", "fedavg+ft", {}, SPEC, [0, 1], TrainSettings(), weights=weights)
    save(home.model, info, {"personalized": W, "common": W})
    return home.path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return fill(DeviceHome(tmp_path / "home"))


def verify(*said: object) -> tuple[int, list[str]]:
    result = CliRunner().invoke(main, ["verify", *map(str, said)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output.splitlines()


def test_a_whole_home_is_whole_and_left_as_it_is(home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert verify("--home", home) == (0, [f"{home} is whole"])
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name",
    [
        "orders/train-2-kiel/state.safetensors",
        "orders/train-1-kiel/shared.safetensors",
        "orders/train-2-kiel/update.json",
        "model/model.safetensors",
        "model/common.safetensors",
        "model/model.json",
        "plan.json",
    ],
)
def test_every_damaged_file_has_its_line(home: Path, name: str) -> None:
    path = home / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, [line] = verify("--home", home)
    assert code == 4
    assert str(path if path.name != "model.json" else path.parent) in line


def test_homes_are_found_by_server_shard_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "attune"))
    paths = [fill(DeviceHome(homes.device_home("localhost", 50051, tmp_path / shard))) for shard in ("one", "two")]
    assert verify("--server", "localhost:50051") == (0, [f"{path} is whole" for path in sorted(paths)])
    assert verify("--data", tmp_path / "two") == (0, [f"{paths[1]} is whole"])
    assert verify("--home", paths[0].parent)[1] == [f"{path} is whole" for path in sorted(paths)]
    (paths[0] / "model" / "model.safetensors").unlink()
    assert verify()[0] == 4
    assert verify("--server", "elsewhere:1")[0] == 19


def test_a_start_sweeps_up_what_a_kill_left(home: Path) -> None:
    (home / "identity").mkdir()
    left = [home / ".device.json.0123456789ab.tmp", home / "identity" / ".key.pem.ba9876543210.tmp"]
    for path in left:
        path.touch()
    (home / ".filling-model").mkdir()
    (home / "model").rename(home / "model.old")  # as after a kill between the two renames
    with DeviceHome(home).locked():
        assert [path.exists() for path in left] == [False, False]
        assert not (home / ".filling-model").exists()
    assert verify("--home", home) == (0, [f"{home} is whole"])
    (home / "model.old").mkdir()
    with DeviceHome(home).locked():
        assert not (home / "model.old").exists()
