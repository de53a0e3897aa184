"""A hosted fleet: its devices, the lines about many of them, and the independence of devices when one ends."""

import math
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common import faults
from attune.common.config import TrainSettings
from attune.common.errors import NoModel, SettingError, ShardError
from attune.common.exchange.messages import Order
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.fedclient import fleet, shards
from attune.fedclient.address import ServerAddress
from attune.fedclient.cli import main
from attune.fedclient.console import CLOSED
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import load_shard
from attune.fedclient.fleet import FleetConsole, agreeing
from attune.fedclient.home import DeviceHome
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import Work
from attune.fedclient.work.worker import LearnerCache
from tests.fedclient import conftest


@pytest.fixture
def folder(tmp_path):
    for number in (1, 2, 10):
        conftest.tabular_shard(tmp_path / "shards" / f"shard{number}", seed=number)
    (tmp_path / "shards" / "partition.png").write_bytes(b"")
    return tmp_path / "shards"


def options(folder, **changed):
    return DeviceOptions(**({"data": folder, "server": ServerAddress("127.0.0.1", 1)} | changed))


def members(bench, folder, **changed):
    paths = shards.expand([f"{folder}/*"])
    return shards.members(paths, bench.options(**({"home": None, "name": "edge", "data": folder} | changed)))


def test_a_pattern_means_shards_in_the_order_of_their_numbers(folder):
    assert [path.name for path in shards.expand([f"{folder}/*"])] == ["shard1", "shard2", "shard10"]
    assert [path.name for path in shards.expand([str(folder / "shard2"), f"{folder}/*"])] == ["shard2", "shard1", "shard10"]
    assert shards.is_fleet([f"{folder}/shard[1]"])
    assert not shards.is_fleet([str(folder / "shard1")])
    with pytest.raises(ShardError, match="no shard matches"):
        shards.expand([f"{folder}/client*"])


def test_a_pattern_matches_texts_and_archives_if_it_names_their_suffix(tmp_path):
    for name in ("a.txt", "b.txt", "c.TAB", "d.NPZ", "e.csv", "README.md"):
        (tmp_path / name).write_text("")

    def matched(pattern):
        return [path.name for path in shards.expand([f"{tmp_path}/{pattern}"])]

    assert matched("*.txt") == ["a.txt", "b.txt"]
    assert matched("[ac].*") == ["a.txt", "c.TAB"] and matched("*.[ct][sx][vt]") == ["a.txt", "b.txt", "e.csv"]
    assert matched("*") == ["d.NPZ", "e.csv"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "notes.txt").write_text("")
    with pytest.raises(ShardError, match=r"'.*only/\*'.*1 .*not taken.*notes\.txt"):
        matched("only/*")


def test_shards_of_the_same_name_have_homes_and_names_of_their_own(tmp_path):
    paths = [tmp_path / one / two for one in "ab" for two in ("east side", "west")] + [tmp_path / "north.east"]
    listed = shards.members(paths, options(tmp_path, home=tmp_path / "homes", name="edge"))
    assert len({member.name for member in listed}) == len({member.home for member in listed}) == 5
    assert listed[4].name == "edge-north.east"
    assert listed[4].home == tmp_path / "homes" / "north.east"
    assert [member.label for member in listed[:1]] == shards.labels(paths)[:1] != ["east-side"]
    with pytest.raises(SettingError):
        shards.members(paths, options(tmp_path, name="../edge"))


def test_every_device_has_its_own_certificate_and_connection(bench, folder):
    bench.server.works = []
    outcomes = fleet.run(members(bench, folder), bench.lines)
    assert sorted(bench.server.seen.enrolled) == ["edge-shard1", "edge-shard10", "edge-shard2"]
    fingerprints, connections = zip(*bench.server.seen.streams, strict=True)
    assert len(set(fingerprints)) == len(set(connections)) == 3
    assert [type(outcome.error) for outcome in outcomes] == [NoModel] * 3
    assert fleet.exit_code(outcomes) == 19


def test_a_bad_shard_or_home_ends_its_own_device_alone(bench, folder):
    bench.server.works, bench.server.rounds = ["evaluate"], [0]
    (folder / "shard1" / "train.npz").write_bytes(b"no zip")
    listed = members(bench, folder)
    with DeviceHome(listed[1].home).locked():
        outcomes = fleet.run(listed, bench.lines)
    assert [outcome.error is None for outcome in outcomes] == [False, False, True]
    assert fleet.exit_code(outcomes) == 6
    shown = fleet.table(outcomes)
    assert shown[0].startswith("done: 1 of 3 devices have their model, mean accuracy 0.")
    assert shown[-1].endswith(str(listed[2].home / "model"))
    assert shown[2].endswith("failed")
    first, second = fleet.failures(outcomes)
    assert first.startswith("shard1: ")
    assert "another fedclient is running" in second


def test_a_full_disk_is_waited_for_while_the_others_go_on(bench, folder):
    """Wait, because a fleet has no service unit for each device that would start it again."""
    bench.server.works, bench.server.rounds = ["evaluate"], [0]
    faults.arm("edge-shard1:0:state-written=raise-ENOSPC")
    try:
        outcomes = fleet.run(members(bench, folder), bench.lines)
    finally:
        faults.arm("")
    assert [outcome.error for outcome in outcomes[1:]] == [None] * 2
    assert len(bench.server.seen.streams) == 5, "it came again, and asked the finished federation once more for its model"
    assert any("full" in line and "trying again" in line for line in bench.lines.lines)


def outcome_of(folder, name, **said):
    result = OrderResult(order_id="e", round=2, trained=False, samples=80, **said)
    return fleet.DeviceOutcome(name, folder / name, result)


def test_the_table_says_of_each_device_whether_its_model_is_better(tmp_path):
    def ended(name, better, worse):
        said = {"better_than_common": better, "worse_than_common": worse, "test_samples": 40, "accuracy_before": 0.7}
        return outcome_of(tmp_path, name, **said)

    shown = fleet.table([ended("a", 9, 0), ended("b", 1, 12), ended("c", 4, 3), ended("d", 0, 0), fleet.DeviceOutcome("e")])
    assert shown[1] == "what they keep against the other models, on the same test samples: better 1, worse 1, unclear 2"
    assert [line.split()[3] for line in shown[2:]] == ["better", "worse", "unclear", "unclear", "-"]
    assert len(fleet.table([fleet.DeviceOutcome("e")])) == 2, "nothing was compared"


def test_the_table_says_where_a_model_is_no_better_than_a_constant_answer(tmp_path):
    def ended(name, accuracy, constant):
        return outcome_of(tmp_path, name, accuracy_before=accuracy, accuracy_constant=constant)

    said = fleet.table([ended("a", 0.7, 0.6), ended("b", 0.5, 0.5), ended("c", 1.0, 1.0)])[1]
    assert said == "a constant answer: mean accuracy 0.700, and on 1 of 3 devices the model is no better"
    assert fleet.table([ended("a", 0.7, 0.6)])[1] == "a constant answer: mean accuracy 0.600"


def test_the_table_has_the_mean_of_ordinary_models_alone_where_devices_have_them(tmp_path):
    def ended(name, alone):
        said = {"accuracy_before": 0.5, "accuracy_kept": 0.9, "accuracy_alone": alone, "test_samples": 40}
        return outcome_of(tmp_path, name, **said)

    shown = fleet.table([ended("a", 0.75), ended("b", 0.5), ended("c", None)])
    assert shown[0].endswith("mean accuracy 0.900")
    assert shown[1] == "the best ordinary model alone (scikit-learn): mean accuracy 0.625"


def test_the_command_ends_with_the_table_and_then_evaluates_each_shard(bench, folder, tmp_path):
    bench.server.works, bench.server.rounds = ["evaluate"], [0]
    server, home = f"127.0.0.1:{bench.server.port}", str(tmp_path / "homes")
    data = ["--data", str(folder / "shard2"), "--data", f"{folder}/shard10"]

    def call(*words):
        return CliRunner().invoke(main, [*words, *data, "--home", home])

    joined = call("join", "--server", server, "--token", bench.server.token(), "--name", "edge")
    assert (joined.exit_code, joined.output) == (0, "shard2: enrolled as edge-shard2\nshard10: enrolled as edge-shard10\n")
    listed = shards.members(shards.expand(data[1::2]), bench.options(home=tmp_path / "homes", name=None, token=None))
    assert fleet.exit_code(fleet.run(listed, bench.lines)) == 0
    seen = call("evaluate")
    assert seen.exit_code == 0, seen.output
    lines = seen.output.splitlines()
    assert [line.split(" (")[0] for line in lines] == ["edge-shard2", "edge-shard10", lines[2].split(" (")[0]]
    assert lines[2].startswith("mean of 2 devices: accuracy 0.")
    (tmp_path / "homes" / "shard2" / "model" / "model.json").unlink()
    assert call("evaluate").exit_code == 19
    assert call("evaluate", "--json").stdout.startswith('{"clients": [{"name": "edge-shard10"')


def test_an_unquoted_pattern_is_explained(folder):
    result = CliRunner().invoke(main, ["--data", *map(str, sorted(folder.iterdir()))])
    assert result.exit_code == 2
    assert "put a pattern in quotes" in result.output


async def test_many_devices_say_one_line_a_round(bench):
    names = [f"s{n}" for n in range(6)]

    def result(round_, loss, after):
        return OrderResult(
            order_id="x", round=round_, trained=True, samples=1, loss=loss, accuracy_before=0.5, accuracy_after=after
        )

    console = FleetConsole(bench.lines, names)
    for name in names:
        console.console_of(name).say(f"enrolled as edge-{name}")
    for number, name in enumerate(names):
        console.console_of(name).result(result(1, float(number), 0.1 * number))
    console.console_of("s0").result(result(2, 1.0, 0.5))
    for name in names[1:]:
        console.ended(name)
    console.flush()
    assert bench.lines.lines == [
        "round 1  6 devices  loss 2.5  accuracy 0.500 -> 0.250",
        "round 2  1 device  loss 1  accuracy 0.500 -> 0.500",
        "6 devices, such as s5: enrolled as edge-s5",
    ]
    assert agreeing([("a", "no"), ("b", "yes")]) == ["a: no", "b: yes"]


def test_too_few_files_for_a_fleet_is_said_before_it_starts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with pytest.raises(SettingError, match=r"1000 devices need about \d+ open files.* may open 256: host fewer"):
        fleet.make_room(1000)


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedper"])
def test_a_device_whose_tensors_are_put_away_between_orders_learns_the_same_bits(method, shard, tmp_path):
    from attune.fedclient.model.artifact import finished_model, save
    from attune.fedclient.store import FolderStore
    from attune.fedclient.work.worker import LearnerSlot, local_learner

    plan = Plan("f", 3, default_spec("tabular", (6,), 3, 0, "dnn", {}), ["ant", "bee", "cow"], method, {}, TrainSettings())

    def digests(keep):
        home = DeviceHome(tmp_path / f"{method}-{keep}")
        data, cache = LazyShard.in_memory(load_shard(shard)), LearnerCache(math.inf if keep else 0)
        make = partial(local_learner, plan, data, "kiel", FolderStore(home).orders, options(shard, device="cpu"))
        slot = LearnerSlot("kiel", cache, make)
        part = {"fedmcsa": "attended"}.get(method, "shared")
        for number in (1, 2, 3):
            order = Order(f"train-{number}-kiel", number, "train", (), (part,))
            Work(slot.learner(), order).run()
            slot.release()
            assert (slot._learner is None) is not keep
        return slot.newest.parts, (save(home.model, *finished_model(slot.learner())) / "model.safetensors").read_bytes()

    assert digests(keep=True) == digests(keep=False)


def test_the_learner_that_has_waited_longest_is_dropped_first():
    class Slot:
        dropped = False

        def drop(self):
            self.dropped = True

    cache, (first, second, third) = LearnerCache(100), (Slot() for _ in range(3))
    cache.release(first, 60)
    cache.release(second, 40)
    cache.pin(first)
    cache.release(first, 60)
    assert not first.dropped and not second.dropped, "together they are just not too large"
    cache.release(third, 10)
    assert [slot.dropped for slot in (first, second, third)] == [False, True, False]
    cache.release(third, 101)
    assert first.dropped and third.dropped, "what is too large alone does not stay either"


# --- lines of a device whose output nobody reads

CODE = """
import sys, time
from attune.fedclient.console import console
screen = console()
time.sleep(0.5)
for number in range(5):
    screen.say(f"line {number}")
screen.close()
open(sys.argv[1], "w").write(screen.last_line)
"""


@pytest.mark.parametrize(("tail", "said"), [("| true", CLOSED + "\n"), ("2>&1 | true", ""), (">&-", ""), (">&- 2>&-", "")])
def test_a_closed_output_is_named_once_and_ends_nothing(tmp_path: Path, tail: str, said: str) -> None:
    """Run a device as in `fedclient ... | head -1`, and without any stdout."""
    end = tmp_path / "end"
    command = f"'{sys.executable}' -c \"$CODE\" '{end}' {tail}"
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": CODE}, capture_output=True, text=True, timeout=60)
    assert done.stderr == said
    assert end.read_text() == "line 4"
