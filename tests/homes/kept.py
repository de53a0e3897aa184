"""Every file that a server or a device keeps, and where a later release finds the version of its format."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

FIELD = "a field of its own"
SCHEMA = "the schema number in state.sqlite, which the server reads before it"
DEVICE = "the file `format` of the device's home"
FOLDER = "summary.json of the same folder"
MODEL = "model.json of the same folder, which has its digest"
STANDARD = "none: a format of others, which says by itself what it is"
OPAQUE = "none: random characters without a structure"
EMPTY = "none: an empty file of a lock"
CACHE = "the digest in the folder's name, which depends on the version of what is fitted"
SERVER = {
    "state.sqlite": FIELD,
    "state.sqlite-wal": STANDARD,
    "state.sqlite-shm": STANDARD,
    "audit.jsonl": SCHEMA,
    "state/*.safetensors": SCHEMA,
    "state/recipe.*.json": SCHEMA,
    "given/*.json": SCHEMA,
    "given/*.safetensors": SCHEMA,
    "inbox/*/update.json": SCHEMA,
    "inbox/*/*.safetensors": SCHEMA,
    "inbox/*/*.bin": SCHEMA,
    "uploads/*/*": SCHEMA,
    "serve/*": SCHEMA,
    "privacy/noise-secret": OPAQUE,
    "privacy/statistics.json": SCHEMA,
    "server.json": FIELD,
    "dashboard.json": FIELD,
    "dashboard-tokens.json": FIELD,
    "dashboard-token": OPAQUE,
    "metrics-token": OPAQUE,
    "local-token": OPAQUE,
    "storage.json": SCHEMA,
    "cache/*": SCHEMA,
    "ca/ca.pem": STANDARD,
    "ca/ca-key.pem": STANDARD,
    "operator/operator.pem": STANDARD,
    "lock": EMPTY,
    "*.lock": EMPTY,
}
DEVICES = {
    "format": FIELD,
    "disclosed.jsonl": FIELD,
    "device.json": DEVICE,
    "shard.json": DEVICE,
    "plan.json": DEVICE,
    "orders-done": DEVICE,
    "orders/*/update.json": DEVICE,
    "orders/secure.json": DEVICE,
    "statistics.json": DEVICE,
    "sums.json": DEVICE,
    "orders/secret": OPAQUE,
    "orders/*/*.safetensors": DEVICE,
    "fitted/*/*.safetensors": CACHE,
    "identity/ca.pem": STANDARD,
    "identity/device.pem": STANDARD,
    "identity/key.pem": STANDARD,
    "model/model.json": FIELD,
    "model/signature.json": FIELD,
    "model/*.safetensors": MODEL,
    "lock": EMPTY,
}
EXPORTED = {
    "summary.json": FIELD,
    "signature.json": FIELD,
    "revoked.json": FOLDER,
    "status.json": FOLDER,
    "metrics.csv": FOLDER,
    "plan.json": FOLDER,
    "*.safetensors": FOLDER,
    "clients/*.safetensors": FOLDER,
}
SAVED = {  # beside the files of an export, by Result.save
    "table.csv": FOLDER,
    "manifest.json": FOLDER,
    "auto.json": FOLDER,
    "models/*/model.json": FIELD,
    "models/*/*.safetensors": MODEL,
}
BACKUP = {"MANIFEST.json": FIELD}  # beside the files of a server's home
PRIVACY = {"*/ledger.json": FIELD, "lock": EMPTY, "*/lock": EMPTY}


def unlisted(folder: Path, *tables: Iterable[str]) -> list[str]:
    """Return the files below a folder that no table names. Runs that were put aside in it are like the folder itself.

    Unfinished files, whose names begin with a dot, are no kept ones: the next start removes them.
    """
    patterns = [pattern for table in tables for pattern in table]
    kept = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_dir() or any(part.startswith(".") for part in parts):
            continue
        name = "/".join(parts[2:] if parts[0] == "runs" else parts)
        if not any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns):
            kept.append(str(path.relative_to(folder)))
    return kept
