"""Fuzzing of one target by coverage: `python -m tests.fuzz.fuzz TARGET FOLDER [options of libFuzzer]`; needs atheris.

FOLDER is a corpus that grows, one file for each input. It begins with the seeds and the kept inputs of the repository.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["attune"]):
    from tests.fuzz.corpus import kept
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import throw


def main() -> None:
    name, folder, *options = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate([*seeds(name), *kept(name)]):
        (Path(folder) / f"begin{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options, folder], lambda data: throw(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
