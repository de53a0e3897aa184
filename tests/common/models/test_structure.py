"""Roles, components and tensors, on our models and on models in other styles."""

import pytest
import torch
from torch import nn

from attune.common.models import registry
from attune.common.models.structure import components, roles, tensors_of


def named(model: nn.Module, role: str) -> set[str]:
    return {name for name, has in roles(model).items() if role in has}


def ours(kind: str, shape: tuple[int, ...], name: str | None = None, **options: object) -> nn.Module:
    usual = "vit" if kind == "images" else "transformer"
    return registry.build(registry.default_spec(kind, shape, 3, 9, name or usual, options), 0)


def modules(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


@pytest.mark.parametrize(("kind", "shape"), [("images", (8, 8, 1)), ("tokens", (5,)), ("series", (5, 2))])
@pytest.mark.parametrize("depth", [1, 2])
def test_our_transformers(kind, shape, depth):
    model = ours(kind, shape, depth=depth)
    blocks = [f"blocks.{i}" for i in range(depth)]
    assert named(model, "qkv") == {f"{block}.attention.to_qkv.weight" for block in blocks}
    assert named(model, "head") == {"head.weight", "head.bias"}
    assert named(model, "mlp") == {f"{block}.mlp.{i}.{p}" for block in blocks for i in (0, 3) for p in ("weight", "bias")}
    norms = [f"{block}.norm{i}" for block in blocks for i in (1, 2)] + ["norm"]
    assert named(model, "norm") == {f"{norm}.{p}" for norm in norms for p in ("weight", "bias")}
    assert named(model, "encoder") == {name for name in tensors_of(model) if name.startswith("blocks.")}
    assert set(roles(model)) == set(tensors_of(model))


def test_one_tensor_holds_a_blocks_q_k_and_v():
    assert ours("images", (8, 8, 1)).blocks[0].attention.to_qkv.weight.shape == (3 * 32, 32)


def test_dnn_and_mlr_have_a_head_only():
    for name, layers in (("dnn", ["hidden0", "head"]), ("mlr", ["head"])):
        model = ours("tabular", (5,), name)
        assert {name for name, has in roles(model).items() if has} == {"head.weight", "head.bias"}
        assert components(model) == {layer: [f"{layer}.weight", f"{layer}.bias"] for layer in layers}


def test_the_registry_knows_the_roles_of_every_model():
    shapes = {"images": (8, 8, 1), "tokens": (5,), "series": (5, 2), "tabular": (5,)}
    known = {name: entry for name, entry in registry.MODELS.items() if entry.roles is not None}
    for name, entry in known.items():
        for kind in entry.kinds:
            spec = registry.default_spec(kind, shapes[kind], 2, 9, name, {}, per_position=entry.labels_pixels)
            model = registry.build(spec, 0)
            assert frozenset().union(*roles(model).values()) == entry.roles


def test_components_of_the_vit():
    model = ours("images", (8, 8, 1))
    found = components(model)
    assert found["class_token"] == ["class_token"] and found["position"] == ["position"]
    assert found["blocks.1.attention.to_qkv"] == ["blocks.1.attention.to_qkv.weight"]
    assert found["blocks.0.mlp.3"] == ["blocks.0.mlp.3.weight", "blocks.0.mlp.3.bias"]
    assert sorted(name for names in found.values() for name in names) == sorted(tensors_of(model))


def test_computable_buffers_stay_out():
    model = ours("series", (5, 2))
    assert "positions" in dict(model.named_buffers()) and "positions" not in tensors_of(model)


def test_torchs_own_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = modules(
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), fc=nn.Linear(8, 2), extra=nn.Linear(2, 2)
    )
    blocks = [f"encoder.layers.{i}" for i in range(2)]
    assert named(model, "qkv") == {f"{block}.self_attn.in_proj_{p}" for block in blocks for p in ("weight", "bias")}
    assert named(model, "mlp") == {f"{block}.linear{i}.{p}" for block in blocks for i in (1, 2) for p in ("weight", "bias")}
    assert named(model, "head") == {"fc.weight", "fc.bias"}
    assert named(model, "encoder") == {name for name in tensors_of(model) if name.startswith("encoder.layers.")}


def test_attention_with_sizes_of_its_own():
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    assert named(attention, "qkv") == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}


@pytest.mark.parametrize(
    "names",
    [("q", "k", "v"), ("to_q", "to_k", "to_v"), ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"),
     ("to_q", "to_kv"), ("qkv",), ("to_qkv",), ("qkv_proj",), ("c_attn",), ("query_key_value",), ("Wqkv",),
     ("q_lin", "k_lin", "v_lin")],
)  # fmt: skip
def test_names_of_projections(names):
    def block() -> nn.Module:
        inner = modules(**{name: nn.Linear(4, 4, bias=False) for name in names}, proj=nn.Linear(4, 4))
        return modules(attn=inner, q_norm=nn.LayerNorm(4), ffn=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    model = modules(layers=nn.ModuleList([block(), block()]), out=nn.Linear(4, 2))
    assert named(model, "qkv") == {f"layers.{i}.attn.{name}.weight" for i in range(2) for name in names}
    assert named(model, "mlp") == {f"layers.{i}.ffn.0.{p}" for i in range(2) for p in ("weight", "bias")}
    assert named(model, "head") == {"out.weight", "out.bias"}


def test_a_lone_key_or_value_is_no_attention():
    model = modules(key=nn.Linear(4, 4), value=nn.Linear(4, 4), last=nn.Linear(4, 2))
    assert named(model, "qkv") == set()


def test_projections_beside_the_mlp():
    def block() -> nn.Module:
        return modules(**{name: nn.Linear(4, 4, bias=False) for name in ("q", "k", "v", "out_proj", "fc1", "fc2")})

    model = modules(h=nn.ModuleList([block(), block()]), classifier=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert named(model, "mlp") == {f"h.{i}.fc{j}.weight" for i in range(2) for j in (1, 2)}
    assert named(model, "head") == {"classifier.2.weight", "classifier.2.bias"}


def test_output_layer_in_a_sibling_as_in_bert():
    def block() -> nn.Module:
        inner = modules(query=nn.Linear(4, 4), key=nn.Linear(4, 4), value=nn.Linear(4, 4))
        return modules(
            attention=modules(self=inner, output=modules(dense=nn.Linear(4, 4))), intermediate=modules(dense=nn.Linear(4, 8))
        )

    model = modules(layer=nn.ModuleList([block()]), classifier=nn.Linear(4, 2))
    assert named(model, "mlp") == {"layer.0.intermediate.dense.weight", "layer.0.intermediate.dense.bias"}
    assert len(named(model, "encoder")) == 10


def test_lists_of_lists():
    def block() -> nn.Module:
        return nn.ModuleList(
            [modules(norm=nn.LayerNorm(4), fn=modules(to_qkv=nn.Linear(4, 12), to_out=nn.Linear(4, 4))), nn.Linear(4, 4)]
        )

    model = modules(layers=nn.ModuleList([block(), block()]), mlp_head=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    assert named(model, "mlp") == {f"layers.{i}.1.{p}" for i in range(2) for p in ("weight", "bias")}
    assert named(model, "head") == {"mlp_head.1.weight", "mlp_head.1.bias"}
    assert len(named(model, "encoder")) == 16 and len(named(model, "norm")) == 6


def test_batch_norm_with_running_statistics():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2), nn.GroupNorm(1, 2), nn.RMSNorm(2)
    )
    own = {f"1.{p}" for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert named(model, "norm") == own | {"4.weight", "4.bias", "5.weight"}
    assert named(model, "head") == {"3.weight", "3.bias"}
    assert components(model)["1"] == ["1.weight", "1.bias"] and components(model)["1.running_mean"] == ["1.running_mean"]
    assert sorted(name for names in components(model).values() for name in names) == sorted(model.state_dict())


def test_tied_tensors_count_once_and_order_is_the_models():
    model = modules(embed=nn.Embedding(5, 4), middle=nn.Linear(4, 4), head=nn.Linear(4, 5, bias=False))
    model.head.weight = model.embed.weight
    assert list(tensors_of(model)) == ["embed.weight", "middle.weight", "middle.bias"]
    assert sum(map(torch.numel, tensors_of(model).values())) == 20 + 16 + 4
    detached = tensors_of(model)["embed.weight"]
    assert not detached.requires_grad and detached.data_ptr() == model.embed.weight.data_ptr()


def test_a_bare_linear():
    model = nn.Linear(3, 2)
    assert components(model) == {"model": ["weight", "bias"]} and named(model, "head") == {"weight", "bias"}


def test_roles_survive_a_functional_call():
    model = ours("images", (8, 8, 1))
    values = {name: tensor + 0.01 for name, tensor in tensors_of(model).items()}
    x = torch.rand(2, 1, 8, 8)
    changed = torch.func.functional_call(model, values, (x,))
    assert changed.shape == (2, 3) and not torch.equal(changed, model(x))
