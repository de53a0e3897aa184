"""Pictures of finished models on a shard's test part, and attention rollout by hand and against an independent oracle."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attune.common.config import TrainSettings
from attune.common.errors import NoModel, SettingError, ShapeMismatch, ShardError
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Scale
from attune.features.finished import shown
from attune.features.finished.drawings import attentions, effective, over_patches, rollout
from attune.features.finished.model_plots import PICTURES, plot, titles
from attune.fedclient.cli import main
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import artifact
from tests.pictures import Page, check_pictures

TINY = {"width": 8, "heads": 2, "depth": 2, "patch": 2}
ALL = {"rollout", "confusion", "classes"}


def model(folder, method="fedavg", name="a", kind="vit", shape=(4, 6, 1), seed=0, kept="personalized", classes=(5, 7, 9)):
    """Write a finished model with weights drawn from the seed."""
    data = {3: "images", 2: "series", 1: "tabular"}[len(shape)]
    spec = default_spec(data, shape, len(classes), 0, kind, TINY if kind == "vit" else {})
    info = artifact.ModelInfo(name, "federation", method, {}, spec, list(classes), TrainSettings(), kept=kept)
    artifact.save(folder / "model", info, {kept: tensors_of(build(spec, seed))})
    return folder


def shard(folder, shape=(4, 6, 1), samples=10, labels=(5, 9)):
    draw = np.random.default_rng(0)
    folder.mkdir()
    y = np.array(labels)[np.arange(samples) % len(labels)]
    for part in ("train", "test"):
        np.savez(folder / f"{part}.npz", x=draw.random((samples, *shape), dtype=np.float32), y=y)
    return folder


def numbers_of(folder, path):
    """Return true and predicted labels, computed in another way than plotting does."""
    loaded = artifact.Model.load(folder / "model")
    with np.load(path / "test.npz") as test:
        return test["y"].tolist(), loaded.predict(test["x"], "test")


def test_all_pictures_of_one_model(tmp_path):
    home, data = model(tmp_path / "home"), shard(tmp_path / "shard")
    lines = plot([home], data, tmp_path / "out", 4, ())
    page = check_pictures(tmp_path / "out", ALL)
    assert len(lines) == 4
    true, found = numbers_of(home, data)
    pairs = {(t, f): sum((t, f) == pair for pair in zip(true, found, strict=True)) for t in (5, 9) for f in (5, 7, 9)}
    counted = {(int(row[1]), int(row[2])): int(row[3]) for row in page.rows if row[0] == "fedavg" and len(row) == 4}
    assert counted == {pair: count for pair, count in pairs.items() if count}
    by_class = {row[1]: (int(row[2]), int(row[3])) for row in page.rows if row[0] == "fedavg" and len(row) == 6}
    assert by_class == {"5": (5, pairs[5, 5]), "9": (5, pairs[9, 9])}


def test_the_maps_numbers_are_the_rollouts(tmp_path):
    home, data = model(tmp_path / "home"), shard(tmp_path / "shard")
    plot([home], data, tmp_path / "out", 3, ("rollout",))
    page = check_pictures(tmp_path / "out", {"rollout"})
    assert [row[:2] for row in page.rows] == [["test sample", "label"], ["0", "5"], ["2", "5"], ["1", "9"]]
    _, found = numbers_of(home, data)
    network = build(artifact.Model.load(home / "model").info.model, 0).eval()
    with np.load(data / "test.npz") as test, torch.no_grad():
        x = torch.from_numpy(test["x"]).movedim(-1, 1)
        maps = rollout(attentions(network, lambda: network(x)))[:, 0, 1:]
    for row in page.rows[1:]:
        share = (maps[int(row[0])] / maps[int(row[0])].sum()).numpy()
        assert row[2] == str(found[int(row[0])])
        assert float(row[3]) == pytest.approx(np.exp(-(share * np.log(share)).sum()), abs=6e-5)


def test_what_a_model_is_called():
    info = [
        SimpleNamespace(title=title, name=name)
        for title, name in (("x, local model", "a"), ("x, local model", "b"), ("y", "a"))
    ]
    assert titles(info) == ["x, local model (a)", "x, local model (b)", "y"]


def test_a_model_is_called_by_its_method_if_it_is_the_methods_own():
    def title(**changed):
        spec = default_spec("tabular", (4,), 2, 0, "mlr", {})
        return artifact.ModelInfo("a", "federation", "x", {}, spec, [0, 1], TrainSettings(), **changed).title

    assert title() == title(kept="common", own_choice="common") == "x"
    assert title(kept="common") == "x, common model"
    assert title(kept="common", weights={"personalized": 0.4, "common": 0.6}) == "x, blend"


def test_a_model_without_attention_has_the_other_pictures(tmp_path):
    home, data = model(tmp_path / "home", kind="mlr"), shard(tmp_path / "shard")
    lines = plot([home], data, tmp_path / "out", 2, ())
    check_pictures(tmp_path / "out", {"confusion", "classes"})
    assert lines[-1].startswith("no picture 'rollout': the model")
    with pytest.raises(SettingError, match="has no attention"):
        plot([home], data, tmp_path / "again", 2, ("rollout",))


def test_what_does_not_fit_says_so(tmp_path):
    home, data = model(tmp_path / "home"), shard(tmp_path / "shard")
    with pytest.raises(NoModel, match="no finished model"):
        plot([tmp_path], data, tmp_path / "out", 2, ())
    with pytest.raises(ShapeMismatch, match="shard"):
        plot([home], shard(tmp_path / "other", shape=(6, 6, 1)), tmp_path / "out", 2, ())
    with pytest.raises(SettingError, match="different classes"):
        plot([home, model(tmp_path / "b", classes=(5, 8, 9))], data, tmp_path / "out", 2, ())
    np.savez(data / "test.npz", x=np.empty((0, 4, 6, 1), dtype=np.float32), y=np.empty(0, dtype=np.int64))
    with pytest.raises(ShardError, match="no test samples"):
        plot([home], data, tmp_path / "out", 2, ())


def test_patches_in_effect_by_hand():
    assert effective(np.array([[0.2, 0.2], [0.2, 0.2]])) == pytest.approx(4.0)
    assert effective(np.array([[0.0, 0.7], [0.0, 0.0]])) == pytest.approx(1.0)


def test_the_command(tmp_path):
    option = next(parameter for parameter in shown.plot.params if parameter.name == "pictures")
    assert list(option.type.choices) == list(PICTURES)
    home, data = model(tmp_path / "home"), shard(tmp_path / "shard")
    words = ["plot", "--data", str(data), "--out", str(tmp_path / "out"), "--picture", "classes"]
    done = CliRunner().invoke(main, [*words, "--home", str(home)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, str(tmp_path / "out" / "index.html"))
    assert Page(tmp_path / "out" / "index.html").row("fedavg")[1] == "5"
    assert CliRunner().invoke(main, [*words, "--home", str(home), "--model", str(home)]).exit_code == 2
    (home / "model" / "model.json").write_bytes(msgspec.json.encode({}))
    assert CliRunner().invoke(main, [*words, "--home", str(home)]).exit_code == NoModel.exit_code


def of_task(folder, task, names, seed=0, targets=None):
    """Write a finished linear model for another task, with weights drawn from the seed."""
    spec = default_spec("tabular", (4,), len(names), 0, "mlr", {})
    info = artifact.ModelInfo(
        "a",
        "federation",
        "fedavg",
        {},
        spec,
        list(names),
        TrainSettings(),
        kept="common",
        own_choice="common",
        task=task,
        targets=targets,
    )
    artifact.save(folder / "model", info, {"common": tensors_of(build(spec, seed))})
    return folder


def shard_of_task(folder, task, names, y):
    folder.mkdir()
    x = np.random.default_rng(1).normal(size=(len(y), 4))
    for part in ("train", "test"):
        np.savez(folder / f"{part}.npz", x=x, y=y)
    (folder / "meta.json").write_bytes(msgspec.json.encode({"task": task, "classes": list(names), "standardise": False}))
    return folder


def test_numbers_are_drawn_in_their_unit_with_the_errors_in_the_page(tmp_path):
    """Draw two models and two targets; R2 is that of `fedclient evaluate`, and the errors are computed from `predict`."""
    y = np.random.default_rng(2).normal(size=(30, 2)) * [40.0, 0.1] + [300.0, -1.0]
    scale = Scale([300.0, -1.0], [40.0, 0.1])
    homes = [of_task(tmp_path / str(seed), "regression", ("dose", "level"), seed, scale) for seed in (0, 1)]
    data = shard_of_task(tmp_path / "site", "regression", ("dose", "level"), y)
    lines = plot(homes, data, tmp_path / "out", 2, ())
    page = check_pictures(tmp_path / "out", {"predicted"})
    assert len(lines) == 2
    rows = [row for row in page.rows if row[0].startswith("fedavg")]
    assert [row[:3] for row in rows] == [
        [name, target, "30"] for target in ("dose", "level") for name in ("fedavg (a) 1", "fedavg (a) 2")
    ]
    for number, home in enumerate(homes):
        loaded = artifact.Model.load(home / "model")
        with np.load(data / "test.npz") as test:
            error = np.array(loaded.predict(test["x"])) - test["y"]
        mine = [row for row in rows if row[0] == f"fedavg (a) {number + 1}"]
        r2, _ = loaded.evaluate(load_shard(data))
        assert np.mean([float(row[3]) for row in mine]) == pytest.approx(r2, abs=2e-4)
        for k, row in enumerate(mine):
            by_hand = [np.abs(error[:, k]).mean(), np.sqrt((error[:, k] ** 2).mean()), error[:, k].mean()]
            assert [float(cell) for cell in row[4:]] == pytest.approx(by_hand, abs=6e-5)


def test_several_labels_have_an_accuracy_each(tmp_path):
    y = (np.random.default_rng(3).random((20, 3)) < 0.4).astype(np.int64)
    home, data = of_task(tmp_path / "home", "multilabel", "abc"), shard_of_task(tmp_path / "site", "multilabel", "abc", y)
    plot([home], data, tmp_path / "out", 2, ())
    page = check_pictures(tmp_path / "out", {"labels"})
    with np.load(data / "test.npz") as test:
        right = (np.array(artifact.Model.load(home / "model").predict(test["x"])) == test["y"]).sum(axis=0)
    assert [row[1:4] for row in page.rows if row[0] == "fedavg"] == [
        [name, "20", str(count)] for name, count in zip("abc", right, strict=True)
    ]
    with pytest.raises(SettingError, match="'predicted' is of models for regression, and this one is for multilabel"):
        plot([home], data, tmp_path / "again", 2, ("predicted",))


def vit(shape=(4, 6, 1), **options):
    options = {"width": 8, "heads": 2, "depth": 2, "patch": 2, **options}
    return build(default_spec("images", shape, 3, 0, "vit", options), seed=1).eval()


def test_two_layers_and_two_heads_by_hand():
    """Compute T = 2, so that each layer has 4 weights, of which int(0.3 * 4) = 1 is dropped.

    Layer 1: maximum of [[.9 .1] [.4 .6]] and [[.5 .5] [.2 .8]] = [[.9 .5] [.4 .8]]; .4 goes: [[.9 .5] [0 .8]]; with the
    identity [[1.9 .5] [0 1.8]]; normalised [[1.9/2.4 .5/2.4] [0 1]].
    Layer 2: maximum of [[.3 .7] [.5 .5]] and [[.6 .4] [.5 .5]] = [[.6 .7] [.5 .5]]; the first .5 goes: [[.6 .7] [0 .5]];
    with the identity [[1.6 .7] [0 1.5]]; normalised [[1.6/2.3 .7/2.3] [0 1]].
    """
    one = [[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]]
    two = [[[0.3, 0.7], [0.5, 0.5]], [[0.6, 0.4], [0.5, 0.5]]]
    found = rollout([torch.tensor([one], dtype=torch.float64), torch.tensor([two], dtype=torch.float64)])
    a, b, c, d = 1.9 / 2.4, 0.5 / 2.4, 1.6 / 2.3, 0.7 / 2.3
    assert np.allclose(found, [[[c * a, c * b + d], [0.0, 1.0]]], rtol=0, atol=1e-15)


def oracle(layers, discarded):
    """Compute in plain loops: fuse, drop, add the identity, normalise, multiply from the left."""
    result = []
    for image in range(len(layers[0])):
        steps = layers[0].shape[-1]
        rolled = np.eye(steps)
        for weights in layers:
            fused = np.array([[max(head[i, j] for head in weights[image]) for j in range(steps)] for i in range(steps)])
            ranked = sorted((fused[i, j], i, j) for i in range(steps) for j in range(steps))
            for _, i, j in ranked[: int(discarded * steps**2)]:
                fused[i, j] = 0.0
            for i in range(steps):
                fused[i, i] += 1.0
                fused[i] /= sum(fused[i])
            rolled = fused @ rolled
        result.append(rolled)
    return np.array(result)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    images=st.integers(1, 3),
    heads=st.integers(1, 3),
    steps=st.integers(1, 6),
    depth=st.integers(1, 4),
    discarded=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_against_the_oracle(images, heads, steps, depth, discarded, seed):
    draw = np.random.default_rng(seed)
    layers = [draw.dirichlet(np.ones(steps), size=(images, heads, steps)) for _ in range(depth)]
    found = rollout([torch.from_numpy(layer) for layer in layers], discarded)
    assert np.allclose(found, oracle(layers, discarded), rtol=0, atol=1e-12)
    assert np.allclose(found.sum(dim=-1), 1.0)


def test_the_weights_are_those_of_the_forward_pass():
    """Compute softmax(q k^T / sqrt(E)) of each head by hand, block by block, from the projections of each block's input."""
    model = vit()
    x = torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    entered = []
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda module, inputs, out: entered.append(out.detach()))
    with torch.no_grad():
        found = attentions(model, lambda: model(x))
    assert [tuple(weights.shape) for weights in found] == [(3, 2, 7, 7)] * 2
    for block, h_BTD, weights in zip(model.blocks, entered, found, strict=True):
        w_q, w_k, _ = block.attention.to_qkv.weight.detach().double().chunk(3)
        for head in range(2):
            rows = slice(4 * head, 4 * head + 4)
            scores = (h_BTD.double() @ w_q[rows].T) @ (h_BTD.double() @ w_k[rows].T).transpose(1, 2) / 2.0
            assert torch.allclose(weights[:, head].double(), scores.softmax(dim=-1), atol=1e-6)


def test_a_map_has_a_row_for_each_row_of_patches_and_leaves_the_model_as_it_was():
    model = vit(shape=(5, 6, 1))
    x = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        map_Bhw = over_patches(model, 5, 6, lambda: model(x))
        rolled = rollout(attentions(model, lambda: model(x)))
    assert map_Bhw.shape == (2, 3, 3), "5 rows of pixels are padded to three patches"
    assert torch.equal(map_Bhw[1].flatten(), rolled[1, 0, 1:])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_attention_says_so():
    model = build(default_spec("images", (8, 8, 1), 3, 0, "mlr", {}), seed=1)
    with pytest.raises(SettingError, match="has no attention: a rollout needs a Transformer"):
        attentions(model, lambda: None)


def test_attention_without_a_class_token_or_of_another_kind_says_so():
    series = build(default_spec("series", (4, 2), 3, 0, "transformer", {"width": 8, "heads": 2}), seed=1)
    with pytest.raises(SettingError, match="no class token"):
        over_patches(series, 4, 4, lambda: series(torch.zeros(1, 4, 2)))
    foreign = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2, enable_nested_tensor=False)
    with pytest.raises(SettingError, match="attention of an unknown kind"):
        attentions(foreign, lambda: None)
