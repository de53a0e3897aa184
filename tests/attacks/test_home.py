"""Another user of the server's machine looks into its home."""

from __future__ import annotations

from pathlib import Path

from attune.fedserver.home import ServerHome


def test_folders_that_others_could_read_are_closed_to_them(tmp_path: Path) -> None:
    """Use a home that was made by `mkdir`, or restored from a backup with other modes."""
    home = ServerHome(tmp_path / "home")
    for folder in (home.path, *(home.path / name for name in ("ca", "state", "inbox", "uploads", "operator"))):
        folder.mkdir(mode=0o755, parents=True)
        folder.chmod(0o755)
    home.create()
    folders = [home.path, *(path for path in home.path.rglob("*") if path.is_dir())]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}
