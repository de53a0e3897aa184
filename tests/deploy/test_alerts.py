"""The alert rules fire when they should and only then, as Prometheus itself evaluates them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from attune.common.config import RoundSettings, ServerSettings, Settings, TrainSettings, load_settings
from attune.fedserver.core import planning

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


# --- federation.toml: it loads, it has every section, and its values are the defaults, so that a copy changes nothing


def test_the_example_is_the_defaults(deploy):
    said = load_settings(deploy / "federation.toml", (), {})
    assert set(said) == set(Settings.__struct_fields__)
    assert planning.resolve(said) == planning.resolve({})


def test_every_setting_of_a_device_and_of_the_server_is_in_it(deploy):
    said = load_settings(deploy / "federation.toml", (), {})
    unset = {field.encode_name for field in msgspec.structs.fields(TrainSettings) if field.default is msgspec.UNSET}
    by_samples = {"local_epochs"}  # without it the devices' samples decide
    assert set(said["train"]) == set(TrainSettings.__struct_fields__) - unset - by_samples
    assert set(said["server"]) == set(ServerSettings.__struct_fields__)
    assert set(said["round"]) >= set(RoundSettings.__struct_fields__) - {"train"}


def test_what_the_example_leaves_in_comments_is_accepted_too(deploy, tmp_path):
    text = (deploy / "federation.toml").read_text()
    for line in ('name = "vit"', "width = 32", "depth = 2"):
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    path = tmp_path / "federation.toml"
    path.write_text(text)
    settings = planning.resolve(load_settings(path, (), {}))
    from attune.common.models.registry import default_spec

    spec = default_spec("images", (8, 8, 1), 10, 0, settings.model_name, settings.model_options)
    assert msgspec.to_builtins(spec)["options"]["width"] == 32
