"""The aggregators of a server whose rounds are carried out by a team of workers."""

from __future__ import annotations

from typing import cast

from attune.common.methods.settings.aggregators import MeanSettings
from attune.fedserver.lab.aggregators.base import Aggregator, Vault
from attune.fedserver.lab.build import AggregatorSpec, Maker, made
from attune.fedserver.lab.cluster.hypernetwork import SpreadHypernetwork
from attune.fedserver.lab.cluster.spread import BlobVault, Spread
from attune.fedserver.lab.cluster.team import Team

PLAIN = ("none", "clip")


def maker(team: Team) -> Maker:
    """By columns, and hypernetworks by heads. A plain mean stays here: to send a number costs more than to add it."""

    def make(job: AggregatorSpec, vault: Vault) -> Aggregator:
        if isinstance(job.settings, MeanSettings) and job.settings.robust in PLAIN:
            return made(job, vault)
        if job.aggregator == "hypernetwork":
            return SpreadHypernetwork(team, job, vault)
        return made(job, vault, Spread(team, job, cast(BlobVault, vault)))

    return make
