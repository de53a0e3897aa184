"""A hypernetwork whose heads are spread over workers: the bits of one process, whoever dies and wherever the cluster ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.fedserver.lab.aggregators import hypernetwork
from attune.fedserver.lab.aggregators.base import PartUpdate
from attune.fedserver.lab.aggregators.network import Head
from attune.fedserver.lab.cluster.groups import cut
from attune.fedserver.lab.cluster.inline import InlineCrew
from tests.aggregators.conftest import COMPONENTS, draw
from tests.cluster.conftest import Played, rounds

OPTIMISERS = {
    "adam": {},
    "sgd": {"server_optimiser": "sgd"},
    "plain sgd": {"server_optimiser": "sgd", "server_momentum": 0.0},
    "fixed": {"embedding": "fixed"},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypernetwork, "BLOCK_ROWS", 7)


@pytest.fixture(params=OPTIMISERS)
def settings(request):
    return {"embedding_dim": 5, "hidden": 7, **OPTIMISERS[request.param]}


def begun(settings, team=None) -> Played:
    return Played("hypernetwork", settings, team, components=COMPONENTS, initial=draw(0))


def history(played: Played, restarts: bool = False) -> Iterator[object]:
    """All that anybody sees of some rounds, a fit of newcomers, and what is served between."""
    for number, samples in enumerate([*rounds(), {"new": 3, "odd": 4}]):
        for client in (*samples, "seen"):
            played.aggregator.admit(client, founder=client != "dot")
        yield [(client, _bits(W)) for client, W in played.aggregator.generate([*sorted(samples), "stranger"])]
        updates = [PartUpdate(name, m, draw(1000 * number + sum(name.encode()), 0.1)) for name, m in samples.items()]
        yield (played.aggregator.fit if "new" in samples else played.aggregator.close_round)(updates)
        yield played.commit()
        yield _bits(played.aggregator.cold_start())
        if restarts:
            played.reopen()


def _bits(W) -> dict[str, bytes]:
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in W.items()}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_any_number_of_workers_gives_the_bits_of_one_process(settings, team, workers, restarts):
    found, crew = team(workers)
    expected = list(history(begun(settings), restarts))
    assert list(history(begun(settings, found), restarts)) == expected
    assert found.present and "step" in {method for _, method, _ in crew.calls}


def test_each_worker_has_its_own_heads_with_their_moments_and_the_server_none(settings, team):
    found, crew = team(2)
    played = begun(settings, found)
    list(history(played))
    state = played.aggregator._state
    assert not any(name.startswith("head.") for name in state.network)
    assert not any(name.startswith("head.") for moments in state.moments.values() for name in moments)
    held = [set(worker.hand._heads["generated", number].network._state.network) for number, worker in enumerate(crew.workers)]
    assert held[0].isdisjoint(held[1]) and all(held)
    assert {name.removesuffix(".weight") for name in held[0] | held[1] if name.endswith(".weight")} == {
        "head.blocks.0",
        "head.blocks.1",
        "head.token",
        "head.scale",
    }


def test_state_goes_to_a_worker_once(settings, team):
    found, crew = team(3)
    list(history(begun(settings, found)))
    methods = [method for _, method, _ in crew.calls]
    assert methods.count("hold") == 3 and methods.count("fill") == 4, "of four heads"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("every", [7, 11, 16])
def test_a_worker_that_dies_is_replaced_and_its_step_done_again(settings, team, workers, every, caplog):
    calls = 0

    def dies(call) -> bool:
        nonlocal calls
        calls += call[1] not in ("facts", "hold", "fill")
        return call[1] not in ("facts", "hold", "fill") and calls % every == 0

    found, crew = team(workers, dies=dies, hires=1000)
    expected = list(history(begun(settings)))
    assert list(history(begun(settings, found))) == expected
    assert found.present and len(crew.workers) > workers and "its step done again" in caplog.text


@pytest.mark.parametrize("last", [1, 4, 9, 14, 20, 33, 50, 90])
def test_where_the_cluster_ends_the_server_goes_on_by_itself(settings, team, last, caplog):
    found, crew = team(2, hires=2)
    crew.dies = lambda call: len(crew.calls) > 2 + last
    expected = list(history(begun(settings)))
    assert list(history(begun(settings, found))) == expected
    assert not found.present and caplog.text.count("is not used any more") == 1


def test_a_round_that_was_not_committed_is_closed_again_from_the_vault(settings, team):
    seen = []
    for each in (begun(settings), begun(settings, team(3)[0])):
        for number in (1, 2):
            updates = [PartUpdate(name, 1, draw(number + sum(name.encode()), 0.1)) for name in ("ann", "bob")]
            each.aggregator.close_round(updates)
            each.vault.take_back()
            each.reopen()
        each.aggregator.close_round(updates)
        seen.append(each.commit())
    assert seen[0] == seen[1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 6))
def test_heads_are_cut_in_their_order_into_groups_that_are_not_empty(sizes, pieces):
    heads = [Head(f"h{k}", (f"t{k}",), (size,)) for k, size in enumerate(sizes)]
    groups = cut(heads, pieces)
    assert [head for group in groups for head in group] == heads
    assert all(groups) and len(groups) <= pieces
    if len(set(sizes)) == 1 and sizes[0]:
        assert max(map(len, groups)) - min(map(len, groups)) <= 1 or len(groups) < pieces


def test_a_crew_in_this_process_shares_nothing_with_its_caller():
    crew = InlineCrew(1)
    worker, sent = crew.hire(), {"x": [1]}
    ticket = worker.ask("echo", sent)
    sent["x"].append(2)
    worker.hand.echo = lambda given: given
    answer = ticket.answer()
    assert answer == {"x": [1]}
