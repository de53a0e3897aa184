"""asyncio prints no lines on stderr when the server vanishes."""

import gc
import logging
import threading

import pytest
import torch

from attune.common.errors import Unreachable
from attune.fedclient import address, fleet, shards
from tests.fedclient import conftest


@pytest.mark.parametrize("many", [False, True], ids=["one device", "a fleet"])
def test_a_server_that_vanishes_leaves_no_task_behind(bench, many, tmp_path, monkeypatch, caplog):
    bench.server.faults.no_uploads = True  # devices keep their streams open, and try to hand in
    folder = tmp_path / "shards"
    for number in range(3):
        conftest.tabular_shard(folder / f"shard{number}", seed=number)

    def strike():
        while len(bench.server.seen.uploads) < 3:
            threading.Event().wait(0.01)
        bench.server.stop()
        bench.server.stop = lambda: None

    threading.Thread(target=strike, daemon=True).start()
    monkeypatch.setattr(address, "LONGEST_DELAY_S", 0.3)  # several connections are tried
    over = threading.Event()

    def collect():
        while not over.wait(0.05):
            gc.collect()

    torch.optim.SGD([torch.zeros(1)])  # this imports half of torch
    gc.collect()
    gc.freeze()  # existing objects are not scanned again and again
    collector = threading.Thread(target=collect)
    collector.start()
    with caplog.at_level(logging.WARNING):
        if many:
            options = bench.options(home=None, name="edge", data=folder, connect_timeout_s=2.0)
            outcomes = fleet.run(shards.members(shards.expand([f"{folder}/*"]), options), bench.lines)
            assert [type(outcome.error) for outcome in outcomes] == [Unreachable] * 3
        else:
            with pytest.raises(Unreachable):
                bench.run(connect_timeout_s=2.0)
        over.set()
        collector.join()
        gc.collect()
        gc.unfreeze()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
