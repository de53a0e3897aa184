"""A hostile device tries to decide the federation's data and model, or to end the server, before round 1."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from attune.common.plan import Profile
from tests.e2e.hand import PROFILE, Hand, kind_of, refusal
from tests.e2e.harness import Federation, FederationAt, Server, until

FLAGS = ("--method", "fedavg", "--rounds", "2")
TEXT = Profile(kind="tokens", shape=(8,), labels=[0, 1], samples=20, test_samples=5, vocabulary=30)


@pytest.fixture
def start(federation_at: FederationAt) -> Callable[..., tuple[Federation, Server]]:
    def begin(*flags: str) -> tuple[Federation, Server]:
        federation = federation_at("start")
        return federation, federation.server(*FLAGS, *flags)

    return begin


def hand(server: Server, name: str) -> Hand:
    return Hand(server.port, server.join_token, name)


def like(profile: Profile, **fields: Any) -> Profile:
    return msgspec.structs.replace(profile, **fields)


def test_the_first_shape_does_not_win(start: Any) -> None:
    """Let the majority of the connected devices decide. The odd device is told why, and the operator sees it."""
    federation, server = start("--min-clients", "3")
    mallory = hand(server, "mallory").connect(like(PROFILE, shape=(4000, 4000, 3), kind="images"))
    until(lambda: federation.client("mallory").get("state"), "mallory to be there")
    honest = [hand(server, name).connect() for name in ("ada", "bob")]
    kind, message = refusal(mallory.end)
    assert (kind, "(4000, 4000, 3)" in message) == ("shape-mismatch", True)
    honest.append(hand(server, "carl").connect())
    for stream in honest:
        assert stream.next("order").round == 1
    assert "(4000, 4000, 3)" in federation.client("mallory")["note"]


def test_a_tie_waits_for_the_operator_or_one_more_device_and_says_so(start: Any) -> None:
    federation, server = start("--min-clients", "2")
    mallory = hand(server, "mallory").connect(like(PROFILE, shape=(4,)))
    ada = hand(server, "ada").connect()
    [trouble] = until(lambda: troubles(federation), "the tie to be said")
    assert "(4,)" in trouble and "(3,)" in trouble and "data.shape" in trouble, trouble
    bob = hand(server, "bob").connect()
    assert kind_of(mallory.end) == "shape-mismatch"
    assert {ada.next("order").round, bob.next("order").round} == {1}
    assert troubles(federation) == []


def troubles(federation: Federation) -> list[str]:
    found: list[str] = msgspec.json.decode(federation.command("fedserver", "status", "--json").stdout)["troubles"]
    return found


def test_the_operator_s_word_outranks_any_majority(start: Any) -> None:
    declared = ("--set", 'data.kind="tabular"', "--set", "data.shape=[3]", "--set", "data.classes=[0, 1]")
    _, server = start(*declared, "--min-clients", "2")
    for name in ("mallory1", "mallory2", "mallory3"):
        assert kind_of(hand(server, name).connect(like(PROFILE, shape=(4,))).end) == "shape-mismatch"
    assert kind_of(hand(server, "mallory4").connect(like(PROFILE, labels=[0, 1, 2])).end) == "undeclared-labels"
    streams = [hand(server, name).connect() for name in ("ada", "bob")]
    assert {stream.next("order").round for stream in streams} == {1}


@pytest.mark.parametrize(
    ("profile", "kind"),
    [
        (like(TEXT, vocabulary=1 << 45), "setting"),
        (like(TEXT, vocabulary=(1 << 20) + 1), "setting"),
        (like(PROFILE, labels=["x" * (3 << 20)]), "setting"),
        (like(PROFILE, labels=["x" * 257]), "setting"),
        (like(PROFILE, labels=list(range(65_537))), "setting"),
        (like(PROFILE, labels=[f"{number:0250d}" for number in range(5000)]), "setting"),
        (like(PROFILE, labels=["a\x1b[2J", "b"]), "setting"),
        (like(PROFILE, kind="images", shape=(1 << 20, 1 << 20, 1)), "setting"),
        (like(PROFILE, shape=(0,)), "setting"),
        (like(PROFILE, shape=(3, 3, 3, 3)), "setting"),
        (like(PROFILE, samples=1 << 60), "setting"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{str(value)[:60]}",
)
def test_a_profile_that_no_shard_has_is_refused(before_round_1: tuple[Federation, Server], profile: Profile, kind: str) -> None:
    federation, server = before_round_1
    number = len(federation.status()["clients"])
    found, message = refusal(hand(server, f"mallory{number}").connect(profile).end)
    assert found == kind
    assert len(message) < 1000
    assert server.popen.poll() is None


@pytest.fixture(scope="module")
def before_round_1(federation_at: FederationAt) -> tuple[Federation, Server]:
    federation = federation_at("before")
    return federation, federation.server(*FLAGS, "--min-clients", "99")


def test_devices_for_whom_no_model_can_be_built_do_not_end_the_server(start: Any) -> None:
    """Let all of them agree on images of 8,000 x 8,000, for which a model would be far too large."""
    federation, server = start("--min-clients", "2", "--model", "mlr")
    huge = Profile(kind="images", shape=(8000, 8000, 1), labels=list(range(1000)), samples=9, test_samples=2)
    streams = [hand(server, name).connect(huge) for name in ("mallory", "malvina")]
    [trouble] = until(lambda: troubles(federation), "the plan that cannot be to be said")
    assert "server.max_model_bytes" in trouble
    assert server.popen.poll() is None
    for stream in streams:
        stream.hang_up()
    honest = [hand(server, name).connect() for name in ("ada", "bob")]
    assert {stream.next("order").round for stream in honest} == {1}


def test_an_error_names_three_labels_and_not_half_a_million(start: Any) -> None:
    _, server = start("--min-clients", "2")
    for stream in [hand(server, name).connect() for name in ("ada", "bob")]:
        stream.next("welcome")
    many = like(PROFILE, labels=list(range(50_000)))
    kind, message = refusal(hand(server, "mallory").connect(many).end)
    assert kind == "undeclared-labels"
    assert "49,995 more" in message or "49995 more" in message, message
    assert len(message) < 400
