"""The Dockerfiles and the compose file, compared with the code. No image is built here: `make images` does."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from attune.common.config import ServerSettings, convert
from attune.features.web.serving import PageAddress
from tests.packaging.checkout import ROOT, shipped

IMAGES = {"Dockerfile.server": "fedserver", "Dockerfile.client": "fedclient"}


def test_every_stage_of_every_image_begins_with_the_same_pinned_base(instructions):
    """Require the digest: a tag may name other bytes tomorrow."""
    stages = [rest.partition(" AS ")[0] for name in IMAGES for word, rest in instructions(name) if word == "FROM"]
    assert stages == ["${BASE}"] * 4
    bases = {instructions(name)[0] for name in IMAGES}
    assert len(bases) == 1
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", bases.pop()[1])


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_exists_and_is_not_ignored(name, deploy, instructions):
    ignored = (deploy.parent / ".dockerignore").read_text().splitlines()
    sources = [
        word for what, rest in instructions(name) if what == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "constraints.txt", "common", IMAGES[name]} <= set(sources)
    for source in sources:
        assert (deploy.parent / source).exists()
        assert ignored[0] == "*"
        assert f"!{source}" in ignored, "the folder would not reach the build"


@pytest.mark.parametrize("name", IMAGES)
def test_all_that_the_package_consists_of_is_copied_to_its_place(name, instructions):
    """Check every folder: the root is the package `attune`, and a folder in another place would be missing in the image."""
    copies = [rest.split() for what, rest in instructions(name) if what == "COPY" and "--from" not in rest]
    places = {Path(source): Path(target) for *sources, target in copies for source in sources}
    assert all(target == (Path(source) if (ROOT / source).is_dir() else Path()) for source, target in places.items()), places
    needed = shipped() | {Path("README.md"), Path("LICENSE"), Path("pyproject.toml")}
    assert [path for path in sorted(needed) if not any(path.is_relative_to(source) for source in places)] == []


@pytest.mark.parametrize("name", IMAGES)
def test_the_second_stage_is_small_and_not_root(name, instructions):
    found = instructions(name)
    starts = [index for index, (word, _) in enumerate(found) if word == "FROM"]
    assert len(starts) == 2
    last = found[starts[1] :]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/attune /opt/attune"]
    assert [rest for word, rest in last if word == "USER"] == ["attune"]
    assert not any("pip" in rest for _, rest in last)


def test_the_image_of_a_device_has_nothing_that_only_a_server_needs(instructions):
    installs = {name: [rest for word, rest in instructions(name) if word == "RUN" and "pip install" in rest] for name in IMAGES}
    asked = {name: lines[-1].split()[-1] for name, lines in installs.items()}
    assert asked == {"Dockerfile.server": "'.[server]'", "Dockerfile.client": "'.[train]'"}


@pytest.mark.parametrize(("name", "command"), IMAGES.items())
def test_the_entry_point_is_a_command_of_the_package(name, command, instructions, commands, parse):
    found = dict(instructions(name))
    assert json.loads(found["ENTRYPOINT"]) == [command]
    assert commands[command].is_file()
    if command == "fedserver":
        ports = [int(port) for port in found["EXPOSE"].split()]
        assert parse([command, *json.loads(found["CMD"])]).params["port"] == ports[0]


def test_the_compose_file_starts_commands_that_the_images_know(deploy, parse):
    compose = yaml.safe_load((deploy / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "device0", "device1"}
    port = parse(["fedserver", *compose["services"]["server"]["command"]]).params["port"]
    names = set()
    for device in ("device0", "device1"):
        words = compose["services"][device]["command"]
        said = parse(["fedclient", *words]).params
        assert said["server"] == f"server:{port}"
        assert said["token"] == "${ATTUNE_TOKEN:-missing}"
        targets = [volume.split(":")[1] for volume in compose["services"][device]["volumes"]]
        assert words[words.index("--data") + 1] in targets
        names.add(said["name"])
    assert len(names) == 2


def test_dashboard_and_metrics_in_compose_are_reached_from_this_machine_alone(deploy, instructions, parse):
    compose = yaml.safe_load((deploy / "compose.yaml").read_text())
    server = compose["services"]["server"]
    said = parse(["fedserver", *server["command"]]).params
    page = PageAddress.parse(said["dashboard"])
    assert not page.local, "a published port leads to no loopback address of a container"
    assert f"127.0.0.1:{page.port}:{page.port}" in server["ports"]
    assert str(page.port) in dict(instructions("Dockerfile.server"))["EXPOSE"].split()
    settings = dict(assignment.split("=", 1) for assignment in said["assignments"])
    assert settings["server.advertise"] == "${ATTUNE_ADVERTISE:-localhost:50051}", "a container's own name is known to nobody"
    folder = Path(settings["server.metrics_token_file"]).parent
    assert f"metrics-token:{folder}" in server["volumes"]
    assert f"install -d -o attune -g attune {folder}" in dict(instructions("Dockerfile.server"))["RUN"]
    convert(
        ServerSettings, {name.removeprefix("server."): value for name, value in settings.items() if "$" not in value}, "server."
    )


def test_every_service_is_confined_and_its_volumes_are_declared(deploy):
    compose = yaml.safe_load((deploy / "compose.yaml").read_text())
    used = set()
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert (deploy / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        used |= {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert used == set(compose["volumes"])
    assert compose["services"]["server"]["mem_limit"] == "8g"
    assert all(service["depends_on"]["server"] == {"condition": "service_healthy"} for service in _devices(compose))


def test_both_servers_of_the_standby_file_keep_their_state_at_one_place(deploy, parse):
    postgres = pytest.importorskip("attune.features.remote.postgres")
    s3 = pytest.importorskip("attune.features.remote.s3")
    compose = yaml.safe_load((deploy / "compose.standby.yaml").read_text())
    servers = [service for name, service in compose["services"].items() if name.startswith("server")]
    commands = [parse(["fedserver", *server["command"]]).params for server in servers]
    assert len(servers) == 2 and commands[0] == commands[1]
    postgres.check_url(commands[0]["ledger"])
    s3.check_url(commands[0]["blobs"])
    assert all("authority:/var/lib/attune/server/ca" in server["volumes"] and server["read_only"] for server in servers)
    used = {volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", ())}
    assert used == set(compose["volumes"])


def test_volumes_of_the_standby_file_belong_to_the_user_of_the_image(deploy, instructions):
    """A new volume has the owner of the folder that it covers; a folder that the image lacks would be root's."""
    [made] = re.findall(
        r"install -d -o attune -g attune (.*)", " ".join(dict(instructions("Dockerfile.server"))["RUN"].split())
    )
    compose = yaml.safe_load((deploy / "compose.standby.yaml").read_text())
    targets = {volume.split(":")[1] for name in ("server0", "server1") for volume in compose["services"][name]["volumes"]}
    assert targets == {"/var/lib/attune", "/var/lib/attune/server/ca"}
    assert {"/var/lib/attune/server", "/var/lib/attune/server/ca"} <= set(made.split())


def test_servers_of_the_standby_file_wait_for_their_stores(deploy):
    text = (deploy / "compose.standby.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"server0", "server1", "postgres", "seaweedfs", "bucket"}
    for name in ("server0", "server1"):
        assert services[name]["depends_on"] == {
            "postgres": {"condition": "service_healthy"}, "bucket": {"condition": "service_completed_successfully"},
        }  # fmt: skip
        assert (services[name]["cap_drop"], services[name]["restart"]) == (["ALL"], "always")
        environment = services[name]["environment"]
        assert (
            environment["PGPASSWORD"]
            == services["postgres"]["environment"]["POSTGRES_PASSWORD"]
            == "${POSTGRES_PASSWORD:?choose one}"
        )
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert environment[key] == services["seaweedfs"]["environment"][key]
        assert environment["AWS_ENDPOINT_URL"] == "http://seaweedfs:8333"
    assert services["bucket"]["depends_on"] == {"seaweedfs": {"condition": "service_healthy"}}
    assert all(services[name]["healthcheck"]["test"][0] == "CMD" for name in ("postgres", "seaweedfs"))
    assert "-ip.bind=0.0.0.0" in services["seaweedfs"]["command"].split(), "the health check asks 127.0.0.1"
    assert services["server0"]["ports"] != services["server1"]["ports"]
    assert not re.search(r"(PASSWORD|SECRET\w*): *[\"']?(?!\$\{)\w", text)


def _devices(compose):
    return [service for name, service in compose["services"].items() if name != "server"]


def test_the_health_check_is_a_command_of_the_server(instructions, parse):
    check = dict(instructions("Dockerfile.server"))["HEALTHCHECK"].partition("CMD ")[2]
    words = shlex.split(check.partition("|")[0])
    assert parse(words).params["as_json"] is True
