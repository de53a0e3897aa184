"""What objective and predictor of the Gaussian process both have to know: importable without torch."""

from __future__ import annotations

import msgspec

from attune.common.config import Count, Positive


class ProcessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernel and Gibbs sampler: docs/methods/pfedgp.md. Set once, both components get them."""

    # Length scale of the kernel, in root-mean-square distance of a feature. Small: only very similar samples count.
    length_scale: Positive = 0.5
    # Prior variance of the latent function. Small: probabilities near 1/2. Large: the sampler moves slowly.
    output_scale: Positive = 8.0
    # Gibbs steps of each chain, before its last state is used.
    gibbs_steps: Count = 5
    # Number of chains. More: less noise, and proportionally more time and memory.
    gibbs_draws: Count = 20
