"""The same federation twice: simulated, and over mutual TLS between a server and two devices. The models are the same."""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import attune


def main(rounds: int = 5, port: int = 50051) -> None:
    """Print the predictions of both models for the same samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 100, 6)).astype(np.float32)
    data = {f"device{n}": (x[n], (x[n, :, 0] > n).astype(int)) for n in range(2)}
    simulated = attune.simulate(data, "fedmcsa", rounds=rounds)
    os.environ["ATTUNE_HOME"] = tempfile.mkdtemp()
    listening = threading.Event()
    serving = {"rounds": rounds, "host": "127.0.0.1", "port": port, "exit_when_done": True, "say": lambda _: listening.set()}
    with ThreadPoolExecutor() as threads:
        server = threads.submit(attune.serve, "fedmcsa", **serving)
        listening.wait()
        clients = [attune.Client(f"localhost:{port}", shard, name=name) for name, shard in data.items()]
        models = list(threads.map(attune.Client.run, clients))
        server.result()
    for model in models:
        print(model.info.name, model.predict(x[0][:9]) == simulated.model(model.info.name).predict(x[0][:9]))


if __name__ == "__main__":
    main()
