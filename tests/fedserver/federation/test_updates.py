"""Numbers of an update: those that are kept, and those that are refused by name."""

import msgspec
import pytest

from attune.common.errors import UpdateRefused
from attune.common.exchange.protobuf import UPDATE
from attune.common.metrics import MAX_COUNT, Metrics, metrics_of, read_metrics
from attune.common.pb import federation_pb2 as pb
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.federation.updates import row_of

ORDER = OrderId("evaluate", 3, "kiel")
KIEL = DeviceRecord("kiel", "key", samples=40, contributed=1, fetched=3)


def row(samples=40, report=b""):
    return row_of(
        ORDER, UPDATE.read(pb.Update(order_id=str(ORDER), samples=samples, metrics_json=report).SerializeToString()), KIEL
    )


def test_a_row_has_all_that_was_reported():
    said = {"accuracy_before": 0.5, "accuracy_common": 0.25, "accuracy_local": 0.75, "kept": "local", "test_samples": 8}
    found = row(report=msgspec.json.encode(said))
    assert found == Report(round=3, work="evaluate", client="kiel", samples=40, bytes_up=0, **said)


def test_what_a_device_does_not_say_is_none():
    assert row() == Report(round=3, work="evaluate", client="kiel", samples=40, bytes_up=0)


def test_more_samples_than_declared_are_refused():
    with pytest.raises(UpdateRefused, match="kiel claims 41 samples; it declared 40"):
        row(samples=41)


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (b'{"accuracy_common": 1.5}', "accuracy_common"),
        (b'{"accuracy_local": NaN}', "malformed"),
        (b'{"accuracy_kept": -0.25}', "accuracy_kept = -0.25"),
        (b'{"loss": 1e999}', "out of range"),
        (b'{"auroc_kept": 1.01}', "auroc_kept"),
        (b'{"auroc_error_alone": -0.01}', "auroc_error_alone"),
        (b'{"auroc_gain_alone": 1e999}', "out of range"),
        (b'{"roc": {"kept": [0.5, 0.5]}}', "roc"),
        (('{"roc": {"kept": [' + ", ".join(["1.5"] * 13) + "]}}").encode(), "roc"),
        (b'{"roc": {"<b>": [0.5]}}', "roc"),
        (b'{"loss": -1.79e308}', "loss"),
        (b'{"kept": "the best of all"}', "kept"),
        (b'{"test_samples": -1}', "test_samples"),
        (b'{"test_samples": 18446744073709551615}', "test_samples"),
        (b'{"seconds": NaN}', "malformed"),
        (b'{"seconds": -1.0}', "seconds"),
        (f'{{"bytes_down": {MAX_COUNT + 1}}}'.encode(), "bytes_down"),
        (b'{"seconds": "long"}', "seconds"),
        (b"[]", "object"),
        (b"\xff", ""),
    ],
)
def test_impossible_numbers_are_refused_by_name(report, named):
    with pytest.raises(UpdateRefused, match=rf"kiel reports metrics that cannot be: .*{named}"):
        read_metrics(report, "kiel")


def test_only_r2_lies_below_0_and_not_below_minus_1():
    assert read_metrics(b'{"accuracy_kept": -0.25}', "kiel", "regression").accuracy_kept == -0.25
    with pytest.raises(UpdateRefused, match="accuracy_kept"):
        read_metrics(b'{"accuracy_kept": -1.5}', "kiel", "regression")
    with pytest.raises(UpdateRefused, match="accuracy_kept"):
        read_metrics(b'{"accuracy_kept": -0.25}', "kiel", "multilabel")


def test_a_number_that_a_newer_device_reports_is_passed_over():
    assert read_metrics(b'{"loss": 1, "mood": "good"}', "kiel") == Metrics(loss=1.0)


def test_the_metrics_of_a_row_are_those_it_was_made_of():
    reported = Metrics(loss=0.5, accuracy_before=0.25, kept="common", test_samples=4)
    whole = Report(round=1, work="train", client="a", **msgspec.structs.asdict(reported))
    assert metrics_of(whole) == reported
    assert msgspec.json.decode(msgspec.json.encode(metrics_of(whole)), type=Metrics) == reported
