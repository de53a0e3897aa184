"""Rounds of devices with a tag: who trains, what is said where too few are here, and what a peer may call itself."""

import msgspec
import pytest

from attune.common.config import RoundSettings
from attune.common.errors import SettingError
from attune.common.plan import Profile, check_tag
from attune.fedserver.core.messages import Connected, Disconnected, Open, Record, Reported, Resumed
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.policy import Synchronous
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.core.round import step
from attune.fedserver.core.state import Round
from attune.fedserver.core.tags import by_tag, is_outside, of_device, of_token, tag_of, tags_told

SETTINGS = RoundSettings(rounds=3, min_clients=2, devices="tag:icu")
RULES = Rules(SETTINGS, Synchronous(SETTINGS, 0))
FLEET = {"a": False, "b": True, "c": False, "d": True}  # whether it is outside


def played(state: Round, *events) -> tuple[Round, list]:
    effects: list = []
    for event in events:
        taken = step(RULES, state, event, 0.0)
        state, effects = taken.state, [*effects, *taken.effects]
    return state, effects


def test_devices_with_the_tag_train_and_all_evaluate() -> None:
    state, effects = played(Round(), Resumed(0.0), *(Connected(name, 0.0, outside=FLEET[name]) for name in "abc"))
    assert effects == [Open("train", 1, ("a", "c"))] and state.record.cohort == ("a", "c")
    state, _ = played(state, Connected("d", 1.0, outside=True))
    assert state.record.devices == ("a", "c"), "a latecomer without it is no replacement"
    assert RULES.policy.ask_to_evaluate(state) == {"a", "b", "c", "d"}


def test_without_enough_of_them_no_round_opens_and_the_operator_reads_why() -> None:
    state, effects = played(Round(), Resumed(0.0), *(Connected(name, 0.0, outside=FLEET[name]) for name in "abd"))
    assert effects == []
    assert RULES.policy.refuses(state) == "round.devices = 'tag:icu': 1 devices with this tag are connected, of at least 2"
    _, effects = played(state, Connected("b", 1.0))
    assert effects == [Open("train", 1, ("a", "b"))], "it came back with the tag"


@pytest.mark.parametrize("order", ["abcd", "dcba"])
def test_a_restart_asks_the_same_devices(order: str) -> None:
    connected = [Connected(name, 0.0, outside=FLEET[name]) for name in order]
    before, _ = played(Round(), Resumed(0.0), *connected, Disconnected("c", 1.0))
    record = msgspec.json.decode(msgspec.json.encode(before.record), type=Record)
    after, effects = played(Round.of(record, {"a"}), Resumed(5.0), *connected)
    assert after.record.cohort == before.record.cohort == ("a", "c")
    assert {name for effect in effects if isinstance(effect, Open) for name in effect.devices} <= {"a", "c"}
    closed, _ = played(after, Reported("a", 1, 6.0), Reported("c", 1, 6.0))
    assert closed.inside == {"a", "c"}


def test_the_operators_tag_wins_and_words_of_a_peer_are_bounded() -> None:
    device, plain = DeviceRecord("a", "key", token="1f"), Profile("tabular", (1,), [0, 1], 9, 9)
    assert tag_of(device, {}) == "" and tag_of(device, {of_device("a"): "ward"}) == "ward"
    assert tag_of(device, {of_device("a"): "ward", of_token("1f"): "icu"}) == "icu"
    assert tags_told({"a": plain}, {}) == {}
    said = msgspec.structs.replace(plain, tag="icu")
    assert tags_told({"a": said}, {}) == {of_device("a"): "icu"} and tags_told({"a": said}, {of_device("a"): "icu"}) == {}
    assert tags_told({"a": plain}, {of_device("a"): "icu"}) == {of_device("a"): ""}, "a device without one takes its own back"
    for bad in ("a b", "-x", "\x1b[2J", "x" * 33, "tag:icu"):
        with pytest.raises(SettingError, match="is no tag"):
            check_tag(bad)


def test_settings_and_conflicts() -> None:
    assert resolve({"round": {"devices": "tag:icu"}}).round.devices == "tag:icu"
    with pytest.raises(SettingError, match=r"round\.devices"):
        resolve({"round": {"devices": "icu"}})
    for other in ({"mode": "buffered"}, {"adapt_rounds": 2}):
        with pytest.raises(SettingError, match=r"round\.devices cannot be combined|cannot be combined with round\.devices"):
            resolve({"round": {"devices": "tag:icu"} | other})
        resolve({"round": other})  # without a tag there is nothing to refuse
    assert not is_outside("", "") and is_outside("tag:icu", "") and not is_outside("tag:icu", "icu")


def test_groups_of_the_status_by_hand() -> None:
    clients = [{"tag": "icu", "accuracy": 0.5}, {"tag": "icu", "accuracy": 0.7}, {"tag": None, "accuracy": None}]
    assert by_tag(clients) == [
        {"tag": "icu", "devices": 2, "accuracy": pytest.approx(0.6)},
        {"tag": "without a tag", "devices": 1, "accuracy": None},
    ]
    assert by_tag([{"accuracy": 0.5}]) == []
