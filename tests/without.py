"""`make without`: the package without each feature, and a federation over the network without any.

Features are taken out of a copy of the package, one after the other. A process that is forked from this one, which has imported
other packages alone, imports the copy alone, which it asserts first.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"benchmarks", "docs", "examples", "tests"}
FEATURES = sorted(path.parent.name for path in (ROOT / "features").glob("*/feature.py"))
OTHERS = ("torch._dynamo", "grpc.aio", "cryptography.x509", "matplotlib.figure", "sklearn.ensemble", "msgspec", "click")
START = """
import contextlib, importlib, importlib.util, io, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
copy, *names = sys.argv[1:]
sys.path[:] = [copy, *(path for path in sys.path if "__editable__" not in path and not (Path(path) / "attune").exists())]
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
import attune
for name in names:
    assert importlib.util.find_spec(f"attune.features.{name}") is None, f"{name} can be imported"
assert Path(attune.__file__).parent == Path(copy) / "attune"
from attune import seams
from attune.fedserver.cli import main

def said(*words):
    "Run `fedserver`, and return its exit status and all that it prints."
    sys.argv, text, status = ["fedserver", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    return status, text.getvalue()

import numpy
rng = numpy.random.default_rng(0)
data = {name: (rng.normal(size=(20, 4)).astype("float32"), numpy.arange(20) % 2) for name in ("kiel", "lund")}
"""
EACH = """
[name] = names
status, help = said("--help")
assert status == 0 and "Commands:" in help
for command in [command for command, feature in seams.COMMANDS.items() if feature == name]:
    assert f"  {command} " not in help, command
    status, line = said(command)
    assert status == 2 and line.count("\\n") == 1 and name in line, line
for method in ("fedavg", "fedtp"):
    home = Path(copy) / f"{method}-{name}"
    attune.simulate(data, method, rounds=1, home=home, progress=False)
    status, shown = said("status", "--home", str(home / "server"))
    assert status == 0 and f"round 1/1 of {method}" in shown, shown
for path in sorted(Path(attune.__file__).parent.rglob("*.py")):
    module = ".".join(("attune", *path.relative_to(Path(attune.__file__).parent).with_suffix("").parts))
    if "starter" not in path.parts:
        try:
            importlib.import_module(module.removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            assert not str(error.name).startswith("attune"), (module, error)
"""
NETWORK = """
from attune.fedserver.home import ServerHome
listening, home = threading.Event(), Path(copy) / "home"
with ThreadPoolExecutor() as threads:
    server = threads.submit(attune.serve, "fedtp", rounds=2, home=home, host="127.0.0.1", port=0, exit_when_done=True,
                            say=lambda line: listening.set())
    server.add_done_callback(lambda _: listening.set())
    assert listening.wait(60)
    address, token = f"127.0.0.1:{ServerHome(home).address().port}", (home / "local-token").read_text()
    devices = [attune.Client(address, data[name], name=name, token=token, home=Path(copy) / name) for name in data]
    models = list(threads.map(attune.Client.run, devices))
    server.result()
assert len(models) == 2 and all(len(model.predict(data["kiel"][0])) == 20 for model in models)
"""


def copy_package(folder: Path) -> None:
    """Copy the package without what is not shipped."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if Path(name).parts[0] not in NOT_SHIPPED and (ROOT / name).is_file():
            (folder / "attune" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "attune" / name)


def live(folder: Path, program: str, names: list[str]) -> None:
    """Run a program in this process, with its output in the file `said`."""
    os.chdir(folder)
    with Path("said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.argv = ["", str(folder), *names]
    exec(compile(START + program, "without", "exec"), {"__name__": "__main__"})  # noqa: S102 (our own code)


def check(folder: Path, program: str, names: list[str]) -> None:
    """Run a program with the copy, of which some features are taken out meanwhile; end with its output if it fails."""
    began = time.monotonic()
    features, aside = folder / "attune" / "features", folder / "aside"
    for name in names:
        (features / name).rename(aside / name)
    forked = multiprocessing.get_context("fork").Process(target=live, args=(folder, program, names))
    forked.start()
    forked.join()
    for name in names:
        (aside / name).rename(features / name)
    if forked.exitcode:
        sys.exit(f"without {' '.join(names)}:\n{(folder / 'said').read_text()}")
    print(f"without {' '.join(names)}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    for other in OTHERS:
        import_module(other)
    assert "attune" not in sys.modules
    with tempfile.TemporaryDirectory() as work:
        copy_package(Path(work))
        (Path(work) / "aside").mkdir()
        for one in FEATURES:
            check(Path(work), EACH, [one])
        check(Path(work), NETWORK, FEATURES)
