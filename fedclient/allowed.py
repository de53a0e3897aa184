"""Whether a device may take part under a plan."""

from __future__ import annotations

import msgspec

from attune.common.errors import HomeMismatch, SettingError
from attune.common.json_text import from_json
from attune.common.plan import Plan
from attune.fedclient.store import Store


def check_plan(plan: Plan, store: Store, allow_models: tuple[str, ...]) -> None:
    """Errors: HomeMismatch if the home is bound to another federation; SettingError for code that is not allowed here."""
    kept = store.plan()
    if kept is not None:
        try:
            stored = from_json(kept, Plan)
        except msgspec.DecodeError as error:
            raise HomeMismatch(f"the plan in {store.where} is damaged ({error}); restore it, or use another --home") from None
        if stored.federation != plan.federation:
            raise HomeMismatch(f"{store.where} holds the state of another federation; use another --home for this one")
        if stored != plan:
            raise HomeMismatch(
                f"the server's plan differs from the one this device trained under (in {store.where}); use another --home"
            )
    if ":" in plan.model.name and plan.model.name not in allow_models:
        raise SettingError(
            f"the federation's model is code of its own, {plan.model.name}: if you trust it and it is installed here, "
            f"start with --allow-model {plan.model.name}"
        )
