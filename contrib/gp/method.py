"""pFedGP's row and its settings, without torch.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021. The network
before the head is the kernel, and is averaged; the Gaussian processes on it are the device's own.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from attune.common.config import Count, Positive
from attune.common.methods.method import Method
from attune.common.methods.settings.objectives import ObjectiveSettings, PredictorSettings

PFEDGP = Method(
    name="pfedgp",
    citation="Achituve et al., NeurIPS 2021",
    parts=(("@head", "private"), ("*", "shared")),
    objective="gp",
    predictor="gp",
)
_ONLY_CLASSES = "it classifies by Gaussian processes. Take fedavg+ft or fedper"


class ProcessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernel and Gibbs sampler (docs/methods/pfedgp.md). Set once, objective and predictor get them."""

    # Length scale of the kernel, in root-mean-square distance of a feature. Small: only very similar samples count.
    length_scale: Positive = 0.5
    # Prior variance of the latent function. Small: probabilities near 1/2. Large: the sampler moves slowly.
    output_scale: Positive = 8.0
    # Gibbs steps of each chain, before its last state is used.
    gibbs_steps: Count = 5
    # Number of chains. More: less noise, and proportionally more time and memory.
    gibbs_draws: Count = 20


class GpObjectiveSettings(ProcessSettings, ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """pFedGP: docs/methods/pfedgp.md."""

    implementation: ClassVar[str] = "attune.contrib.gp.objective:GpObjective"
    own_loop: ClassVar[str] = "its loss is a likelihood of Gaussian processes over a whole batch"
    not_private: ClassVar[str] = own_loop
    only_classes: ClassVar[str] = _ONLY_CLASSES
    uses_head: ClassVar[bool] = False
    needs_features: ClassVar[bool] = True
    # Largest number of labelled points of a mini-batch in a step, drawn at random. Time is cubic in it.
    batch_points: Count = 128


class GpPredictorSettings(ProcessSettings, PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """pFedGP: docs/methods/pfedgp.md."""

    implementation: ClassVar[str] = "attune.contrib.gp.objective:GpPredictor"
    needs_features: ClassVar[bool] = True
    only_classes: ClassVar[str] = _ONLY_CLASSES
    # Largest number of training points, at least one of each class first. Fewer than classes: some classes are never
    # predicted. Time is cubic in it.
    memory_points: Count = 256
