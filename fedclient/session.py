"""Decisions of a device after each message or break: events in, effects out; no clock, no I/O.

The same order may arrive many times, because streams break and both sides restart: its id decides. A finished order is handed
in again without training, the order at work is left alone, and any other order replaces the present one. A break stops no work,
but results are handed in only on a stream on which the server has asked for them.
"""

from __future__ import annotations

import math

from attune.common.exchange.messages import Farewell, Notice, Order, SecureMessage, StatisticsRequest, Welcome
from attune.fedclient import messages
from attune.fedclient.address import CONNECT_TIMEOUT_S, backoff_s
from attune.fedclient.messages import Effect, Event

ASKS_FOR_MODEL = (
    "the federation is over, and this device holds no state of it: asking the server for the model. Parts that only this "
    "device had are lost; if there is a backup of its home, restore that instead"
)
STEADY_S = 5.0  # a stream that lived this long starts the back-off anew


class Session:
    """One device's decisions from start to end.

    Args:
        finished: Id of the newest order whose result is on disk, if any.
        connect_timeout_s: Longest time without a word from the server before the device gives up.
        stay: Whether to wait for the federation's next run at the end, for as long as it takes.
    """

    def __init__(
        self, finished: str | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S, *, stay: bool = False
    ) -> None:
        self.finished = finished
        self.connect_timeout_s = connect_timeout_s
        self.stay = stay
        self.asked_for_model = False  # once for each plan; a device without orders has lost them, or never had one
        self.kept = False  # the model of this plan is kept already
        self.plan_json: bytes | None = None
        self.working: str | None = None
        self.sending: str | None = None
        self.asked: str | None = None  # the order that the server sent on the present stream
        self.breaks = 0  # in a row
        self.lost = False  # and the user knows it
        self.displaced = False  # taken for a break, once since the last stream that lasted
        self.over = False

    def on(self, event: Event) -> list[Effect]:
        """Return the effects of `event`, in order. After Farewell there are none, unless the device stays."""
        if self.over:
            return []
        match event:
            case messages.StreamOpened():
                back, self.lost = self.lost, False
                return [messages.Say("connected again")] if back else []
            case Notice(text):
                return [messages.Say(text)]
            case Welcome(plan_json):
                return self._welcomed(plan_json)
            case Order():
                return self._ordered(event)
            case SecureMessage():
                return [] if self.plan_json is None and not event.of_statistics else [messages.Exchange(event)]
            case StatisticsRequest():
                return [messages.Disclose(event)]
            case Farewell(message):
                if self.finished is None and not self.asked_for_model:
                    self.asked_for_model = True
                    return [*self._stop(), messages.Say(ASKS_FOR_MODEL), messages.AskForModel(), messages.Reconnect(0.0)]
                before, self.kept, self.over = self.kept, True, not self.stay
                return [] if before else [*self._stop(), messages.Keep(message)]
            case messages.Broke(reason, silent_s, lived_s):
                return self._broke(reason, silent_s, lived_s)
            case messages.Displaced(reason, lived_s):
                return self._displaced(reason, lived_s)
            case messages.WorkDone(order_id):
                return self._done(order_id)
            case messages.WorkFailed(order_id, reason):
                return self._failed(order_id, reason)
            case messages.Sent(order_id, late):
                return self._sent(order_id, late)
            case messages.SendRefused(order_id, reason, known):
                return self._refused(order_id, reason, known)
            case messages.Expired(order_id):
                return self._expired(order_id)

    def _welcomed(self, plan_json: bytes) -> list[Effect]:
        """Handle a plan. Another plan is another run of the federation, or an error; preparing it shows which."""
        if plan_json == self.plan_json:
            return []
        if self.plan_json is not None:
            self.finished = None
        self.plan_json, self.kept, self.asked_for_model = plan_json, False, False
        return [*self._stop(), messages.Prepare(plan_json)]

    def _ordered(self, order: Order) -> list[Effect]:
        if self.plan_json is None:
            return [messages.Refuse(f"the server sent order {order.id} before saying what the federation is about")]
        self.asked = order.id
        if order.id == self.working:
            return [messages.Extend(order)] if order.deadline_s else []
        if order.id == self.sending:
            return []
        effects = self._stop()
        if order.id == self.finished:
            self.sending = order.id
            return [*effects, messages.Send(order.id, resume=True)]
        self.working, self.kept = order.id, False
        return [*effects, messages.Start(order)]

    def _stop(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.working is not None:
            effects.append(messages.StopWork(self.working))
        if self.sending is not None:
            effects.append(messages.StopSending(self.sending))
        self.working = self.sending = None
        return effects

    def _done(self, order_id: str) -> list[Effect]:
        self.finished = order_id
        if order_id != self.working:
            return []
        self.working = None
        if order_id != self.asked:
            return []
        self.sending = order_id
        return [messages.Send(order_id, resume=False)]

    def _failed(self, order_id: str, reason: str) -> list[Effect]:
        if order_id != self.working:
            return []
        self.working = None
        report = [messages.ReportTrouble(order_id, reason)] if order_id == self.asked else []
        return [messages.Say(f"cannot carry out this order: {reason}"), *report]

    def _sent(self, order_id: str, late: bool) -> list[Effect]:
        if order_id != self.sending:
            return []
        self.sending = None
        return [messages.Say("the round closed before this update arrived; waiting for the next")] if late else []

    def _refused(self, order_id: str, reason: str, known: bool) -> list[Effect]:
        if order_id == self.sending:
            self.sending = None
        said = messages.Say(f"THE SERVER REFUSED THIS UPDATE: {reason} (private state is kept; waiting for the next order)")
        report = messages.ReportTrouble(order_id, f"update refused: {reason}")
        return [said] if known or order_id != self.asked else [said, report]

    def _expired(self, order_id: str) -> list[Effect]:
        """Handle a deadline. Finished training is still handed in, because the server may have extended the round."""
        if order_id != self.working:
            return []
        return [messages.StopWork(order_id), *self._failed(order_id, "the deadline passed")]

    def _broke(self, reason: str, silent_s: float, lived_s: float) -> list[Effect]:
        patient = self.stay and self.kept
        if silent_s >= self.connect_timeout_s and not patient:
            return [messages.GiveUp(reason)]
        if lived_s >= STEADY_S:
            self.breaks, self.displaced = 0, False
        self.breaks += 1
        effects: list[Effect] = [] if self.lost else [messages.Say(f"{reason} (trying again)")]
        self.lost, self.asked = True, None
        if self.sending is not None:
            # The server asks again for what it still wants. An answer before that would count as late.
            effects.append(messages.StopSending(self.sending))
            self.sending = None
        # The last try comes at the end of the connect timeout, not later.
        left_s = math.inf if patient else self.connect_timeout_s - silent_s
        return [*effects, messages.Reconnect(min(backoff_s(self.breaks), left_s))]

    def _displaced(self, reason: str, lived_s: float) -> list[Effect]:
        # A busy server may handle our own broken stream after the one that replaced it. So the first time counts as a break.
        if self.breaks and lived_s < STEADY_S and not self.displaced:
            self.displaced = True
            return self._broke(reason, 0.0, lived_s)
        return [*self._stop(), messages.Yield(reason)]
