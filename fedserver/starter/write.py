"""Writer of a new project's files."""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import SettingError

FILES = Path(__file__).parent / "project"


def write_project(folder: Path) -> list[Path]:
    """Write the files of a new project, and return their paths in the order in which to read them.

    Raises:
        SettingError: The folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already and is not empty; nothing was written: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in ("README.md", "run.py", "data.py", "model.py", "federation.toml"):
        written.append(folder / name)
        written[-1].write_bytes((FILES / name).read_bytes())
    return written
