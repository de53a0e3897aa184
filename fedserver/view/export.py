"""`fedserver export`: write the state and the reports of a federation as safetensors, CSV and JSON files."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from attune.common.errors import NoModel
from attune.common.given_model import GivenModel
from attune.common.identity.signed_files import REVOKED, files_in, sign
from attune.common.metrics import METRICS
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.common.text import csv_cell
from attune.common.wire.blobs import read_frames
from attune.common.wire.files import read_tensors, write_tensors
from attune.common.wire.tensors import Tensors
from attune.fedserver.consent import check_consent
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.authority import KEY_FILE, Authority
from attune.fedserver.lab.aggregators.closed_form import MEMBERS, OF, TOTAL, left_out
from attune.fedserver.lab.aggregators.mean import VALUE
from attune.fedserver.lab.aggregators.stored import MATRICES, NETWORK
from attune.fedserver.lab.engine import Engine
from attune.fedserver.lab.worth import IN_ONE_SUM, fleet_worths
from attune.fedserver.ports.blobs import SERVED, Blobs, blob_of, read_again
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.disk import scratch_blobs
from attune.fedserver.view import summary
from attune.fedserver.view.status import NO_WORTH, status

LEFT_OUT, WORTHS = ("client", "samples", "misfit"), ("client", "worth", "low", "high")
ORDER_COLUMNS = ("round", "work", "client", "samples", "staleness", "arrival")


def export_home(home: ServerHome, out: Path, allowed: Collection[str] = ()) -> list[str]:
    """Write everything into the folder `out`, also beside a running server; return a line for each thing written.

    Args:
        home: The home.
        out: The folder.
        allowed: Code of its own that the home may bring, by name.

    Raises:
        SettingError: The home names code without consent.
        NoModel: Round 1 has not started.
    """
    snapshot = home.snapshot()
    if snapshot.plan is None:
        raise NoModel(f"{home.path} has no model yet: the first round has not started")

    def state() -> list[str]:
        now = home.snapshot()
        check_consent(home, now, allowed)
        out.mkdir(parents=True, exist_ok=True)
        (out / REVOKED).write_bytes(msgspec.json.encode(sorted(device.public_key for device in now.devices if device.revoked)))
        return write_state(now, home.open().blobs, out)

    lines = [*read_again(state), *write_tables(snapshot, snapshot.plan, out)]
    if not (home.authority / KEY_FILE).exists():
        return [*lines, f"not signed: {home.path} has no key of the federation's authority"]
    authority = Authority.load(home.authority)
    begun = (out / REVOKED).stat().st_mtime_ns
    written = [path for path in files_in(out) if path.stat().st_mtime_ns >= begun]  # an older file is not this export's
    signature = sign(out, written, authority.credential, authority.certificate_pem, "")
    return [*lines, f"{signature}: the authority's signature of {len(written)} files, for `fedclient verify-model`"]


def write_tables(
    snapshot: Snapshot, plan: Plan, out: Path, reported: Collection[str] = (), troubles: Sequence[str] = ()
) -> list[str]:
    """Write plan, metrics, summary and status into the folder `out`; return a line for each file.

    Args:
        snapshot: The ledger's contents.
        plan: The plan of the run.
        out: An existing folder.
        reported: Devices that have answered the open orders.
        troubles: Problems that keep the federation from going on.
    """
    (out / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    with (out / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*ORDER_COLUMNS, *METRICS), extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: csv_cell(getattr(row, name)) for name in (*ORDER_COLUMNS, *METRICS)} for row in snapshot.rows)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summarised(snapshot, plan))))
    (out / "status.json").write_bytes(msgspec.json.format(msgspec.json.encode(status(snapshot, set(reported), None, troubles))))
    return [
        f"{out / 'metrics.csv'}: one row per round and client",
        f"{out / 'summary.json'}: accuracies by the protocols of both papers",
        f"{out / 'status.json'}: what `fedserver status --json` prints",
        f"{out / 'plan.json'}: model, classes and settings",
    ]


def summarised(snapshot: Snapshot, plan: Plan) -> summary.Summary:
    """Return the contents of summary.json."""
    settings = snapshot.settings
    return summary.summarise(snapshot.rows, settings, plan.model.name, snapshot.record.round, plan.scored)


def write_state(snapshot: Snapshot, blobs: Blobs, out: Path) -> list[str]:
    """Write the tensors of the state into the folder `out`; return a line for each file.

    Raises:
        Damaged: A file is damaged, or was removed by a running server.
    """
    with scratch_blobs(out) as scratch:
        return list(_tensors(_Exported(snapshot, blobs, scratch), out))


class _Exported:
    """State of a federation that is exported. Generated weights go to `scratch`."""

    def __init__(self, snapshot: Snapshot, blobs: Blobs, scratch: Blobs) -> None:
        assert snapshot.plan is not None  # noqa: S101 (callers have checked)
        self._blobs, self._scratch = blobs, scratch
        self._slots = {(slot.part, slot.key): blob_of(slot) for slot in snapshot.slots}
        self.worths = fleet_worths(snapshot.slots, blobs)
        self._engine = Engine(
            snapshot.plan, snapshot.slots, blobs, snapshot.record.round, served=scratch, variants=snapshot.variants
        )
        present = [device for device in snapshot.devices if device.samples is not None and not device.revoked]
        self._clients = [device.name for device in present]
        self._founders = [device.name for device in present if device.founder]

    def copy(self, part: str, key: str, to: Path) -> bool:
        """Copy a slot to a file; return False if there is no such slot."""
        blob = self._slots.get((part, key))
        if blob is not None:
            self._blobs.check(blob)
            with to.open("wb") as file:
                file.writelines(read_frames(self._blobs.open(blob), 0))
        return blob is not None

    def left_out(self) -> list[tuple[str, int, float]]:
        """Return the rows of left_out.csv; empty where no client has handed in sums, or behind masks."""
        sums = {key.removeprefix(OF): blob for (_, key), blob in sorted(self._slots.items()) if key.startswith(OF)}
        total = next((blob for (_, key), blob in self._slots.items() if sums and key == TOTAL), None)
        if total is None or MEMBERS in {key for _, key in self._slots}:
            return []
        of_clients = ((client, read_tensors(self._blobs.open(blob))) for client, blob in sums.items())
        return left_out(read_tensors(self._blobs.open(total)), of_clients)

    def ends(self) -> list[str]:
        """Return what the names of parts end with: nothing for the plan's own model, and `@` with its name for a variant."""
        return sorted({"", *(part[part.index("@") :] for part, _ in self._slots if "@" in part)})

    def client_weights(self) -> Iterator[tuple[str, Tensors]]:
        """Yield each client with its own weights, all parts together; empty if all clients are served the same."""
        shared = [blob for (_, key), blob in self._slots.items() if key == VALUE]
        for client, parts in self._engine.serve(self._clients, self._founders, solved=False).items():
            weights: Tensors = {}
            for _, blob in sorted(parts.items()):
                if blob not in shared:
                    weights |= read_tensors((self._scratch if blob.name.startswith(SERVED) else self._blobs).open(blob))
            yield client, weights


def _tensors(state: _Exported, out: Path) -> Iterator[str]:
    for end in state.ends():
        if state.copy(f"shared{end}", VALUE, out / f"shared{end}.safetensors"):
            whose = f"all clients of the variant {end[1:]} share" if end else "all clients share"
            yield f"{out / f'shared{end}.safetensors'}: what {whose}"
    folder = out / "clients"
    folder.mkdir(exist_ok=True)
    written = 0
    for client, weights in state.client_weights():
        if weights:
            write_tensors(folder / f"{client}.safetensors", weights)
            written += 1
    if written:
        yield f"{folder}: each client's own weights, as the server would send them next ({written} files)"
    for end in state.ends():
        files = {name: out / f"{name}{end}.safetensors" for name in ("attention", "hypernetwork", "server")}
        if any(state.copy(f"{part}{end}", MATRICES, files["attention"]) for part in ("attended", "generated", "shared")):
            yield f"{files['attention']}: which client learned from which in the last round"
        if state.copy(f"generated{end}", VALUE, files["hypernetwork"]):
            yield f"{files['hypernetwork']}: the hypernetwork, from which each device generates its weights"
        if state.copy(f"generated{end}", NETWORK, files["server"]):
            yield f"{files['server']}: hypernetwork, embeddings and optimiser"
    if rows := state.left_out():
        with (out / "left_out.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([LEFT_OUT, *((csv_cell(client), *numbers) for client, *numbers in rows)])
        first = ", ".join(f"{client} ({misfit:.2f})" for client, _, misfit in rows[:3])
        yield f"{out / 'left_out.csv'}: how little the sums of all others explain a client's, the least first: {first}"
    values = state.worths
    if isinstance(values, str):
        yield from [f"no worth.csv: {NO_WORTH if values == IN_ONE_SUM else values}"] if values else []
        return
    with (out / "worth.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([WORTHS, *((csv_cell(client), *numbers) for client, *numbers in values)])
    yield f"{out / 'worth.csv'}: what each client is worth to the others; show a client its own line alone"


def common_model(snapshot: Snapshot, plan: Plan, blobs: Blobs, beside: Path) -> tuple[GivenModel, Tensors]:
    """Return the model of a run that an unknown device would be served, with its scales.

    Raises:
        NoModel: Parts of its models never leave the devices.
    """
    tensors: Tensors = {}
    with scratch_blobs(beside) as scratch:
        engine = Engine(plan, snapshot.slots, blobs, snapshot.record.round, served=scratch)
        for part, blob in engine.cold_start([""])[""].items():
            if part in engine.manifests:  # and no other device's network
                tensors |= read_tensors((scratch if blob.name.startswith(SERVED) else blobs).open(blob))
    if missing := sorted(tensors_of(build(plan.model, plan.seed)).keys() - tensors.keys()):
        raise NoModel(f"{plan.method} has no common model: devices keep {missing[0]} and {len(missing) - 1} more tensors")
    return GivenModel.of_plan(plan, "common"), tensors
