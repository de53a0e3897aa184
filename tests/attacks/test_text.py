"""Text that crosses the border: a device's for the operator is one short line, and errors tell a device no file names."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.pb import federation_pb2 as pb
from attune.common.text import clean
from attune.common.wire.digest import digest_of
from attune.fedserver.view.homes import render_status
from tests.attacks.attacks import order, with_header
from tests.attacks.conftest import Victim
from tests.e2e.hand import PROFILE, Stream, refusal
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


@given(st.text(st.characters(), max_size=80), st.integers(10, 60))
def test_any_text_becomes_one_printable_line_of_bounded_length(text: str, longest: int) -> None:
    shown = clean(text, longest)
    assert shown.isprintable()
    assert len(shown) <= longest
    assert len(shown.splitlines()) <= 1
    assert clean(shown, longest) == shown


def test_what_people_write_stays_as_it_is() -> None:
    said = "Gerät 7 (Zürich): 温度が高い, disk 93 % full [see /var/log]"
    assert clean(said) == said
    assert clean("round 1\nround 2\tx") == "round 1 round 2 x"
    assert clean("abcdefghijkl", 10) == "abcdefg..."


ENTRY = '{{"x": {{"dtype": "{}", "shape": [1], "data_offsets": [{}, {}]}}}}'
BLOBS = {
    "empty": b"",
    "header too large": (1 << 62).to_bytes(8, "little"),
    "deep": with_header("{" * 3000),
    "no JSON": with_header("{,}"),
    "no such dtype": with_header(ENTRY.format("Q9", 0, 4), bytes(4)),
    "gap": with_header(ENTRY.format("F32", 4, 8), bytes(8)),
    "trailing bytes": with_header(ENTRY.format("F32", 0, 4), bytes(40)),
    "out of range": with_header(ENTRY.format("F32", 0, 4)),
    "misaligned": len(ENTRY.format("F32", 0, 4) + "x").to_bytes(8, "little")
    + (ENTRY.format("F32", 0, 4) + " ").encode()
    + bytes(4),
    "no boolean": with_header(ENTRY.format("BOOL", 0, 1), b"\x07"),
    "twice": with_header('{"x": 1, "x": 2}'),
}


@pytest.mark.parametrize("kind", BLOBS)
def test_an_error_about_a_blob_names_no_folder_of_the_server(victim: Victim, kind: str) -> None:
    eve, data = victim.devices["eve"], BLOBS[kind]
    eve.upload(order(victim), "shared", [data], digest_of(data), len(data))
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
    _, message = refusal(lambda: eve.submit(order(victim), [ref]))
    assert str(victim.federation.folder) not in message
    assert "/attune/" not in message and ".part" not in message, message
