"""Newcomers to a finished federation are fitted in rounds of their own, through kill -9, without effect on other devices."""

from pathlib import Path

from safetensors.numpy import load

from tests.e2e.harness import IN_AGGREGATION, IN_TRAINING, FederationAt

FLAGS = ("--rounds", "2", "--min-clients", "2", "--set", "train.local_epochs=1", "--set", "round.adapt_rounds=2")


def phi(exported: dict[str, bytes]) -> dict[str, bytes]:
    """Return the hypernetwork's own weights, without embeddings."""
    tensors = load(exported["server.safetensors"])
    return {name: tensor.tobytes() for name, tensor in tensors.items() if name.startswith(("mlp.", "head."))}


def test_a_newcomer_is_fitted_through_kills_and_no_other_state_changes(
    federation_at: FederationAt, three_shards: list[Path]
) -> None:
    federation = federation_at("newcomers")
    one, two, three = three_shards
    server = federation.server(*FLAGS)
    assert [device.code() for device in federation.devices([one, two])] == [0, 0]
    federation.await_status(lambda status: status["state"] == "done")
    before = federation.export()
    assert "clients/three.safetensors" not in before
    models = {shard.name: (federation.model(shard) / "model.safetensors").read_bytes() for shard in (one, two)}

    # The server is killed while the newcomer trains; it comes back, and serves an old device at once.
    newcomer = federation.device(three, fault=IN_TRAINING)
    newcomer.await_fault()
    status = federation.status()
    assert (status["state"], status["round"], status["rounds"], status["adapting"]) == ("training", 2, 2, [three.name])
    server.kill()
    newcomer.kill()
    server = federation.server(fault=IN_AGGREGATION)
    back = federation.device(one)
    assert back.code() == 0, back.text
    assert federation.status()["adapting"] == [three.name]

    # The server is killed while it takes in the newcomer's update.
    newcomer = federation.device(three)
    server.await_fault()
    assert federation.status()["state"] == "aggregating"
    server.kill()
    server = federation.server()
    assert newcomer.code() == 0, newcomer.text
    status = federation.await_status(lambda status: status["state"] == "done")
    assert (status["round"], status["adapting"]) == (4, [])
    assert all(client["accuracy"] is not None for client in status["clients"]) and len(status["clients"]) == 3

    after = federation.export()
    untouched = [name for name in before if name.endswith(".safetensors") and name != "server.safetensors"]
    assert sorted(untouched) == [f"clients/{one.name}.safetensors", f"clients/{two.name}.safetensors", "shared.safetensors"]
    assert all(after[name] == before[name] for name in untouched)
    assert phi(after) == phi(before)
    assert f"clients/{three.name}.safetensors" in after
    assert models == {shard.name: (federation.model(shard) / "model.safetensors").read_bytes() for shard in (one, two)}
    rows = [(row["round"], row["work"], row["client"]) for row in federation.metrics() if int(row["round"]) > 2]
    assert rows == [(*of, three.name) for of in (("3", "train"), ("4", "train"), ("4", "evaluate"))]
    assert server.stop() == 0


def test_a_method_with_nothing_personal_says_so_and_serves_the_common_model(
    federation_at: FederationAt, three_shards: list[Path]
) -> None:
    federation = federation_at("nothing")
    server = federation.server("--method", "fedavg", "--model", "mlr", *FLAGS)
    assert "newcomers get the common model" in server.text
    assert [device.code() for device in federation.devices(three_shards[:2])] == [0, 0]
    newcomer = federation.device(three_shards[2])
    assert newcomer.code() == 0, newcomer.text
    assert "newcomers get the common model" in newcomer.text
    status = federation.status()
    assert (status["state"], status["round"], len(status["clients"])) == ("done", 2, 3)
