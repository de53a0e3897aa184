"""Isolation of a simulation from the global state of torch: neither changes the other."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attune
from attune.common.torch_state import may_draw, plain_torch, seeded

CPU = torch.device("cpu")
Digests = dict[str, str]


class Noisy(nn.Module):
    """Network that draws numbers outside of layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).relu()
        if self.training:
            hidden = hidden + 0.1 * torch.randn(hidden.shape) * torch.rand_like(hidden)
        return self.head(hidden)


def dropping(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


def noisy(spec: Any) -> nn.Module:
    return Noisy()


def train(model: Any, data: Any, context: Any) -> None:
    optimizer = torch.optim.SGD(context.parameters(), 0.1)
    for x, y in data.batches(16):
        optimizer.zero_grad()
        context.loss(x + 0.1 * torch.randn(x.shape), y).backward()
        optimizer.step()


def digests(model: Any, seed: int = 0, **more: Any) -> Digests:
    def data(at: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(at).normal(size=(40, 3)).astype("f4")
        return x, (x[:, 0] > 0).astype(int)

    shards = {f"d{at}": data(at) for at in range(2)}
    return attune.simulate(shards, "fedavg", model, rounds=1, seed=seed, progress=False, **more).digests


undisturbed = cache(digests)

CASES: dict[str, dict[str, Any]] = {
    "a layer": {"model": dropping},
    "a model's own code": {"model": noisy},
    "a loop of one's own": {"model": "dnn", "train": train},
}


@pytest.mark.parametrize("case", CASES)
def test_threads_that_draw_change_no_bits(case: str) -> None:
    given = CASES[case]
    alone = {seed: digests(seed=seed, **given) for seed in range(2)}
    beside: dict[int, Digests] = {}
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(0.0003):
            torch.rand(3)

    drawing = threading.Thread(target=draw)
    threads = [threading.Thread(target=lambda seed=seed: beside.update({seed: digests(seed=seed, **given)})) for seed in alone]
    for thread in (drawing, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    drawing.join()
    assert beside == alone


@contextmanager
def changed(set_: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


@pytest.mark.parametrize(
    ("set_", "value", "get"),
    [
        (torch.set_default_dtype, torch.float64, torch.get_default_dtype),
        (torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype),
        (torch.set_default_device, "meta", torch.get_default_device),
        (torch.set_num_threads, 3, torch.get_num_threads),
        (torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled),
        (torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision),
        (torch.set_grad_enabled, False, torch.is_grad_enabled),
        (torch.manual_seed, 77, torch.initial_seed),
    ],
)
def test_settings_of_the_program_change_no_bits_and_stay(set_: Any, value: Any, get: Any) -> None:
    plain, before = undisturbed(dropping), get()
    with changed(set_, value, before):
        now, drawn = get(), torch.random.get_rng_state()
        assert digests(dropping) == plain
        assert get() == now and torch.equal(torch.random.get_rng_state(), drawn)


def convolving(spec: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))


def convolved(**more: Any) -> Digests:
    rng = np.random.default_rng(0)
    images = {name: (rng.integers(0, 255, (40, 8, 8)).astype(np.uint8), np.arange(40) % 2) for name in "ab"}
    return attune.simulate(images, "fedavg", convolving, rounds=1, progress=False, **more).digests


convolved_alone = cache(convolved)
BACKENDS = torch.backends


@pytest.mark.parametrize(
    ("owner", "flag", "value"),
    [
        (BACKENDS, "fp32_precision", "tf32"),
        (BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
        (BACKENDS.mkldnn.conv, "fp32_precision", "bf16"),
        (BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        (BACKENDS.mkldnn, "enabled", False),
        (BACKENDS.mkldnn, "deterministic", True),
        (BACKENDS.cudnn, "benchmark", True),
        (BACKENDS.cudnn, "deterministic", True),
    ],
)
def test_flags_of_torchs_libraries_change_no_bits_and_stay(owner: Any, flag: str, value: Any) -> None:
    plain, loop = convolved_alone(), convolved_alone(train=train)
    seen: list[Any] = []

    def watched(model: torch.nn.Module, data: Any, context: Any) -> None:
        seen.append(getattr(owner, flag))
        train(model, data, context)

    with changed(lambda to: setattr(owner, flag, to), value, getattr(owner, flag)):
        assert (convolved(), convolved(train=watched)) == (plain, loop)
        assert getattr(owner, flag) == value
    assert len(set(seen)) == 1 and value not in seen


def test_small_numbers_are_kept_and_no_algorithm_is_asked_for() -> None:
    small = torch.tensor([1e-40])
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with plain_torch():
            assert small.mul(0.5).item() > 0 and not torch.are_deterministic_algorithms_enabled()
        assert small.mul(0.5).item() == 0 and torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)


def test_processes_have_the_same_bits(tmp_path: Path) -> None:
    """The model's module sets another default type where it is imported, so in the other processes."""
    (tmp_path / "wide_by_default.py").write_text(
        "import torch\n\n\ndef make(spec):\n    torch.set_default_dtype(torch.float64)\n"
        "    layers = [torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]\n"
        "    return torch.nn.Sequential(*layers).float()\n"
    )
    sys.path.insert(0, str(tmp_path))
    before = torch.get_default_dtype()
    try:
        assert digests("wide_by_default:make", executor="processes", workers=1) == digests("wide_by_default:make")
    finally:
        sys.path.remove(str(tmp_path))
    assert torch.get_default_dtype() == before


def test_a_seeded_block_draws_what_torchs_generator_would() -> None:
    """Dropout has the bits that it had when it drew from the generator of the process."""
    layers = [nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), nn.LSTM(8, 8, 2, dropout=0.3)]
    x = torch.randn(4, 5, 8)

    def drawn() -> list[torch.Tensor]:
        outputs = [layer(x) for layer in layers]
        return [*(output[0] if isinstance(output, tuple) else output for output in outputs), torch.randperm(9), torch.randn(3)]

    torch.manual_seed(5)
    expected = drawn()
    with seeded(CPU, 5, everything=True):
        assert all(torch.equal(one, other) for one, other in zip(drawn(), expected, strict=True))


def test_layers_that_draw_are_known() -> None:
    assert all(
        map(may_draw, [Noisy(), dropping(None), nn.LSTM(2, 2, 2, dropout=0.1), nn.MultiheadAttention(2, 1, dropout=0.1)])
    )
    assert not may_draw(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.LSTM(2, 2)))


def test_code_that_seeds_torch_itself_gets_its_numbers() -> None:
    torch.manual_seed(3)
    expected, before = torch.randn(4), torch.random.get_rng_state()
    with seeded(CPU, 5, everything=True):
        first = torch.randn(2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            assert torch.equal(torch.randn(4), expected)
        second = torch.randn(2)
    with seeded(CPU, 5, everything=True):
        assert torch.equal(torch.cat([torch.randn(2), torch.randn(2)]), torch.cat([first, second]))
    assert torch.equal(torch.random.get_rng_state(), before)
