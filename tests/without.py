"""`make without`: the package without each feature, and a federation over the network without any.

Features are deleted from a copy of the package. A process imports the copy alone, which it asserts first.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"benchmarks", "docs", "examples", "tests"}
FEATURES = sorted(path.parent.name for path in (ROOT / "features").glob("*/feature.py"))
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
    attune.simulate(data, method, rounds=1, home=Path(copy) / method, progress=False)
    status, shown = said("status", "--home", str(Path(copy) / method / "server"))
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


def check(program: str, names: list[str]) -> None:
    """Run a program with a copy of the package without some features; end with its output if it fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "attune"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if Path(name).parts[0] not in NOT_SHIPPED and (ROOT / name).is_file():
                (package / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, package / name)
        for name in names:
            shutil.rmtree(package / "features" / name)
        done = subprocess.run(
            [sys.executable, "-c", START + program, folder, *names], cwd=folder, text=True, capture_output=True
        )
    if done.returncode:
        sys.exit(f"without {' '.join(names)}:\n{done.stdout}{done.stderr}")
    print(f"without {' '.join(names)}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    for one in FEATURES:
        check(EACH, [one])
    check(NETWORK, FEATURES)
