"""The matrix of networks and sites: scores, tests and words worked out by hand, and what may not be shared."""

from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from attune import seams
from attune.common.config import TrainSettings
from attune.common.errors import Forbidden, NoModel, SettingError, UpdateRefused
from attune.common.exchange.messages import BlobRef, Order
from attune.common.given_model import HANDED_IN
from attune.common.metrics import MOST_OTHERS, OtherScore, read_metrics
from attune.common.models.registry import default_spec
from attune.common.plan import Plan, Scale
from attune.common.statistics import column_of
from attune.common.wire.digest import digest_of
from attune.common.wire.files import tensor_bytes, write_tensors
from attune.features.matrix.server import matrix_of, matrix_section
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import comparison_of
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.gate import Gate, finished_network
from attune.fedclient.messages import OrderResult
from attune.fedclient.model.model_info import ModelInfo, save
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import FolderOrders
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.engine import Engine
from attune.fedserver.stores.folder import FolderBlobs

SPEC = default_spec("tabular", (1,), 2, 0, "mlr", {})
METHOD = {key: value for key, value in HANDED_IN.items() if key != "name"}
PLAN = Plan(
    "f", 3, SPEC, [0, 1], "custom", METHOD, TrainSettings(validation=0.0), Scale([0.0], [1.0]), given="sha256:0", matrix=True
)
# The class 1 is what each of them takes for x above 0, above 2, and below 0.
NETWORKS = {"a": (1.0, 0.0), "b": (1.0, -2.0), "c": (-1.0, 0.0)}


def network(name: str) -> dict[str, torch.Tensor]:
    slope, start = NETWORKS[name]
    return {"head.weight": torch.tensor([[0.0], [slope]]), "head.bias": torch.tensor([0.0, start])}


def keep(folder: Path, name: str = "a", **changes: Any) -> Path:
    """Write a finished model."""
    fields = {"kept": "personalized", **changes}
    info = ModelInfo("a", "f", "fedper", {}, SPEC, [0, 1], TrainSettings(), **fields)
    return save(folder / "model", info, {next(iter(fields.get("weights", {fields["kept"]: 1.0}))): network(name)})


def site(folder: Path, x: list[float], y: list[int]) -> Learner:
    """Return the device with the network a and these test samples."""
    np.savez(folder / "train.npz", x=np.array([[-1.0], [1.0]], np.float32), y=np.array([0, 1]))
    np.savez(folder / "test.npz", x=np.array(x, np.float32)[:, None], y=np.array(y))
    return Learner(PLAN, prepare(load_shard(folder), PLAN), "a", FolderOrders(folder / "orders"), torch.device("cpu"))


def evaluated(learner: Learner, others: str = "bc") -> OrderResult:
    refs = [BlobRef(f"attended/{name}", digest_of(tensor_bytes(network(name))), 100) for name in others]
    order = Order("evaluate-1-a", 1, "evaluate", cold_start=(BlobRef("attended", "sha256:1", 100), *refs))
    assert [ref.part for ref, _ in learner.missing(order)] == [ref.part for ref in refs]
    return learner.carry_out(Work(learner, order, {ref.digest: network(ref.part[-1]) for ref in refs}))


def test_networks_of_others_are_compared_with_the_own_one_as_by_hand(tmp_path: Path) -> None:
    """Expect of 8 samples (x = 1, class 0) and 4 (x = 3, class 1): a is right on the 4, b on all, c on the 8.

    The tests by McNemar have p = 2 / 2**8 and, with 8 against 4, 2 (1 + 12 + 66 + 220 + 495) / 2**12.
    """
    keep(tmp_path)
    result = evaluated(site(tmp_path, [1.0] * 8 + [3.0] * 4, [0] * 8 + [1] * 4))
    assert result.accuracy_before == pytest.approx(4 / 12)
    assert result.others == {
        "b": OtherScore(score=1.0, better=8, worse=0),
        "c": OtherScore(score=pytest.approx(8 / 12), better=8, worse=4),
    }
    column = column_of(result.others, 12)
    assert {name: pair.p for name, pair in column.items()} == pytest.approx({"b": 2 * 2 / 256, "c": 1588 / 4096})
    assert [pair.finding(pair.p) for pair in column.values()] == ["better", "unclear"]
    lines = [line for line in comparison_of(result) if "network of" in line]
    assert lines[0].startswith("the network of b here: accuracy 1.000; against this device's own +0.667 (+0.")
    assert lines[0].endswith("it is better (p = 0.016, corrected for 2 networks)")
    assert "+0.333" in lines[1] and "which may be chance" in lines[1]

    rows = [
        Report(round=1, work="evaluate", client="a", accuracy_before=4 / 12, test_samples=12, others=dict(result.others)),
        Report(round=1, work="evaluate", client="b", others={"c": OtherScore(score=0.25)}),
    ]
    section = matrix_section(rows, "classes", drawn=True)
    assert section is not None and section.table is not None and section.picture is not None
    assert section.table.rows == [("b", "1.000 (+0.667, better)", None), ("c", "0.667 (+0.333)", "0.250")]
    assert "better at a (that of b, +0.667" in section.caption
    assert matrix_section([Report(round=1, work="evaluate", client="a")], "classes", drawn=False) is None


def test_without_a_network_of_its_own_a_device_scores_and_compares_nothing(tmp_path: Path) -> None:
    result = evaluated(site(tmp_path, [1.0, 3.0], [0, 1]), "b")
    assert result.others == {"b": OtherScore(score=1.0)}
    assert column_of(result.others, 2) == {}


@pytest.mark.parametrize("events", [12, 9])
def test_aurocs_are_compared_from_10_cases_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=40), np.arange(40) < events
    monkeypatch.setattr(f"{__name__}.PLAN", msgspec.structs.replace(PLAN, score="auroc"))
    keep(tmp_path)
    others = evaluated(site(tmp_path, x.tolist(), y.astype(int).tolist())).others
    if events < 10:
        assert others == {}
        return
    own = roc_auc_score(y, x)  # b ranks as a does, c the other way round
    assert [others[name].score for name in "bc"] == pytest.approx([own, 1 - own])
    assert [others[name].gain for name in "bc"] == pytest.approx([0.0, 1 - 2 * own])
    assert others["c"].better is None and 0 < others["c"].p <= 1


def test_only_a_finished_network_of_the_same_model_is_shared(tmp_path: Path) -> None:
    with pytest.raises(NoModel, match="no finished model"):
        finished_network(PLAN, tmp_path)
    assert finished_network(PLAN, keep(tmp_path, "b"))["head.bias"][1] == -2.0
    for changes, why in (
        ({"kept": "alone", "weights": {"forest": 1.0}}, "hold training samples"),
        ({"method": "fedtp+knn"}, "predicts by its own samples"),
        ({"privacy": {"unit": "example"}}, "noise or masks"),
        ({"classes": [0, 2]}, "another one than"),
    ):
        described = msgspec.json.decode((tmp_path / "model" / "model.json").read_bytes()) | changes
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "model.json").write_bytes(msgspec.json.encode(described))
        write_tensors(tmp_path / "other" / "model.safetensors", network("b"))
        with pytest.raises((NoModel, SettingError), match=why):
            finished_network(PLAN, tmp_path / "other")


def test_a_device_hands_in_its_network_only_if_its_owner_shares_it(tmp_path: Path) -> None:
    order = Order("train-1-a", 1, "train", returns=("attended",))
    usual = DeviceOptions(tmp_path, ServerAddress("localhost", 1))
    with pytest.raises(Forbidden, match="its owner shares none"):
        Gate(usual, PLAN).check_sums(order)
    Gate(DeviceOptions(tmp_path, ServerAddress("localhost", 1), disclose=("model",)), PLAN).check_sums(order)
    keep(tmp_path, "c")
    learner = site(tmp_path, [1.0], [1])
    result = learner.carry_out(Work(learner, order, {}))
    assert (result.trained, result.loss) == (True, None)
    assert [(part.part, part.digest) for part in result.parts] == [("attended", digest_of(tensor_bytes(network("c"))))]
    too_many = tuple(BlobRef(f"attended/{n}", f"sha256:{n}", 1) for n in range(MOST_OTHERS + 1))
    with pytest.raises(Forbidden, match="101 networks"):
        learner.missing(Order("evaluate-1-a", 1, "evaluate", cold_start=too_many))


def test_the_server_serves_each_device_the_networks_of_the_others(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    plan = msgspec.structs.replace(PLAN, given="")
    engine = Engine(plan, [], blobs, 0)
    entries = {}
    for name in "ab":
        blob = engine.arrive(name, "attended", write_tensors(partial(blobs.create, f"inbox/{name}"), network(name))).blob
        entries[name] = AcceptedUpdate(Report(round=1, work="train", client=name, samples=5), {"attended": blob})
    engine.aggregate(entries)
    engine.settle()
    served = engine.cold_start("abc")
    assert {name: sorted(parts) for name, parts in served.items()} == {
        "a": ["attended", "attended/b"],
        "b": ["attended", "attended/a"],
        "c": ["attended", "attended/a", "attended/b"],
    }
    assert served["c"]["attended/b"].digest == digest_of(tensor_bytes(network("b")))
    assert engine.max_bytes()["attended"] < 1 << 17  # what is larger is refused before it arrives
    nan = {name: tensor * float("nan") for name, tensor in network("c").items()}
    for wrong, why in ((nan, "not-finite|NaN"), ({"head.bias": torch.zeros(3)}, "head")):
        with pytest.raises(Exception, match=rf"(?s)c's attended update.*({why})"):
            engine.arrive("c", "attended", write_tensors(partial(blobs.create, "inbox/c"), wrong))


def test_reports_of_other_networks_are_bounded() -> None:
    read_metrics(b'{"others": {"b": {"score": 0.5, "better": 3, "worse": 1}}}', "a")
    many = {str(n): {"score": 0.5} for n in range(MOST_OTHERS + 1)}
    for wrong in ({"b": {"score": 2}}, {"b": {"score": 0.5, "gain": 3}}, {"b" * 65: {"score": 0.5}}, many):
        with pytest.raises(UpdateRefused, match="a reports metrics that cannot be"):
            read_metrics(msgspec.json.encode({"others": wrong}), "a")


def test_runs_without_a_matrix_are_refused_by_name() -> None:
    with pytest.raises(SettingError, match="devices of fedavg end with one common model"):
        matrix_of(Plan("f", 3, SPEC, [0, 1], "fedavg", {}, TrainSettings()))
    private = resolve({"method": {"name": "fedper"}, "privacy": {"secure_aggregation": True}}).privacy
    with pytest.raises(SettingError, match="networks stay at their site"):
        matrix_of(Plan("f", 3, SPEC, [0, 1], "fedper", {}, TrainSettings(), privacy=private))
    with pytest.raises(SettingError, match="is set by `fedserver evaluate --matrix`"):
        resolve({"round": {"matrix": True}})
    with pytest.raises(SettingError, match="--matrix needs the feature 'matrix', which is not in this installation"):
        unwrap(seams.matrix_of)(PLAN)
    given, tensors = matrix_of(Plan("f", 3, SPEC, [0, 1], "local", {}, TrainSettings()))
    given.check()
    assert tensors.keys() == network("a").keys()
