"""An engine over a folder, and rounds with made-up updates: the server's work on tensors without the server."""

from functools import partial

import torch

from attune.common.config import TrainSettings
from attune.common.plan import ModelSpec, Plan
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.recovery import take_up
from attune.fedserver.stores.folder import FolderBlobs

TINY = {"width": 8, "heads": 2, "depth": 1}


def plan(method="fedavg", model="mlr", **options):
    shape, kind = ((4,), "tabular") if model == "mlr" else ((4, 4, 1), "images")
    spec = ModelSpec(model, kind, shape, 3, options=TINY if model == "vit" else {})
    return Plan("federation", 7, spec, [0, 1, 2], method, options, TrainSettings())


class Bench:
    """Engine over a folder. `restart` makes a new one from the committed state, as a new process would."""

    def __init__(self, folder, plan_):
        self.folder, self.plan, self.slots, self.closed = folder, plan_, {}, 0
        self.restart()
        self.commit()

    def restart(self):
        self.blobs = FolderBlobs(self.folder)
        self.engine, self.remade = take_up(self.plan, list(self.slots.values()), self.blobs, self.closed)

    def commit(self, keep=1):
        self.slots |= {(slot.part, slot.key): slot for slot in self.engine.staged_slots()}
        self.engine.settle()
        self.engine.forget(self.closed - keep)

    def digests(self, names=("a", "b")):
        return {name: {part: blob.digest for part, blob in parts.items()} for name, parts in self.engine.serve(names).items()}

    def entry(self, name, value, samples):
        """Return an update with `value` everywhere."""
        parts = {}
        for part, manifest in self.engine.manifests.items():
            tensors = {key: torch.full(spec.shape, float(value)) for key, spec in manifest.items()}
            parts[part] = self.write(f"inbox/{name}.{part}.{self.closed}", tensors)
        return AcceptedUpdate(Report(round=self.closed + 1, work="train", client=name, samples=samples), parts)

    def write(self, name, tensors):
        return write_tensors(partial(self.blobs.create, name), tensors)

    def read(self, blob):
        return read_tensors(self.blobs.open(blob))

    def damage(self, name):
        """Flip a bit of a file of the state; return the file, and the bytes that it had."""
        path = self.folder / "state" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return path, whole

    def round(self, **updates):
        self.engine.aggregate({name: self.entry(name, *said) for name, said in updates.items()})

    def close(self, keep=1, **updates):
        self.round(**updates)
        self.closed += 1
        self.commit(keep)

    def take(self, entries, *founders, **options):
        """Close a round with these updates, and return its outcome."""
        outcome = self.engine.aggregate(entries, *founders, **options)
        self.closed += 1
        self.commit()
        return outcome

    def go_back(self, to):
        assert self.engine.go_back(to).refused == ""
        self.closed += 1
        self.commit(self.closed)
