"""The schemes' settings, their defaults and checks; no numpy here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from attune.common.config import Count, CountOrZero

Concentration = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # of a Dirichlet distribution
Deviation = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Part = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class IidSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everybody gets the same share of every class: nothing to set."""


class PathologicalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A few classes for each client."""

    classes_per_client: Count = 2


class DirichletSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of each class by a Dirichlet distribution, sizes capped."""

    alpha: Concentration = 0.3  # smaller is more unequal


class PachinkoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pachinko allocation: a coarse class, then a fine class of it, for every single sample."""

    alpha: Concentration = 0.3  # over the coarse classes
    beta: Concentration = 10.0  # over the fine classes of a coarse one
    coarse: str = "coarse"  # the label array with the coarse classes


class Coarse5Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Siblings that share a coarse class."""

    siblings: Count = 5  # clients to a coarse class
    each: Literal["equal", "one-class"] = "equal"  # "one-class", the harder variant: each sibling gets one fine class
    coarse: str = "coarse"


class UnequalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FedMCSA's images: consecutive classes, unequal sizes, both parts pooled."""

    classes_per_client: Count = 2
    test: Part = 0.25  # of each client's samples


class SyntheticSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Synthetic(alpha, beta)."""

    alpha: Deviation = 0.5  # of the clients' models: how much their labellings differ
    beta: Deviation = 0.5  # of the clients' features
    features: Count = 60
    classes: Annotated[int, msgspec.Meta(ge=2)] = 10
    test: Part = 0.25  # of each client's samples; 0.1 in the published code (E4)


class NaturalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients that the data name."""

    by: str = "client"  # the column or label array that names the client
    split: Literal["auto", "given", "random", "time"] = "auto"  # auto: "given" if there is a test part, else "random"
    group: str = ""  # a label array: samples with the same value are in the same part
    test: Part = 0.25  # of each client's samples, unless given
    at_least: Annotated[int, msgspec.Meta(ge=2)] = 2  # samples; clients with fewer are left out


class RolesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client to a role, its text cut in time."""

    window: Count = 80  # characters of a sample
    target: Literal["each", "last"] = "each"  # the next character of each position, or of the last alone
    stride: CountOrZero = 0  # characters from one window to the next; 0: `window` for "each", 1 for "last"
    train: Part = 0.8  # of the role's text, its beginning
    at_least: CountOrZero = 0  # characters; roles with fewer are left out
