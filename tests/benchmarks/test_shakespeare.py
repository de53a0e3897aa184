"""The text benchmark: the content of its windows, and its rows against shares by hand."""

from __future__ import annotations

import gzip
import string

import pytest

from benchmarks import shakespeare


def letters(codes):
    return ["".join(string.printable[code] for code in row) for row in codes.tolist()]


def test_windows_lie_side_by_side_and_labels_are_the_next_letters():
    x, y = shakespeare.cut("to be or not", 3)
    assert letters(x) == ["to ", "be ", "or "] and letters(y) == ["o b", "e o", "r n"]
    assert [len(part) for part in shakespeare.cut("abc", 3)] == [0, 0], "the last label would be missing"


def test_a_roles_last_fifth_is_its_test_part_and_shares_no_letter_with_the_rest():
    role = shakespeare.in_time("abcdefghijklmnopqrst", 3)  # 16 and 4 letters
    assert letters(role.train[0]) == ["abc", "def", "ghi", "jkl", "mno"] and letters(role.train[1])[-1] == "nop"
    assert letters(role.test[0]) == ["qrs"] and letters(role.test[1]) == ["rst"]


@pytest.fixture
def plays(tmp_path):
    path = tmp_path / "roles.tsv.gz"
    rows = ["role_id\tplay\trole\tline", *(f"0\thamlet\tFOOL\t{'abc' * 20}" for _ in range(5)), "1\thamlet\tGHOST\tMark me."]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return path


def test_roles_are_read_line_by_line_and_short_ones_left_out(plays):
    assert shakespeare.texts(plays, 100) == {"0 FOOL, hamlet": "\n".join(["abc" * 20] * 5)}
    assert len(shakespeare.texts(plays, 8)) == 2


def test_a_row_averages_positions_and_the_causal_last_one_predicts_the_leak(plays, monkeypatch):
    monkeypatch.setattr(shakespeare, "BATCHES", {4: 8})
    monkeypatch.setattr(shakespeare, "MODEL", {"width": 8, "depth": 1, "heads": 2})
    causal, leaky = shakespeare.runs(plays, 100, rounds=1, share=1.0, seed=0)
    assert (causal["targets"], leaky["targets"], causal["window"]) == ("causal", "leaky", 4)
    for row in (causal, leaky):
        assert row["accuracy"] == pytest.approx((3 * row["label_in_input"] + row["last_position"]) / 4, abs=0.011)
    assert leaky["leak_predicts"] == pytest.approx(75 + causal["last_position"] / 4, abs=0.005)
