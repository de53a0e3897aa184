"""A device from enrolment to its model, against a server that speaks the contract over mutual TLS."""

from __future__ import annotations

import json

from click.testing import CliRunner

from attune.common.wire.files import read_tensors
from attune.fedclient.cli import main


def test_a_whole_run_ends_with_a_model_that_works_offline(bench, tmp_path):
    folder = bench.run()
    assert folder == tmp_path / "home" / "model"
    assert [update.order_id for update in bench.server.seen.submits] == ["train-1-kiel", "train-2-kiel", "evaluate-2-kiel"]
    first, _, last = bench.server.seen.submits
    assert first.samples == 36, "a tenth of 40 is held out"
    assert first.metrics.test_samples == 20
    assert first.metrics.HasField("loss")
    assert first.metrics.HasField("accuracy_after")
    assert not last.parts
    assert not last.metrics.HasField("loss")
    assert not last.metrics.HasField("accuracy_after")

    assert bench.server.seen.progress[0].order_id == "train-1-kiel"
    assert 0 < bench.server.seen.progress[0].done <= 1
    served = bench.server.serving["shared"]
    kept = read_tensors(folder / "model.safetensors")
    assert all(kept[name].equal(value) for name, value in served.items())
    said = json.loads((folder / "model.json").read_text())
    assert said["classes"] == ["ant", "bee", "cow"]
    assert said["accuracy"] == last.metrics.accuracy_before > 0.8
    assert bench.lines.lines[-1].endswith(str(folder))

    bench.server.stop()
    bench.server.stop = lambda: None
    result = CliRunner().invoke(main, ["evaluate", "--data", str(bench.shard), "--home", str(tmp_path / "home"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["accuracy"] == last.metrics.accuracy_before
