"""Parts, options and names of methods: valid ones, refused ones, and the messages."""

import msgspec
import pytest
from torch import nn

from attune.common.errors import SettingError
from attune.common.methods.method import Method, assign, configure
from attune.common.methods.registry import configured_in, get, method_from_options, names
from attune.common.methods.settings.aggregators import AttentionSettings, HypernetworkSettings, MeanSettings
from attune.common.methods.settings.objectives import ProximalSettings
from attune.common.plan import ModelSpec, Plan, TrainSettings


def test_fedbn_keeps_running_statistics_too():
    batch_norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    kinds = assign(get("fedbn"), batch_norm)
    assert kinds["1.running_mean"] == kinds["1.num_batches_tracked"] == "private" and kinds["3.weight"] == "shared"


def test_a_selector_that_matches_nothing_is_named_with_method_and_model(models):
    with pytest.raises(SettingError, match=r"fedtp.*'@qkv'") as caught:
        assign(get("fedtp"), models["dnn"]())
    assert type(models["dnn"]()).__name__ in str(caught.value)


def test_the_first_selector_that_matches_wins_and_globs_reach_names():
    method = Method("mine", "none", (("0.*", "private"), ("*.bias", "attended"), ("*", "shared")))
    kinds = assign(method, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    assert kinds == {"0.weight": "private", "0.bias": "private", "1.weight": "shared", "1.bias": "attended"}


def test_a_tensor_that_no_selector_matches_is_named():
    with pytest.raises(SettingError, match=r"1\.weight"):
        assign(Method("mine", "none", (("0.*", "private"),)), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))


def test_integers_cannot_be_generated():
    with pytest.raises(SettingError, match="num_batches_tracked"):
        assign(Method("mine", "none", (("*", "generated"),)), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def test_options_reach_the_component_that_declares_them():
    options = configure(get("fedtp"), {"name": "fedtp", "embedding_dim": 16, "server_optimiser": "sgd", "uniform": True})
    assert options.aggregators["generated"] == HypernetworkSettings(embedding_dim=16, server_optimiser="sgd")
    assert options.aggregators["shared"] == MeanSettings(uniform=True)


def test_the_published_settings_of_fedmcsa_are_the_papers():
    method = get("fedmcsa")
    for model, decay in (("dnn", {}), ("mlr", {"weight_decay": 1e-3})):
        given = method.preset("published", model)
        train = {"lr": 0.02, "momentum": 0.0, "batch_size": 20, "local_steps": 20, "clip_norm": 0.0, "validation": 0.0} | decay
        assert (given["train"], given["round"]) == (train, {"train": "all", "take_back": 0.0})
        options = configure(method, given["method"])
        assert options.aggregators == {"attended": AttentionSettings(bound_change=0.0, bound_samples=0.0, sigma=50.0)}
        assert options.objective == ProximalSettings(mu=5.0)
    assert method.evaluate == "trained"
    assert configure(method, {"sigma": 1000, "mu": 0}).objective == ProximalSettings(mu=0.0)


@pytest.mark.parametrize("name", [name for name in names() if get(name).published])
def test_published_settings_have_no_part_that_no_paper_has(name):
    """No paper bounds updates, holds training samples out to weigh models, or takes rounds back."""
    given = get(name).preset("published", None)
    assert given["train"]["validation"] == 0 and given["round"]["take_back"] == 0
    options = configure(get(name), given["method"])
    for aggregator in options.aggregators.values():
        assert getattr(aggregator, "bound_change", 0) == getattr(aggregator, "bound_samples", 0) == 0


def test_the_published_settings_of_fedtp_are_those_of_its_scripts():
    given = get("fedtp").preset("published", "vit")
    steps = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "local_epochs": 5, "weight_decay": 1e-5, "clip_norm": 0.0}
    assert given["train"] == steps | {"validation": 0.0}
    assert given["model"] == {"preset": "paper"} and given["method"]["server_optimiser"] == "sgd"
    assert "model" not in get("fedtp").preset("published", "transformer")
    for name in ("fedtp-mlp", "fedtp-norm", "fedtp-encoder", "fedtp+fedper", "fedtp+fedrod", "fedtp+knn"):
        assert get(name).preset("published", "vit") == given


FAMILY = ["fedmcsa", "fedmcsa-mcsa", "fedavg+mcsa", "fedamp", "heurfedamp", "pfedme+mcsa"]


@pytest.mark.parametrize("name", FAMILY)
def test_the_fedmcsa_family_shares_published_training_and_no_training_defaults(name):
    method = get(name)
    assert method.preset("everyday", "mlr") == dict(method.defaults)
    assert not method.defaults.get("train", {}).keys() & {"lr", "local_steps", "batch_size"}, "these are everybody's"
    assert method.preset("published", "mlr")["train"] == get("fedmcsa").preset("published", "mlr")["train"]
    mu = {found.objective.mu for found in (configure(method, method.published["method"]),) if hasattr(found.objective, "mu")}
    assert mu <= {5.0, 15.0}


def test_a_method_without_published_settings_says_so():
    with pytest.raises(SettingError, match="method fedavg has no settings as published"):
        get("fedavg").preset("published", None)
    with pytest.raises(SettingError, match=r"unknown preset 'publishd' \(did you mean 'published'\?\)"):
        get("fedmcsa").preset("publishd", None)


def test_the_ablation_without_attention_is_uniform():
    assert configure(get("fedmcsa-mcsa"), {}).aggregators["shared"] == MeanSettings(uniform=True)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedmcsa", {"sigm": 3}, r"method\.sigm.*'sigma'"),
        ("fedavg", {"sigma": 3}, r"fedavg has no setting method\.sigma"),
        ("local", {"sigma": 3}, "it has none"),
        ("fedmcsa", {"sigma": -1}, "sigma"),
        ("fedmcsa", {"sigma": float("inf")}, "sigma"),
        ("fedmcsa", {"components": "block"}, "components"),
        ("fedtp", {"server_optimiser": "lion"}, "server_optimiser"),
        ("fedtp", {"layers": 0}, "layers"),
        ("fedprox", {"mu": "much"}, "mu"),
    ],
)
def test_wrong_options_are_named(method, options, words):
    with pytest.raises(SettingError, match=words):
        configure(get(method), options)


def test_unknown_methods_suggest_the_nearest():
    with pytest.raises(SettingError, match="'fedtp'"):
        get("fedpt")
    assert get("fedtp") is method_from_options({}) and "fedmcsa" in names()


def test_every_built_in_method_has_a_citation_valid_defaults_and_a_name_of_its_own():
    for name in names():
        method = get(name)
        assert method.name == name and method.citation
        configure(method, {})
        TrainSettings(**method.defaults.get("train", {}))
        assert set(method.defaults) | set(method.published) <= {"method", "train", "round", "model"}
        TrainSettings(**method.published.get("train", {}))


def test_a_users_own_row():
    options = {
        "name": "custom",
        "parts": {"@qkv": "generated", "*": "attended"},
        "objective": "proximal",
        "evaluate": "trained",
        "sigma": 7,
        "mu": 0.5,
    }
    method = method_from_options(options)
    assert method.parts == (("@qkv", "generated"), ("*", "attended")) and method.evaluate == "trained"
    typed = configure(method, options)
    assert typed.aggregators["attended"] == AttentionSettings(sigma=7.0) and typed.objective == ProximalSettings(mu=0.5)


def test_a_users_row_says_the_same_as_the_built_in_one(models):
    mine = method_from_options({"name": "custom", "parts": {"@qkv": "generated", "*": "shared"}})
    assert assign(mine, models["vit"]()) == assign(get("fedtp"), models["vit"]())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "parts"),
        ({"parts": {}}, "empty"),
        ({"parts": {"*": "shard"}}, "parts"),
        ({"parts": {"*": "shared"}, "objective": "proximale"}, "'proximal'"),
        ({"parts": {"*": "shared"}, "predictor": "modle"}, "'model'"),
        ({"parts": {"*": "shared"}, "aggregators": {"shared": "meen"}}, "'mean'"),
        ({"parts": {"*": "private"}, "aggregators": {"private": "mean"}}, "never leaves"),
        ({"parts": {"*": "shared"}, "aggregators": {"solved": "mean"}}, "solved"),
    ],
)
def test_wrong_rows_are_refused(row, words):
    with pytest.raises(SettingError, match=words):
        method_from_options({"name": "custom", **row})


def test_a_plan_gives_its_method_back():
    spec = ModelSpec("dnn", "tabular", (6,), 3)
    plan = Plan("id", 0, spec, [0, 1, 2], "custom", {"parts": {"*": "shared"}}, TrainSettings())
    assert configured_in(plan).method.parts == (("*", "shared"),)


def test_a_plan_keeps_its_typed_settings_beside_its_bytes() -> None:
    plan = Plan("f", 0, ModelSpec("dnn", "tabular", (3,), 2), [0, 1], "fedprox", {"mu": 0.5}, TrainSettings())
    before = msgspec.json.encode(plan)
    configured = configured_in(plan)
    assert configured.method is get("fedprox") and configured.objective == ProximalSettings(mu=0.5)
    assert configured_in(plan) is configured, "parsed once"
    assert msgspec.json.encode(plan) == before and plan == msgspec.json.decode(before, type=Plan)
    assert configured_in(msgspec.structs.replace(plan, method_options={})).objective == ProximalSettings(), "not another plan's"
