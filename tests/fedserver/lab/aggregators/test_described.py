"""Embeddings of later devices from descriptions of their data: the regression by hand, and in the engine through restarts."""

import math

import numpy as np
import pytest
import torch

from attune.common.models.feature_mean import description_size, moments
from attune.common.models.registry import build
from attune.common.plan import ModelSpec
from attune.fedserver.lab.aggregators.described import BANDWIDTHS, DescriptionRegression, ToldDescriptions
from tests.fedserver.bench import Bench, plan

NAMES = ["a", "b", "c", "d", "e", "f"]


def by_hand(known: np.ndarray, output: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the output for `asked` and the bandwidth, with loops over devices in float64."""
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    deviation[deviation == 0] = 1
    known, asked = (known - mean) / deviation, (asked - mean) / deviation
    pairs = sorted(math.dist(known[i], known[j]) for i in range(len(known)) for j in range(i))
    median = pairs[(len(pairs) - 1) // 2]  # torch's: the lower one of two

    def mixed(point: np.ndarray, bandwidth: float, without: int | None) -> np.ndarray:
        total, weights = np.zeros(output.shape[1]), 0.0
        for i in range(len(known)):
            if i != without:
                weight = math.exp(-(math.dist(point, known[i]) ** 2) / (2 * (bandwidth * median) ** 2))
                total, weights = total + weight * output[i], weights + weight
        return total / weights

    def error(bandwidth: float) -> float:
        return sum(float(((mixed(known[i], bandwidth, i) - output[i]) ** 2).sum()) for i in range(len(known)))

    bandwidth = min(BANDWIDTHS, key=error)
    return mixed(asked, bandwidth, None), bandwidth


@pytest.mark.parametrize("seed", range(6))
def test_regression_and_its_bandwidth_are_those_of_loops_in_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, asked = rng.normal(size=(9, 3)), rng.normal(size=3)
    known[:, 2] = asked[2]  # a number that all devices share says nothing
    z = known[:, :2] @ rng.normal(size=(2, 4)) + 0.1 * seed * rng.normal(size=(9, 4))
    network = rng.normal(size=(4, 5))
    regression = DescriptionRegression(
        torch.from_numpy(known), torch.from_numpy(z), lambda z_NE: (z_NE @ torch.from_numpy(network)).tanh()
    )
    expected, bandwidth = by_hand(known, np.tanh(z @ network), asked)
    assert regression.bandwidth == bandwidth
    assert np.allclose(regression.output(torch.from_numpy(asked)).numpy(), expected, atol=1e-12)


def test_the_embedding_gives_the_wanted_output_where_the_mean_embedding_does_not() -> None:
    """Take a network that does not see the sign of an embedding, and two devices of each kind, with other signs."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(8, 3, dtype=torch.float64, generator=draw)
    z[1::2] = -0.9 * z[::2]
    known = z.square()
    regression = DescriptionRegression(known, z, lambda z_NE: z_NE.square())
    asked = known[2] + 0.01
    wanted = regression.output(asked)
    off = torch.dist(((z[2] + z[3]) / 2).square(), wanted)
    assert off > 0.5 and torch.dist(regression.embedding(asked).square(), wanted) < 0.1 * off


def test_descriptions_that_say_nothing_give_the_mean() -> None:
    z = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    regression = DescriptionRegression(torch.ones(7, 2).double(), z, lambda z_NE: z_NE)
    assert torch.allclose(regression.output(torch.ones(2).double()), z.mean(dim=0), atol=1e-15)
    assert torch.allclose(regression.embedding(torch.ones(2).double()), z.mean(dim=0), atol=1e-12)


def test_moments_are_mean_and_deviation_over_all_batches() -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    found = moments(torch.split(x, 16), lambda batch: batch * 2)
    assert np.allclose(found, [*(2 * x).mean(dim=0), *(2 * x).std(dim=0, correction=0)], atol=1e-6)
    model = build(plan("fedtp", "vit").model, 0)
    assert description_size(model) == 2 * model.get_submodule("head").in_features


def described(bench: Bench, name: str) -> list[float]:
    size = description_size(build(bench.plan.model, bench.plan.seed))
    return torch.randn(size, generator=torch.Generator().manual_seed(ord(name[0]))).tolist()


def played(folder, embedding: str, restarts: bool = False) -> Bench:
    """Train six devices that tell of their data, one round."""
    bench = Bench(folder, plan("fedtp", "vit", embedding_dim=3, embedding=embedding))
    for name in NAMES:
        assert bench.engine.told.take({name: described(bench, name)})
    bench.engine.serve(NAMES, NAMES)
    bench.take({name: bench.entry(name, 0.1 * k - 0.2, 3) for k, name in enumerate(NAMES)}, NAMES)
    if restarts:
        bench.restart()
    return bench


def test_a_newcomer_begins_near_the_devices_whose_data_are_like_its_own(tmp_path) -> None:
    """Tell the server the description of device b: the newcomer's weights are nearer b's than the mean's are."""
    bench = played(tmp_path, "described", restarts=True)
    assert bench.engine.told.take({"new": described(bench, "b")})
    served = bench.engine.serve(["b", "new", "silent"], ["b"])
    weights = {
        name: torch.cat([tensor.reshape(-1) for tensor in bench.read(parts["generated"]).values()])
        for name, parts in served.items()
    }
    assert torch.dist(weights["new"], weights["b"]) < 0.5 * torch.dist(weights["silent"], weights["b"])
    mean = bench.engine.cold_start(["new"])["new"]["generated"].digest
    assert served["silent"]["generated"].digest == mean, "a device that tells nothing begins with the mean"


def test_descriptions_change_nothing_for_other_embeddings_and_founders(tmp_path) -> None:
    ways = {embedding: played(tmp_path / embedding, embedding) for embedding in ("trained", "described")}
    served = {embedding: bench.engine.serve([*NAMES, "founder"], [*NAMES, "founder"]) for embedding, bench in ways.items()}
    digests = [{name: parts["generated"].digest for name, parts in one.items()} for one in served.values()]
    assert digests[0] == digests[1]
    ways["trained"].engine.told.take({"new": described(ways["trained"], "b")})
    mean = ways["trained"].engine.cold_start(["new"])["new"]["generated"].digest
    assert ways["trained"].engine.serve(["new"])["new"]["generated"].digest == mean


@pytest.mark.parametrize("wrong", [[1.0], [math.nan] * 16, [math.inf] * 16])
def test_a_description_of_another_form_is_ignored(tmp_path, wrong: list[float]) -> None:
    bench = played(tmp_path, "described")
    assert not bench.engine.told.take({"new": wrong})
    assert bench.engine.serve(["new"])["new"]["generated"].digest == bench.engine.cold_start(["new"])["new"]["generated"].digest


def test_a_newcomers_first_round_is_made_again_with_its_description(tmp_path) -> None:
    """Damage the state after a newcomer's first update: it is made again from the recipe, which has the description."""
    bench = played(tmp_path, "described", restarts=True)
    bench.engine.told.take({"new": described(bench, "c")})
    bench.engine.serve(["new"])
    bench.close(new=(0.3, 3))
    path, whole = bench.damage("generated.network.2.safetensors")
    bench.restart()
    assert path.read_bytes() == whole and bench.remade == [f"state/{path.name}"]


def test_a_recipe_has_the_same_bytes_in_every_process(tmp_path) -> None:
    """Expect the descriptions of newcomers in the order of names: that of a set differs from process to process."""
    bench = played(tmp_path, "described")
    newcomers = [f"n{number:02}" for number in range(12)]
    bench.engine.told.take({name: described(bench, "a") for name in reversed(newcomers)})
    bench.engine.serve(newcomers)
    bench.close(a=(0.3, 3))
    assert list(bench.engine._recipes[0].descriptions) == ["a", *newcomers]


@pytest.mark.parametrize("lie", [1e308, -1e101, math.inf, math.nan])
def test_numbers_of_which_no_mean_can_be_made_are_no_description(lie: float) -> None:
    model = build(ModelSpec("dnn", "tabular", (3,), 2, options={"hidden": [4]}), 0)
    told = ToldDescriptions(model)
    said = [1.0] * description_size(model)
    assert told.take({"ada": said})
    assert not told.take({"eve": [lie, *said[1:]]})
    assert told.by_client == {"ada": said}
