"""One revision's half of `make same-bits`: it runs every case, and prints the digests of the files that the case leaves.

The program runs with the `attune` on PYTHONPATH, which may be years older than this file. So it uses only the stable parts for
users: `attune.simulate`, the two commands, and the files of homes.

It prints one line of JSON for each case: {"case": NAME, "digests": {ITEM: DIGEST}}, or {"case": NAME, "failed": WHY}.
"""

import hashlib
import json
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np

METHODS = [
    "ditto", "fedamp", "fedavg", "fedavg+ft", "fedavg+mcsa", "fedbn", "fedmcsa", "fedmcsa-mcsa", "fedper", "fedprox",
    "fedrep", "fedrod", "fedtp", "fedtp+fedper", "fedtp+fedrod", "fedtp+knn", "fedtp+mcsa", "fedtp-encoder", "fedtp-mlp",
    "fedtp-norm", "heurfedamp", "local", "per-fedavg", "pfedgp", "pfedhn", "pfedme", "pfedme+mcsa",
    "vanilla-personalized",
]  # fmt: skip
# Methods that the first revision does not have.
NEWER = ["analytic", "apfl", "fedala", "fedbabu", "feddbe", "fedsa-lora", "fedtp-lora", "mr-mtl"]
OVER_THE_NETWORK = ["fedavg", "fedtp", "fedmcsa", "fedper", "pfedme", "ditto"]
SAMPLED = {"round.clients": 3, "round.evaluate_every": 1}
# Variants of a round that the methods' defaults do not use: method, settings, other arguments of attune.simulate, by name.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sampled": ("fedper", SAMPLED, {}),
    "sampled, all train": ("fedmcsa", SAMPLED | {"round.train": "all"}, {}),
    "sampled, generated": ("fedtp", SAMPLED, {}),
    "bf16": ("fedavg", {"round.encoding": "bf16"}, {}),
    "int8": ("fedtp", {"round.encoding": "int8"}, {}),
    "int8, attended": ("fedmcsa", {"round.encoding": "int8"} | SAMPLED, {}),
    "zstd": ("fedtp", {"round.encoding": "zstd"}, {}),
    "int8 up, zstd down": ("fedavg", {"round.encoding": "int8", "round.served": "zstd"}, {}),
    "an encoding for each part": ("fedtp", {"round.encodings": {"generated": "int8", "shared": "bf16"}}, {}),
    "clipped": ("fedavg", {"method.robust": "clip"}, {}),
    "median": ("fedper", {"method.robust": "median"}, {}),
    "trimmed mean": ("fedavg", {"method.robust": "trimmed-mean"}, {}),
    "multi-krum": ("fedavg", {"method.robust": "multi-krum"}, {}),
    "clipped, generated": ("fedtp", {"method.robust": "clip"}, {}),
    "no bounds": ("fedavg", {"method.bound_change": 0, "method.bound_samples": 0}, {}),
    "narrow bounds": ("fedavg", {"method.bound_change": 0.5, "method.bound_samples": 0.5}, {}),
    "cap and floor": ("fedmcsa", {"method.attention_cap": 0.15, "method.self_floor": 0.4}, {}),
    "the dial": ("fedmcsa", {"method.dial": True}, {"baseline": "local"}),
    "published": ("fedmcsa", {"method.preset": "published", "train.validation": 0.1, "round.take_back": 10.0}, {}),
    "baseline": ("fedtp", {}, {"baseline": "local"}),
    "adam, cosine, augmented": (
        "fedavg",
        {"train.optimizer": "adam", "train.lr": 0.01, "train.schedule": "cosine", "train.augment": ["flip", "crop", "noise"]},
        {},
    ),
    "server's sgd": ("pfedhn", {"method.server_optimiser": "sgd"}, {}),
    "stacked": ("fedtp", {}, {"executor": "stacked"}),
    "stacked, attended": ("fedmcsa", {}, {"executor": "stacked"}),
    "processes": ("fedper", {}, {"executor": "processes", "workers": 2}),
    "tabular": ("fedmcsa", {}, {}),
    "tokens": ("fedtp", {"data.kind": "tokens"}, {}),
    "regression": ("fedavg+ft", {}, {"task": "regression"}),
    "multilabel": ("fedper", {}, {"task": "multilabel"}),
}
SEED, ROUNDS, DEVICES = 5, 3, 4
# Models and epochs are named: the revisions may have other defaults.
SMALL = {"train.local_epochs": 1, "train.batch_size": 8}
MODELS = {"tabular": "dnn", "tokens": "transformer", "regression": "dnn", "multilabel": "dnn"}  # of variants; else IMAGES
IMAGES = "vit"
PATIENCE_S = 180.0  # longest time of a federation over the network, which needs ten seconds on a quiet machine
LENGTH = 8  # bytes of a safetensors file with the length of its header
# Keys of JSON that differ between runs although no bit of a model does.
VOLATILE = {"seconds", "federation", "check"}
# Keys that the first revision does not have: metrics of what a device keeps and of privacy, and the form of model.json.
NEWER_KEYS = {
    "above_constant", "epsilon", "likelihood_after_0", "likelihood_after_10", "likelihood_after_20", "likelihood_after_5",
    "likelihood_closed_form", "likelihood_closed_form_error", "likelihood_kept", "test_groups", "format", "privacy",
}  # fmt: skip
NEWER_KEYS |= {
    f"kept_{name}_{rival}" for name in ("better_than", "worse_than", "gain", "error", "p") for rival in ("common", "local")
}


def shards(kind: str) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the data of each device: (train_x, train_y, test_x, test_y). Devices differ in size and in their labels.

    Args:
        kind: the name of a variant that needs other data than images, or any other text.
    """
    made = {}
    for number in range(DEVICES):
        rng = np.random.default_rng(number)
        train, test = 18 + 8 * number, 12  # the first device has too few samples to hold any out
        label = (rng.integers(0, 4, train + test) + number) % 6
        if kind == "tokens":
            x = (label[:, None] + rng.integers(0, 3, (train + test, 7))) % 9
        elif kind in ("tabular", "regression", "multilabel"):
            x = (rng.normal(size=(train + test, 6)) + label[:, None] / 3).astype("f4")
        else:
            pattern = np.random.default_rng(99).normal(size=(6, 8, 8, 1))
            x = (pattern[label] + rng.normal(size=(train + test, 8, 8, 1))).astype("f4")
        y = label
        if kind == "regression":
            y = x[:, :2].sum(axis=1, keepdims=True) + label[:, None]
        if kind == "multilabel":
            y = np.stack([label % 2, label // 3], axis=1)
        made[f"d{number}"] = (x[:train], y[:train], x[train:], y[train:])
    return made


def without_sums() -> dict[str, str]:
    """Return the setting that keeps the closed form of all devices' sums out of blends, if the revision knows it."""
    from attune.common.config import RoundSettings

    return {"round.analytic": "off"} if "analytic" in RoundSettings.__struct_fields__ else {}


def simulated(folder: Path, method: str, kind: str, settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    """Run one federation in this process and return the digests of its home."""
    import attune

    home = folder / "simulated" / kind.replace(" ", "-")
    attune.simulate(
        shards(kind),
        method=method,
        model=MODELS.get(kind, IMAGES),
        rounds=ROUNDS,
        seed=SEED,
        settings={**SMALL, **without_sums(), **settings},
        home=home,
        progress=False,
        **more,
    )
    return digests(home / "server", {path.name: path for path in (home / "devices").iterdir()})


def networked(folder: Path, method: str) -> dict[str, str]:
    """Run one federation in real processes over mutual TLS and return the digests of its homes.

    One device has a process of its own; the others are hosted together.
    """
    from attune.fedclient import options

    place = folder / "network" / method
    files = place / "shards"
    files.mkdir(parents=True)
    members = shards("images")
    for name, (train_x, train_y, test_x, test_y) in members.items():
        np.savez(files / f"{name}.npz", train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
    server = place / "attune" / "server"
    flags = ["--host", "127.0.0.1", "--port", "0", "--dashboard", "off", "--exit-when-done", "--join-uses", str(DEVICES)]
    flags += [
        "--method", method, "--model", IMAGES, "--rounds", str(ROUNDS), "--seed", str(SEED), "--min-clients",
        str(DEVICES),
    ]  # fmt: skip
    for key, value in {**SMALL, "server.threads": 1}.items():
        flags += ["--set", f"{key}={value}"]
    with running(place) as start:
        start("fedserver", *flags)
        port = listening(server, PATIENCE_S)
        to = ["--server", f"localhost:{port}", "--device", "cpu", "--threads", "1"]
        if hasattr(options, "DeviceOptions"):  # the first revision has no such class, and discloses statistics unasked
            to += ["--disclose", "statistics"]
        start("fedclient", "--data", str(files / "d0.npz"), "--name", "solo-d0", "--home", str(place / "solo"), *to)
        hosted = [word for name in members if name != "d0" for word in ("--data", str(files / f"{name}.npz"))]
        start("fedclient", *hosted, "--name", "host", "--home", str(place / "hosted"), *to)
    homes = {path.parent.name: path.parent for path in (place / "hosted").glob("*/device.json")}
    if len(homes) != DEVICES - 1:
        raise RuntimeError(f"{DEVICES - 1} hosted devices were started, and {len(homes)} have a home")
    return digests(server, {"solo": place / "solo"} | homes)


@contextmanager
def running(place: Path) -> Iterator[Callable[..., None]]:
    """Give a function that starts commands; at the end, wait until all have ended well. None outlives the block.

    Raises:
        RuntimeError: a command failed, or took too long; with the end of what it printed.
    """
    processes: list[tuple[ForkProcess, Path]] = []

    def start(command: str, *words: str) -> None:
        log = place / f"{len(processes)}-{command}.log"
        process = get_context("fork").Process(target=become, args=(command, words, log, place / "attune"))
        process.start()
        processes.append((process, log))

    try:
        yield start
        deadline = time.monotonic() + PATIENCE_S
        for process, log in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                raise RuntimeError(f"{log.name}: exit status {process.exitcode}: {log.read_text()[-400:].strip()}")
    finally:
        for process, _ in processes:
            process.kill()
            process.join()


def become(command: str, words: Sequence[str], log: Path, home: Path) -> None:
    """Run a command in this process, which was forked for it, as users run it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.environ["ATTUNE_HOME"] = str(home)
    sys.argv = [command, *words]
    [entry] = entry_points(group="console_scripts", name=command)
    sys.exit(entry.load()())


def listening(server: Path, patience_s: float) -> int:
    """Wait until a server listens; return its port.

    Raises:
        RuntimeError: it does not in this time.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            return int(json.loads((server / "server.json").read_bytes())["port"])
        time.sleep(0.1)
    raise RuntimeError(f"no server listens after {patience_s:.0f} s: {server.parent.parent}/0-fedserver.log says why")


def digests(server: Path, devices: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of every slot, of every tensor file of server and devices, of every metric and of every model.json."""
    made = {}
    with closing(sqlite3.connect(server / "state.sqlite")) as ledger:
        for part, key, digest in ledger.execute("SELECT part, key, digest FROM slots ORDER BY part, key"):
            made[f"slot {part}/{key}"] = digest
        for number, work, client, row in ledger.execute(
            "SELECT round, work, client, row FROM metrics ORDER BY round, work, client"
        ):
            made[f"metrics of round {number}, {client}, {work}"] = of_json(row)
    for path in sorted((server / "state").glob("*.safetensors")):
        made[f"server {path.name}"] = of_tensors(path)
    for name, home in sorted(devices.items()):
        for path in sorted(home.glob("orders/*/*.safetensors")) + sorted(home.glob("model/*.safetensors")):
            made[f"device {name} {path.relative_to(home)}"] = of_tensors(path)
        made[f"device {name} model/model.json"] = of_json((home / "model" / "model.json").read_bytes())
    return made


def of_tensors(path: Path) -> str:
    """Return a digest of names, types, shapes and bytes of the tensors in a safetensors file, in the order of names."""
    data = path.read_bytes()
    begin = LENGTH + int.from_bytes(data[:LENGTH], "little")
    hashed = hashlib.sha256()
    for name, entry in sorted(json.loads(data[LENGTH:begin]).items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            hashed.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            hashed.update(data[begin + first : begin + last])
    return hashed.hexdigest()


def of_json(text: bytes) -> str:
    """Return a digest of a JSON object without its volatile keys."""
    kept = {key: value for key, value in json.loads(text).items() if key not in VOLATILE | NEWER_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def main(folder: Path, only: str) -> None:
    """Run the cases whose names contain `only`, and print a line of JSON for each.

    The network's come first: their processes are forked from this one, which has imported what takes longest and done nothing.
    """
    import grpc.aio  # noqa: F401
    import torch  # noqa: F401

    cases: dict[str, Callable[[], dict[str, str]]] = {}
    for method in OVER_THE_NETWORK:
        cases[f"{method}, over the network"] = partial(networked, folder, method)
    for method in METHODS:
        cases[method] = partial(simulated, folder, method, method, {}, {})
    for name, (method, settings, more) in VARIANTS.items():
        cases[f"{method}, {name}"] = partial(simulated, folder, method, name, settings, more)
    for name, run in cases.items():
        if only not in name:
            continue
        try:
            line: dict[str, Any] = {"case": name, "digests": run()}
        except Exception as error:
            why = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
            line = {"case": name, "failed": why.replace(str(folder), "FOLDER")}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that children end, too
    main(Path(sys.argv[1]), sys.argv[2])
