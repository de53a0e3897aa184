"""A running federation for attackers: a real server over mutual TLS, two honest devices and Eve, each with an order."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from attune.common.pb import federation_pb2 as pb
from tests.e2e.hand import CALL_S, Hand, Stream
from tests.e2e.harness import Federation, Server, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "3", "--rounds", "3")
FLAGS += ("--set", "round.stall_s=0", "--set", "server.handshake_s=2")

HONEST = ("ada", "bob")


@dataclass
class Victim:
    """Federation under attack. Honest devices do not answer, so the round stands still. Eve is enrolled and in the cohort."""

    federation: Federation
    server: Server
    devices: dict[str, Hand] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    orders: dict[str, pb.Order] = field(default_factory=dict)
    strangers: Iterator[int] = field(default_factory=itertools.count)

    def device(self, name: str) -> Hand:
        """Enrol another device with the operator's token."""
        return Hand(self.server.port, self.server.join_token, name)

    def stranger(self) -> Hand:
        """Return a device that is not enrolled."""
        return self.device(f"mallory{next(self.strangers)}")

    def scratch(self) -> Path:
        """Return a folder of the attacker's own."""
        return self.federation.folder / f"attacker{next(self.strangers)}"

    def health(self, caller: Hand) -> str:
        reply = HealthStub(caller.channel).Check(HealthCheckRequest(), timeout=CALL_S)
        return HealthCheckResponse.ServingStatus.Name(reply.status)

    @property
    def state(self) -> dict[str, Any]:
        """State that an attack must not change: the round, its cohort, and the server's files."""
        status = self.federation.status()
        honest = [entry for entry in status["clients"] if entry["name"] in HONEST]
        standing = {entry["name"]: (entry["state"], entry["samples"], entry["note"]) for entry in honest}
        kept = ("state", "phase", "round", "model", "min_clients", "accuracy", "reason", "troubles")
        return {key: status[key] for key in kept} | standing

    def new_log(self) -> Callable[[], str]:
        """Return a reader of the server's log from now on."""
        begin = len(self.server.text)
        return lambda: self.server.text[begin:]


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with begun(tmp_path_factory.mktemp("attacks"), *HONEST, "eve") as victim:
        yield victim


@contextmanager
def begun(folder: Path, *names: str) -> Iterator[Victim]:
    """Run a federation of devices with these names, of which each has an order."""
    federation = Federation(folder)
    victim = Victim(federation, federation.server(*FLAGS))
    for name in names:
        victim.devices[name] = victim.device(name)
        victim.streams[name] = victim.devices[name].connect()
    for name, stream in victim.streams.items():
        victim.orders[name] = stream.next("order")
    yield victim
    federation.close()


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """Check that after an attack the server runs, and the federation's state is unchanged."""
    before = running.state
    log = running.new_log()
    yield running
    assert running.server.popen.poll() is None, running.server.text
    until(lambda: running.state == before, "the state to be as before, where new connections waited after a flood")
    assert "Traceback" not in log()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of attacks with -v: the attack, the expected answer and the answer."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = [value for report in reports for name, value in report.user_properties if name == "attack" and report.when == "call"]
    if not rows or config.get_verbosity() < 1:
        return
    terminalreporter.section("attacks")
    wide = max(len(what) for what, _, _ in rows)
    terminalreporter.write_line(f"{'what was tried':{wide}}  {'must be answered':20}  was answered, the state unchanged")
    for what, must, was in rows:
        terminalreporter.write_line(f"{what:{wide}}  {must:20}  {was}")
    terminalreporter.write_line(f"{len(rows)} attacks of the table; further tests of tests/attacks are listed above")
