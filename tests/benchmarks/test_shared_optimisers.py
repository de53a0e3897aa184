"""Committed rows of the server's optimisers: each was tested with the rates that were best on validation parts."""

import csv

from benchmarks.shared_optimiser_tables import PATH
from benchmarks.shared_optimisers import DEVICE_LR, POINTS, SEEDS, SERVER_LR, chosen


def test_tests_ran_with_the_rates_that_validation_parts_chose() -> None:
    with PATH.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for task, _ in POINTS:
        for optimiser, servers in ({"local": (None,)} | SERVER_LR).items():
            mine = [row for row in rows if (row["task"], row["optimiser"]) == (task, optimiser)]
            assert sum(row["part"] == "validation" for row in mine) == len(DEVICE_LR) * len(servers)
            tested = [row for row in mine if row["part"] == "test"]
            assert sorted(int(row["seed"]) for row in tested) == list(SEEDS)
            lr, server = chosen(rows, task, optimiser)
            assert {(float(row["lr"]), row["shared_lr"]) for row in tested} == {(lr, "" if server is None else str(server))}
