"""The next run of a home: the files that stay, those put aside, a killed command, and refusals."""

import asyncio
import contextlib
import shutil

import msgspec
import pytest

from attune.common import aio
from attune.common.config import TrainSettings
from attune.common.errors import AttuneError, HomeBusy, HomeMismatch, SettingError
from attune.common.plan import ModelSpec, Plan
from attune.fedserver import runs
from attune.fedserver.choosing.race_course import Race
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import Report, Slot
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Certificate, Token
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.sqlite import SqliteLedger
from attune.fedserver.view.homes import listed

PLAN = Plan("federation", 7, ModelSpec("mlr", "tabular", (4,), 2), [0, 1], "fedavg", {}, TrainSettings())
SETTINGS = {"method": {"name": "fedavg", "momentum": 0.5}, "round": {"rounds": 5}, "server": {"certificate_days": 7.0}}


class Ran:
    """Home with one device after three closed rounds."""

    def __init__(self, path, phase=Phase.DONE):
        self.home = ServerHome(path / "server")
        self.home.create()
        self.ledger = self.home.open().ledger
        self.do(self.ledger.set_overrides({"method": {"name": "fedavg"}, **{k: SETTINGS[k] for k in ("round", "server")}}))
        self.do(self.ledger.add_token(Token("token", b"so secret", 1, 9e9, "test")))
        self.do(self.ledger.enrol("ada", "key", Certificate("print", "ada", "device", 9e9), 1.0, "token"))
        (self.home.path / "state" / "shared.common.3.safetensors").write_bytes(b"state")
        slot = Slot("shared", "common", "shared.common.3.safetensors", "sha256:0", 5)
        row = Report(round=3, work="train", client="ada", samples=4)
        self.do(self.ledger.commit_round(Record(phase=phase, round=3, devices=("ada",), cohort=("ada",)), [slot], [row],
                                         {"ada": {"contributed": 3}}, PLAN))  # fmt: skip
        self.do(self.ledger.close())

    @staticmethod
    def do(work):
        return aio.run(work) if asyncio.iscoroutine(work) else work

    @property
    def found(self):
        return self.home.snapshot()


def test_members_stay_and_all_else_begins_anew(tmp_path):
    ran = Ran(tmp_path)
    before = ran.found
    kept = runs.begin(ran.home, "second", {"method": {"name": "fedtp"}, "round": {"rounds": 2}}, "operator ada")
    found = ran.found
    assert (found.run, found.plan, found.record, found.slots, found.rows, found.leaving) == (
        "second",
        None,
        Record(),
        (),
        (),
        False,
    )
    assert found.certificates == before.certificates
    (ada,) = found.devices
    assert (ada.name, ada.public_key, ada.founder, ada.contributed, ada.samples) == ("ada", "key", True, 0, None)
    assert found.overrides == {"method": {"name": "fedtp"}, "round": {"rounds": 2}, "server": {"certificate_days": 7.0}}
    assert list((ran.home.path / "state").iterdir()) == []
    assert kept == str(ran.home.runs / "first")
    with ran.home.reading() as reader:
        assert [entry.event for entry, _ in reader.audit()] == ["run begun"]


def test_what_is_put_aside_has_all_results_and_no_secret(tmp_path):
    ran = Ran(tmp_path)
    before = ran.found
    runs.begin(ran.home, "second", {}, "ada")
    aside = ServerHome(ran.home.runs / "first")
    found = aside.snapshot()
    assert (found.plan, found.record, found.rows, found.slots) == (before.plan, before.record, before.rows, before.slots)
    assert (aside.path / "state" / "shared.common.3.safetensors").read_bytes() == b"state"
    ledger = aside.open().ledger
    assert (Ran.do(ledger.tokens()), Ran.do(ledger.certificates())) == ([], [])
    Ran.do(ledger.close())
    assert b"so secret" not in (aside.path / "state.sqlite").read_bytes(), "not even in pages that are free"
    assert not aside.authority.exists()
    assert [(run.name, run.present, run.round) for run in listed(ran.home)] == [("first", False, 3), ("second", True, 0)]


@pytest.mark.parametrize("at", ["copying", "before the rename", "after the ledger"])
def test_a_command_that_is_killed_leaves_a_home_that_can_go_on(tmp_path, monkeypatch, at):
    ran = Ran(tmp_path)

    class Killed(BaseException):
        pass

    def die(*arguments, **more):
        raise Killed

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        if at == "copying":
            patched.setattr(runs.shutil, "copyfile", die)
        elif at == "before the rename":
            patched.setattr(SqliteLedger, "begin_run", die)
        else:
            patched.setattr(DiskStorage, "clear_blobs", die)
        runs.begin(ran.home, "second", {}, "ada")
    if at == "after the ledger":
        assert (ran.found.run, ran.found.leaving) == ("second", True)
        storage = ran.home.open()
        Ran.do(runs.tidy(storage, ran.found))
    else:
        assert (ran.found.run, ran.found.record.round) == ("", 3)
        assert (ran.home.path / "state" / "shared.common.3.safetensors").exists()
        runs.begin(ran.home, "second", {}, "ada")
    assert (ran.found.run, ran.found.leaving) == ("second", False)
    assert list((ran.home.path / "state").iterdir()) == []
    assert len(ServerHome(ran.home.runs / "first").snapshot().rows) == 1


def test_a_run_that_is_not_over_is_ended_first(tmp_path):
    ran = Ran(tmp_path, Phase.TRAINING)
    with pytest.raises(HomeMismatch, match=r"the run first is not over .*fedserver run stop"):
        runs.begin(ran.home, "second", {}, "ada")
    assert runs.stop(ran.home, "ada") == 3
    found = ran.found
    assert (found.record.phase, found.record.cohort, found.overrides["round"]["rounds"]) == (Phase.DONE, (), 3)
    with pytest.raises(HomeMismatch, match="the run first is over already"):
        runs.stop(ran.home, "ada")
    runs.begin(ran.home, "second", {}, "ada")


def test_no_new_run_while_a_server_runs_or_with_a_taken_name_or_a_wrong_setting(tmp_path):
    ran = Ran(tmp_path)
    with ran.home.locked(), pytest.raises(HomeBusy):
        runs.begin(ran.home, "second", {}, "ada")
    for name in ("first", "../up", ""):
        with pytest.raises(SettingError, match="run"):
            runs.begin(ran.home, name, {}, "ada")
    with pytest.raises(SettingError, match="rounds"):
        runs.begin(ran.home, "second", {"round": {"roundz": 3}}, "ada")
    assert ran.found.record.round == 3
    runs.begin(ran.home, "second", {}, "ada")
    with pytest.raises(SettingError, match="there is a run second already"):
        runs.begin(ran.home, "second", {}, "ada")


def test_a_run_in_which_nothing_happened_is_replaced_and_leaves_nothing(tmp_path):
    ran = Ran(tmp_path)
    runs.begin(ran.home, "second", {}, "ada")
    assert runs.begin(ran.home, "third", {}, "ada") == ""
    assert [run.name for run in listed(ran.home)] == ["first", "third"]
    with pytest.raises(HomeMismatch, match="no round of the run third is closed"):
        runs.stop(ran.home, "ada")


@pytest.mark.parametrize("races", [False, True])
def test_a_run_without_a_closed_round_is_no_dead_end(tmp_path, races):
    ran = Ran(tmp_path, Phase.TRAINING)
    ledger = ran.home.open().ledger
    Ran.do(ledger.put_record(Record(phase=Phase.TRAINING, devices=("ada",), cohort=("ada",))))
    Ran.do(ledger.set_race(Race({"method": {"name": "auto"}}, 5) if races else None))
    Ran.do(ledger.close())
    if races:
        with pytest.raises(HomeMismatch, match=r"a race .* is under way .*fedserver run stop"):
            runs.begin(ran.home, "second", {}, "ada")
        assert runs.stop(ran.home, "ada") == 0
    with pytest.raises(HomeMismatch, match=r"no round of the run first is closed: .*fedserver run new"):
        runs.stop(ran.home, "ada")
    runs.begin(ran.home, "second", {}, "ada")
    assert (ran.found.run, ran.found.plan, ran.found.race) == ("second", None, None)


def test_the_first_runs_plan_is_the_one_of_version_1_to_the_byte():
    assert b'"run"' not in msgspec.json.encode(PLAN)
    named = msgspec.structs.replace(PLAN, run="second")

    class OfThen(msgspec.Struct):
        """Message as an old device reads it: it skips unknown fields."""

        federation: str
        method: str

    assert msgspec.json.decode(msgspec.json.encode(named), type=OfThen).method == "fedavg"


def test_a_home_without_a_server_has_no_runs(tmp_path):
    with pytest.raises(AttuneError, match="holds no federation"):
        runs.begin(ServerHome(tmp_path / "none"), "second", {}, "ada")
    shutil.rmtree(tmp_path, ignore_errors=True)
