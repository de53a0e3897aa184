"""Text of a device for the operator's terminal or log: it arrives as one short line."""

from __future__ import annotations

import msgspec
import pytest

from attune.common.pb import federation_pb2 as pb
from attune.fedserver.view.status_text import render_status
from tests.attacks.conftest import Victim
from tests.e2e.hand import PROFILE, Stream
from tests.e2e.harness import until

LONGEST_LINE = 700  # most characters of a log line
FORGED = "round 9/9 closed: 2 answers, accuracy 1.0000"
TEXTS = {
    "markup": "[/bold] [red]all is well[/red] [link=file:///etc/passwd]x[/link]",
    "escape sequences": "\x1b[2J\x1b[1;1H\x1b]0;owned\x07 \x9b31m red",
    "forged lines": f"nothing\n{FORGED}\r\n{FORGED}\u2028{FORGED}\x85{FORGED}",
    "text that runs backwards": "\u202egnihtyreve si lla\u202c \u2066\u200f",
    "three megabytes": "x" * (3 << 20),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_trouble_reaches_the_operator_as_plain_text(victim: Victim, text: str) -> None:
    log = victim.new_log()
    victim.streams["eve"].say(trouble=pb.Trouble(order_id=victim.orders["eve"].id, reason=text))
    until(lambda: "eve: " in log(), "the trouble to be logged")
    check(log(), victim)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_a_device_calls_its_software_is_one_short_word_in_the_log(victim: Victim, text: str) -> None:
    log = victim.new_log()
    hello = pb.Hello(protocol=1, software=text, profile_json=msgspec.json.encode(PROFILE))
    mallory = victim.stranger()
    stream = Stream(mallory, pb.DeviceMessage(hello=hello))
    stream.next("welcome")
    until(lambda: f"{mallory.name} connected" in log(), "the device to be logged")
    check(log(), victim)
    mallory.close()
    until(lambda: f"{mallory.name} disconnected" in log(), "the device to have gone")


def check(log: str, victim: Victim) -> None:
    for line in (*log.split("\n"), *render_status(victim.federation.status()).split("\n")):
        assert len(line) < LONGEST_LINE
        assert line.isprintable(), ascii(line)
    assert not any(line.startswith(FORGED) for line in log.splitlines())
