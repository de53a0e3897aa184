"""The page's summary of all reports: its status is that of all of them, and its lines are their means."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.metrics import METRICS
from attune.common.statistics import gain_of, verdict_of
from attune.features.web.facts import CondensedReports
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.export import ORDER_COLUMNS
from attune.fedserver.view.status import status
from attune.fedserver.view.summary import row_of

NAMES = ("anna", "ben", "cleo")
share = st.none() | st.floats(0, 1)
reported = st.fixed_dictionaries(
    {
        "accuracy_before": share,
        "accuracy_after": share,
        "accuracy_common": share,
        "accuracy_constant": share,
        "loss": st.none() | st.floats(0, 9),
        "seconds": st.none() | st.floats(0, 9),
        "bytes_up": st.none() | st.integers(0, 99),
        "test_samples": st.none() | st.integers(1, 50),
    }
)
keys = st.tuples(st.integers(1, 5), st.sampled_from(["train", "evaluate"]), st.sampled_from(NAMES))


def in_time(rows):
    return sorted(rows, key=lambda row: (row.round, row.work != "train", row.client))


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(keys, reported, max_size=20), st.sampled_from(["fedtp", "fedmcsa"]), st.booleans())
def test_the_status_of_what_is_kept_is_that_of_all_rows(found, method, done):
    rows = in_time(Report(round=r, work=w, client=c, **numbers) for (r, w, c), numbers in found.items())
    condensed = CondensedReports()
    for row in rows:
        condensed.add([row, row])
    devices = tuple(DeviceRecord(name, name) for name in NAMES)
    record = Record(phase=Phase.DONE if done else Phase.TRAINING, round=5)
    overrides = {"method": {"name": method}, "round": {"rounds": 5}}
    whole, kept = (Snapshot(overrides, None, record, devices, (), tuple(each)) for each in (rows, condensed.rows))
    assert status(kept, set()) == status(whole, set())
    assert len(condensed.rows) <= 8 * len(NAMES)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(keys, reported, max_size=20))
def test_lines_and_totals_do_not_depend_on_how_often_the_newest_round_is_read(found):
    rows = in_time(Report(round=r, work=w, client=c, **numbers) for (r, w, c), numbers in found.items())
    once, often = CondensedReports(), CondensedReports()
    once.add(rows)
    for end in range(len(rows) + 1):
        often.add([row for row in rows[:end] if row.round >= often.newest])
    assert once.lines == often.lines
    assert once.totals == often.totals
    assert [line.round for line in once.lines] == sorted({row.round for row in rows})
    for name in once.totals:
        assert once.totals[name]["bytes_up"] == sum(row.bytes_up or 0 for row in rows if row.client == name)


def test_a_line_by_hand():
    rows = [
        Report(
            round=3, work="train", client="anna", loss=1.0, accuracy_before=0.2, accuracy_after=0.4, seconds=2.0, bytes_up=10
        ),
        Report(round=3, work="train", client="ben", loss=3.0, accuracy_before=0.4, seconds=5.0, bytes_up=20, bytes_down=7),
        Report(
            round=3, work="evaluate", client="ben", accuracy_before=0.5, accuracy_common=0.25, accuracy_alone=0.75, seconds=1.0
        ),
    ]
    condensed = CondensedReports()
    condensed.add(rows)
    [line] = condensed.lines
    assert (line.trained, line.evaluated) == (("anna", "ben"), ("ben",))
    assert (line.before, line.after, line.accuracy, line.common) == (pytest.approx(0.3), 0.4, 0.5, 0.25)
    assert (line.alone, line.kept) == (0.75, None)
    assert line.metrics == {"loss": 2.0, "seconds": 5.0, "bytes_up": 30, "bytes_down": 7}
    assert condensed.totals == {
        "anna": {"seconds": 2.0, "bytes_up": 10, "bytes_down": 0},
        "ben": {"seconds": 6.0, "bytes_up": 20, "bytes_down": 7},
    }


def test_a_line_of_metrics_csv_is_the_row_that_was_written():
    row = Report(
        round=2,
        work="evaluate",
        client="anna",
        samples=7,
        accuracy_before=0.5,
        kept="common",
        bytes_up=0,
        fitted={"ridge": -3.0},
    )
    cells = {name: "" if (value := getattr(row, name)) is None else str(value) for name in (*ORDER_COLUMNS, *METRICS)}
    assert row_of(cells) == msgspec.structs.replace(row, fitted={}), "votes are in no view"


def test_verdicts_by_hand():
    """Expect p = 0.013 for 12 of 14 against 2, at most 0.026 with two rivals; 3 against 1 is unclear."""
    better = {"better_than_local": 12, "worse_than_local": 2, "better_than_common": 14, "worse_than_common": 0}
    assert verdict_of(better) == "better"
    assert verdict_of(better | {"better_than_common": 3, "worse_than_common": 1}) == "better", "the federation gave both"
    assert verdict_of(better | {"better_than_local": 3}) == "unclear"
    assert verdict_of({"better_than_common": 3, "worse_than_common": 1}) == "unclear"
    assert verdict_of(better | {"better_than_common": 0, "worse_than_common": 14}) == "worse"
    assert verdict_of({"better_than_local": None, "worse_than_local": None}) is None
    assert gain_of(better | {"test_samples": 40}) == 0.25
    assert gain_of({"better_than_common": 1, "worse_than_common": 3, "test_samples": 20}) == -0.1
    assert gain_of({"test_samples": 20}) is None


def test_what_is_kept_is_compared_with_ordinary_models_alone_by_hand():
    """Expect p = 0.0063 for 11 against 1, at most 0.019 with three rivals; 12 against 4 has 0.077."""
    own = {"better_than_alone": 0, "worse_than_alone": 20, "test_samples": 40}
    kept = {f"kept_{word}_than_alone": n for word, n in (("better", 11), ("worse", 1))}
    local = {f"kept_{word}_than_local": n for word, n in (("better", 12), ("worse", 4))}
    common = {f"kept_{word}_than_common": n for word, n in (("better", 2), ("worse", 2))}
    assert (verdict_of(own), gain_of(own)) == ("worse", -0.5), "an earlier device compares its own model alone"
    assert (verdict_of(own | kept | common), gain_of(own | kept | common)) == ("better", 0.25)
    assert verdict_of(own | kept | local) == "unclear", "the device could have trained its network alone"
    assert gain_of(own | local | common) == 0.2, "without ordinary models, the local network"
    everything = {"kept_better_than_alone": 1, "kept_worse_than_alone": 11} | local | common
    assert (verdict_of(own | everything), gain_of(own | everything)) == ("worse", -0.25)
