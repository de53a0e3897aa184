"""The Helm chart: rendered by Helm's own library, checked against Kubernetes' schemas, and its servers started as it says.

No cluster is here: nothing was scheduled, and no probe was sent by a kubelet.
"""

import contextlib
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from attune.fedserver.home import ServerHome
from tests import engines
from tests.needs import Later, needs
from tests.packaging.checkout import ROOT

pytestmark = needs("helm_python", "kubernetes_validate")
helm, kubernetes_validate = Later("helm_python"), Later("kubernetes_validate")

CHART = ROOT / "deploy" / "helm"
LEAST = {"secrets": {"authority": "attune-authority", "stores": "attune-stores"}, "advertise": "fed.example.org:50051"}
SECRETS = {**LEAST["secrets"], "metrics": "attune-metrics"}
MOST = LEAST | {
    "secrets": SECRETS,
    "image": {"repository": "registry.example.org/attune-server", "digest": f"sha256:{'0' * 64}"},
    "replicas": 3,
    "extraArgs": ["--set=server.threads=4"],
    "extraEnv": [{"name": "AWS_REGION_HINT", "value": "x"}],
    "extraVolumes": [{"name": "root", "configMap": {"name": "postgres-root"}}],
    "extraVolumeMounts": [{"name": "root", "mountPath": "/etc/postgres", "readOnly": True}],
    "service": {"type": "NodePort", "annotations": {"a": "b"}, "loadBalancerSourceRanges": ["192.0.2.0/24"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"monitors": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]},
    "serviceAccount": {"annotations": {"example.org/role": "bucket"}, "automountToken": True},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "priorityClassName": "high",
}
NOTHING_MORE = LEAST | {
    "service": {"type": "ClusterIP"}, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
}  # fmt: skip
SETTINGS = '[method]\nname = "fedavg"\n[model]\nname = "mlr"\n'
# The properties of a ServiceMonitor that the chart may use; kubernetes-validate has no schema of it (monitoring.coreos.com/v1).
SERVICE_MONITOR = {"selector", "endpoints"}
ENDPOINT = {"port", "path", "interval", "authorization"}

Objects = dict[tuple[str, str], dict[str, Any]]


def rendered(values: dict[str, Any]) -> Objects:
    """Return the objects of a release `fed`, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="fed", namespace="learning")
    documents = [one for name, text in files.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def pod(objects: Objects) -> dict[str, Any]:
    return dict(objects["Deployment", "fed"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("values", [LEAST, MOST, NOTHING_MORE], ids=["least", "most", "nothing more"])
def test_helm_finds_no_fault_and_kubernetes_knows_every_field(values: dict[str, Any]) -> None:
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == [] and [one for one in report["messages"] if one["severity"] > 1] == []
    for (kind, _), one in rendered(values).items():
        if kind == "ServiceMonitor":
            assert one["apiVersion"] == "monitoring.coreos.com/v1"
            assert set(one["spec"]) <= SERVICE_MONITOR and all(set(end) <= ENDPOINT for end in one["spec"]["endpoints"])
        else:
            for version in ("1.27", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secrets": {}}, r"secrets\.authority: name the Secret with ca\.pem and ca-key\.pem"),
        ({"secrets": {"authority": "a"}}, r"secrets\.stores: name the Secret with the URLs"),
        ({"advertise": ""}, r"advertise: say HOST:PORT"),
        ({"advertise": "https://fed.example.org"}, r"at '/advertise'"),
        ({"serviceMonitor": {"enabled": True}}, r"serviceMonitor needs secrets\.metrics"),
        ({"replica": 3}, r"additional properties 'replica' not allowed"),
        ({"replicas": "two"}, r"at '/replicas': got string, want integer"),
        ({"service": {"typ": "NodePort"}}, r"at '/service': additional properties 'typ'"),
        ({"image": {"digest": "latest"}}, r"at '/image/digest'"),
        ({"extraArgs": ["serve"]}, r"at '/extraArgs/0'"),
    ],
)
def test_a_wrong_values_file_is_refused_with_the_name_of_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        rendered(LEAST | change)


def test_the_pods_are_confined() -> None:
    for values in (LEAST, MOST):
        spec = pod(rendered(values))
        assert spec["securityContext"] == {
            "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
    assert pod(rendered(LEAST))["automountServiceAccountToken"] is False
    assert "useradd --system --uid 10001 " in (ROOT / "deploy" / "Dockerfile.server").read_text()


def test_keys_are_mounted_as_files_and_never_in_the_environment_or_on_a_disk() -> None:
    spec = pod(rendered(MOST))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["authority"]["secret"]["secretName"] == "attune-authority"
    assert volumes["keys"]["emptyDir"]["medium"] == "Memory"
    mounts = {mount["name"]: mount for mount in spec["initContainers"][0]["volumeMounts"]}
    assert mounts["authority"]["readOnly"] and mounts["metrics"]["readOnly"]
    assert "authority" not in {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    from_secrets = [one["valueFrom"]["secretKeyRef"] for one in spec["containers"][0]["env"] if "valueFrom" in one]
    assert {one["name"] for one in from_secrets} == {"attune-stores"}
    assert {one["key"] for one in from_secrets if not one.get("optional")} == {"ledger", "blobs"}


def test_connections_go_to_the_one_server_that_is_ready() -> None:
    objects = rendered(LEAST)
    deployment, service = objects["Deployment", "fed"], objects["Service", "fed"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "100%", "maxUnavailable": "100%"}
    assert service["spec"]["type"] == "LoadBalancer" and service["spec"]["selector"].items() <= labels.items()
    assert [(one["targetPort"], one["protocol"]) for one in service["spec"]["ports"]] == [("devices", "TCP")]
    [server] = pod(objects)["containers"]
    assert server["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "monitor"}
    assert server["startupProbe"]["failureThreshold"] == 2**31 - 1, "a waiting server is never killed"
    budget = objects["PodDisruptionBudget", "fed"]["spec"]
    assert budget["minAvailable"] == 1 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert ("PodDisruptionBudget", "fed") not in rendered(NOTHING_MORE)


def test_the_network_policy_lets_devices_in_and_the_server_out_to_its_stores() -> None:
    policy = rendered(MOST)["NetworkPolicy", "fed"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [one["ports"][0]["port"] for one in policy["ingress"]] == ["devices", "monitor"]
    assert "from" not in policy["ingress"][0] and policy["ingress"][1]["from"] == MOST["networkPolicy"]["monitors"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53, 5432, 443]
    assert len(rendered(LEAST)["NetworkPolicy", "fed"]["spec"]["ingress"]) == 1
    assert ("NetworkPolicy", "fed") not in rendered(NOTHING_MORE)


# --- the servers of two pods, started as the chart says


class Pod:
    """A pod of the chart on this machine: its paths lie below a folder, and its ports are free ones."""

    def __init__(self, folder: Path, secrets: dict[str, dict[str, str]], bin_folder: Path) -> None:
        self.spec, self.folder = pod(rendered(LEAST | {"secrets": SECRETS, "federation": SETTINGS})), folder
        self.ports = {"50051": engines.free_port(), "50052": engines.free_port()}
        for path in ("var/lib/attune", "run/attune/keys", "etc/attune"):
            (folder / path).mkdir(parents=True)
        config = rendered(LEAST | {"federation": SETTINGS})["ConfigMap", "fed"]["data"]
        for name, files in {"run/attune/authority": secrets["authority"], "run/attune/metrics": secrets["metrics"],
                            "etc/attune": config}.items():  # fmt: skip
            (folder / name).mkdir(exist_ok=True)
            for file, text in files.items():
                (folder / name / file).write_text(text)
                (folder / name / file).chmod(0o440)
        self.environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
        for one in self.spec["containers"][0]["env"]:
            if "value" in one:
                self.environment[one["name"]] = self.mapped(one["value"])
            elif (value := secrets["stores"].get(one["valueFrom"]["secretKeyRef"]["key"])) is not None:
                self.environment[one["name"]] = value

    def mapped(self, text: str) -> str:
        """Return a text with the container's paths and ports as they are here, and variables as Kubernetes puts them in."""
        text = re.sub(r"(?<![\w.])/(var/lib/attune|run/attune|etc/attune)", rf"{self.folder}/\1", text)
        for port, here in self.ports.items():
            text = re.sub(rf"^(--port=|--dashboard=0\.0\.0\.0:){port}$", rf"\g<1>{here}", text)
        return re.sub(r"\$\((\w+)\)", lambda found: self.environment[found[1]], text)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Run the init container, and then the server during the block."""
        [keys], [server] = self.spec["initContainers"], self.spec["containers"]
        subprocess.run([*keys["command"], *map(self.mapped, keys["args"])], check=True, timeout=30)
        words = ["fedserver", *map(self.mapped, server["args"])]
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            finally:
                process.kill()

    def probe(self, name: str) -> int:
        """Send a probe of the chart; return the status, or 0 if nothing listens."""
        asked = self.spec["containers"][0][name]["httpGet"]
        assert asked["port"] == "monitor"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['50052']}{asked['path']}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.mark.engines
def test_two_pods_of_the_chart_serve_one_after_the_other(tmp_path: Path, commands: dict[str, Path]) -> None:
    """The first start of a federation with an authority from a secret; then the other pod takes over with the same one."""
    from attune.fedserver.identity.authority import Authority

    ledger, blobs = engines.remote_words()[1::2]
    authority = Authority.create(tmp_path / "made")
    secrets = {
        "authority": {path.name: path.read_text() for path in (tmp_path / "made").iterdir()},
        "metrics": {"metrics-token": "a-token-of-a-monitor-0123456789"},
        "stores": {"ledger": ledger, "blobs": blobs, **engines.weed().environment},
    }
    pods = [Pod(tmp_path / name, secrets, commands["fedserver"].parent) for name in ("one", "two")]
    with pods[0].running() as first:
        engines.until(lambda: pods[0].probe("readinessProbe") == 200 or first.poll() is not None, "the first to be ready")
        assert first.poll() is None, pods[0].log
        assert pods[0].probe("livenessProbe") == 200
        assert authority.short_fingerprint in pods[0].log and "fed.example.org:50051" in pods[0].log
        with pods[1].running() as second:
            engines.until(lambda: "takes over when it ends" in pods[1].log or second.poll() is not None, "the other to wait")
            probes = ("startupProbe", "livenessProbe", "readinessProbe")
            assert [pods[1].probe(name) for name in probes] == [200, 200, 503]
            first.send_signal(signal.SIGTERM)
            engines.until(lambda: pods[1].probe("readinessProbe") == 200 or second.poll() is not None, "the other to serve")
            assert second.poll() is None and first.wait(timeout=30) == 0, pods[1].log
            assert authority.short_fingerprint in pods[1].log
            metrics = urllib.request.Request(
                f"http://127.0.0.1:{pods[1].ports['50052']}/metrics",
                headers={"authorization": f"Bearer {secrets['metrics']['metrics-token']}"},
            )
            with urllib.request.urlopen(metrics, timeout=5) as answer:  # noqa: S310 - a fixed address
                assert b"attune_" in answer.read()
            token = subprocess.run(
                ["fedserver", "token"], env=pods[1].environment, capture_output=True, text=True, timeout=60
            )  # as `kubectl exec` does
            assert (token.returncode, token.stderr) == (0, "")
    home = pods[1].folder / "var" / "lib" / "attune" / "server"
    assert ServerHome(home).storage_place() is not None
    on_disk = [path for path in home.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert {path.relative_to(home).parts[0] for path in on_disk} <= {"operator"}
