"""Homes of an earlier revision: this version continues them to the same bits, and shows their content."""

import json
import platform
from importlib.metadata import version
from typing import Any

import pytest

from attune.common.hardware import processor_name
from tests.e2e.harness import Federation, FederationAt
from tests.homes.make import COMING, EXPECTED, HERE, HOST, PORTABLE, held, shown, unpack

NOTED = json.loads(EXPECTED.read_text(encoding="utf-8"))
LARGEST_BYTES = 2 << 20  # limit of all archives together
WEIGHED = ("model.json", ", evaluate")  # items with exponentials of numpy, whose last bit depends on the processor
THIS = {"torch": version("torch"), "machine": platform.machine(), "processor": processor_name()}
SAME_NUMBERS = all(NOTED[what] == here for what, here in THIS.items())


@pytest.fixture
def home(request: pytest.FixtureRequest, federation_at: FederationAt) -> Federation:
    """Return the kept home of this name, without processes."""
    federation = federation_at(request.param)
    federation.environment |= PORTABLE
    unpack(HERE / f"{request.param}.tar.xz", federation.home.parent)
    return federation


DISCLOSED = ("midrun", "newcomers")  # made by 82b576c
AS_BEFORE = ("--threads", "1", "--disclose", "statistics")  # earlier versions disclosed them unasked


def go_on(federation: Federation, kind: str) -> dict[str, Any]:
    """Start the server and the devices that come back, and return the content of the home when all is done."""
    folder = federation.home.parent
    first, *others = [folder / "shards" / f"{name}.npz" for name in COMING[kind]]
    server = federation.server()
    more = [word for shard in others for word in ("--data", str(shard))]
    name, place = (HOST, folder / "devices") if others else (f"{HOST}-{first.stem}", folder / "devices" / first.stem)
    devices = federation.device(
        first, *more, *(AS_BEFORE if kind in DISCLOSED else ("--threads", "1")), "--home", str(place), name=name
    )
    assert devices.code() == 0, devices.text
    federation.await_status(lambda status: status["state"] == "done")
    assert server.stop() == 0
    return held(folder)


@pytest.mark.parametrize(("home", "kind"), [(kind, kind) for kind in COMING], indirect=["home"])
def test_a_home_of_an_earlier_version_is_gone_on_with_to_the_same_bits(home: Federation, kind: str) -> None:
    after, expected = go_on(home, kind), NOTED["homes"][kind]
    assert after.keys() == expected.keys()
    if SAME_NUMBERS:  # another torch rounds differently, and so do MKL's portable kernels on another maker's processor
        assert [item for item in after if after[item] != expected[item] and not item.endswith(WEIGHED)] == []


@pytest.mark.parametrize("home", ["finished"], indirect=True)
def test_a_finished_home_of_an_earlier_version_is_shown_as_that_version_showed_it(home: Federation) -> None:
    assert shown(home.home.parent, lambda *words: home.command(*words).stdout) == NOTED["homes"]["finished"]
    home.command("fedserver", "verify", "--home", str(home.home))
    for device in (home.home.parent / "devices").iterdir():
        home.command("fedclient", "verify", "--home", str(device))


def test_the_homes_are_small() -> None:
    assert sum(path.stat().st_size for path in HERE.glob("*.tar.xz")) < LARGEST_BYTES
