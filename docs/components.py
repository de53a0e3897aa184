"""The packages that Attune runs on, with versions and licences, as a CycloneDX bill of materials: `make site` writes it.

It lists the packages that are installed here and that Attune needs, alone or with its extras for users. The same installation
gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attune import DISTRIBUTION

OF_DEVELOPERS = {"dev", "docs", "engines"}  # extras of Attune that no user installs


def components() -> dict[str, Any]:
    """Return the bill of materials in the form of CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json)."""
    found: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    root = distribution(DISTRIBUTION)
    extras = set(root.metadata.get_all("Provides-Extra") or ()) - OF_DEVELOPERS
    waiting, seen = deque([(canonicalize_name(DISTRIBUTION), frozenset(extras))]), set()
    while waiting:
        if (wanted := waiting.popleft()) in seen:
            continue
        seen.add(wanted)
        name, chosen = wanted
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        for line in found[name].requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
                needs.setdefault(name, set()).add(canonicalize_name(need.name))
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    listed = {name: _component(name, found[name]) for name in sorted(found)}
    own = listed.pop(canonicalize_name(DISTRIBUTION))
    purls = {name: _purl(name, package) for name, package in sorted(found.items())}
    relations = [
        {"ref": purl, "dependsOn": [purls[need] for need in sorted(needs.get(name, ())) if need in purls]}
        for name, purl in purls.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": list(listed.values()),
        "dependencies": relations,
    }


def _component(name: str, package: Distribution) -> dict[str, Any]:
    purl = _purl(name, package)
    licences = [{"license": {"name": licence}} for licence in _licences(package)]
    return {"type": "library", "bom-ref": purl, "name": name, "version": package.version, "purl": purl, "licenses": licences}


def _purl(name: str, package: Distribution) -> str:
    return f"pkg:pypi/{name}@{package.version}"


def _licences(package: Distribution) -> list[str]:
    """Return the licences as the package states them: an expression, classifiers, or the first line of its text."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return [expression]
    stated = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if line.startswith("License ::")]
    return stated or [line.strip() for line in (metadata.get("License") or "").splitlines()[:1]]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(components(), indent=1) + "\n", encoding="utf-8")
