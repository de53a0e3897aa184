"""The chain of transforms of a part on the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from attune.common.exchange.encodings import PartEncoding
from attune.common.exchange.registry import transforms_for
from attune.common.exchange.transform import Chain, Transform, TransformSettings
from attune.common.methods.method import SOLVED
from attune.common.methods.ridge import sizes_of
from attune.common.methods.settings.aggregators import AggregatorSettings, ClosedFormSettings
from attune.common.plan import Plan
from attune.common.task import TaskName
from attune.fedserver.lab.checks import ChangeBound, FiniteCheck, NormLimit, SampleBound, ShapeCheck, SumsCheck
from attune.fedserver.lab.client_noise import ClientNoise, home_key
from attune.fedserver.ports.blobs import Blobs


def chain_of(
    part: str,
    settings: AggregatorSettings,
    transforms: Mapping[str, TransformSettings],
    noise: ClientNoise | None,
    task: TaskName,
    values: Mapping[str, Tensor],
) -> Chain:
    """Return the transforms of a part: bounds within a cohort, checks on arrival, those of the plan, and the encoding.

    With `noise`, clipping and noise take the place of the bounds. `values` are the part's tensors before round 1.
    """
    said_above = max(settings.bound, settings.bound_change)  # clipping changes half of a cohort in every round: that is no news
    bounds: list[Transform] = [
        SampleBound(settings.bound_samples),
        ChangeBound(settings.bound, settings.no_vote, said_above, settings.amplifies),
    ]
    checks: list[Transform] = [NormLimit(), FiniteCheck(), ShapeCheck()]
    if isinstance(settings, ClosedFormSettings):
        checks = [SumsCheck(task, sizes_of(values)), *checks[1:]]  # sums are no change, whose norm has a limit
    return Chain(
        [
            *(bounds if noise is None else [noise]),
            *checks,
            *transforms_for(part, transforms, beside=part == SOLVED),
            PartEncoding(),
        ]
    )


def noise_of(plan: Plan, blobs: Blobs, blocks: int) -> ClientNoise | None:
    """Return the transform that makes noisy sums of a cohort's changes; None without client-level privacy.

    Args:
        plan: The plan.
        blobs: The blobs of the home, with its secret.
        blocks: The number of parts that are released.
    """
    privacy = plan.noisy_sums
    if privacy is None:
        return None
    key = partial(home_key, blobs, privacy.insecure_seed, plan.run)
    quantile = privacy.clip_quantile
    return ClientNoise(privacy.clip, privacy.noise or 0.0, plan.expected_devices, blocks, key, quantile)
