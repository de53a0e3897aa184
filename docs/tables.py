"""The tables of the reference pages, made from the code: errors, metrics, steps of faults, commands."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from types import ModuleType

import click

from attune.common import faults
from attune.common.errors import AttuneError
from attune.common.metrics import METRICS
from attune.common.wire import malformed
from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli import cli as fedserver
from docs.markdown import table

SIDES = ("common", "fedserver", "fedclient")
TO_DO = re.compile(r"What to do: (.*?)(?:\n\n|\Z)", re.DOTALL)


def comments(module: ModuleType) -> dict[int, str]:
    """Return the comments of a module's source, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def error_classes(root: type[AttuneError] = AttuneError) -> Iterator[type[AttuneError]]:
    """Yield every error of the product, once all its modules are imported."""
    if root is AttuneError:
        for side in SIDES:
            package = importlib.import_module(f"attune.{side}")
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as missing:  # a library of an extra that is not installed
                    if missing.name is None or missing.name.startswith("attune"):
                        raise
    if root.__module__.startswith("attune."):
        yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def errors() -> Iterator[str]:
    """Yield the table of errors: those that end a command with a code of their own first."""
    classes = {error for error in error_classes() if error is not malformed.Malformed}
    ordered = sorted(classes, key=lambda error: (error.exit_code, not issubclass(AttuneError, error), error.kind))
    yield from table(
        ("exit code", "kind", "gRPC status", "what happened", "what to do"),
        ((str(error.exit_code), f"`{error.kind}`", error.status, *_explained(error)) for error in ordered),
    )


def _explained(error: type[AttuneError]) -> tuple[str, str]:
    text = inspect.getdoc(error) or ""
    advice = TO_DO.search(text)
    return text.partition("\n")[0], " ".join(advice[1].split()) if advice else ""


def malformed_kinds() -> Iterator[str]:
    """Yield the table of the ways in which bytes can be malformed."""
    said = comments(malformed)
    lines = {
        node.value: said.get(node.lineno, "")
        for node in ast.walk(ast.parse(inspect.getsource(malformed)))
        if isinstance(node, ast.Constant) and node.value in malformed.KINDS
    }
    yield from table(
        ("kind", "gRPC status", "what is wrong"),
        ((f"`{kind}`", malformed.Malformed(kind, "").status, lines[kind]) for kind in malformed.KINDS),
    )


def metrics() -> Iterator[str]:
    """Yield the table of metrics."""
    yield from table(
        ("metric", "meaning", "unit", "better", "per"),
        ((f"`{metric.name}`", metric.meaning, metric.unit, metric.better or "", metric.per) for metric in METRICS.values()),
    )


def fault_steps() -> Iterator[str]:
    """Yield the tables of the steps at which a fault can strike."""
    for side, steps in (("server", faults.SERVER_STEPS), ("device", faults.DEVICE_STEPS)):
        yield f"Steps of the {side}:"
        yield ""
        yield from table(("step", "what is true there"), ((f"`{step}`", text) for step, text in steps.items()))
        yield ""


def commands() -> Iterator[str]:
    """Yield a section for each command, with the table of its options."""
    for program, group in (("fedserver", fedserver), ("fedclient", fedclient)):
        for name, command in _with_commands(program, group):
            yield from _command(name, command, program)


def _with_commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            if inner is not None:
                yield from _with_commands(f"{name} {word}", inner)


def _command(name: str, command: click.Command, program: str) -> Iterator[str]:
    arguments = [param.make_metavar(click.Context(command)) for param in command.params if isinstance(param, click.Argument)]
    yield f"{'##' if name == program else '###'} {name}"
    yield ""
    yield " ".join((command.help or "").partition("\n\n")[0].split())
    yield ""
    if arguments:
        yield f"Arguments: {', '.join(f'`{word}`' for word in arguments)}."
        yield ""
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield from table(("option", "meaning"), ((_flags(option), _meaning(option)) for option in options))
        yield ""


def _flags(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar}" if option.metavar else ""
    return f"`{', '.join(option.opts)}{value}`"


def _meaning(option: click.Option) -> str:
    said = [option.help or ""]
    if isinstance(option.type, click.Choice):
        said.append(f"One of {', '.join(f'`{choice}`' for choice in option.type.choices)}.")
    if option.show_default:
        said.append(f"Default: `{option.default}`.")
    return " ".join(said).strip()


REGIONS = {
    "errors": errors,
    "malformed": malformed_kinds,
    "metrics": metrics,
    "fault-steps": fault_steps,
    "commands": commands,
}
