"""The generated regions of the documents: `make docs` rewrites them from the code and from the result files.

A region begins with `<!-- generated: NAME -->` and ends with `<!-- end generated -->`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from attune.seams import SEAMS, features
from benchmarks import (
    across_sizes_tables,
    closed_form_tables,
    described_tables,
    method_tables,
    paper_findings,
    private_tables,
    recipe_tables,
    report,
    robust_tables,
    schemas,
    shared_optimiser_tables,
    target_tables,
)
from benchmarks.measure import read_limits
from docs import alone_tables, disclosed, settings_tables, tables, training_tables
from docs.markdown import table

ROOT = Path(__file__).parents[1]
REGION = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->\n.*?<!-- end generated -->", re.DOTALL)
CODE = ("common", "features", "fedserver", "fedclient", "simulation", "contrib", "benchmarks", "examples")


def packages() -> Iterator[str]:
    """Yield the packages, each with the first line of its docstring."""
    rows = []
    for top in CODE:
        for file in sorted((ROOT / top).rglob("__init__.py")):
            summary = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            rows.append((f"`{file.parent.relative_to(ROOT)}`", summary))
    yield from table(("package", "its job"), rows)


def layers() -> Iterator[str]:
    """Yield the contracts of import-linter in pyproject.toml."""
    settings = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())
    contracts = settings["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        if contract["type"] == "layers":
            yield from [f"{contract['name']}:", "", "```text", *contract["layers"], "```", ""]
    yield "Further contracts:"
    yield ""
    yield from (f"- {contract['name']}." for contract in contracts if contract["type"] != "layers")


def limits() -> Iterator[str]:
    """Yield what `make measure` counts, each with its limit."""
    yield from table(("what", "limit"), ((what, f"{limit:,}") for what, limit in read_limits()["limits"].items()))


def declared_seams() -> Iterator[str]:
    """Yield each feature with what it is, then each seam with what it does and who answers it."""
    rows = []
    for feature in features():
        module = ast.parse((ROOT / "features" / feature.name / "feature.py").read_text(encoding="utf-8"))
        commands = ", ".join(f"`fedserver {name}`" for name in feature.commands)
        rows.append((f"`{feature.name}`", (ast.get_docstring(module) or "").partition(": ")[2], commands))
    yield from table(("feature", "what it is", "commands"), rows)
    for name, seam in SEAMS.items():
        [answer] = (f"{feature.name}.{feature.answers[name]}" for feature in features() if name in feature.answers)
        parameters = ", ".join(inspect.signature(seam).parameters)
        yield from ("", f"`{name}({parameters})`, answered by `features.{answer}`:", "", inspect.getdoc(seam) or "")


REGIONS: dict[str, Callable[[], Iterator[str]]] = {
    "packages": packages,
    "layers": layers,
    "limits": limits,
    "seams": declared_seams,
    **tables.REGIONS,
    **settings_tables.REGIONS,
    **disclosed.REGIONS,
    "paper-findings": paper_findings.findings,
    "papers": report.papers,
    "recipes": recipe_tables.sections,
    "public-tables": recipe_tables.public,
    "rivals": alone_tables.rivals,
    "kept_alone": alone_tables.kept_alone,
    "at-a-glance": alone_tables.at_a_glance,
    "attackers": robust_tables.sections,
    "liars": robust_tables.liars,
    "all-methods": method_tables.sections,
    "private-methods": private_tables.sections,
    "visible-by-mode": private_tables.visible,
    "secure-solving": private_tables.solved,
    "described": described_tables.lines,
    "schemas": schemas.lines,
    "shared-optimisers": shared_optimiser_tables.lines,
    "closed-form-costs": closed_form_tables.costs,
    "closed-form-sizes": closed_form_tables.sizes,
    "kinds-of-devices": closed_form_tables.kinds,
    "flipped-sums": closed_form_tables.flipped,
    "targets": target_tables.targets,
    "beside": target_tables.beside,
    "default-training": training_tables.models,
    "enough": training_tables.enough,
    "across-sizes": across_sizes_tables.lines,
}


def pages() -> list[Path]:
    """Return the documents that have generated regions."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in documents if REGION.search(path.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """Return a page's text with its regions as the code and the result files have them.

    Raises:
        KeyError: If no function makes a region of this name.
    """

    def region(match: re.Match[str]) -> str:
        made = "\n".join(REGIONS[match["name"]]())
        return f"<!-- generated: {match['name']} -->\n\n{made.strip()}\n\n<!-- end generated -->"

    return REGION.sub(region, text)


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit status 1 if a page is not up to date.")
def main(check: bool) -> None:
    """Write the generated regions of the documents."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        made = filled(text)
        if check and made != text:
            raise SystemExit(f"{path.relative_to(ROOT)} is out of date: make docs")
        if made != text:
            path.write_text(made, encoding="utf-8")
            click.echo(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
