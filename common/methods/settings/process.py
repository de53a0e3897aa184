"""What objective and predictor of the Gaussian process both have to know: importable without torch."""

from __future__ import annotations

import msgspec

from attune.common.config import Count, Positive


class ProcessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernel and Gibbs sampler: docs/methods/pfedgp.md. Set once, both components get them."""

    length_scale: Positive = 0.5  # of the kernel, in root-mean-square distance of a feature
    output_scale: Positive = 8.0  # prior variance of the latent function
    gibbs_steps: Count = 5  # of each chain, before its last state is used
    gibbs_draws: Count = 20  # chains side by side
