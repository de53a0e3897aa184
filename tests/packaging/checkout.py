"""The files of the checkout, and those of them that the wheel must have."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
NOT_SHIPPED = {"benchmarks", "docs", "examples", "tests"}


def files() -> list[Path]:
    """Return every file that is tracked, or is new and not ignored, relative to the root. Links are left out."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = sorted({Path(name) for name in done.stdout.split("\0") if name})
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def package_folders() -> set[Path]:
    """Return every folder with an `__init__.py` that is part of `attune`; the root itself is Path(".")."""
    found = {path.parent for path in files() if path.name == "__init__.py"}
    return {folder for folder in found if not NOT_SHIPPED & set(folder.parts[:1])}


def shipped() -> set[Path]:
    """Return the files of an installed `attune`, relative to the root: code, stubs, typing mark, protos, data of packages."""
    folders = package_folders() - {Path()}
    code = {path for path in files() if path.parent in folders}
    top = {path for path in files() if path.parent == Path() and (path.suffix == ".py" or path.name == "py.typed")}
    protos = {path for path in files() if path.parts[0] == "proto" and path.suffix == ".proto"}
    folders_of_data = ("features/web/page", "simulation/starter/project", "features/remote/schema")
    data = {path for path in files() if path.parent in map(Path, folders_of_data)}
    return code | top | protos | data


def pyproject() -> dict[str, Any]:
    return msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())
