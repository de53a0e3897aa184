"""Attention rollout (Abnar & Zuidema, ACL 2020), as FedTP's figures use it: where a Transformer looks.

B samples, T positions, H heads, P patches in h rows and w columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.models.blocks import SelfAttention
from attune.common.models.structure import roles
from attune.common.models.vit import VisionTransformer

DISCARDED = 0.3  # of the weights of a layer: the lowest, as FedTP has it


def attentions(model: nn.Module, run: Callable[[], object]) -> list[Tensor]:
    """Return the weights (B, H, T, T) of every self-attention that `run` passes through, in that order.

    Raises:
        SettingError: The model has no attention, or attention of an unknown kind.
    """
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name, its_roles in roles(model).items() if "qkv" in its_roles))
    owners = [model.get_submodule(path.rpartition(".")[0]) for path in paths]
    who = f"the model {type(model).__name__}"
    if not owners:
        raise SettingError(f"{who} has no attention: a rollout needs a Transformer, such as vit")
    if not all(isinstance(owner, SelfAttention) for owner in owners):
        raise SettingError(f"{who} has attention of an unknown kind: a rollout needs a built-in model")
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: object, qkv_BTF: Tensor) -> None:
        seen.append(owner_of[module].weights(qkv_BTF))

    owner_of: dict[nn.Module, SelfAttention] = {owner.to_qkv: owner for owner in owners if isinstance(owner, SelfAttention)}
    handles = [projection.register_forward_hook(look) for projection in owner_of]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def rollout(layers: Sequence[Tensor], discarded: float = DISCARDED) -> Tensor:
    """Return how much of each input position is in each output position, (B, T, T) float64.

    For each layer's weights (B, H, T, T): take the maximum over heads, set the lowest share `discarded` of an image's weights
    to 0, add the identity for the residual path, and normalise rows. The layers are multiplied, the last on the left.
    """
    _, _, steps, _ = layers[0].shape
    identity_TT = torch.eye(steps, dtype=torch.float64)
    rolled_BTT = identity_TT.expand(len(layers[0]), -1, -1)
    for A_BHTT in layers:
        fused_BX = A_BHTT.double().cpu().amax(dim=1).flatten(start_dim=1)
        lowest_BX = fused_BX.argsort(dim=1, stable=True)[:, : int(discarded * steps * steps)]
        kept_BTT = fused_BX.scatter(1, lowest_BX, 0.0).view(-1, steps, steps) + identity_TT
        rolled_BTT = kept_BTT / kept_BTT.sum(dim=-1, keepdim=True) @ rolled_BTT
    return rolled_BTT


def over_patches(model: nn.Module, height: int, width: int, run: Callable[[], object]) -> Tensor:
    """Return how much of each patch is in the class token after the last layer, (B, h, w) float64, for images of this size.

    `run` passes the images through the model.

    Raises:
        SettingError: As in `attentions`, or the model has no class token.
    """
    layers = attentions(model, run)
    if not isinstance(model, VisionTransformer):
        raise SettingError(f"the model {type(model).__name__} has no class token: a rollout over images needs a vit")
    rows, columns = -(-height // model.patch), -(-width // model.patch)
    return rollout(layers)[:, 0, 1:].view(-1, rows, columns)
