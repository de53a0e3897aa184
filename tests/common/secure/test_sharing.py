"""Shares of a secret: each is the polynomial's value, and as many as the threshold give the secret."""

from itertools import combinations
from random import Random

import pytest

from attune.common.secure.masks import PRIME, SECRET_BYTES, combine, split, weights_at_zero

SECRET = bytes(range(7, 7 + SECRET_BYTES))


def coefficients(threshold: int) -> list[int]:
    draw = Random(threshold)
    return [draw.randrange(PRIME) for _ in range(threshold - 1)]


def test_shares_of_small_numbers_by_hand() -> None:
    shares = split(bytes(SECRET_BYTES - 1) + b"\5", [3, 2], 3)  # 5 + 3 x + 2 x^2
    assert [int.from_bytes(share, "big") for share in shares] == [10, 19, 32]


@pytest.mark.parametrize(("threshold", "count"), [(2, 3), (26, 50), (129, 256)])
def test_each_share_is_the_value_of_the_polynomial_in_the_field(threshold: int, count: int) -> None:
    drawn = [int.from_bytes(SECRET, "big"), *coefficients(threshold)]
    expected = [sum(c * pow(x, power, PRIME) for power, c in enumerate(drawn)) % PRIME for x in range(1, count + 1)]
    assert [int.from_bytes(share, "big") for share in split(SECRET, drawn[1:], count)] == expected


def test_every_three_of_five_give_the_secret_and_two_do_not() -> None:
    shares = dict(enumerate(split(SECRET, coefficients(3), 5), start=1))
    for points in combinations(shares, 3):
        assert combine({point: shares[point] for point in points}, weights_at_zero(points)) == SECRET
    two = {point: shares[point] for point in (1, 2)}
    with pytest.raises(ValueError, match="shares of different secrets"):
        combine(two, weights_at_zero((1, 2)))


def test_the_most_devices_give_the_secret_back() -> None:
    shares = dict(enumerate(split(SECRET, coefficients(129), 256), start=1))
    points = sorted(Random(1).sample(range(1, 257), 129))
    assert combine({point: shares[point] for point in points}, weights_at_zero(points)) == SECRET
