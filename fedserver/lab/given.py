"""A model that is given for evaluation, as blobs of the server: a description, and the tensors beside it."""

from __future__ import annotations

from functools import partial

import msgspec

from attune.common.errors import AttuneError, SettingError
from attune.common.given_model import GivenModel
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.common.text import from_json
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of
from attune.common.wire.files import read_tensors, write_tensors
from attune.common.wire.header import check_manifest
from attune.common.wire.tensors import Tensors, check_finite, manifest_of
from attune.fedserver.ports.blobs import Blobs, Damaged

GIVEN = "given/"  # names of its blobs begin so; no other blob's does
MISSING = "the model that this run evaluates is not in {}: give it again (fedserver evaluate)"


def store_given(blobs: Blobs, given: GivenModel, tensors: Tensors) -> str:
    """Store a model, and return the digest of its description.

    Raises:
        SettingError: The tensors are not those of the model, or are not finite.
        DiskFull: The disk has no room.
    """
    check_tensors(given.model, given.seed, tensors)
    beside = f"{GIVEN}new.safetensors"
    blob = write_tensors(partial(blobs.create, beside), tensors)
    text = msgspec.json.encode(msgspec.structs.replace(given, files={given.network: blob.digest}, size=blob.size))
    digest = digest_of(text)
    blobs.keep(blob, tensors_name(digest))
    blobs.put(description_name(digest), text)
    blobs.remove([beside])
    return digest


def forget_others(blobs: Blobs, digest: str) -> None:
    """Remove the models that earlier runs evaluated; their state has the tensors."""
    blobs.remove([name for name in blobs.names(GIVEN) if name not in (tensors_name(digest), description_name(digest))])


def check_tensors(spec: ModelSpec, seed: int, tensors: Tensors) -> None:
    """Check that tensors are those of the model that a specification builds, and finite.

    Raises:
        SettingError: They are not, or the model cannot be built.
    """
    try:
        check_manifest(manifest_of(tensors), manifest_of(tensors_of(build(spec, seed))), "the given model")
        for name, tensor in tensors.items():
            check_finite(name, tensor, "the given model")
    except AttuneError as error:
        raise SettingError(f"the tensors are not those of the model that model.json describes: {error}") from None


def read_given(blobs: Blobs, digest: str) -> GivenModel:
    """Return the description with this digest.

    Raises:
        Damaged: It is missing or has other bytes.
    """
    try:
        text = blobs.get(description_name(digest))
    except KeyError:
        text = b""
    if digest_of(text) != digest:
        raise Damaged(MISSING.format("this home"))
    return from_json(text, GivenModel)


def tensors_of_given(blobs: Blobs, digest: str) -> Tensors:
    """Return the tensors of the model whose description has this digest.

    Raises:
        Damaged: The description or the tensors are missing, or have other bytes.
    """
    given = read_given(blobs, digest)
    blob = Blob(tensors_name(digest), given.files[given.network], given.size)
    return read_tensors(blobs.open(blob), digest=blob.digest)


def tensors_name(digest: str) -> str:
    """Return the name of the tensors' blob beside the description with this digest."""
    return f"{GIVEN}{digest.rpartition(':')[2]}.safetensors"


def description_name(digest: str) -> str:
    """Return the name of the blob with the description that has this digest."""
    return f"{GIVEN}{digest.rpartition(':')[2]}.json"
