"""Classes of the plan: the union of what the devices have, each class once, whatever a site's table looks like."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from attune.common.classes import NO, YES, look_alikes, other_forms
from attune.common.errors import SettingError
from attune.common.plan import Label, Profile
from attune.common.text import listed
from attune.fedserver.core.data_form import MAX_LABELS

_SHOWN = 4
REMEDY = "Write each class in one way at all sites; or, if these are different classes, declare all classes in data.classes"


def united_classes(profiles: Mapping[str, Profile], declared: Sequence[Label]) -> list[Label]:
    """Return the classes of the plan, sorted: those that the operator declares, else the union over the devices.

    If any device has text labels, every label is its written text, so 1 and "1" are one class.

    Raises:
        SettingError: Classes that nobody declared look alike, or seem to be one class that is written in two ways.
    """
    if declared:
        return sorted(set(declared), key=lambda label: (isinstance(label, str), label))
    labels = {label for profile in profiles.values() for label in profile.labels}
    if len(labels) > MAX_LABELS:
        most = max(profiles, key=lambda name: len(profiles[name].labels))
        raise SettingError(
            f"the devices declare {len(labels)} classes together, {len(profiles[most].labels)} of them {most}; at most "
            f"{MAX_LABELS} are possible. Revoke the devices that are wrong, or declare data.classes"
        )
    if all(isinstance(label, int) for label in labels):
        return sorted(labels)
    _check_apart(profiles)
    return sorted({str(label) for label in labels})


def _check_apart(profiles: Mapping[str, Profile]) -> None:
    by_device = [frozenset(map(str, profile.labels)) for profile in profiles.values()]
    labels = frozenset().union(*by_device)
    if words := _yes_and_no(by_device):
        everything = msgspec.json.encode(sorted(labels)).decode()
        usual = [max(group, key=lambda label: sum(label in have for have in by_device)) for group in words]
        pairs = [f"{label}={one}" for group, one in zip(words, usual, strict=True) for label in group if label != one]
        raise SettingError(
            f"some devices seem to say yes and no in other words: {_described(words, profiles)}. {REMEDY}, by the line "
            f"`classes = {everything}` in [data]. To write them alike, add `--map 'LABEL:{','.join(pairs)}'` to fedclient there"
        )
    groups = look_alikes(labels)
    if groups:
        raise SettingError(f"classes of the devices look alike: {_described(groups, profiles)}. {REMEDY}")
    forms: dict[str, set[str]] = defaultdict(set)
    for label in sorted(labels):
        for form in other_forms(label):
            forms[form].add(label)
    several = [sorted(group) for group in forms.values() if len(group) > 1]
    twice = [group for group in dict.fromkeys(map(tuple, several)) if not any(len(have & {*group}) > 1 for have in by_device)]
    if twice:
        raise SettingError(
            "classes differ only by zeros, signs, marks or accents that programs add and remove, and no device has both: "
            f"{_described(twice, profiles)}. {REMEDY}"
        )


def _yes_and_no(by_device: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the words for no and those for yes, if together the devices have several words for one.

    If a device has other classes too, only pairs in whole words count: such letters and digits are classes of many data.
    """
    words = [sorted(label for have in by_device for label in have if label.casefold() in meaning) for meaning in (NO, YES)]
    known = {*words[0], *words[1]}
    several = [list(dict.fromkeys(group)) for group in words if len({label.casefold() for label in group}) > 1]
    pairs = len(several) == 2 and min(map(len, known)) > 1 and all(len(known & have) in (0, 2) for have in map(set, by_device))
    if not several or not (pairs or all(known.issuperset(have) for have in by_device)):
        return []
    return [] if any(len(have & {*group}) > 1 for have in map(set, by_device) for group in several) else several


def classes_apart(labels: Mapping[str, Collection[str]]) -> str:
    """Warn that no class of some devices occurs at another one: another task, or the same classes in other words.

    Args:
        labels: The classes of each device.
    """
    holders = Counter(label for have in labels.values() for label in set(have))
    apart = [name for name in sorted(labels) if labels[name] and all(holders[label] == 1 for label in labels[name])]
    if not apart or len(labels) < 2:
        return ""
    named = listed([f"{name} ({listed(sorted(labels[name]), _SHOWN)})" for name in apart], _SHOWN)
    return (
        f"no class of these devices occurs at another one: {named}. If they are the others' classes in other words, "
        "write them alike; if not, each is learned on one device alone"
    )


def _described(groups: Sequence[Sequence[str]], profiles: Mapping[str, Profile]) -> str:
    clauses = [" and ".join(f"{label!r} ({_devices_with(label, profiles)})" for label in group) for group in groups[:_SHOWN]]
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return f"{'; '.join(clauses)}{more}"


def _devices_with(label: str, profiles: Mapping[str, Profile]) -> str:
    return listed([name for name in sorted(profiles) if label in map(str, profiles[name].labels)], _SHOWN)
