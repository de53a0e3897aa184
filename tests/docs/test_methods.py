"""The documents on each method, compared with the registry."""

from __future__ import annotations

import re
from typing import Any

from attune.common.methods import registry
from attune.fedserver.core.adaptation import adaptation_of

CONFIGURED = {name: registry.configured_from({"name": name}) for name in registry.names()}


def test_what_newcomers_of_each_method_train_is_described(page: Any) -> None:
    rows = page("docs/operations/rounds.md").table("## Newcomers")
    described = {what: set(re.findall(r"`([\w+-]+)`", methods)) for methods, what, *_ in rows[4:]}
    nothing = {name for name, configured in CONFIGURED.items() if adaptation_of(configured, "personal") is None}
    assert described[next(what for what in described if what.startswith("no part"))] == nothing
    single = {name for name in CONFIGURED if "+" not in name and not name.startswith("fedtp-")}
    assert set().union(*described.values()) >= single


def test_each_method_that_refuses_a_loop_of_the_users_own_is_named(page: Any) -> None:
    [said] = re.findall(r"^- (.*?) refuse a loop of your own", page("docs/own-training.md").text, re.MULTILINE)
    refusing = {name.partition("+")[0] for name, configured in CONFIGURED.items() if configured.objective.own_loop}
    assert {name.lower() for name in re.split(r", | and ", said)} == refusing
