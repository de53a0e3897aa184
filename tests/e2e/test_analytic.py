"""`--method analytic` over the network: kill -9 between any two steps changes no bit, and no device hands in sums unasked."""

import csv
import re
import shutil
import signal
from pathlib import Path

import pytest

from attune.fedclient.model.artifact import read_info
from attune.fedclient.options import Baseline
from attune.fedserver.home import ServerHome
from attune.fedserver.view.export import export_home
from tests.e2e.harness import Federation, digit_shards
from tests.e2e.test_repeat_and_kill import Outcome, flags

SETTINGS = ("method.name=analytic", "model.features=50")
TOLD = ("--disclose", "statistics", "--disclose", "sums")
MASKED = (*SETTINGS, "privacy.secure_aggregation=true", "privacy.secure_wait_s=60")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("shards"), 3, 24, 12)


BLENDED = ("method.name=fedavg", "model.name=mlr", "round.rounds=2")
BASELINES: dict[tuple[str, ...], Baseline] = {SETTINGS: "none", BLENDED: "alone"}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, shards: list[Path]) -> dict[tuple[str, ...], Outcome]:
    """Return the outcome by settings."""
    folder = tmp_path_factory.mktemp("simulated")
    return {of: Outcome.simulated(folder / kept, shards, of, kept) for of, kept in BASELINES.items()}


@pytest.mark.parametrize(
    ("settings", "server_fault", "device_fault"),
    [
        (SETTINGS, "1:update-accepted", "1:trained"),
        (SETTINGS, "1:aggregated", "1:order-committed"),
        (SETTINGS, "2:settled", "2:uploaded"),
        (BLENDED, "1:aggregated", "1:uploaded"),
        (BLENDED, "2:evaluation-committed", "2:compared"),
    ],
)
def test_a_kill_of_either_side_changes_no_bit(settings, server_fault, device_fault, simulated, shards, federation_at) -> None:
    """Use the closed form as a method, and in the blends of another method."""
    federation: Federation = federation_at("killed")
    told = (*TOLD, "--baseline", BASELINES[settings])
    server = federation.server("--min-clients", "3", *flags(settings), fault=f"server:{server_fault}=kill")
    killed, *others = (
        federation.device(shard, *told, fault="" if place else f"*:{device_fault}=kill") for place, shard in enumerate(shards)
    )
    assert killed.code() == -signal.SIGKILL, killed.text
    killed = federation.device(shards[0], *told)
    assert server.code() == -signal.SIGKILL, server.text
    federation.server()
    assert [process.code() for process in (killed, *others)] == [0, 0, 0], killed.text
    assert Outcome.of(federation, shards) == simulated[settings]


def test_a_device_whose_owner_does_not_allow_sums_hands_in_none(shards: list[Path], federation_at) -> None:
    federation: Federation = federation_at("unasked")
    server = federation.server("--min-clients", "3", *flags(SETTINGS))
    device = federation.device(shards[0], "--disclose", "statistics")
    assert device.code() != 0
    assert "its owner allows that by fedclient --disclose sums" in device.text
    server.wait_for("hands in no sums over its samples, which method analytic needs")
    assert not federation.inbox()


def test_after_forget_nothing_of_the_device_is_left(shards: list[Path], federation_at, tmp_path: Path) -> None:
    """The new run has the bits of a federation that the device never joined."""
    federation: Federation = federation_at("forgotten")
    server = federation.server("--exit-when-done", "--min-clients", "3", *flags(SETTINGS))
    devices = [federation.device(shard, *TOLD) for shard in shards]
    assert [process.code() for process in (*devices, server)] == [0, 0, 0, 0], server.text
    gone, *rest = shards
    said = federation.command("fedserver", "forget", gone.name, "--set", "round.min_clients=2").stdout
    assert f"{gone.name} is revoked" in said and "with what" in said
    server = federation.server("--exit-when-done")
    devices = [federation.device(shard, *TOLD) for shard in rest]
    assert [process.code() for process in (*devices, server)] == [0, 0, 0], server.text
    never = Outcome.simulated(tmp_path / "never", rest, SETTINGS)
    assert Outcome.of(federation, rest).models == never.models
    assert federation.client(gone.name)["state"] == "revoked"


def test_a_device_that_hands_in_no_sums_is_served_those_of_the_others(shards: list[Path], federation_at) -> None:
    federation: Federation = federation_at("two")
    server = federation.server("--exit-when-done", "--min-clients", "3", *flags(BLENDED))
    silent, *others = shards
    devices = [federation.device(shard, *TOLD, "--baseline", "alone") for shard in others]
    devices.append(federation.device(silent, "--disclose", "statistics", "--baseline", "alone"))
    assert [process.code() for process in (*devices, server)] == [0, 0, 0, 0], server.text
    solved = {slot.key for slot in ServerHome(federation.home).snapshot().slots if slot.part == "solved"}
    assert solved == {"start", "total", *(f"sums/{shard.name}" for shard in others)}
    weights = read_info(federation.model(silent)).weights
    assert sum(weight for name, weight in weights.items() if name.startswith("closed-form")) > 0
    assert federation.status()["closed_form"] == "the closed form of the devices' sums joins every device's blend"
    logs = {shard: next(federation.folder.glob(f"attune/devices/*/{shard.name}-*/disclosed.jsonl")) for shard in shards}
    assert [shard for shard, log in logs.items() if "solved" not in log.read_text()] == [silent], "the others' logs say it"


# --- behind masks, where no owner has to allow it

STATISTICS = ("--disclose", "statistics")  # as all devices of a simulation do


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("five"), 5, 24, 12)


MASKED_BLENDS = (*BLENDED, *MASKED[-2:])


@pytest.fixture(scope="module", params=[(MASKED, "none"), (MASKED_BLENDS, "alone")], ids=["analytic", "blends"])
def masked(request, tmp_path_factory: pytest.TempPathFactory, five: list[Path]) -> tuple[list[str], tuple[str, ...], Outcome]:
    """Return the server's settings, the devices' flags, and the outcome of a simulation."""
    settings, baseline = request.param
    outcome = Outcome.simulated(tmp_path_factory.mktemp("masked"), five, settings, baseline)
    return flags(settings), (*STATISTICS, "--baseline", baseline), outcome


EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")


def test_a_server_that_is_killed_at_each_step_of_the_sum_changes_no_bit(masked, five: list[Path], federation_at) -> None:
    settings, told, expected = masked
    federation: Federation = federation_at("server")
    steps = [*(f"1:secure-{exchange}" for exchange in EXCHANGES), "1:aggregated", "1:settled", "2:secure-masked", "2:settled"]
    server = federation.server("--min-clients", "5", *settings, fault=f"server:{steps[0]}=kill")
    devices = [federation.device(shard, *told) for shard in five]
    for step in (*steps[1:], ""):
        assert server.code() == -signal.SIGKILL, server.text
        server = federation.server(fault=f"server:{step}=kill") if step else federation.server("--exit-when-done")
    assert [process.code() for process in (*devices, server)] == [0] * 6, server.text
    assert Outcome.of(federation, five) == expected


def test_a_device_that_is_killed_at_each_step_of_the_sum_changes_no_bit(masked, five: list[Path], federation_at) -> None:
    settings, told, expected = masked
    federation: Federation = federation_at("device")
    server = federation.server("--min-clients", "5", *settings, "--exit-when-done")
    others = [federation.device(shard, *told) for shard in five[1:]]
    sums = (f"1:secure-{exchange}" for exchange in EXCHANGES)
    for step in ("1:order-committed", *sums, "2:trained", "2:secure-masked", "2:compared"):
        killed = federation.device(five[0], *told, fault=f"*:{step}=kill")
        assert killed.code() == -signal.SIGKILL, killed.text
    last = federation.device(five[0], *told)
    assert [process.code() for process in (*others, last, server)] == [0] * 6, server.text
    assert Outcome.of(federation, five) == expected
    assert "in a sum" not in last.text


@pytest.mark.parametrize(("base", "part"), [(SETTINGS, "attended"), (BLENDED, "solved")], ids=["analytic", "blends"])
@pytest.mark.parametrize(("exchange", "counted"), [("masked", 5), ("survivors", 6)])
def test_a_device_that_drops_out_of_the_sum_is_told_whether_it_counts(
    exchange: str, counted: int, base: tuple[str, ...], part: str, five: list[Path], federation_at, tmp_path: Path
) -> None:
    """It cannot know: the others take its masks off without it. A device that comes later is in no sum at all."""
    sixth = shutil.copytree(five[0], tmp_path / "sixth")
    federation: Federation = federation_at("dropped")
    settings = (*base, "privacy.secure_aggregation=true", "privacy.secure_wait_s=4", "round.grace_s=2.0")
    server = federation.server("--min-clients", "6", *flags(settings), "--exit-when-done", fault="server:1:settled=hang")
    gone = federation.device(sixth, *STATISTICS, fault=f"*:1:secure-{exchange}=kill")
    devices = [federation.device(shard, *STATISTICS) for shard in five]
    assert gone.code() == -signal.SIGKILL, gone.text
    server.wait_for(f"round 1: {counted} of 6 updates are summed")
    server.await_fault()
    server.kill()
    server = federation.server("--exit-when-done")
    back = federation.device(sixth, *STATISTICS)
    late = federation.device(shutil.copytree(five[1], tmp_path / "late"), *STATISTICS)
    assert [process.code() for process in (*devices, back, late, server)] == [0] * 8, server.text
    state = federation.home / "state"
    markers = {path.name.split(".")[1] for path in state.glob(f"{part}.sums~*")}
    assert markers == {f"sums~{shard.name}" for shard in five} | ({"sums~sixth"} if counted == 6 else set())
    assert federation.client("late")["accuracy"] is not None


def test_a_second_run_gets_no_second_sum(five: list[Path], federation_at) -> None:
    """A run without a device neither: so `forget` says what it cannot do, before it revokes the device."""
    federation: Federation = federation_at("second")
    server = federation.server("--min-clients", "5", *flags(MASKED), "--exit-when-done")
    devices = [federation.device(shard, *STATISTICS) for shard in five]
    assert [process.code() for process in (*devices, server)] == [0] * 6, server.text
    for command in (("forget", five[0].name), ("run", "new", "second", *flags(MASKED))):
        refused = federation.command("fedserver", *command, code=2)
        assert "nothing is taken out of it: method analytic gets no other" in refused.stderr
    assert federation.client(five[0].name)["state"] != "revoked"
    federation.command("fedserver", "run", "new", "other", *flags((*MASKED_BLENDS, "round.rounds=1")))
    server = federation.server("--exit-when-done")
    devices = [federation.device(shard, *STATISTICS) for shard in five]
    assert [process.code() for process in (*devices, server)] == [0] * 6, server.text
    assert "5 of 5 devices were in such a sum before" in federation.status()["closed_form"]
    federation.command("fedserver", "run", "new", "others", "--set", "method.name=fedavg")


@pytest.mark.parametrize("settings", [SETTINGS, (*MASKED, "privacy.secure_devices=5")])
def test_each_site_is_told_its_own_worth_and_behind_masks_nobody_is(settings, tmp_path, federation_at) -> None:
    federation: Federation = federation_at("worth")
    federation.server("--min-clients", "5", *flags(settings))
    shards = digit_shards(tmp_path, 5, 24, 12)
    devices = {shard.stem: federation.device(shard, *(() if settings is not SETTINGS else TOLD)) for shard in shards}
    assert [device.code() for device in devices.values()] == [0] * 5
    federation.await_status(lambda status: status["state"] == "done")
    export_home(ServerHome(federation.home), tmp_path / "out")
    said = {
        name: re.findall(r"others would change by (\S+) \(95 % (\S+) to (\S+)\)", device.text)
        for name, device in devices.items()
    }
    if settings is not SETTINGS:
        assert not any(said.values()) and not (tmp_path / "out" / "worth.csv").exists()
        return
    with (tmp_path / "out" / "worth.csv").open(newline="") as file:
        rows = {
            row["client"]: tuple(f"{float(row[key]):+.4f}" for key in ("worth", "low", "high")) for row in csv.DictReader(file)
        }
    assert len(set(rows.values())) == 5
    assert {client: said[client.rpartition("-")[2]] for client in rows} == {
        client: [numbers] for client, numbers in rows.items()
    }
