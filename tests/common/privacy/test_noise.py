"""Random numbers from a secret: their distribution, and that only the same context repeats them."""

import pytest
import torch

from attune.common.privacy.noise import BLOCK, NoiseStream, key_of

SECRET = b"s" * 32


def normals(*context: str | int, count: int = 400_000) -> torch.Tensor:
    return NoiseStream(key_of(SECRET, *context)).normal(count)


def test_normals_have_the_moments_and_tails_of_normals() -> None:
    drawn = normals("run", 1)
    assert drawn.dtype == torch.float64
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        assert drawn.pow(power).mean().item() == pytest.approx(moment, abs=0.02 * 4 ** (power / 2))
    for bound, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert (drawn.abs() > bound).double().mean().item() == pytest.approx(share, rel=0.1)
    assert torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1].abs() < 0.01


@pytest.mark.parametrize("apart", range(1, 8))
def test_normals_that_share_draws_are_independent(apart: int) -> None:
    drawn, eighth = normals("run", 2, count=20 * BLOCK), BLOCK // 8
    of_eighths = drawn.view(20, 8, eighth)
    one, other = of_eighths.transpose(0, 1).flatten(1), of_eighths.roll(apart, dims=1).transpose(0, 1).flatten(1)
    for values in ((one, other), (one.square(), other.square()), (one.pow(3), other), (one.abs(), other.pow(4))):
        for a, b in zip(*values, strict=True):
            assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.02  # 5.7 deviations


def test_uniforms_are_never_zero_and_fill_the_unit_interval() -> None:
    drawn = NoiseStream(key_of(SECRET, "u")).uniform(200_000)
    assert drawn.min() > 0 and drawn.max() <= 1
    counts = torch.histc(drawn, 20, 0, 1)
    assert ((counts - 10_000).abs() < 500).all()


def test_a_stream_does_not_depend_on_the_sizes_of_its_requests() -> None:
    whole, pieces = NoiseStream(key_of(SECRET, 3)), NoiseStream(key_of(SECRET, 3))
    wanted = whole.normal(2 * BLOCK)
    assert torch.cat([pieces.normal(size) for size in (1, 7, BLOCK - 8, BLOCK)]).equal(wanted)


@pytest.mark.parametrize("other", [("run", 2), ("run", "1", ""), ("run1",), ("ru", "n1")])
def test_another_context_or_secret_gives_independent_numbers(other: tuple[str | int, ...]) -> None:
    one = normals("run", 1, count=50_000)
    assert one.equal(normals("run", 1, count=50_000))
    for second in (normals(*other, count=50_000), NoiseStream(key_of(b"t" * 32, "run", 1)).normal(50_000)):
        assert torch.corrcoef(torch.stack([one, second]))[0, 1].abs() < 0.02
