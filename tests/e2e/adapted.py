"""Models with a frozen body and trained adapters for tests, which find them as attune.tests.e2e.adapted."""

import os
from math import prod

import torch
from torch import nn

from attune.common.models.body import load_body
from attune.common.models.closed_form import ClosedFormOnBody
from attune.common.models.registry import build
from attune.common.plan import ModelSpec

BODY = "ATTUNE_TEST_BODY"  # an environment variable with the path of the body's weights


class Adapted(nn.Module):
    """Linear layer with an adapter beside it: a product of two narrow layers."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.up(self.down(x))
        return added


def table_body(spec: ModelSpec) -> nn.Module:
    """Make the body of `layered` with new weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(spec.shape), 8), nn.BatchNorm1d(8), nn.ReLU())


def layered(spec: ModelSpec) -> nn.Module:
    """Make a body with running statistics, an adapter and a head. The environment may name a file with the body's weights."""
    body = _frozen(spec)
    body[1] = Adapted(body[1])
    return nn.Sequential(body, nn.Linear(8, spec.classes))


def closed_form(spec: ModelSpec) -> nn.Module:
    """Make a closed form on the outputs of the same body, which drops half of them in training."""
    return ClosedFormOnBody(spec, nn.Sequential(_frozen(spec), nn.Dropout(0.5)), 8)


class _Bag(nn.Module):
    """Mean of drawn embeddings of a sequence's tokens (B, T)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        drawn = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(3))
        self.embedding = nn.Embedding.from_pretrained(drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.embedding(x).mean(dim=1)
        return mean


def of_tokens(spec: ModelSpec) -> nn.Module:
    """Make a closed form on the mean of embeddings."""
    return ClosedFormOnBody(spec, _Bag(spec.vocabulary, 12), 12)


def _frozen(spec: ModelSpec) -> nn.Module:
    body = table_body(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for parameter in body.parameters():
            nn.init.uniform_(parameter, -1, 1)
    if where := os.environ.get(BODY):
        load_body(body, where)
    return body.requires_grad_(False)


def vit(spec: ModelSpec) -> nn.Module:
    """Make a Vision Transformer with an adapter in each attention; the head is trained too."""
    options = {"width": 8, "heads": 2, "depth": 2, "patch": 4}
    model = build(ModelSpec("vit", "images", spec.shape, spec.classes, options=options), 3).requires_grad_(False)
    for block in model.blocks:
        block.attention.to_qkv = Adapted(block.attention.to_qkv)
    model.head.requires_grad_(True)
    return model


class Lora(nn.Module):
    """Linear layer with an adapter whose factors have the names that peft gives them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return added


def lora(spec: ModelSpec) -> nn.Module:
    """Make the model of `vit` with the names of peft."""
    model = vit(spec)
    for block in model.blocks:
        block.attention.to_qkv = Lora(block.attention.to_qkv.base)
    return model


def without_attention(spec: ModelSpec) -> nn.Module:
    """Make the model of `vit` with only the head trained."""
    model = vit(spec)
    for block in model.blocks:
        block.attention.to_qkv = block.attention.to_qkv.base
    return model


def peft_lora(spec: ModelSpec) -> nn.Module:
    """Make the model of `vit` with peft."""
    from peft import LoraConfig, inject_adapter_in_model

    options = {"width": 8, "heads": 2, "depth": 2, "patch": 4}
    model = build(ModelSpec("vit", "images", spec.shape, spec.classes, options=options), 3)
    adapted: nn.Module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_qkv"]), model)
    adapted.head.requires_grad_(True)
    return adapted
