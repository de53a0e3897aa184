"""Client-level privacy by real processes: a server that is killed before the commit releases the same noise afterwards."""

import json
import shutil
import signal
import stat

from attune.common.errors import HomeMismatch
from tests.e2e.harness import digit_shards

SETTINGS = (
    *("method.name=fedavg", "model.name=mlr", "train.local_epochs=1", "server.threads=1", "round.rounds=2"),
    *(
        "privacy.unit=client", "privacy.devices=3", "privacy.noise=2.0", "privacy.delta=0.1",
        "data.classes=[0,1,2,3,4,5,6,7,8,9]",
    ),
)  # fmt: skip


def test_a_killed_server_repeats_its_noise_and_charges_it_once(federation_at, tmp_path):
    federation = federation_at("server")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    server = federation.server("--min-clients", "3", *flags, fault="server:2:aggregated=kill")
    devices = federation.devices(digit_shards(tmp_path / "shards", 3, 60, 20))
    assert server.code() == -signal.SIGKILL, server.text
    file = federation.home / "state" / "shared.value.2.safetensors"
    staged, first = file.read_bytes(), (federation.home / "state" / "shared.value.1.safetensors").read_bytes()
    server = federation.server("--exit-when-done")
    assert [process.code() for process in (*devices, server)] == [0] * 4, server.text
    assert file.read_bytes() == staged != first
    spent = json.loads(federation.command("fedserver", "privacy", "--home", str(federation.home), "--json").stdout)["released"]
    assert (spent["releases"], spent["rate"]) == (2, 1.0) and 0 < spent["spent"] < 10
    secret = federation.home / "privacy" / "noise-secret"
    assert len(secret.read_bytes()) == 32 and stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_server_with_another_noise_secret_or_authority_is_refused(federation_at, tmp_path):
    federation, other = federation_at("server"), federation_at("other")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    for each in (federation, other):
        assert each.server("--min-clients", "3", *flags).stop() == 0

    def refused(words: str) -> bool:
        start = federation.command("fedserver", "--port", "0", "--dashboard", "off", code=HomeMismatch.exit_code)
        return words in start.stderr

    for folder in ("privacy", "ca"):
        right, words = tmp_path / folder, f"copy {federation.home / folder} from the server that has it, or from a backup"
        shutil.move(federation.home / folder, right)
        if folder == "privacy":
            assert refused(words), "nor does a new secret take its place"
        shutil.copytree(other.home / folder, federation.home / folder)
        assert refused(words)
        shutil.rmtree(federation.home / folder)
        shutil.move(right, federation.home / folder)
    assert federation.server().stop() == 0


def test_a_new_run_takes_a_new_noise_secret_where_the_old_one_is_lost(federation_at):
    federation = federation_at("server")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    assert federation.server("--min-clients", "3", *flags).stop() == 0
    shutil.rmtree(federation.home / "privacy")
    federation.command("fedserver", "run", "new", "second", *flags)
    assert federation.server().stop() == 0
    assert len((federation.home / "privacy" / "noise-secret").read_bytes()) == 32
