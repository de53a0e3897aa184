"""The objectives by name, and the settings of each: importable without torch."""

from __future__ import annotations

import msgspec

from common.config import Count, NonNegative, Positive
from common.gp.settings import ProcessSettings


class SgdSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plain loss has nothing to set."""


class ProximalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FedProx's mu, which is FedMCSA's lambda; 0 is plain SGD."""

    mu: NonNegative = 0.01


class MamlSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First-order MAML: docs/methods/per-fedavg.md."""

    alpha: Positive | None = None  # learning rate of the inner step; None: train.lr
    beta: Positive | None = None  # of the step that is taken, with the gradient behind the inner one; None: train.lr


class MoreauSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pFedMe: docs/methods/pfedme.md."""

    mu: NonNegative = 15.0  # the paper's lambda
    inner_steps: Count = 5  # the paper's K: steps of the personal model on one mini-batch
    personal_lr: Positive | None = None  # of these steps; None: train.lr


class OwnModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ditto: docs/methods/ditto.md."""

    mu: NonNegative = 0.1  # the paper's lambda; 0: the own model learns alone


class AlternatingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FedRep: docs/methods/fedrep.md. Both take the place of train.local_epochs and train.local_steps."""

    head_epochs: Count = 4  # of the private part, the rest frozen
    body_epochs: Count = 1  # of the rest, the private part frozen


class TwoHeadsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FedRoD has nothing to set."""


class GpSettings(ProcessSettings, frozen=True, forbid_unknown_fields=True):
    """pFedGP: docs/methods/pfedgp.md."""

    batch_points: Count = 128  # most labelled points of a mini-batch that a step uses; time is cubic in it


SETTINGS: dict[str, type[msgspec.Struct]] = {
    "sgd": SgdSettings,
    "proximal": ProximalSettings,
    "maml": MamlSettings,
    "moreau": MoreauSettings,
    "own-model": OwnModelSettings,
    "alternating": AlternatingSettings,
    "two-heads": TwoHeadsSettings,
    "gp": GpSettings,
}
KEEPS_OWN = frozenset({"moreau", "own-model", "two-heads"})  # those with extras: tensors of a device's own beside the model's
HEADLESS = frozenset({"gp"})  # those in which the classifier head takes no part
CLASSES = {
    "sgd": "common.objectives.sgd:Sgd",
    "proximal": "common.objectives.proximal:Proximal",
    "maml": "common.objectives.maml:Maml",
    "moreau": "common.objectives.moreau:Moreau",
    "own-model": "common.objectives.own_model:OwnModel",
    "alternating": "common.objectives.alternating:Alternating",
    "two-heads": "common.objectives.two_heads:TwoHeads",
    "gp": "common.objectives.gp:Gp",
}
