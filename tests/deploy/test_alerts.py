"""The alert rules fire when they should and only then, as Prometheus itself evaluates them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).with_name("alerts.test.yaml")


def test_each_tested_alert_is_a_rule(deploy: Path) -> None:
    [group] = yaml.safe_load((deploy / "alerts.yaml").read_text())["groups"]
    tested = {one["alertname"] for test in yaml.safe_load(TESTS.read_text())["tests"] for one in test["alert_rule_test"]}
    assert len(tested) > 4 and tested <= {rule["alert"] for rule in group["rules"]}


@pytest.mark.engines
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: it comes with Prometheus")
def test_alerts_fire_when_they_should(deploy: Path, tmp_path: Path) -> None:
    for file in (deploy / "alerts.yaml", TESTS):
        shutil.copy(file, tmp_path)
    done = subprocess.run(["promtool", "test", "rules", TESTS.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
