"""Device names, and that identity is cheap to import."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import SettingError
from attune.common.identity.names import check_name, joined_name


@pytest.mark.parametrize(
    "name", ["a", "pi-3.kitchen_2", "_x", "7", "a" * 64, "küche", "München", "東京", "Кухня", "हिन्दी", "東" * 64]
)
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".pi",
        "-pi",
        "a/b",
        "a b",
        "pi\n",
        "ku\u0308che",
        "a" * 65,
        "a\0",
        "\u0308a",
        "a\u200bb",
        "a\u202eb",
        "²",
        "a\ud800",
        "💻",
    ],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(SettingError, match="--name"):
        check_name(name)


@pytest.mark.parametrize(
    ("hostname", "shard", "expected"),
    [
        ("pi", "shard3", "pi-shard3"),
        ("pi.local", "client 3 (new).npz", "pi.local-client-3-new-.npz"),
        ("", "shard3", "shard3"),
        (".pi", "..", "pi"),
        ("日本", "東京", "日本-東京"),
        ("pi", "Mu\u0308nchen Süd", "pi-München-Süd"),
        ("", "💻", "device"),
    ],
)
def test_joined_names(hostname: str, shard: str, expected: str) -> None:
    assert joined_name(hostname, shard) == expected


@given(st.text(max_size=90), st.text(max_size=90))
def test_joined_names_are_always_good(hostname: str, shard: str) -> None:
    assert check_name(joined_name(hostname, shard))


def test_long_joined_names_that_begin_alike_stay_different() -> None:
    first, second = (joined_name("h" * 60, f"shard{number}") for number in (1, 2))
    assert first != second
    assert len(first) == len(second) == 64


def test_long_names_of_long_letters_fit_into_the_name_of_a_file() -> None:
    name = joined_name("東" * 60, "𠀀" * 60)
    assert len(name) <= 64 and len(name.encode()) <= 192 and name == check_name(name)
