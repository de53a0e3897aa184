"""A clock that is 100 days away for 20 s, of the server or of a device, ends no process; then rounds go on."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.harness import FederationAt, Process, _script, tabular_shard, until

AWAY_S, SPAN_S = 100 * 86400, 20.0
FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "100000")
WAITS = ("--set", "round.quorum=2", "--set", "round.grace_s=600", "--set", "train.local_epochs=1")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that shifts a process's time of day."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed here")
    library = tmp_path_factory.mktemp("shim") / "shift.so"
    source = Path(__file__).with_name("shift.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("restarted", [False, True], ids=["runs on", "restarted meanwhile"])
@pytest.mark.parametrize("away_s", [AWAY_S, -AWAY_S], ids=["ahead", "behind"])
@pytest.mark.parametrize("side", ["server", "device"])
def test_a_clock_that_is_away_for_a_while_ends_nobody(
    federation_at: FederationAt, tmp_path: Path, shim: Path, side: str, away_s: int, restarted: bool
) -> None:
    federation = federation_at("clock")
    shifted_by = tmp_path / "shift"
    shifted_by.write_text("0")
    shifted = federation.environment | {"LD_PRELOAD": str(shim), "SHIFT_FILE": str(shifted_by)}
    shards = [tabular_shard(tmp_path / f"s{number}", number) for number in range(2)]

    def started(who: str) -> Process:
        if who == "server":
            words = ["--host", "127.0.0.1", "--port", str(federation.port), "--join-uses", "9", "--dashboard", "off"]
            command = [_script("fedserver"), *words, *(() if federation.port else (*FLAGS, *WAITS))]
        else:
            shard = shards[int(who[-1])]
            command = [
                _script("fedclient"), "--data", str(shard), "--device", "cpu", "--server", f"localhost:{federation.port}",
            ]  # fmt: skip
            command += ["--name", shard.name]
        environment = shifted if who in (side, f"{side}0") else federation.environment
        process = Process(command, federation._log(who), environment, fresh=True)
        federation.processes.append(process)
        if who == "server":
            federation.port = int(process.wait_for(r"listens on \S+:(\d+) ")[1])
        return process

    processes = {who: started(who) for who in ("server", "device0", "device1")}

    def round_is(least: int) -> bool:
        ended = {who: process.text[-500:] for who, process in processes.items() if process.popen.poll() is not None}
        assert not ended, ended
        return bool(federation.status()["round"] >= least)

    until(lambda: round_is(3), "the first rounds")
    shifted_by.write_text(str(away_s))
    if restarted:
        victim = "server" if side == "server" else "device0"
        processes[victim].kill()
        processes[victim] = started(victim)
    ends = time.monotonic() + SPAN_S
    while time.monotonic() < ends:
        round_is(0)
        time.sleep(1.0)
    shifted_by.write_text("0")
    closed = federation.status()["round"]
    until(lambda: round_is(closed + 3), "rounds after the clock is right again")
