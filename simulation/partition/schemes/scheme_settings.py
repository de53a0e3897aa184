"""Settings of the schemes, with defaults and checks. This module does not import numpy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from attune.common.config import Count, CountOrZero

Concentration = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # of a Dirichlet distribution
Deviation = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
SampleShare = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class IidSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `iid`: none, every client gets the same share of every class."""


class PathologicalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `pathological`: a few classes for each client."""

    classes_per_client: Count = 2


class DirichletSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `dirichlet`: shares of each class by a Dirichlet distribution, with capped sizes."""

    alpha: Concentration = 0.3  # smaller is more unequal


class PachinkoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `pachinko`: for every sample a coarse class, then a fine class of it."""

    alpha: Concentration = 0.3  # over the coarse classes
    beta: Concentration = 10.0  # over the fine classes of a coarse one
    coarse: str = "coarse"  # the label array with the coarse classes


class Coarse5Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `coarse5`: siblings share a coarse class."""

    siblings: Count = 5  # clients per coarse class
    # What each sibling gets: an equal share of every fine class, or one fine class (harder). The setting is called `each`.
    fine_classes: Literal["equal", "one-class"] = msgspec.field(name="each", default="equal")
    coarse: str = "coarse"


class UnequalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `two-class-unequal` (FedMCSA's images): consecutive classes, unequal sizes, both parts pooled."""

    classes_per_client: Count = 2
    test: SampleShare = 0.25  # of each client's samples


class SyntheticSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of Synthetic(alpha, beta)."""

    alpha: Deviation = 0.5  # deviation of the means of the clients' models; no label depends on it (erratum E8)
    beta: Deviation = 0.5  # deviation of the clients' features
    features: Count = 60
    classes: Annotated[int, msgspec.Meta(ge=2)] = 10
    test: SampleShare = 0.25  # of each client's samples; 0.1 in the published code (E4)


class CountsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `counts`: a table of label counts for each client, both parts pooled."""

    table: str = ""  # path of a CSV file with the columns client, label, samples
    test: SampleShare = 0.25  # of each client's samples


class NaturalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `natural`: the data name the clients."""

    by: str = "client"  # the column or label array that names the client
    split: Literal["auto", "given", "random", "time"] = "auto"  # auto: "given" if there is a test part, else "random"
    group: str = ""  # a label array: samples with the same value are in the same part
    test: SampleShare = 0.25  # of each client's samples, unless given
    at_least: Annotated[int, msgspec.Meta(ge=2)] = 2  # samples; clients with fewer are left out


class RolesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `roles`: a client for each role, whose text is cut in time."""

    window: Count = 80  # characters of a sample
    target: Literal["each", "last"] = "each"  # the next character of each position, or of the last alone
    stride: CountOrZero = 0  # characters from one window to the next; 0: `window` for "each", 1 for "last"
    train: SampleShare = 0.8  # share of the role's text, from its beginning
    at_least: CountOrZero = 0  # characters; roles with fewer are left out
