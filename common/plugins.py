"""Components by name: the built-in ones, and those of other packages, found by entry point or by `attune.register`.

An entry point of the group `attune.GROUP` names the object that describes a component, and that object needs no torch: the
row of a method, the settings of an aggregator, objective or predictor, the entry of a model. Names are always looked up among
the entry points that are installed here; no string that came over the network is ever imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Generic, NamedTuple, TypeVar, cast

from attune import DISTRIBUTION
from attune.common.errors import SettingError, WireError, nearest
from attune.common.text import clean

GROUPS = ("methods", "aggregators", "objectives", "predictors", "models", "readers", "transforms")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,99}")
_registered: dict[str, dict[str, object]] = {group: {} for group in GROUPS}

T = TypeVar("T")


class Package(NamedTuple):
    """An installed distribution that offers a component."""

    name: str  # in its canonical form: "my-plugin"
    version: str


def register(group: str, name: str, component: object) -> None:
    """Make a component of this program known under `name`, as an entry point of the group `attune.GROUP` would.

    Args:
        group: One of `GROUPS`.
        name: Name in settings. A second registration of a name takes the place of the first.
        component: What an entry point of the group would name (CONTRIBUTING.md, "A package of your own").

    Raises:
        SettingError: For an unknown group.
    """
    if group not in GROUPS:
        raise SettingError(f"attune.register: unknown group {group!r}{nearest(group, GROUPS)}")
    _registered[group][name] = component


class PluginRegistry(Mapping[str, T], Generic[T]):
    """The components of one group. Built-in names win over others; two packages that offer one name are an error.

    A lookup of an unknown name raises KeyError. Iteration gives the built-in names first; it loads no package.
    """

    def __init__(self, group: str, kind: type, built_in: Mapping[str, T]) -> None:
        self.group, self._kind, self.built_in = group, kind, built_in

    def __repr__(self) -> str:
        return f"PluginRegistry({self.group}: {', '.join(self)})"

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        if name in _registered[self.group]:
            return self._checked(name, _registered[self.group][name], "attune.register")
        entry_point = self._entry_point(name)
        if entry_point is None:
            raise KeyError(name)
        return self._checked(name, loaded(entry_point), f"the package {_package_of(entry_point).name}")

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in _registered[self.group] or name in _offered(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.built_in, *_registered[self.group], *_offered(self.group))))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def shipped(self) -> dict[str, T]:
        """All components of attune-fl itself: the built-in ones, and those that its own entry points name."""
        attached = (name for name, offers in _offered(self.group).items() if _package_of(offers[0]).name == DISTRIBUTION)
        return {**self.built_in, **{name: self[name] for name in attached}}

    def require(self, name: str, what: str) -> T:
        """Return the component that settings call `name`.

        Args:
            name: Name of the component.
            what: How an error names it, such as "method".

        Raises:
            SettingError: For an unknown name, with the nearest known one, and as `package_of`.
        """
        if name not in self:
            raise SettingError(f"unknown {what} {name!r}{nearest(name, self)}")
        return self[name]

    def package_of(self, name: str) -> Package | None:
        """Return the package that offers `name`; None if it is built in, registered by this program, or unknown.

        Loads no code of the package.

        Raises:
            SettingError: If two packages offer the name.
        """
        if name in self.built_in or name in _registered[self.group]:
            return None
        entry_point = self._entry_point(name)
        package = _package_of(entry_point) if entry_point is not None else None
        return None if package is None or package.name == DISTRIBUTION else package

    def _entry_point(self, name: str) -> EntryPoint | None:
        offers = _offered(self.group).get(name, ())
        if len(offers) > 1:
            packages = " and ".join(sorted(_package_of(entry_point).name for entry_point in offers))
            raise SettingError(f"{packages} both offer {name!r} ({self.group}): uninstall one of them")
        return offers[0] if offers else None

    def _checked(self, name: str, component: object, who: str) -> T:
        fits = issubclass(component, self._kind) if isinstance(component, type) else isinstance(component, self._kind)
        if not fits:
            raise SettingError(f"{who} offers {name!r} ({self.group}), which is no {self._kind.__name__}: {component!r}")
        return cast(T, component)


def loaded(entry_point: EntryPoint) -> object:
    """Load what an entry point names.

    Raises:
        SettingError: For a package that cannot be imported; it names the package.
    """
    try:
        component: object = entry_point.load()
    except Exception as error:
        # Whatever a user's package raises when it is imported is an error of that package.
        raise SettingError(
            f"the package {_package_of(entry_point).name} cannot be imported ({entry_point.value}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return component


def imported(path: str) -> object:
    """Import the object at "package.module:attribute", a path out of this installation's own code."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def implementation_of(settings: type, name: str) -> object:
    """Return the class that carries a component out, as its settings name it.

    Args:
        settings: With an attribute `implementation`: the class, or "package.module:Class", which is imported now.
        name: Name of the component in settings.

    Raises:
        SettingError: If the settings name no class, or one that cannot be imported.
    """
    implementation: object = getattr(settings, "implementation", "")
    if not isinstance(implementation, str):
        return implementation
    if not implementation:
        raise SettingError(f"{settings.__name__}, the settings of {name!r}, name no implementation: set it to the class")
    try:
        return imported(implementation)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"the implementation of {name!r}, {implementation}, cannot be imported: {error}") from error


def installed() -> tuple[str, ...]:
    """Return the names of all packages here that offer components, attune-fl left out."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return `installed` for this sys.path, so that no file is read again."""
    offers = (offer for group in GROUPS for offers in _scanned(group, path).values() for offer in offers)
    return tuple(sorted({_package_of(entry_point).name for entry_point in offers} - {DISTRIBUTION}))


def canonical(name: str) -> str:
    """Return a distribution's name in the form in which all spellings of it are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_installed(plugins: Mapping[str, str]) -> None:
    """Refuse to go on unless exactly these versions of these packages are installed.

    Raises:
        SettingError: It names the package and how to install it.
    """
    for name, wanted in plugins.items():
        remedy = f"pip install '{name}=={wanted}'"
        try:
            here = version(name)
        except PackageNotFoundError:
            raise SettingError(f"the plug-in {name} {wanted} is not installed here: {remedy}") from None
        if here != wanted:
            raise SettingError(f"the plug-in {name} is needed in version {wanted}, and {here} is installed here: {remedy}")


def check_allowed(plugins: Mapping[str, str], allowed: tuple[str, ...]) -> None:
    """Refuse packages that a server names and this device has not allowed; nothing is imported or looked up.

    Raises:
        SettingError: It names the package and how to allow it.
        WireError: For a name or version that cannot be one.
    """
    known = {canonical(name) for name in allowed}
    for name, wanted in plugins.items():
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(wanted):
            raise WireError(f"the server names a plug-in that cannot be: {clean(f'{name} {wanted}')!r}")
        if canonical(name) not in known:
            raise SettingError(
                f"the federation has devices run code of the plug-in {name} {wanted}: if you trust it, install it "
                f"(pip install '{name}=={wanted}') and start with --allow-plugin {name}"
            )


def check_model_allowed(model: str, allowed: Collection[str], what: str) -> None:
    """Refuse a model that is code (`module:factory`) and was not allowed by name; nothing is imported.

    Args:
        model: Name of the model.
        allowed: Names that the user has allowed.
        what: Description of the thing that has this model, for the error.

    Raises:
        SettingError: It names the model and how to allow it.
    """
    if ":" in model and model not in allowed:
        shown = clean(model)
        raise SettingError(
            f"{what} is code of its own, {shown}: if you trust it and it is installed here, name it in allow_models "
            f"(Python) or start with --allow-model {shown}"
        )


def own_measure(model: str) -> Any:
    """Return an instance of the class Measure in the module of a model of one's own, for the task custom.

    Raises:
        SettingError: The model is not of one's own, or its module has no such class with the functions loss and score.
    """
    module, colon, _ = model.partition(":")
    guide = "(docs/own-training.md#a-task-of-your-own)"
    if not colon:
        raise SettingError(
            f'the task "custom" needs a model of your own, module:factory, beside a class Measure {guide}: not {model}'
        )
    try:
        made: Any = imported(f"{module}:Measure")
        measure = made()
    except (ImportError, AttributeError) as error:
        raise SettingError(f"the module {module} has no class Measure for the task custom {guide}: {error}") from None
    if lacking := [name for name in ("loss", "score") if not callable(getattr(measure, name, None))]:
        raise SettingError(f"{module}:Measure has no {' and no '.join(lacking)} {guide}")
    return measure


def _offered(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    return _scanned(group, tuple(sys.path))


@lru_cache(maxsize=64)
def _scanned(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; what attune-fl itself offers wins as built in does.

    path: sys.path, so that a package is found after a folder was put there.
    """
    offers: dict[str, tuple[EntryPoint, ...]] = {}
    for entry_point in entry_points(group=f"attune.{group}"):
        offers[entry_point.name] = (*offers.get(entry_point.name, ()), entry_point)
    for name, several in offers.items():
        shipped = tuple(entry_point for entry_point in several if _package_of(entry_point).name == DISTRIBUTION)
        offers[name] = shipped or several
    return offers


def _package_of(entry_point: EntryPoint) -> Package:
    distribution = entry_point.dist
    if distribution is None:  # only entry points that were made by hand have none
        return Package("unknown", "0")
    return Package(canonical(distribution.name), distribution.version)
