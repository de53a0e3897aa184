"""Whether a device may take part under a plan."""

from __future__ import annotations

import msgspec

from attune.common.errors import HomeMismatch, SettingError, WireError
from attune.common.identity.names import check_name
from attune.common.plan import Plan
from attune.common.text import clean, from_json
from attune.fedclient.store import Store


def check_plan(plan: Plan, store: Store, allow_models: tuple[str, ...]) -> Plan | None:
    """The plan of another run of the same federation, which this one follows; None where there is none.

    Errors: HomeMismatch if the home is bound to another federation; SettingError for code that is not allowed here.
    """
    if plan.run:
        try:
            check_name(plan.run)
        except SettingError:
            raise WireError(f"the server names a run that cannot be: {clean(plan.run)!r}") from None
    before = None
    kept = store.plan()
    if kept is not None:
        try:
            stored = from_json(kept, Plan)
        except msgspec.DecodeError as error:
            raise HomeMismatch(f"the plan in {store.where} is damaged ({error}); restore it, or use another --home") from None
        if stored.federation != plan.federation:
            raise HomeMismatch(f"{store.where} holds the state of another federation; use another --home for this one")
        if stored.run != plan.run:
            before = stored
        elif stored != plan:
            raise HomeMismatch(
                f"the server's plan differs from the one this device trained under (in {store.where}); use another --home"
            )
    if ":" in plan.model.name and plan.model.name not in allow_models:
        raise SettingError(
            f"the federation's model is code of its own, {plan.model.name}: if you trust it and it is installed here, "
            f"start with --allow-model {plan.model.name}"
        )
    return before
