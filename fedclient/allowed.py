"""Whether a device may take part under a plan."""

from __future__ import annotations

import msgspec

from attune.common.errors import HomeMismatch, SettingError, WireError
from attune.common.identity.names import check_name
from attune.common.methods.registry import packages_on_devices
from attune.common.plan import Plan
from attune.common.plugins import check_allowed, check_installed
from attune.common.text import clean, from_json
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import Store


def check_plan(plan: Plan, store: Store, options: DeviceOptions) -> Plan | None:
    """Refuse a plan under which this device must not take part.

    Returns:
        The plan of another run of the same federation, which this one follows; None where there is none.

    Raises:
        HomeMismatch: The home is bound to another federation.
        SettingError: The plan runs code that is not allowed or not installed here.
    """
    before = _plan_before(plan, store)
    if ":" in plan.model.name and plan.model.name not in options.allow_models:
        raise SettingError(
            f"the federation's model is code of its own, {plan.model.name}: if you trust it and it is installed here, "
            f"start with --allow-model {plan.model.name}"
        )
    check_allowed(plan.plugins, options.allow_plugins)
    check_installed(plan.plugins)
    # What the plan says it uses is not taken on trust: no other package's code is loaded for a name that the server gives.
    for package in packages_on_devices(plan.method, plan.method_options, plan.model.name, plan.device_transforms):
        if package.name not in plan.plugins:
            raise WireError(f"the server's plan uses the plug-in {package.name}, which it does not list; update the server")
    return before


def _plan_before(plan: Plan, store: Store) -> Plan | None:
    if plan.run:
        try:
            check_name(plan.run)
        except SettingError:
            raise WireError(f"the server names a run that cannot be: {clean(plan.run)!r}") from None
    kept = store.plan()
    if kept is None:
        return None
    try:
        stored = from_json(kept, Plan)
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"the plan in {store.where} is damaged ({error}); restore it, or use another --home") from None
    if stored.federation != plan.federation:
        raise HomeMismatch(f"{store.where} holds the state of another federation; use another --home for this one")
    if stored.run != plan.run:
        return stored
    if stored != plan:
        raise HomeMismatch(
            f"the server's plan differs from the one this device trained under (in {store.where}); use another --home"
        )
    return None
