"""Federations of adapters on a frozen body: tensors that travel, the server's state, and the devices' models."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attune
from attune.common.config import merge
from attune.common.errors import AttuneError, SettingError
from attune.common.models import registry
from attune.common.models.body import body_of, names_of
from attune.common.plan import ModelSpec
from attune.common.wire import files
from attune.fedclient.model import portable
from attune.fedclient.model.artifact import Model, read_info
from attune.fedclient.work import orders
from tests.e2e import adapted
from tests.e2e.hosted import host
from tests.forked import hosts

LAYERED, VIT = "attune.tests.e2e.adapted:layered", "attune.tests.e2e.adapted:vit"
LORA = "attune.tests.e2e.adapted:lora"
SMALL = {"seed": 3, "round": {"rounds": 2}, "train": {"local_epochs": 1, "local_steps": 0, "batch_size": 8, "lr": 0.2}}
TRAINED = {"0.1.down.weight", "0.1.up.weight", "1.weight", "1.bias"}


def federation(members: Mapping[str, Any], method: str, model: Any, **given: Any) -> attune.Result:
    return attune.simulate(members, method, model, settings=merge(SMALL, given.pop("settings", {})), progress=False, **given)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Record the names in every blob: served, handed in, and of both sides' state, in files and in memory."""
    blobs: list[set[str]] = []
    begin, in_memory = files.TensorWriter.__init__, orders.tensor_bytes

    def seen(writer: files.TensorWriter, where: Any, manifest: Mapping[str, Any], **options: Any) -> None:
        blobs.append({name.removeprefix("personal.") for name in manifest})
        begin(writer, where, manifest, **options)

    def seen_in_memory(tensors: Mapping[str, Any]) -> bytes:
        blobs.append({name.removeprefix("personal.") for name in tensors})
        return in_memory(tensors)

    monkeypatch.setattr(files.TensorWriter, "__init__", seen)
    monkeypatch.setattr(orders, "tensor_bytes", seen_in_memory)
    return blobs


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "ditto", "pfedhn"])
def test_no_blob_has_a_tensor_of_the_body(clouds: dict[str, Path], written: list[set[str]], method: str) -> None:
    result = federation(clouds, method, LAYERED)
    frozen = names_of(result.model("site-0").trainer.network.model)
    assert len(frozen) == 7
    assert [names for names in written if names & frozen] == []
    parts = [names for names in written if names & TRAINED]
    assert len(parts) > 2 * len(clouds)
    assert all(names == TRAINED for names in parts), "attended, generated and averaged are adapters and head alone"


def test_fedtp_generates_the_adapters_of_the_projections(digits: dict[str, Path], written: list[set[str]]) -> None:
    one, two, *_ = digits
    result = federation(digits, "fedtp", VIT)
    model = result.model(one)
    qkv = {f"blocks.{block}.attention.to_qkv.{layer}.weight" for block in (0, 1) for layer in ("down", "up")}
    assert set(model.tensors) == qkv | {"head.weight", "head.bias"}
    assert qkv in written and {"head.weight", "head.bias"} in written
    assert not any(names & names_of(model.trainer.network.model) for names in written)
    others = result.model(two).tensors
    assert any(not torch.equal(model.tensors[name], others[name]) for name in qkv), "a device's own"


def test_devices_generate_their_own_adapters_from_a_network_for_adapters_alone(
    digits: dict[str, Path], written: list[set[str]]
) -> None:
    one, two, *_ = digits
    result = federation(digits, "fedtp", VIT, settings={"method": {"embedding": "device", "hidden": 6}})
    [network, *others] = [names for names in written if any(name.startswith("phi/head.") for name in names)]
    assert network >= {"phi/head.blocks.0.weight", "phi/head.blocks.1.weight"}
    assert len(others) > len(digits)
    assert all(names == network for names in others)
    models = [result.model(name).tensors for name in (one, two)]
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0] if "to_qkv" in name)


def test_fedsa_lora_shares_half_of_each_adapter(digits: dict[str, Path]) -> None:
    """Expect the first factors of the adapters to be one for all, and each device to keep its second ones."""
    one, two, *_ = digits
    result = federation(digits, "fedsa-lora", LORA)
    models = [result.model(name).members["personalized"].tensors for name in (one, two)]
    down = [name for name in models[0] if ".lora_A." in name]
    up = [name for name in models[0] if ".lora_B." in name]
    assert len(down) == len(up) == 2
    assert all(torch.equal(models[0][name], models[1][name]) for name in down), "as served in the last evaluation"
    assert not any(torch.equal(models[0][name], models[1][name]) for name in up)
    assert {key.partition("/")[0] for key in result.digests} == {"shared", "solved"}


def test_fedtp_lora_makes_all_adapters_and_is_fedtp_on_the_projections(digits: dict[str, Path]) -> None:
    one, two, *_ = digits
    result, other = (federation(digits, method, LORA) for method in ("fedtp-lora", "fedtp"))
    assert result.digests == other.digests
    models = [result.model(name).tensors for name in (one, two)]
    factors = [name for name in models[0] if "lora_" in name]
    assert len(factors) == 4 and not any(torch.equal(models[0][name], models[1][name]) for name in factors)


@pytest.mark.parametrize(("method", "selector"), [("fedsa-lora", r"\*lora_A\*"), ("fedtp-lora", r"\*lora_\*")])
def test_methods_of_adapters_refuse_a_model_without_their_names(digits: dict[str, Path], method: str, selector: str) -> None:
    with pytest.raises(AttuneError, match=rf"method {method}: no tensor of the model .* is '{selector}'; choose a model"):
        federation(digits, method, VIT)


def test_fedtp_says_so_where_no_projection_has_an_adapter(digits: dict[str, Path]) -> None:
    with pytest.raises(AttuneError, match=r"fedtp: no tensor of the model VisionTransformer outside its frozen body is '@qkv'"):
        federation(digits, "fedtp", "attune.tests.e2e.adapted:without_attention")


def test_the_body_is_pinned_and_stays_as_it_is(clouds: dict[str, Path]) -> None:
    """Check that training does not change the body, including statistics of a normalisation layer."""
    fresh = registry.build(ModelSpec(LAYERED, "tabular", (6,), 3), 3)
    before = {name: tensor.clone() for name, tensor in body_of(fresh).tensors.items()}
    model = federation(clouds, "fedavg", LAYERED).model("site-1")
    assert model.info.model.body_digest == body_of(fresh).digest
    kept = model.trainer.network.model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in before.items())
    assert not torch.equal(model.tensors["0.1.up.weight"], torch.zeros_like(model.tensors["0.1.up.weight"]))


def test_a_loop_of_ones_own_trains_the_adapters_alone(clouds: dict[str, Path]) -> None:
    """Use also a loop that trains every tensor: the other devices' body is another copy."""

    def train(model: nn.Module, data: Any, context: Any) -> None:
        model.train().requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in data.batches():
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    result = federation(clouds, "fedavg", LAYERED, train=train)
    kept = result.model("site-0").trainer.network.model
    assert body_of(kept).digest == body_of(registry.build(result.model("site-0").info.model, 3)).digest


@pytest.mark.parametrize("executor", ["stacked", "processes"])
def test_devices_that_are_computed_together_come_to_the_same(digits: dict[str, Path], executor: Any) -> None:
    with hosts():
        one, other = (federation(digits, "fedmcsa", VIT, executor=each) for each in ("sequential", executor))
    for name in digits:
        mine, theirs = one.model(name).tensors, other.model(name).tensors
        assert all(torch.allclose(mine[each], theirs[each], atol=1e-4) for each in mine)


def test_a_module_that_is_handed_over_has_its_body_too(clouds: dict[str, Path]) -> None:
    module = adapted.layered(ModelSpec(LAYERED, "tabular", (6,), 3))
    model = federation(clouds, "fedavg", module).model("site-0")
    assert set(model.tensors) == TRAINED


def test_a_body_drawn_from_the_seed_is_there_in_the_finished_model(clouds: dict[str, Path]) -> None:
    model = federation(clouds, "fedavg", drawn).model("site-0")
    assert set(model.tensors) == {"1.weight", "1.bias"}
    assert model.info.seed == 3 and model.info.model.body_digest == body_of(model.trainer.network.model).digest


def drawn(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(spec.shape[0], 8).requires_grad_(False), nn.Linear(8, spec.classes))


def test_the_same_bits_over_the_network(clouds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    settings = merge(SMALL, {"method": {"name": "fedmcsa"}, "model": {"name": LAYERED}})
    result = attune.simulate(clouds, settings=settings, progress=False)
    saved = result.save(tmp_path / "saved")
    network = host(tmp_path, clouds, settings, allow_models=(LAYERED,))
    assert result.digests == network.digests
    for name in clouds:
        assert read_info(saved / "models" / name).files == read_info(network.model(name)).files


def test_the_finished_model_is_whole(clouds: dict[str, Path], tmp_path: Path) -> None:
    """Check that a loaded model and an exported file have the body."""
    result = federation(clouds, "fedmcsa", LAYERED)
    model = Model.load(result.save(tmp_path / "saved") / "models" / "site-2", allow_models=[LAYERED])
    x = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    predicted = model.predict(x)
    assert predicted == result.model("site-2").predict(x)
    assert portable.export(model, tmp_path / "out.pt2") <= portable.TOLERANCE
    program = torch.export.load(tmp_path / "out.pt2")
    found = program.module()(torch.from_numpy(x)).argmax(-1)
    assert [model.info.classes[index] for index in found] == predicted
    for name, tensor in body_of(model.trainer.network.model).tensors.items():
        held = [torch.equal(each, tensor) for each in program.state_dict.values() if each.shape == tensor.shape]
        assert any(held), f"the file has no {name}"


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="ONNX is not installed")
def test_an_onnx_file_has_its_body(clouds: dict[str, Path], tmp_path: Path) -> None:
    model = federation(clouds, "fedmcsa", LAYERED).model("site-2")
    assert portable.export(model, tmp_path / "out.onnx") <= portable.TOLERANCE


def test_without_its_body_a_finished_model_says_so(clouds: dict[str, Path], tmp_path, monkeypatch) -> None:
    saved = federation(clouds, "fedavg", LAYERED).save(tmp_path / "saved") / "models" / "site-0"
    other = adapted.table_body(ModelSpec(LAYERED, "tabular", (6,), 3))
    files.write_tensors(tmp_path / "other.safetensors", other.state_dict())
    monkeypatch.setenv(adapted.BODY, str(tmp_path / "other.safetensors"))
    with pytest.raises(SettingError, match="adapters of a frozen body with the digest sha256:"):
        Model.load(saved, allow_models=[LAYERED])


def test_pefts_lora_travels_alone(digits: dict[str, Path], written: list[set[str]]) -> None:
    pytest.importorskip("peft")
    first, *_ = digits
    model = federation(digits, "fedmcsa", "attune.tests.e2e.adapted:peft_lora").model(first)
    layers = {f"blocks.{block}.attention.to_qkv.lora_{each}.default.weight" for block in (0, 1) for each in "AB"}
    assert set(model.tensors) == layers | {"head.weight", "head.bias"}
    assert not any(names & names_of(model.trainer.network.model) for names in written)
    assert any(bool(model.tensors[name].any()) for name in layers if "lora_B" in name), "zero before training"
