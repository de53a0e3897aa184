"""Commitments of a federation to its secrets: the ledger has them, so that a server with other secrets is refused.

Servers that stand by for each other need the same secrets, which reach each of them as files. A commitment tells nothing of
a secret: it is 16 bytes of a keyed digest, or the fingerprint of a certificate, which devices know anyway.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from attune.common.errors import HomeMismatch
from attune.common.identity.credential import fingerprint_of
from attune.fedserver.identity.authority import authority_certificate_in
from attune.fedserver.ports.blobs import NOISE_SECRET, Blobs
from attune.fedserver.ports.storage import Storage

AUTHORITY, NOISE = "authority", "noise secret"
COMMITMENT_BYTES = 16
LABEL = b"attune commitment to a noise secret"
LOST = " If it is lost, begin a new run (`fedserver run new`), whose noise has nothing to do with that of this one."


def commitments_of(authority: Path, blobs: Blobs) -> dict[str, str]:
    """Return the commitment to each secret that a home has.

    Args:
        authority: The folder of the authority.
        blobs: The blobs of the home.

    Raises:
        HomeMismatch: The certificate of the authority is damaged.
    """
    commitments = {}
    if (certificate := authority_certificate_in(authority)) is not None:
        commitments[AUTHORITY] = fingerprint_of(certificate)
    try:
        secret = blobs.get(NOISE_SECRET)
    except KeyError:
        return commitments
    return commitments | {NOISE: hmac.digest(secret, LABEL, "sha256")[:COMMITMENT_BYTES].hex()}


def check_secrets(known: Mapping[str, str], authority: Path, blobs: Blobs) -> None:
    """Check that a home has the secrets of its federation.

    Args:
        known: Commitments by name, as the ledger has them.
        authority: The folder of the authority.
        blobs: The blobs of the home.

    Raises:
        HomeMismatch: A secret is another one, or is missing.
    """
    mine = commitments_of(authority, blobs)
    folders = {AUTHORITY: authority, NOISE: authority.parent / Path(NOISE_SECRET).parent}
    for name, commitment in known.items():
        if mine.get(name) != commitment:
            what = "is not the one of this federation" if name in mine else "is missing"
            raise HomeMismatch(
                f"the {name} of this server {what}: copy {folders[name]} from the server that has it, or from a backup."
                f"{LOST if name == NOISE else ''}"
            )


async def bind_secrets(storage: Storage, known: Mapping[str, str], authority: Path, noisy: bool) -> None:
    """Commit the federation to the secrets of this home, which has been checked.

    Args:
        storage: Its storage.
        known: Commitments by name, as the ledger has them.
        authority: The folder of the authority.
        noisy: Whether the present run draws noise in the server.
    """
    mine = commitments_of(authority, storage.blobs)
    bound = {**known, **{name: mine[name] for name in mine if noisy or name != NOISE}}
    if bound != known:
        await storage.ledger.set_commitments(bound)
