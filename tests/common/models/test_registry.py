"""Models by name: their data, options, determinism, and users' own models."""

import socket
import sys
import types

import msgspec
import pytest
import torch
from torch import nn

from attune.common.errors import SettingError
from attune.common.models import registry
from attune.common.models.structure import roles, tensors_of
from attune.common.plan import ModelSpec

CASES = [
    ("vit", "images", (8, 8, 1), 0),
    ("vit", "images", (1, 1, 2), 0),
    ("transformer", "tokens", (6,), 20),
    ("transformer", "series", (7, 3), 0),
    ("transformer", "tabular", (5,), 0),
    ("convnet", "images", (1, 1, 2), 0),
    ("convnet", "images", (17, 30, 3), 0),
    ("convnet", "series", (5, 2), 0),
    ("convnet-bn", "series", (16, 1), 0),
    ("convnet-bn", "images", (16, 5, 2), 0),
    ("lstm", "tokens", (6,), 20),
    ("lstm", "series", (7, 3), 0),
    ("dnn", "tabular", (5,), 0),
    ("dnn", "images", (4, 4, 2), 0),
    ("mlr", "series", (7, 3), 0),
]
SMALL = {"lstm": {"width": 16}}  # the loop below has a learning rate for small networks


def batch(kind: str, shape: tuple[int, ...], n: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "tokens":
        return torch.randint(0, 20, (n, *shape), generator=generator)
    if kind == "images":
        height, width, channels = shape
        shape = (channels, height, width)
    return torch.rand((n, *shape), generator=generator)


@pytest.mark.parametrize(("name", "kind", "shape", "vocabulary"), CASES)
def test_every_model_computes_and_learns(name, kind, shape, vocabulary):
    spec = registry.default_spec(kind, shape, 3, vocabulary, name, SMALL.get(name, {}))
    model = registry.build(spec, 0)
    x, y = batch(kind, shape), torch.tensor([0, 1, 2, 0, 1, 2])
    logits = model(x)
    assert logits.shape == (6, 3) and logits.dtype == torch.float32
    nn.functional.cross_entropy(logits, y).backward()
    plain = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in plain.values())
    received = {key: tensor.clone() for key, tensor in tensors_of(model).items()}
    pull = sum((parameter - received[key] - 1).square().sum() for key, parameter in model.named_parameters())
    (0.5 * pull).backward()  # the gradient of half a squared distance of 1 in every coordinate is -1
    assert all(torch.allclose(parameter.grad, plain[key] - 1, atol=1e-5) for key, parameter in model.named_parameters())
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
    assert loss.item() < 1.0  # ln 3 = 1.10 is chance


@pytest.mark.parametrize(("name", "kind", "shape", "vocabulary"), CASES)
def test_weights_depend_on_the_seed_alone(name, kind, shape, vocabulary):
    spec = registry.default_spec(kind, shape, 3, vocabulary, name, {})
    before = torch.get_rng_state()
    one = tensors_of(registry.build(spec, 5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = tensors_of(registry.build(spec, 5)), tensors_of(registry.build(spec, 6))
    assert all(torch.equal(one[key], again[key]) for key in one) and list(one) == list(again)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("kind", "needed", "chosen"),
    [
        ("images", {"head"}, "convnet"),
        ("images", {"norm"}, "convnet-bn"),
        ("images", {"norm", "encoder"}, "vit"),
        ("images", {"qkv"}, "vit"),
        ("pixels", {"head"}, "unet"),
        ("pixels", {"norm"}, "unet"),
        ("series", {"head"}, "dnn"),
        ("tabular", {"head"}, "dnn"),
        ("tabular", {"norm"}, "transformer"),
        ("series", {"norm", "qkv"}, "transformer"),
        ("tokens", {"head"}, "transformer"),
    ],
)
def test_the_usual_model_that_has_the_roles(kind, needed, chosen):
    pixels = kind == "pixels"
    assert registry.model_for("images" if pixels else kind, frozenset(needed), per_position=pixels) == chosen


@pytest.mark.parametrize(
    ("kind", "options", "chosen"),
    [
        ("images", {"channels"}, "convnet"),
        ("images", {"width"}, "vit"),
        ("series", {"width", "heads"}, "transformer"),
        ("series", {"embedding"}, "lstm"),
        ("tabular", {"depth"}, "transformer"),
        ("images", {"widht"}, "convnet"),  # the error names the option later
    ],
)
def test_the_usual_model_that_has_the_options(kind, options, chosen):
    assert registry.model_for(kind, frozenset(), options) == chosen


def test_no_model_has_such_a_role():
    with pytest.raises(SettingError, match="of the roles bones"):
        registry.model_for("images", frozenset({"bones", "head"}))


def test_the_spec_says_everything_and_survives_json():
    spec = registry.default_spec("images", (28, 28, 1), 10, 0, None, {"depth": 1})
    assert spec.name == "vit" and spec.options["patch"] == 7 and spec.options["depth"] == 1 and spec.options["dropout"] == 0.0
    saved = msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec)
    assert saved == spec
    assert registry.default_spec("images", (28, 28, 1), 10, 0, "vit", spec.options) == spec
    one, two = tensors_of(registry.build(spec, 0)), tensors_of(registry.build(saved, 0))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("shape", "patch"), [((8, 8, 1), 2), ((28, 28, 1), 7), ((32, 32, 3), 8), ((30, 30, 3), 8), ((1, 1, 1), 1), ((4, 64, 1), 4)]
)
def test_patches_are_about_sixteen(shape, patch):
    spec = registry.default_spec("images", shape, 2, 0, "vit", {})
    assert spec.options["patch"] == patch
    model = registry.build(spec, 0)
    assert model.position.shape[1] - 1 <= 16 and model(batch("images", shape)).shape == (6, 2)


def test_patches_by_hand():
    spec = registry.default_spec("images", (3, 3, 1), 2, 0, None, {"patch": 2})
    x = torch.arange(1.0, 10).reshape(1, 1, 3, 3)
    assert registry.build(spec, 0).patches(x)[0].tolist() == [[1, 2, 4, 5], [3, 0, 6, 0], [7, 8, 0, 0], [9, 0, 0, 0]]


def test_the_papers_vit_has_59_percent_in_qkv():
    spec = registry.default_spec("images", (32, 32, 3), 10, 0, "vit", {"preset": "paper"})
    model = registry.build(spec, 0)
    qkv = sum(tensors_of(model)[name].numel() for name, what in roles(model).items() if "qkv" in what)
    assert qkv == 8 * 3 * 512 * 128  # 1.57 M: errata E5
    rest = 8 * (512 * 128 + 128 + 2 * 128 * 256 + 256 + 128 + 4 * 128) + 48 * 128 + 128 + 65 * 128 + 128 + 2 * 128 + 1290
    assert sum(map(torch.numel, tensors_of(model).values())) == qkv + rest and round(100 * qkv / (qkv + rest)) == 59
    assert model.dropout.p == 0.1
    assert registry.default_spec("images", (32, 32, 3), 10, 0, None, {"preset": "paper", "depth": 2}).options["depth"] == 2


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (1, 1, 2), (9, 14, 3)])
def test_the_unet_scores_and_learns_every_pixel(shape, norm):
    spec = registry.default_spec("images", shape, 3, 0, None, {"depth": 2, "norm": norm}, per_position=True)
    model = registry.build(spec, 0)
    x = batch("images", shape)
    y = (x.mean(dim=1) * 3).long().clamp(max=2)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimiser.zero_grad()
        scores = model(x)
        assert scores.shape == (6, *shape[:2], 3) and scores.dtype == torch.float32
        loss = nn.functional.cross_entropy(scores.flatten(end_dim=-2), y.flatten())
        loss.backward()
        optimiser.step()
    assert loss.item() < 1.0 and all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_unet_has_the_sizes_of_its_paper_in_small():
    """Count 9 weights for each pair of filters, and scale and shift of each filter: 2, 4 and 8 filters over 3 channels."""
    spec = registry.default_spec("images", (8, 8, 3), 5, 0, "unet", {"width": 2, "depth": 2}, per_position=True)
    model = registry.build(spec, 0)
    down = 9 * (3 * 2 + 2 * 2 + 2 * 4 + 4 * 4 + 4 * 8 + 8 * 8) + 4 * (2 + 4 + 8)
    up = 9 * ((4 + 8) * 4 + 4 * 4 + (2 + 4) * 2 + 2 * 2) + 4 * (4 + 2)
    assert sum(parameter.numel() for parameter in model.parameters()) == down + up + 2 * 5 + 5
    assert model.eval()(torch.zeros(1, 3, 8, 8)).shape == (1, 8, 8, 5)


def test_a_model_is_for_images_or_for_pixels():
    with pytest.raises(SettingError, match="vit does not take images with a label for every pixel; models that do: unet"):
        registry.default_spec("images", (8, 8, 1), 2, 0, "vit", {}, per_position=True)
    with pytest.raises(SettingError, match="unet does not take images; models that do: closed-form, convnet"):
        registry.default_spec("images", (8, 8, 1), 2, 0, "unet", {})
    with pytest.raises(SettingError, match="for images with a label for every pixel has tensors of the roles qkv"):
        registry.model_for("images", frozenset({"qkv"}), per_position=True)


def test_usual_models():
    shapes = {"images": (8, 8, 1), "tokens": (5,), "series": (5, 2), "tabular": (5,)}
    chosen = {kind: registry.default_spec(kind, shape, 2, 9, None, {}).name for kind, shape in shapes.items()}
    assert chosen == {"images": "convnet", "tokens": "transformer", "series": "dnn", "tabular": "dnn"}
    assert registry.names() == [
        "closed-form", "convnet", "convnet-bn", "dnn", "huggingface", "lstm", "mlr", "transformer", "unet", "vit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "name", "options", "message"),
    [
        ("images", (8, 8, 1), "vti", {}, "did you mean 'vit'"),
        ("tokens", (8,), "dnn", {}, "dnn does not take tokens; models that do: huggingface, lstm, transformer"),
        ("images", (8, 8, 1), "vit", {"widht": 3}, "model.widht .did you mean 'width'"),
        ("images", (8, 8, 1), None, {"width": 30}, "not a multiple of model.heads = 4"),
        ("images", (8, 8, 1), None, {"width": -1}, ">= 0"),
        ("images", (8, 8, 1), None, {"preset": "big"}, "preset"),
        ("series", (8, 2), None, {"heads": 5}, "not a multiple"),
        ("tabular", (8,), None, {"hidden": []}, "length >= 1"),
        ("tabular", (8,), None, {"hidden": [0]}, ">= 1"),
        ("tabular", (8,), "mlr", {"hidden": [1]}, "unknown setting"),
        ("images", (8, 8, 1), "convnet", {"channels": [4]}, "length >= 2"),
        ("series", (8, 2), "lstm", {"depth": 0}, ">= 1"),
        ("tabular", (8, 2), None, {}, "shape"),
        ("images", (1 << 20, 1 << 20, 3), None, {}, "shape"),
        ("tokens", (1 << 40,), None, {}, "shape"),
    ],
)
def test_refusals(kind, shape, name, options, message):
    with pytest.raises(SettingError, match=message):
        registry.default_spec(kind, shape, 2, 10, name, options)


def test_refused_sizes():
    with pytest.raises(SettingError, match="at least one class"):
        registry.default_spec("tabular", (3,), 0, 0, None, {})
    with pytest.raises(SettingError, match="vocabulary"):
        registry.default_spec("tokens", (3,), 2, 1 << 40, None, {})
    with pytest.raises(SettingError, match="unknown model"):
        registry.build(ModelSpec("gone", "tabular", (3,), 2), 0)


def test_a_model_of_ones_own(monkeypatch):
    module = types.ModuleType("attune_test_models")
    module.make = lambda spec: nn.Linear(spec.shape[0], spec.options["out"])
    module.wrong = lambda spec: 3
    module.number = 4
    monkeypatch.setitem(sys.modules, "attune_test_models", module)
    spec = registry.default_spec("tabular", (3,), 2, 0, "attune_test_models:make", {"out": 7})
    one, two = registry.build(spec, 1), registry.build(spec, 1)
    assert one.weight.shape == (7, 3) and torch.equal(one.weight, two.weight)
    for name, message in (
        ("attune_test_models:wrong", "made a int"),
        ("attune_test_models:number", "is a int"),
        ("attune_test_models:none", "cannot be imported"),
        ("no_such_module_here:make", "cannot be imported"),
        (":make", "cannot be imported"),
    ):
        with pytest.raises(SettingError, match=message):
            registry.build(msgspec.structs.replace(spec, name=name), 0)


def test_a_module_in_this_folder_that_cannot_be_imported_is_named_with_the_remedy(tmp_path, monkeypatch) -> None:
    (tmp_path / "in_this_folder.py").write_text("def make(spec): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with pytest.raises(SettingError, match=r"'in_this_folder:make' cannot be imported: .*PYTHONPATH=\."):
        registry.load("in_this_folder:make")


@pytest.mark.parametrize(
    ("name", "kind", "shape", "options"),
    [
        ("transformer", "tabular", (3,), {"depth": 10_000_000, "width": 4, "heads": 1}),
        ("vit", "images", (4, 4, 1), {"depth": 10_000_000, "width": 4, "heads": 1}),
        ("lstm", "series", (5, 2), {"depth": 10_000_000, "width": 1}),
        ("dnn", "tabular", (3,), {"hidden": [1] * 100_000}),
    ],
)
def test_a_model_of_few_bytes_has_no_endless_layers(name, kind, shape, options):
    """Building millions of modules would take hours, whatever their size; a peer or a folder may ask for it."""
    with pytest.raises(SettingError, match="<= 1000"):
        registry.size_bytes(ModelSpec(name, kind, shape, 3, options=options))


def bert(**config: object) -> ModelSpec:
    sizes = {"hidden_size": 1, "num_attention_heads": 1, "intermediate_size": 1} | config
    return ModelSpec("huggingface", "tokens", (8,), 3, 10, {"type": "bert", "config": sizes})


def test_the_size_of_a_hugging_face_model_is_that_of_its_tensors():
    spec = bert(num_hidden_layers=2)
    tensors = registry.build(spec, 0).state_dict().values()
    assert registry.size_bytes(spec) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_config_with_endless_layers_ends_within_the_bound_on_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "MEASURING_S", 3)
    with pytest.raises(SettingError, match="within 3 s"):
        registry.size_bytes(bert(num_hidden_layers=100_000_000))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", "flash_attention_2", {"": "evil/kernel"}])
def test_a_config_loads_no_kernels_of_the_hub(key: str, value: object):
    for config in ({key: value}, {"text_config": {key: value}}):
        with pytest.raises(SettingError, match="take eager, sdpa"):
            registry.build(bert(**config), 0, "meta")


def test_nothing_is_downloaded_for_a_config(monkeypatch: pytest.MonkeyPatch):
    """The server of a federation chooses the config."""
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: asked.append(host) or [])
    options = {"type": "upernet", "config": {"backbone": "strangers/body"}}
    with pytest.raises(SettingError, match="offline"):
        registry.build(ModelSpec("huggingface", "images", (8, 8, 3), 3, options=options), 0, "meta")
    assert not asked


def test_what_a_process_says_of_a_wrong_config_is_told():
    with pytest.raises(SettingError, match="no Hugging Face model 'nothing'"):
        registry.size_bytes(ModelSpec("huggingface", "tokens", (8,), 3, 10, {"type": "nothing"}))
