"""Newcomers to a finished federation: the tensors that each method trains; no other tensor changes."""

import msgspec
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.method import assign, configure
from attune.common.methods.registry import configured_from, get, names
from attune.common.methods.ridge import nothing_solved
from attune.common.methods.settings.objectives import OBJECTIVES
from attune.common.models.feature_mean import KNOWN
from attune.common.models.registry import build
from attune.common.models.structure import roles, tensors_of
from attune.common.plan import ModelSpec
from attune.common.seeds import derive
from attune.fedclient.work.build import objective_class, objective_for, predictor_for
from attune.fedclient.work.executor import alone
from attune.fedclient.work.objectives.base import PERSONAL, Network
from attune.fedclient.work.objectives.two_heads import SHIFT
from attune.fedclient.work.trainer import Trainer
from attune.fedserver.core.adaptation import AdaptationSpec, adaptation_of
from attune.fedserver.core.planning import resolve

IMAGES = ModelSpec("vit", "images", (4, 4, 1), 3, options={"width": 8, "heads": 2, "depth": 1, "patch": 2})
NORMED = ModelSpec("convnet-bn", "images", (16, 16, 1), 3)
HAND = {
    "fedtp": ({"generated"}, {"generated"}),
    "pfedhn": ({"generated"}, {"generated"}),
    "fedper": ({"private"}, set()),
    "fedrep": ({"private"}, set()),
    "fedbn": ({"private"}, set()),
    "vanilla-personalized": ({"private"}, set()),
    "local": ({"private"}, set()),
    "fedrod": ({"personal"}, set()),
    "pfedme": ({"personal"}, set()),
    "ditto": ({"personal"}, set()),
    "mr-mtl": ({"personal"}, set()),
    "apfl": ({"personal"}, set()),
    "fedala": ({"personal"}, set()),
    "feddbe": ({"personal"}, set()),
    "fedmcsa": ({"attended"}, {"attended"}),
    "heurfedamp": ({"attended"}, {"attended"}),
    "pfedme+mcsa": ({"attended", "personal"}, {"attended"}),
    "fedtp+mcsa": ({"generated", "attended"}, {"generated", "attended"}),
    "fedtp+fedper": ({"generated", "private"}, {"generated"}),
    "fedtp+fedrod": ({"generated", "personal"}, {"generated"}),
}


@pytest.mark.parametrize("name", sorted(HAND))
def test_a_methods_own_rule(name: str) -> None:
    found = adaptation_of(configure(get(name), {}), "personal")
    assert found is not None
    assert (set(found.trains), set(found.returns), found.common) == (*HAND[name], False)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavg+ft", "per-fedavg", "fedmcsa-mcsa", "pfedgp"])
def test_methods_with_nothing_personal_have_nothing_to_fit_but_can_go_on_training(name: str) -> None:
    assert adaptation_of(configure(get(name), {}), "personal") is None
    assert adaptation_of(configure(get(name), {}), "all") == AdaptationSpec((), ("shared",), common=True)


@pytest.mark.parametrize("name", names())
def test_embedding_and_hypernetwork_are_for_methods_that_generate(name: str) -> None:
    method = get(name)
    for adapt, common in (("embedding", False), ("hypernetwork", True)):
        if "generated" in method.kinds:
            assert adaptation_of(configure(method, {}), adapt) == AdaptationSpec(("generated",), ("generated",), common)
        else:
            with pytest.raises(SettingError, match=f'"{adapt}".*{name.replace("+", ".")}'):
                resolve({"method": {"name": name}, "round": {"adapt": adapt}})


def test_an_embedding_that_is_fixed_cannot_be_fitted() -> None:
    with pytest.raises(SettingError, match="fixed"):
        resolve({"method": {"name": "fedtp", "embedding": "fixed"}, "round": {"adapt": "embedding"}})
    assert adaptation_of(configure(get("fedtp"), {"embedding": "fixed"}), "personal") is None
    assert adaptation_of(configure(get("fedtp"), {"embedding": "fixed"}), "hypernetwork") is not None


def test_the_objectives_that_keep_tensors_are_those_with_extras() -> None:
    model = build(msgspec.structs.replace(IMAGES, feature_mean=True), 0)

    def keeps(name: str) -> bool:
        tensors = tensors_of(model) | nothing_solved(1, [1])  # a closed form's, for its objective
        return bool(objective_class(name)(OBJECTIVES[name]()).extras(tensors, Network(model)))

    assert {name: keeps(name) for name in OBJECTIVES} == {name: settings.keeps_own for name, settings in OBJECTIVES.items()}


def trained(name: str, trains: tuple[str, ...], spec: ModelSpec, rounds: int = 1) -> tuple[dict, dict, dict[str, str], Trainer]:
    """Return one device's tensors before and after training, the kind of each (extras are "personal"), and the trainer."""
    options = {"name": name, **({"inner_steps": 2, "mu": 0.01} if "pfedme" in name else {})}
    configured = configured_from(options)
    method, model = configured.method, build(configured.spec_of(spec), 0)
    kinds = dict(assign(method, model))
    trainer = Trainer(
        model,
        objective_for(configured),
        predictor_for(configured),
        TrainSettings(local_epochs=1, batch_size=4, weight_decay=0.01),
        torch.device("cpu"),
        kinds,
    )
    start = {key: torch.ones(1) if key == KNOWN else tensor.clone() for key, tensor in tensors_of(model).items()}
    received = {key: tensor for key, tensor in start.items() if kinds[key] != "private"}
    start |= trainer.extras(start)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(10, spec.shape[2], *spec.shape[:2], generator=draw)
    y = torch.randint(0, 3, (10,), generator=draw)
    after = start
    for number in range(rounds):
        after = alone(trainer.training(after, received, x, y, lambda p, n=number: derive(3, n, p), trains=trains)).tensors
    return start, after, kinds | {key: "personal" for key in start if key.startswith(PERSONAL)}, trainer


@pytest.mark.parametrize("spec", [IMAGES, NORMED], ids=["vit", "convnet-bn"])
@pytest.mark.parametrize("name", names())
def test_what_is_frozen_keeps_every_bit_and_the_rest_moves(name: str, spec: ModelSpec) -> None:
    adaptation = adaptation_of(configure(get(name), {}), "personal")
    if adaptation is None:
        pytest.skip("nothing personal")
    try:
        before, after, kinds, trainer = trained(name, adaptation.trains, spec)
    except SettingError:
        pytest.skip("this model has no such tensors")
    assert before.keys() == after.keys()
    moving = {key for key, kind in kinds.items() if kind in adaptation.trains}
    for key in before.keys() - moving:
        assert torch.equal(before[key], after[key]), key
    parameters = {key for key in moving if key.removeprefix(PERSONAL) in trainer.network.trainable or key == SHIFT}
    assert parameters and all(not torch.equal(before[key], after[key]) for key in parameters)


def test_running_statistics_of_the_frozen_part_stay_and_are_what_is_normalised_with() -> None:
    """Use FedPer on a model with batch normalisation: the head is fitted to the features that it will predict from."""
    before, after, _, trainer = trained("fedper", ("private",), NORMED)
    statistics = [key for key in before if "running" in key]
    assert statistics and all(torch.equal(before[key], after[key]) for key in statistics)
    norms = {key.rpartition(".")[0] for key in statistics}
    modes = {path: module.training for path, module in trainer.network.model.named_modules()}
    assert all(not modes[path] for path in norms) and modes[""]


def test_running_statistics_move_where_they_are_the_devices_own() -> None:
    before, after, kinds, _ = trained("fedbn", ("private",), NORMED)
    own = [key for key in before if "running" in key]
    assert own and all(kinds[key] == "private" and not torch.equal(before[key], after[key]) for key in own)
    before, after, _, _ = trained("ditto", ("personal",), NORMED)
    for key in own:
        assert torch.equal(before[key], after[key]) and not torch.equal(before[PERSONAL + key], after[PERSONAL + key])


def test_pfedmes_own_model_goes_on_from_itself_while_the_common_one_is_frozen() -> None:
    """Use a weak pull: a second round moves it further from its start, which it would not from the common model."""
    _, once, _, _ = trained("pfedme", ("personal",), IMAGES)
    start, twice, _, _ = trained("pfedme", ("personal",), IMAGES, rounds=2)

    def distance(tensors: dict[str, torch.Tensor]) -> float:
        return sum(float((tensors[PERSONAL + key] - start[key]).square().sum()) for key in start if PERSONAL + key in start)

    assert distance(twice) > 1.2 * distance(once)


def test_a_head_alone_is_trained_as_by_hand() -> None:
    """Use FedPer's newcomer: two steps on the whole batch are softmax regression on constant features."""
    configured = configure(get("fedper"), {})
    model = build(ModelSpec("dnn", "tabular", (3,), 2, options={"hidden": [4]}), 0).double()
    kinds = dict(assign(configured.method, model))
    settings = TrainSettings(lr=0.5, momentum=0.0, batch_size=100, local_epochs=2, clip_norm=0.0)
    trainer = Trainer(model, objective_for(configured), predictor_for(configured), settings, torch.device("cpu"), kinds)
    start = {key: tensor.clone() for key, tensor in tensors_of(model).items()}
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 3, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1])
    after = alone(trainer.training(start, start, x, y, lambda purpose: derive(0, purpose), trains=("private",))).tensors
    head = next(key.rpartition(".")[0] for key, of in roles(model).items() if "head" in of)
    with torch.no_grad():
        _, features_BD = trainer.network.with_features(start, x)
    W_CD, b_C = start[f"{head}.weight"], start[f"{head}.bias"]
    for _ in range(2):
        error_BC = ((features_BD @ W_CD.T + b_C).softmax(dim=1) - torch.nn.functional.one_hot(y, 2)) / 6
        W_CD, b_C = W_CD - 0.5 * error_BC.T @ features_BD, b_C - 0.5 * error_BC.sum(dim=0)
    assert torch.allclose(after[f"{head}.weight"], W_CD, rtol=0, atol=1e-12)
    assert torch.allclose(after[f"{head}.bias"], b_C, rtol=0, atol=1e-12)
