"""Blends of several models, the lines that a device prints about them, and the intervals."""

import itertools
import math

import pytest
import torch

from attune.common.metrics import RIVALS
from attune.common.statistics import wilson
from attune.fedclient.console import Console, comparison_of, kept_words
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.blend import Weighing, weights_of
from attune.fedclient.work.calibration import calibrated, log_likelihood
from attune.fedclient.work.comparison import compared
from attune.fedclient.work.stacked.scoring import weigh


def test_weights_are_the_likeliest_of_all():
    """Compare with every mixture on a grid: log likelihood plus log prior, the latter of Dirichlet(2, 2, 2)."""
    generator = torch.Generator().manual_seed(4)
    p_KV = torch.rand(3, 9, generator=generator, dtype=torch.float64) ** torch.tensor([[1.0], [3.0], [0.5]])
    found = weights_of(dict(zip(("personalized", "common", "local"), p_KV, strict=True)))

    def posterior(weights):
        likelihood = sum(math.log(sum(w * float(p) for w, p in zip(weights, p_K, strict=True))) for p_K in p_KV.T)
        return likelihood + sum(map(math.log, weights))

    steps = [i / 50 for i in range(1, 50)]
    best = max(((a, b, 1 - a - b) for a, b in itertools.product(steps, steps) if a + b < 0.999), key=posterior)
    assert tuple(found.values()) == pytest.approx(best, abs=0.02)
    assert posterior(tuple(found.values())) >= posterior(best)


def test_few_samples_move_the_weights_little_and_many_decide():
    def weight(samples):
        right = torch.full((samples,), 0.9)
        return weights_of({"personalized": right, "local": right / 9})["personalized"]

    assert 0.5 < weight(2) < 0.75 < weight(10) < 0.95 < weight(200)


def test_what_others_found_weighs_as_much_as_a_sample_for_each_model():
    """Compute by hand. A sample that all models explain alike leaves the shares of the existing models as they are.

    Shares without one of the models do not count. With a sample that only the first of two models explains, w = (1 + 2 share) /
    (1 + 2).
    """
    alike = {name: torch.tensor([0.5]) for name in ("personalized", "common", "local")}
    shares = {"personalized": 0.2, "common": 0.7, "local": 0.1}
    assert weights_of(alike, shares) == pytest.approx(shares)
    two = {name: alike[name] for name in ("common", "local")}
    assert weights_of(two, shares) == pytest.approx({"common": 7 / 8, "local": 1 / 8})
    assert weights_of(alike, {"common": 0.5, "local": 0.5}) == pytest.approx(dict.fromkeys(alike, 1 / 3))
    seen = {"common": torch.tensor([1.0]), "local": torch.tensor([0.0])}
    assert weights_of(seen, {"common": 0.4, "local": 0.6})["common"] == pytest.approx((1 + 2 * 0.4) / 3, abs=1e-5)


def test_many_samples_outweigh_what_others_found():
    right = torch.full((200,), 0.9)
    assert weights_of({"personalized": right, "local": right / 9}, {"personalized": 0.02, "local": 0.98})["personalized"] > 0.9


def test_samples_that_count_as_one_are_as_one():
    """Use three equal windows of one recording, and one of another."""
    own, rival = torch.tensor([0.9, 0.2]), torch.tensor([0.3, 0.6])
    alike, counts = torch.tensor([0, 0, 0, 1]), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float64)
    once = {"personalized": own, "common": rival}
    often = {name: each[alike] for name, each in once.items()}
    assert weights_of(often, weight=counts) == pytest.approx(weights_of(once))
    assert weigh([Weighing(often, {}, counts), Weighing(often)]) == [
        pytest.approx(weights_of(once), abs=1e-6), pytest.approx(weights_of(often), abs=1e-6),
    ]  # fmt: skip
    assert log_likelihood(often["common"], counts) == pytest.approx(log_likelihood(rival))
    sure = torch.stack([own**power for power in (0.5, 1.0, 2.0)])
    assert calibrated((0.5, 1.0, 2.0), sure[:, alike], counts).sharpness == calibrated((0.5, 1.0, 2.0), sure).sharpness


def test_a_certain_error_rules_nothing_out():
    wrong_once = torch.tensor([0.0] + [1.0] * 9)
    assert weights_of({"personalized": wrong_once, "local": torch.full((10,), 0.5)})["personalized"] > 0.5


def test_the_positions_of_one_sequence_are_no_evidence_of_their_own():
    own, rival = torch.tensor([[0.9] * 4, [0.2] * 4]), torch.tensor([[0.1] * 4, [0.3] * 4])
    long = weights_of({"personalized": own, "common": rival})
    short = weights_of({"personalized": own[:, 0], "common": rival[:, 0]})
    assert long == pytest.approx(short)
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    other = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    found = compared(right, other, RIVALS["local"])
    assert (found["better_than_local"], found["worse_than_local"]) == (1, 1), "as good, better, worse"
    assert found["gain_local"] == 0 and found["error_local"] == pytest.approx(0.25 / 3**0.5) and found["p_local"] == 1


def test_wilson_by_hand():
    # z = 1.959964, p = 0.9, n = 10: (0.9 + 0.192073) / 1.384146 -+ 1.959964 / 1.384146 * sqrt(0.009 + 0.0096036)
    low, high = wilson(0.9, 10)
    assert (low, high) == pytest.approx((0.595850, 0.982124), abs=1e-5)
    assert wilson(1.0, 20)[1] == 1.0 and 0.83 < wilson(1.0, 20)[0] < 0.84
    assert wilson(0.0, 20)[0] == 0.0
    assert wilson(0.5, 0) == (0.0, 1.0)


def result(before, common, local=None, samples=100, **more):
    """Return a device's evaluation; a rival has its accuracy, and how often the own model is better or worse."""
    said = {"accuracy_before": before, "test_samples": samples}
    for name, rival in (("common", common), ("local", local)):
        if rival is not None:
            said |= dict(zip((f"accuracy_{name}", f"better_than_{name}", f"worse_than_{name}"), rival, strict=True))
    return OrderResult(order_id="evaluate-2-kiel", round=2, trained=False, samples=80, **said, **more)


@pytest.mark.parametrize(
    ("own", "common", "local", "said"),
    [
        (0.9, (0.4, 55, 5), (0.7, 22, 2), "the federation helps here"),
        (0.9, (0.4, 55, 5), (0.89, 4, 3), "the federation makes no difference that so few test samples could show"),
        (0.4, (0.9, 2, 52), None, "personalization does not help here"),
        (0.6, (0.1, 55, 5), (0.8, 2, 22), "the federation does not help here"),
        (0.90, (0.88, 7, 5), None, "personalization makes no difference that so few test samples could show"),
        # p = 0.0391 against each: enough for one comparison, not for two.
        (0.9, (0.84, 8, 1), (0.84, 8, 1), "the federation makes no difference that so few test samples could show"),
        (0.9, (0.84, 8, 1), None, "personalization helps here"),
    ],
)
def test_a_device_is_told_whether_it_helps(own, common, local, said):
    lines = comparison_of(result(own, common, local))
    assert lines[0].startswith(f"personalized  accuracy {own:.3f} (")
    assert lines[-2:] == [said, "kept: the personalized model (not chosen)"]


def test_a_model_that_learned_nothing_is_named_although_it_has_no_rival():
    """With one model and `--baseline none` nothing is compared, but a constant answer is known all the same."""
    useless = result(0.55, None, own_choice="common", accuracy_constant=0.6)
    assert comparison_of(useless) == ["no better than a constant answer, which has 0.600"]
    assert comparison_of(result(0.65, None, own_choice="common", accuracy_constant=0.6)) == []


def test_the_last_line_names_the_score_of_the_model(capsys):
    Console().kept("", result(0.8, None, own_choice="common", task="ranked"), None)
    assert capsys.readouterr().out.splitlines()[-1] == "model  AUROC 0.800  in memory"


def test_each_rival_is_compared_on_the_same_samples():
    lines = comparison_of(result(0.9, (0.8, 12, 2), samples=50))
    assert "against the common model: better on 12 of 50 test samples, worse on 2: +0.200 (+0.061 to +0.345)" in lines


def test_the_subject_is_the_federation_where_nothing_is_personal():
    lines = comparison_of(result(0.9, None, (0.4, 55, 5), own_choice="common"))
    assert lines[0].startswith("common        accuracy 0.900 (")
    assert "the federation helps here" in lines
    assert not any("personal" in line for line in lines[:-1])


def test_what_is_kept_is_shown_beside_ordinary_models_alone():
    """Compute by hand: 11 of 12 against 1 has p = 0.0063, and the blend is what counts, not the own model."""
    weights = {"personalized": 0.3, "alone": 0.7}
    more = {"accuracy_alone": 0.8, "better_than_alone": 1, "worse_than_alone": 11, "accuracy_kept": 0.9, "weights": weights}
    kept = {"kept": "alone", "kept_better_than_alone": 11, "kept_worse_than_alone": 1, "validation_samples": 9}
    lines = comparison_of(result(0.7, (0.6, 12, 2), **more, **kept))
    assert [line.split()[:3] for line in lines[:4]] == [
        ["personalized", "accuracy", "0.700"],
        ["common", "accuracy", "0.600"],
        ["alone", "accuracy", "0.800"],
        ["kept", "accuracy", "0.900"],
    ]
    ordinary = "against the best ordinary model alone (scikit-learn): better on 11 of 100 test samples, worse on 1: +0.100 ("
    assert lines[4].startswith(ordinary) and lines[5] == "the federation helps here"


def test_ordinary_models_that_are_all_that_is_kept_are_named():
    alone = result(0.7, None, kept="alone", validation_samples=9, weights={"alone": 1.0}, accuracy_alone=0.8, accuracy_kept=0.8)
    said = "the best ordinary model alone (no other adds to it on 9 samples held out of training)"
    assert (kept_words(alone), alone.accuracy, alone.choice) == (said, 0.8, "alone")
    own = result(0.7, None, (0.4, 55, 5), own_choice="local", accuracy_alone=0.8, better_than_alone=2, worse_than_alone=12)
    assert "the network does not help here" in comparison_of(own)


def test_what_is_kept_is_named_with_its_reason():
    weights = {"personalized": 0.25, "common": 0.75}
    kept = result(0.4, (0.9, 2, 52), kept="common", validation_samples=9, weights=weights, accuracy_kept=0.88)
    said = "kept: a blend of personalized 0.25, common 0.75 (weighted on 9 samples held out of training)"
    assert comparison_of(kept)[-1] == said
    assert kept.accuracy == 0.88
    few = result(0.4, (0.9, 2, 52), kept="common", weights=weights, accuracy_kept=0.88)
    said = "kept: a blend of personalized 0.25, common 0.75 (nothing could be held out to weigh them by)"
    assert comparison_of(few)[-1] == said
    assert comparison_of(result(0.5, None)) == []
