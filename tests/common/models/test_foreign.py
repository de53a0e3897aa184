"""Models of other libraries with random weights: their q,k,v, head, norms and blocks are found, and FedTP fits them.

Hugging Face's models are the real ones of the package transformers.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from attune.common.methods import registry as methods
from attune.common.methods.method import assign
from attune.common.models.structure import components, roles, tensors_of

WIDTH, DEPTH, HIDDEN, CLASSES = 16, 2, 24, 3


class LogitsOf(nn.Module):
    """Hugging Face model as a user's factory returns it: only the logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x).logits
        return logits


def hugging_face(name: str) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    shape = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": HIDDEN}
    bert = {"vocab_size": 30, "num_labels": CLASSES}
    config = {
        "Bert": bert | shape,
        "DistilBert": bert | {"dim": WIDTH, "n_layers": DEPTH, "n_heads": 2, "hidden_dim": HIDDEN},
        "GPT2": bert | {"n_embd": WIDTH, "n_layer": DEPTH, "n_head": 2, "n_inner": HIDDEN, "pad_token_id": 0,
                        "bos_token_id": 1, "eos_token_id": 1},
        "Llama": bert | shape | {"num_key_value_heads": 1, "pad_token_id": 0},
        "ViT": shape | {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES},
    }[name]  # fmt: skip
    kind = "ImageClassification" if name == "ViT" else "SequenceClassification"
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}For{kind}")(getattr(transformers, f"{name}Config")(**config))
    return LogitsOf(made)


class TorchEncoder(nn.Module):
    """Encoder of torch's own layers: nn.MultiheadAttention with q,k,v in one in_proj_weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.embed(x))[:, -1])
        return out


def both(*layers: str) -> set[str]:
    return {f"{layer}.{p}" for layer in layers for p in ("weight", "bias")}


def weights(*layers: str) -> set[str]:
    return {f"{layer}.weight" for layer in layers}


Case = tuple[Callable[[], nn.Module], str, set[str], set[str], set[str], set[str], int]
# How to build it, where block i is, what is in a block of q,k,v, of its MLP and of its norms, the head, norms outside blocks.
CASES: dict[str, Case] = {
    "bert": (
        lambda: hugging_face("Bert"), "inner.bert.encoder.layer.{}.",
        both("attention.self.query", "attention.self.key", "attention.self.value"), both("intermediate.dense", "output.dense"),
        both("attention.output.LayerNorm", "output.LayerNorm"), both("inner.classifier"), 1,
    ),
    "distilbert": (
        lambda: hugging_face("DistilBert"), "inner.distilbert.transformer.layer.{}.",
        both("attention.q_lin", "attention.k_lin", "attention.v_lin"), both("ffn.lin1", "ffn.lin2"),
        both("sa_layer_norm", "output_layer_norm"), both("inner.classifier"), 1,
    ),
    "vit": (
        lambda: hugging_face("ViT"), "inner.vit.layers.{}.",
        both("attention.q_proj", "attention.k_proj", "attention.v_proj"), both("mlp.fc1", "mlp.fc2"),
        both("layernorm_before", "layernorm_after"), both("inner.classifier"), 1,
    ),
    "gpt2": (
        lambda: hugging_face("GPT2"), "inner.transformer.h.{}.", both("attn.c_attn"), both("mlp.c_fc", "mlp.c_proj"),
        both("ln_1", "ln_2"), weights("inner.score"), 1,
    ),
    "llama": (
        lambda: hugging_face("Llama"), "inner.model.layers.{}.",
        weights("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        weights("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        weights("input_layernorm", "post_attention_layernorm"), weights("inner.score"), 1,
    ),
    "torch": (
        TorchEncoder, "encoder.layers.{}.", {"self_attn.in_proj_weight", "self_attn.in_proj_bias"}, both("linear1", "linear2"),
        both("norm1", "norm2"), both("out"), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_roles(case):
    make, block, qkv, mlp, norms, head, outside = case
    model = make()
    found = {
        role: {name for name, has in roles(model).items() if role in has} for role in ("qkv", "mlp", "norm", "encoder", "head")
    }

    def in_blocks(inside: set[str]) -> set[str]:
        return {block.format(i) + name for i in range(DEPTH) for name in inside}

    assert found["qkv"] == in_blocks(qkv) and found["mlp"] == in_blocks(mlp) and found["head"] == head
    assert {name for name in found["norm"] if name in found["encoder"]} == in_blocks(norms)
    assert len({name.rpartition(".")[0] for name in found["norm"] - found["encoder"]}) == outside
    assert found["encoder"] == {name for name in tensors_of(model) if name.startswith(block.partition("{")[0])}
    assert sorted(name for names in components(model).values() for name in names) == sorted(tensors_of(model))


@pytest.mark.parametrize("name", CASES)
def test_fedtp_generates_what_the_model_attends_with(name):
    """Check that q,k,v given by name change the logits, and get gradients (except a key's bias, which cancels in softmax)."""
    model = CASES[name][0]().double().eval()
    generated = [tensor for tensor, kind in assign(methods.get("fedtp"), model).items() if kind == "generated"]
    torch.manual_seed(1)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64) if name == "vit" else torch.randint(2, 30, (2, 5))
    given = {
        tensor: (tensors_of(model)[tensor] + 0.3 * torch.randn_like(tensors_of(model)[tensor])).requires_grad_()
        for tensor in generated
    }
    logits = functional_call(model, {**tensors_of(model), **given}, (x,))
    assert logits.shape == (2, CLASSES) and not torch.allclose(logits, model(x), atol=1e-6)
    gradients = dict(zip(given, torch.autograd.grad(logits.square().sum(), list(given.values())), strict=True))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert all(gradient.abs().max() > 1e-10 for gradient in gradients.values() if gradient.dim() == 2)
