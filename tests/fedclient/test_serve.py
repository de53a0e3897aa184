"""Predictions over HTTP: the same labels as offline, and nothing for strangers, of too many bytes or of nonsense."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from attune.common.errors import PortInUse, SettingError
from attune.fedclient.model import serve
from attune.fedclient.model.serve import Place, app_of
from tests.fedclient.test_portable import finished


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("served"))


@pytest.fixture
def client(model):
    return TestClient(app_of(model), base_url="http://127.0.0.1")


def test_labels_are_those_of_the_model(client, model):
    x = np.random.default_rng(0).normal(2, 3, (9, 5)).astype(np.float32)
    reply = client.post("/predict", json={"x": x.tolist()})
    assert (reply.status_code, reply.json()) == (200, {"labels": model.predict(x)})


def test_it_says_what_it_is(client):
    found = client.get("/model").json()
    assert (found["kind"], found["shape"], found["classes"], found["method"]) == ("tabular", [5], ["x", "y", "z"], "fedavg")
    assert client.get("/healthz").text == "ok\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"no json", 422, "not JSON"),
        (b"[" * 100_000, 422, "not JSON"),
        (b"[1]", 422, "object with the samples"),
        (b'{"x": []}', 422, "1 to 4096 samples, not 0"),
        (b'{"x": [[1, 2]]}', 422, "takes"),
        (b'{"x": [[1], [1, 2]]}', 422, "not all of one shape"),
        (b'{"x": [["a", 1, 2, 3, 4]]}', 422, "not numbers"),
        (b'{"x": [[NaN, 1, 2, 3, 4]]}', 422, "NaN"),
        (b" " * (serve.MAX_BODY_BYTES + 1), 413, "fewer samples"),
    ],
)
def test_nonsense_is_answered_and_the_next_request_is_served(client, body, status, said):
    reply = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status
    assert said in reply.json()["error"]
    assert client.post("/predict", json={"x": [[0] * 5]}).status_code == 200


def test_pages_of_strangers_get_nothing(client):
    body = json.dumps({"x": [[0] * 5]})
    assert client.post("/predict", content=body, headers={"content-type": "text/plain"}).status_code == 415
    headers = {"host": "evil.example", "content-type": "application/json"}
    assert client.post("/predict", content=body, headers=headers).status_code == 400


def test_elsewhere_a_token_is_needed(model):
    with pytest.raises(SettingError, match="--token-file"):
        Place("192.0.2.1").check()
    Place("192.0.2.1", token="secret").check()
    client = TestClient(app_of(model, Place("192.0.2.1", token="secret")))
    body = {"x": [[0] * 5]}
    assert client.post("/predict", json=body).status_code == 401
    assert client.get("/model", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/predict", json=body, headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/healthz").status_code == 200


def test_a_port_that_is_taken_says_so(model):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse, match="choose another --port"):
        serve.serve(model, Place(port=taken.getsockname()[1]), lambda text: None)


def test_many_at_once_are_computed_one_by_one(client, monkeypatch, model):
    inside, most, lock = 0, 0, threading.Lock()
    predict = type(model).predict

    def counted(self, *arguments):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            return predict(self, *arguments)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(type(model), "predict", counted)
    body = {"x": np.zeros((500, 5)).tolist()}
    threads = [threading.Thread(target=client.post, args=("/predict",), kwargs={"json": body}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
