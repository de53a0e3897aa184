"""`server.advertise`: the address in join lines and of the page, where the name of the machine is not known to devices."""

from __future__ import annotations

import socket

import pytest

from attune.common.config import ServerSettings, convert
from attune.common.errors import SettingError
from attune.fedserver.home import ServedAddress
from attune.fedserver.web.serving import PageAddress, names_of

ANY = "0.0.0.0"  # noqa: S104 - an address to print


@pytest.mark.parametrize(
    ("host", "advertised", "joined"),
    [
        (ANY, "", f"{socket.gethostname()}:50051"),
        ("10.0.0.7", "", "10.0.0.7:50051"),
        (ANY, "fed.example", "fed.example:50051"),
        ("10.0.0.7", "fed.example:443", "fed.example:443"),
        (ANY, "[2001:db8::1]", "[2001:db8::1]:50051"),
        (ANY, "[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("::1", "", "[::1]:50051"),
    ],
)  # fmt: skip
def test_join_lines_name_the_advertised_address(host, advertised, joined):
    assert ServedAddress(host, 50051, 1).joined(advertised) == joined


@pytest.mark.parametrize(
    "wrong", ["a b", "fed.example:", "fed.example:0", "fed.example:70000", "::1", "http://fed.example", ":5", "a\n"]
)
def test_a_text_that_is_no_address_is_refused_by_name(wrong):
    with pytest.raises(SettingError, match=r"server\.advertise"):
        convert(ServerSettings, {"advertise": wrong}, "server.")


def test_a_page_for_all_addresses_is_named_and_answers_by_the_advertised_host():
    assert PageAddress(ANY, 8080).url("t", "fed.example:443") == "http://fed.example:8080/?token=t"
    assert PageAddress("::", 8080).url("t", "[2001:db8::1]") == "http://[2001:db8::1]:8080/?token=t"
    assert PageAddress("127.0.0.1", 8080).url("t", "fed.example") == "http://127.0.0.1:8080/?token=t", (
        "the host cannot be there"
    )
    assert "fed.example" in names_of(ANY, "fed.example:443")
    assert "fed.example" in names_of("127.0.0.1", "fed.example"), "a proxy on this machine passes its name on"
