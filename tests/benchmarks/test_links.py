"""A federation over a narrow link in real processes: a long transfer needs one connection, and happens once."""

from __future__ import annotations

from benchmarks.links import Case, measure


def test_bulk_on_a_narrow_link_breaks_no_connection_and_no_byte_is_sent_twice():
    """Run one device at 1 Mbit/s and 300 ms: each transfer of 300 kB takes 2.5 s. `make bench-links` runs the full matrix."""
    found = measure(Case(mbit_s=1.0, clients=1, parameters=75_000, rounds=1, patience_s=180.0))
    assert found["connections_each"] == 2, "one to enrol, one to live"
    assert found["times_the_blobs"] <= 1.05
