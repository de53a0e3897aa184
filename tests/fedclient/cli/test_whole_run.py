"""A device from enrolment to its model, against a server that speaks the contract over mutual TLS."""

from __future__ import annotations

import json

from click.testing import CliRunner

from attune.common.metrics import read_metrics
from attune.common.wire.files import read_tensors
from attune.fedclient.cli import main


def test_a_whole_run_ends_with_a_model_that_works_offline(bench, tmp_path):
    folder = bench.run()
    assert folder == tmp_path / "home" / "model"
    assert [update.order_id for update in bench.server.seen.submits] == ["train-1-kiel", "train-2-kiel", "evaluate-2-kiel"]
    first, _, last = bench.server.seen.submits
    first_metrics, last_metrics = (read_metrics(update.metrics_json, "kiel") for update in (first, last))
    assert first.samples == 36, "a tenth of 40 is held out"
    assert first_metrics.test_samples == 20
    assert first_metrics.loss is not None
    assert first_metrics.accuracy_after is not None
    assert not last.parts
    assert last_metrics.loss is None
    assert last_metrics.accuracy_after is None

    assert bench.server.seen.progress[0].order_id == "train-1-kiel"
    assert 0 < bench.server.seen.progress[0].done <= 1
    served = bench.server.serving["shared"]
    kept = read_tensors(folder / "model.safetensors")
    assert all(kept[name].equal(value) for name, value in served.items())
    said = json.loads((folder / "model.json").read_text())
    assert said["classes"] == ["ant", "bee", "cow"]
    assert said["accuracy"] == last_metrics.accuracy_before > 0.8
    assert bench.lines.lines[-1].endswith(str(folder))

    bench.server.stop()
    bench.server.stop = lambda: None
    result = CliRunner().invoke(main, ["evaluate", "--data", str(bench.shard), "--home", str(tmp_path / "home"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["accuracy"] == last_metrics.accuracy_before


def test_a_name_keeps_its_letters(bench):
    bench.run(name="München")
    assert bench.server.seen.enrolled == ["München"]
    assert bench.server.seen.submits[0].order_id == "train-1-München"
