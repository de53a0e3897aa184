"""A frozen body: its tensors, its digest, and that it never changes."""

import copy
import gc
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from attune.common.errors import SettingError
from attune.common.models import body, registry
from attune.common.models.structure import components, roles, tensors_of
from attune.common.plan import ModelSpec
from attune.common.wire.files import write_tensors
from attune.fedserver.core import planning
from tests.e2e import adapted

HERE = "attune.tests.e2e.adapted"
TABLE = ModelSpec(f"{HERE}:layered", "tabular", (4,), 3)
IMAGES = ModelSpec(f"{HERE}:vit", "images", (8, 8, 1), 3)
TRAINED = ["0.1.down.weight", "0.1.up.weight", "1.weight", "1.bias"]


def test_adapters_and_head_are_all_that_the_model_consists_of() -> None:
    model = registry.build(TABLE, 0)
    assert list(tensors_of(model)) == TRAINED
    assert components(model) == {"0.1.down": TRAINED[:1], "0.1.up": TRAINED[1:2], "1": TRAINED[2:]}
    statistics = {f"0.2.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert body.names_of(model) == {"0.1.base.weight", "0.1.base.bias"} | statistics


def test_roles_are_those_of_the_adapters() -> None:
    found = roles(registry.build(IMAGES, 0))
    qkv = {f"blocks.{block}.attention.to_qkv.{layer}.weight" for block in (0, 1) for layer in ("down", "up")}
    assert {name for name, has in found.items() if "qkv" in has} == qkv
    assert {name for name, has in found.items() if "head" in has} == {"head.weight", "head.bias"}
    assert set(found) == qkv | {"head.weight", "head.bias"}


def test_a_frozen_head_is_not_the_head() -> None:
    """Use a body that classifies something else, and so has a head of its own with the very same name."""
    model = nn.Sequential()
    model.add_module("head", nn.Linear(4, 6).requires_grad_(False))
    model.add_module("mine", nn.Linear(6, 3))
    body.settle(model, TABLE)
    assert {name for name, has in roles(model).items() if "head" in has} == {"mine.weight", "mine.bias"}


def test_the_digest_is_that_of_the_safetensors_file(tmp_path: Path) -> None:
    model = registry.build(TABLE, 0)
    frozen = {name: tensor for name, tensor in model.state_dict().items() if name not in TRAINED}
    assert body.body_of(model).digest == write_tensors(tmp_path / "body.safetensors", frozen).digest


def test_the_seed_draws_adapters_and_leaves_the_body() -> None:
    one, other = registry.build(TABLE, 0), registry.build(TABLE, 1)
    assert body.body_of(one).digest == body.body_of(other).digest
    assert not torch.equal(tensors_of(one)["0.1.down.weight"], tensors_of(other)["0.1.down.weight"])


def test_a_pinned_body_is_built_and_another_one_is_refused() -> None:
    digest = body.body_of(registry.build(TABLE, 0)).digest
    registry.build(msgspec.structs.replace(TABLE, body_digest=digest), 1)
    other = "sha256:" + "0" * 64
    with pytest.raises(SettingError, match=rf"adapted:layered: .*{other}, and the body here has {digest}.*same version"):
        registry.build(msgspec.structs.replace(TABLE, body_digest=other), 0)
    with pytest.raises(SettingError, match="here no parameter is frozen"):
        registry.build(ModelSpec("attune.tests.e2e.own_model:tiny", "tabular", (4,), 3, body_digest=digest), 0)
    registry.build(msgspec.structs.replace(TABLE, body_digest=other), 0, device="meta")  # only its sizes are needed


def test_the_pin_is_a_setting_that_no_factory_sees() -> None:
    digest = "sha256:" + "a" * 64
    spec = registry.default_spec("tabular", (4,), 3, 0, TABLE.name, {"depth": 1, "body_digest": digest})
    assert (spec.body_digest, spec.options) == (digest, {"depth": 1})
    assert b"body_digest" not in msgspec.json.encode(registry.default_spec("tabular", (4,), 3, 0, TABLE.name, {}))
    with pytest.raises(SettingError, match=r"setting model\.body_digest: 'abc' is not sha256:"):
        planning.resolve({"model": {"name": TABLE.name, "body_digest": "abc"}})
    with pytest.raises(SettingError, match=r"model\.body_digest"):
        planning.resolve({"model": {"name": "mlr", "body_digest": digest}})


def test_training_mode_keeps_the_bodys_statistics() -> None:
    model = registry.build(TABLE, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    body.training_mode(model)
    model(torch.randn(6, 4))
    assert model.training and model[0][1].training and not model[0][2].training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_models_of_one_body_hold_it_once_and_a_copy_has_its_own() -> None:
    one, other = registry.build(TABLE, 0), registry.build(TABLE, 1)
    assert one[0][1].base.weight.data_ptr() == other[0][1].base.weight.data_ptr()
    changed = copy.deepcopy(one)
    with torch.no_grad():
        changed[0][1].base.weight.zero_()
    assert other[0][1].base.weight.abs().min() > 0
    assert list(tensors_of(changed)) == TRAINED


def test_a_forgotten_body_leaves_the_structure() -> None:
    model = registry.build(IMAGES, 0)
    digest, names, own = body.body_of(model).digest, body.names_of(model), roles(model)
    body.forget(model)
    assert (body.body_of(model).digest, body.names_of(model), roles(model)) == (digest, names, own)
    assert all(tensor.is_meta == (name in names) for name, tensor in model.state_dict().items())
    gc.collect()
    assert digest not in body._BODIES, "nobody holds its values"


def test_a_body_is_read_from_a_path_or_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = adapted.table_body(TABLE)
    (tmp_path / "weights_of_ours").mkdir()
    (tmp_path / "weights_of_ours" / "__init__.py").touch()
    file = tmp_path / "weights_of_ours" / "small.safetensors"
    write_tensors(file, saved.state_dict())
    monkeypatch.syspath_prepend(str(tmp_path))
    for where in (file, "weights_of_ours:small.safetensors"):
        read = body.load_body(adapted.table_body(TABLE), where)
        assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in read.state_dict().items())
        assert not any(parameter.requires_grad for parameter in read.parameters())
    with pytest.raises(SettingError, match="cannot be read from weights_of_theirs:a: No module named"):
        body.load_body(saved, "weights_of_theirs:a")
    with pytest.raises(SettingError, match=r"cannot be read from .*none"):
        body.load_body(saved, tmp_path / "none")
    with pytest.raises(SettingError, match=r"(?s)cannot be read from .*size mismatch"):
        body.load_body(adapted.table_body(msgspec.structs.replace(TABLE, shape=(5,))), file)


def test_what_a_file_has_and_a_module_has_not_is_left_only_where_that_is_said(tmp_path: Path) -> None:
    saved = adapted.table_body(TABLE).state_dict()
    write_tensors(tmp_path / "more", saved | {"pooler.weight": torch.ones(2), "pooler.bias": torch.ones(1)})
    with pytest.raises(SettingError, match=r"(?s)cannot be read from .*Unexpected key.*pooler"):
        body.load_body(adapted.table_body(TABLE), tmp_path / "more")
    read = body.load_body(adapted.table_body(TABLE), tmp_path / "more", ("pooler.*",)).state_dict()
    assert read.keys() == saved.keys() and all(torch.equal(read[name], tensor) for name, tensor in saved.items())
    with pytest.raises(SettingError, match=r"(?s)cannot be read from .*Missing key"):
        body.load_body(adapted.table_body(TABLE), tmp_path / "more", ("*",))


def test_a_body_need_not_be_there_to_count_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(adapted.BODY, "nowhere")
    assert registry.build(TABLE, 0, device="meta")[0][1].base.weight.is_meta
