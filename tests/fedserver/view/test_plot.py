"""Pictures of a federation: files are written, the page is self-contained, its numbers are right, errors are clear."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import torch
from click.testing import CliRunner

from attune import seams
from attune.common import aio
from attune.common.config import TrainSettings
from attune.common.errors import NoModel, SettingError
from attune.common.pictures import figures
from attune.common.pictures.figures import PageTable, Picture, Section, natural, short, write
from attune.common.plan import ModelSpec, Plan
from attune.common.wire.files import write_tensors
from attune.features.pictures import plots as plot
from attune.fedserver.cli import cli
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.engine import Engine
from attune.fedserver.ports.blobs import ATTEMPTS, Damaged
from attune.fedserver.ports.ledger import Certificate
from attune.fedserver.view.export import export_home
from tests.pictures import Page, check_pictures

TINY = {"width": 8, "heads": 2, "depth": 1}


class Federation:
    """A server's home after some rounds, made without a server or devices; updates are drawn at random."""

    def __init__(self, folder, method="fedavg", clients=4, rounds=2, labels=("0, 1", "2"), **options):
        self.home = ServerHome(folder / "server")
        self.home.create()
        self.ledger = self.home.open().ledger
        self.names = [f"vm-shard{i}" for i in range(clients)]
        for i, name in enumerate(self.names):
            aio.run(self.ledger.enrol(name, "key", Certificate(name, name, "device", 1e9), 0.0))
            aio.run(self.ledger.update_device(name, samples=10, labels=labels[i % len(labels)]))
        said = {"method": {"name": method, **options}, "round": {"rounds": 5}}
        aio.run(self.ledger.set_overrides(said))
        spec = ModelSpec("vit", "images", (4, 4, 1), 3, options=TINY)
        self.plan = Plan("federation", 7, spec, [0, 1, 2], method, options, TrainSettings())
        self.blobs = self.home.open().blobs
        self.engine = Engine(self.plan, [], self.blobs, 0)
        self.commit(Record(), [], self.plan)
        self.engine.settle()
        for number in range(1, rounds + 1):
            self.close(number, folder)

    def close(self, number, folder):
        entries = {}
        for i, name in enumerate(self.names):
            parts = {}
            for part, manifest in self.engine.manifests.items():
                draw = torch.Generator().manual_seed(100 * number + i)
                tensors = {k: torch.randn(spec.shape, generator=draw) for k, spec in manifest.items()}
                create = partial(self.blobs.create, f"inbox/train-{number}-{name}/{part}.safetensors")
                parts[part] = write_tensors(create, tensors)
            row = Report(
                round=number, work="train", client=name, samples=10, loss=1 / number, accuracy_before=0.25,
                accuracy_after=0.5 + i % 8 / 16, test_samples=8, accuracy_constant=0.5,
            )  # fmt: skip
            entries[name] = AcceptedUpdate(row, parts)
        self.engine.aggregate(entries)
        rows = [entry.row for entry in entries.values()]
        self.commit(Record(round=number), rows)
        self.engine.settle()

    def commit(self, record, rows, plan=None):
        aio.run(self.ledger.commit_round(record, self.engine.staged_slots(), rows, {}, plan))

    def plot(self, out, *wanted):
        return plot.plot_home(self.home, out, wanted)

    def evaluate(self, *counts, test_samples=40):
        """Make every device compare its models: (won, lost) against its local model, in the order of names."""
        rows = [
            Report(
                round=2,
                work="evaluate",
                client=name,
                accuracy_before=0.5 + (won - lost) / test_samples,
                accuracy_common=0.25,
                accuracy_local=0.5,
                better_than_local=won,
                worse_than_local=lost,
                better_than_common=30,
                worse_than_common=0,
                test_samples=test_samples,
            )
            for name, (won, lost) in zip(self.names, counts, strict=True)
        ]
        self.commit(Record(round=2), rows)


@pytest.fixture
def federation(tmp_path):
    return lambda *what, **options: Federation(tmp_path, *what, **options)


def test_fedtp_has_curves_and_embeddings(federation, tmp_path):
    fed = federation("fedtp", clients=24)
    lines = fed.plot(tmp_path / "out")
    page = check_pictures(tmp_path / "out", {"accuracy", "embeddings"})
    assert lines[-3].startswith("no picture 'clients': devices have compared nothing yet")
    assert lines[-2].startswith("no picture 'attention': fedtp stores no matrices")
    assert page.row("0")[1:] == ["24", "0.2500", "0.2500", "24", "0.7188", "0.7188"], "0.5 + (0 + ... + 7) / 8 / 16"
    assert [row[0] for row in page.rows if row[1:4] == ["24", "0.2500", "0.2500"]] == ["0", "1"], "served in rounds 1 and 2"
    assert "2 of 5 rounds of fedtp with vit, seed 0." in page.text
    assert page.row("a constant answer: over all test samples")[1] == "0.5000"
    assert page.row("clients whose model is no better than a constant answer")[1] == "24", "served: 0.25 against 0.5"
    assert page.row("FedMCSA: best over all test samples, after round 0")[1] == "0.2500"


def test_fedmcsa_shows_who_learns_from_whom_by_name(federation, tmp_path):
    fed = federation("fedmcsa", clients=3, sigma=0.0)
    lines = fed.plot(tmp_path / "out")
    page = check_pictures(tmp_path / "out", {"accuracy", "attention"})
    assert any("no picture 'embeddings': fedmcsa has no embeddings" in line for line in lines)
    assert page.row("blocks.0.attention.to_qkv") == ["blocks.0.attention.to_qkv", "0.3333", "3.0000"], "sigma 0 is the mean"
    assert page.row("mean") == ["mean", "0.3333", "3.0000"]


NOTED = """
import sys
from importlib.machinery import ModuleSpec

class Noted:
    names = []

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in ("torch", "sklearn") else None

    def create_module(self, spec):
        self.names.append(spec.name)
        raise ModuleNotFoundError(spec.name)

    def exec_module(self, module): ...

sys.meta_path.insert(0, Noted())
"""


def test_what_is_not_needed_is_not_imported(tmp_path):
    """Check imports that take seconds: only a map of embeddings needs scikit-learn, and no picture needs torch.

    The last case is not drawn: it shows that imports are noted.
    """
    cases = {19: "drawn 0 []", 20: "['sklearn']"}  # by number of clients, in one process
    homes = [Federation(tmp_path / str(n), "fedtp+mcsa", clients=n).home.path for n in cases]
    code = NOTED + (
        "import click.testing; from attune.fedserver.cli import cli\n"
        "for home in sys.argv[1:]:\n"
        "    r = click.testing.CliRunner().invoke(cli, ['plot', '--home', home, '--out', f'{home}-pictures'])\n"
        "    print('drawn', r.exit_code, Noted.names, r.output.splitlines())"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, homes)], capture_output=True, text=True, check=True)
    drawn = [line for line in done.stdout.splitlines() if line.startswith("drawn")]
    assert [expected in line for line, expected in zip(drawn, cases.values(), strict=True)] == [True] * 2, drawn
    assert "attention.png" in drawn[0]


def test_the_page_begins_with_who_is_helped_and_ends_with_the_papers_figures(federation, tmp_path):
    """Expect p = 2 / 2**12 for better on 12 of 12 that differ, and the same for worse; 3 against 1 is unclear."""
    fed = federation(clients=4)
    fed.evaluate((3, 1), (12, 0), (0, 12), (12, 0))
    fed.plot(tmp_path / "out")
    page = check_pictures(tmp_path / "out", {"clients", "accuracy"})
    heads = page.heads
    assert heads[:2] == ["Who is helped?", "Devices"]
    assert heads[-1] == "The papers' figures"
    assert "Federation helps 2 of 4 devices for certain: " in page.text
    assert page.row("not helped: another model is better than what it keeps")[1:] == ["1", "-0.3000"]
    table = page.rows[page.rows.index(page.row("device")) + 1 :][:4]
    assert [row[0] for row in table] == ["vm-shard1", "vm-shard3", "vm-shard0", "vm-shard2"], "by what federation gives"
    assert [row[2] for row in table] == ["0.3000", "0.3000", "0.0500", "-0.3000"]
    assert [row[4] for row in table] == ["better", "better", "unclear", "worse"]


def test_the_attention_is_exported_too(federation, tmp_path):
    fed = federation("fedmcsa", clients=2)
    export_home(fed.home, tmp_path / "export")
    slot = next(slot for slot in fed.home.snapshot().slots if slot.key == "matrices")
    assert (tmp_path / "export" / "attention.safetensors").read_bytes() == (fed.home.path / "state" / slot.file).read_bytes()


def test_a_running_server_may_take_the_old_state_away_meanwhile(federation, tmp_path, monkeypatch):
    fed = federation("fedmcsa", clients=2)
    present = fed.home.snapshot()
    old = [msgspec.structs.replace(slot, file=f"old.{slot.file}") for slot in present.slots]
    gone = replace(present, slots=tuple(old))
    answers = [present, gone, present]
    monkeypatch.setattr(ServerHome, "snapshot", lambda home: answers.pop(0))
    source = plot.PictureSource.of_home(fed.home)
    assert source.tensors("matrices", lambda file: "mean" in file) is True
    answers[:] = [gone] * ATTEMPTS
    with pytest.raises(Damaged, match="missing"):
        source.tensors("matrices", lambda file: True)


@pytest.mark.parametrize(
    ("method", "picture", "message"),
    [
        ("fedavg", "attention", "fedavg stores no matrices of which client learns from which"),
        ("fedavg", "embeddings", "fedavg has no embeddings"),
        ("fedtp", "embeddings", "at least 20 clients.*; 2 were trained"),
    ],
)
def test_a_picture_that_was_asked_for_and_cannot_be_is_an_error(federation, tmp_path, method, picture, message):
    with pytest.raises(SettingError, match=message):
        federation(method, clients=2).plot(tmp_path / "out", picture)


def test_before_the_first_round_is_closed_there_is_nothing_to_draw(federation, tmp_path):
    with pytest.raises(NoModel, match="no rounds yet"):
        federation(rounds=0).plot(tmp_path / "out")


def test_without_test_parts_there_are_no_accuracies(federation, tmp_path):
    fed = federation(rounds=0)
    fed.commit(Record(round=1), [Report(round=1, work="train", client="vm-shard0", samples=3, loss=1.0)])
    lines = fed.plot(tmp_path / "out")
    assert any("no picture 'accuracy': no device has reported an accuracy" in line for line in lines)
    with pytest.raises(SettingError, match="none has a test part"):
        fed.plot(tmp_path / "out", "accuracy")


def test_groups_are_the_declared_classes_where_some_clients_share_them(federation):
    fed = federation(clients=4)
    source = plot.PictureSource.of_home(fed.home)
    assert source.groups == {"vm-shard0": "0, 1", "vm-shard1": "2", "vm-shard2": "0, 1", "vm-shard3": "2"}
    assert plot.by_classes({"a": "0", "b": "0"}) == {}, "one group tells nothing"
    assert plot.by_classes({"a": "0", "b": "1"}) == {}, "nor does a group for each"


@pytest.mark.parametrize("form", ["pdf", "svg"])
def test_pictures_of_other_forms_are_the_same_each_time(federation, tmp_path, form):
    fed = federation(clients=2)
    for out in ("one", "two"):
        words = ["plot", "--home", str(fed.home.path), "--out", str(tmp_path / out), "--format", form, "--picture", "accuracy"]
        assert CliRunner().invoke(cli, words).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [f"accuracy.{form}", "index.html"]
    data = (tmp_path / "one" / f"accuracy.{form}").read_bytes()
    assert data == (tmp_path / "two" / f"accuracy.{form}").read_bytes()
    assert data.startswith({"pdf": b"%PDF", "svg": b"<?xml"}[form])
    assert "data:image/png" in (tmp_path / "one" / "index.html").read_text()


def test_a_page_escapes_and_keeps_the_order(tmp_path):
    sections = [Section("a & b", "<script>", Picture("one", figures.new(1, 1)), PageTable(("x",), [[0.5], [None], [3]]))]
    assert write(tmp_path, "<t>", sections) == [tmp_path / "one.png", tmp_path / "index.html"]
    page = Page(tmp_path / "index.html")
    assert "script" not in page.tags
    assert page.rows == [["x"], ["0.5000"], [""], ["3"]]


def test_names_sort_by_their_numbers_and_lose_what_all_begin_with():
    assert natural(["s10", "s2", "a", "10", "9"]) == ["9", "10", "a", "s2", "s10"]
    assert short(["host-shard1", "host-shard12"]) == ["shard1", "shard12"]
    assert short(["shard1", "shard2"]) == ["shard1", "shard2"]
    assert short(["host-a"]) == ["host-a"]


def test_the_command_offers_the_pictures_that_there_are(federation, tmp_path):
    option = next(parameter for parameter in seams.answer("commands", "plot").params if parameter.name == "pictures")
    assert list(option.type.choices) == list(plot.PICTURES)
    fed = federation(clients=2, rounds=1)
    words = ["plot", "--home", str(fed.home.path), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(cli, words).exit_code == 0
    page = check_pictures(tmp_path / "out", {"accuracy"})
    assert page.heads[0] == "Who is helped?"
    assert "Not known to the server: devices have compared nothing yet" in page.text
