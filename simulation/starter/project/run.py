"""Start of everything: a simulation in this process, or the server and the devices of a real federation."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "federation.toml"
HOMES = HERE / "homes"  # the state of server and devices
os.environ.setdefault("ATTUNE_HOME", str(HOMES))

import attune
import data
import model


def simulate() -> None:
    """Run all sites in this process, without a network."""
    given = {"config": CONFIG, "train": model.train, "label": data.LABEL, "table": data.TABLE}
    result = attune.simulate(data.sites(), baseline="alone+local", progress=True, **given)
    print(result.table())


def serve(port: int) -> None:
    """Run the server. It prints the token that devices need, and ends after the last round."""
    attune.serve(config=CONFIG, port=port, join_uses=100, exit_when_done=True)


def device(site: str, server: str, token: str | None) -> None:
    """Run one site. It trains until the federation is over, and keeps its model."""
    client = attune.Client(
        server,
        data.sites()[site],
        model=model.network,  # the only model code that the server may name to run here
        train=model.train,
        label=data.LABEL,
        table=data.TABLE,
        name=site,
        home=HOMES / "devices" / site,
        token=token,
        baseline="alone+local",
    )
    client.run()


def network(port: int) -> None:
    """Run the server and a device for each site as processes of this machine, joined by the network."""
    run = [sys.executable, "-u", __file__]
    server = subprocess.Popen([*run, "serve", "--port", str(port)], stdout=subprocess.PIPE, text=True)
    devices = []
    for line in server.stdout:
        print("server:", line, end="")
        if "fedclient join" in line:  # the server listens now
            devices = [subprocess.Popen([*run, "device", site, "--server", f"localhost:{port}"]) for site in data.sites()]
    sys.exit(max(process.wait() for process in (server, *devices)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.set_defaults(call=simulate)
    commands = parser.add_subparsers()
    for call in (serve, device, network):
        command = commands.add_parser(call.__name__, help=call.__doc__)
        command.set_defaults(call=call)
        if call is device:
            command.add_argument("site")
            command.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
            command.add_argument("--token", help="the token that the server has printed; not needed on the server's machine")
        else:
            command.add_argument("--port", type=int, default=50051)
    given = vars(parser.parse_args())
    given.pop("call")(**given)
