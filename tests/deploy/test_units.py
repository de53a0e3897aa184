"""The systemd units: accepted by systemd, hardened as promised, and starting commands that exist."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from attune.common.config import RoundSettings, ServerSettings, Settings, TrainSettings, load_settings
from attune.fedserver.core import planning

UNITS = ("fedserver.service", "fedserver@.service", "fedclient@.service")
PROMISED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "Restart": "on-failure",
    "SuccessExitStatus": "143",
    "Type": "notify",
    "NotifyAccess": "main",
    "User": "attune",
    "StateDirectoryMode": "0700",
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_accepts_the_unit(name, deploy, commands, tmp_path):
    installed = (deploy / name).read_text().replace("/opt/attune/bin", str(commands["fedserver"].parent))
    path = tmp_path / name.replace("@", "@shard3")
    path.write_text(installed)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_is_hardened(name, unit):
    service = unit(name)["Service"]
    assert {key: service[key] for key in PROMISED} == PROMISED
    assert int(service["RestartSec"]) > 0
    assert service["WatchdogSec"] == "3min"
    assert int(service["LimitNOFILE"]) >= 4096
    assert "server" not in name or service["MemoryMax"] == "75%"


@pytest.mark.parametrize("name", UNITS)
def test_the_home_lies_in_the_state_directory(name, deploy, unit):
    assert f"ATTUNE_HOME=%S/{unit(name)['Service']['StateDirectory']} " in (deploy / name).read_text()


def test_the_server_starts_with_what_the_readme_installs(unit, parse):
    words = unit("fedserver.service")["Service"]["ExecStart"].split()
    assert words[0] == "/opt/attune/bin/fedserver"
    assert str(parse(words).params["config"]) == "/etc/attune/federation.toml"


def test_each_of_several_servers_has_settings_port_and_home_of_its_own(unit, parse):
    service = unit("fedserver@.service")["Service"]
    words = service["ExecStart"].replace("${FEDSERVER_PORT}", "50061").split()
    assert str(parse(words).params["config"]) == "/etc/attune/%i.toml"
    assert (service["EnvironmentFile"], service["StateDirectory"]) == ("/etc/attune/%i.env", "attune-%i")
    alone = dict(unit("fedserver.service")["Service"])
    own = ("ExecStart", "EnvironmentFile", "StateDirectory", "Environment")
    assert {k: v for k, v in service.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}


def test_the_device_starts_on_its_shard(unit, parse):
    words = unit("fedclient@.service")["Service"]["ExecStart"].split()
    context = parse([word for word in words if word != "$ATTUNE_OPTIONS"])
    assert words[words.index("--data") + 1] == "/srv/attune/%i"
    assert context.params["server"] == "${ATTUNE_SERVER}"


def test_statuses_that_are_not_tried_again_are_those_that_a_person_must_mend(unit):
    from attune.common import errors

    final = {
        "fedserver.service": (errors.SettingError, errors.HomeMismatch, errors.Replaced),
        "fedserver@.service": (errors.SettingError, errors.HomeMismatch, errors.Replaced),
        "fedclient@.service": (
            errors.SettingError, errors.HomeMismatch, errors.ShardError, errors.NonFiniteFeatures, errors.UndeclaredLabels,
            errors.ShapeMismatch, errors.NameTaken, errors.TokenRefused, errors.FingerprintMismatch, errors.CertificateRefused,
            errors.NotEnrolled, errors.Forbidden, errors.Replaced,
        ),
    }  # fmt: skip
    for name, kinds in final.items():
        said = unit(name)["Service"]["RestartPreventExitStatus"].split()
        assert [int(code) for code in said] == sorted(kind.exit_code for kind in kinds)


# --- the alert rules fire when they should and only then, as Prometheus itself evaluates them

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
    by_commands = {"train", "given", "matrix"}
    assert set(said["round"]) >= set(RoundSettings.__struct_fields__) - by_commands


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
