"""The policy server over real connections: equal actions, bad messages, limits, several clients, and its end."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from served_policies import CHUNK, decision_transformer, network, scene, served, tiny, vector
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from deft import cli, load_policy
from deft.client import PolicyClient, PolicyError, encode
from deft.config.deployment_settings import ServeConfig
from deft.deployment import server as server_module
from deft.errors import InputError
from deft.evaluation.loaded_policy import LoadedPolicy


@pytest.fixture(scope="module")
def chunks():
    """A server for vla-tiny."""
    with served(tiny(), max_clients=3, max_message_mib=0.1) as (server, port):
        yield server, port


def address(port, mode=None):
    return f"ws://127.0.0.1:{port}/act" + ("" if mode is None else f"?mode={mode}")


def request(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def post(port, body, **headers):
    status, content = request(port, "POST", "/chunk", body, **{"content-type": "application/json", **headers})
    return status, json.loads(content)


# ------------------------------------------------------------------------------------------------------ equal actions

POLICIES = {
    "gaussian": (network, vector),
    "categorical": (lambda: network(spaces.Discrete(3, start=1)), vector),
    "memory": (lambda: network(memory_hidden=8), vector),
    "vla-tiny": (tiny, scene),
    "flow": (lambda: tiny(head="flow"), scene),
}


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_is_the_action_of_the_policy_bit_for_bit(name):
    build, observe = POLICIES[name]
    policy = build()
    torch.manual_seed(5)  # of the noise of a flow
    expected = [policy.get_action(observe(step)) for step in range(7)]
    policy.reset()
    with served(build()) as (_, port), PolicyClient(address(port)) as client:
        torch.manual_seed(5)
        for _ in range(1 if name == "flow" else 2):
            client.reset()
            for step, wanted in enumerate(expected):
                action = client.get_action(observe(step))
                assert (action.dtype, action.shape) == (wanted.dtype, wanted.shape)
                assert action.tobytes() == wanted.tobytes(), step


def test_a_decision_transformer_reads_rewards_and_keeps_its_history():
    policy = decision_transformer()
    with served(decision_transformer()) as (_, port), PolicyClient(address(port)) as client:
        for reward in (1.0, 4.0):  # two episodes that differ in their rewards
            client.reset()
            policy.reset()
            wanted = [policy.get_action(vector(step), reward if step else None) for step in range(5)]
            for step, action in enumerate(wanted):
                assert client.get_action(vector(step), reward if step else None).tobytes() == action.tobytes()
        with pytest.raises(PolicyError, match="needs the reward"):
            client.get_action(vector(5))


def test_two_clients_have_memories_of_their_own():
    policies = [network(memory_hidden=8), network(memory_hidden=8)]
    with (
        served(network(memory_hidden=8)) as (_, port),
        PolicyClient(address(port)) as one,
        PolicyClient(address(port)) as other,
    ):
        for step in range(5):
            for index, (client, policy) in enumerate(zip((one, other), policies, strict=True)):
                observation = vector(10 * index + step)
                assert client.get_action(observation).tobytes() == policy.get_action(observation).tobytes()


def test_clients_at_the_same_time_get_their_own_answers(chunks):
    _, port = chunks
    wrong = []

    def play(seed, policy):
        with PolicyClient(address(port)) as client:
            for step in range(3 * CHUNK):
                observation = scene(seed + step)
                if client.get_action(observation).tobytes() != policy.get_action(observation).tobytes():
                    wrong.append((seed, step))

    threads = [threading.Thread(target=play, args=(seed, tiny())) for seed in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong


def test_chunks_over_websocket_and_http(chunks):
    _, port = chunks
    wanted = tiny().get_chunk(scene(3))
    with PolicyClient(address(port, "chunk")) as client:
        assert client.schema["mode"] == "chunk"
        assert client.get_action(scene(3)).tobytes() == wanted.tobytes()
    status, answer = post(port, json.dumps({"observation": encode(scene(3)), "id": "a"}))
    assert (status, answer["id"]) == (200, "a")
    assert np.asarray(answer["actions"], np.float32).tobytes() == wanted.tobytes()


def test_images_as_lists_and_nested_streams(chunks):
    _, port = chunks
    plain = {
        name: value if isinstance(value, str) else np.asarray(value, np.float32 if name == "state" else None).tolist()
        for name, value in scene(1).items()
    }
    status, answer = post(port, json.dumps({"observation": plain}))
    assert status == 200
    assert np.asarray(answer["actions"], np.float32).tobytes() == tiny().get_chunk(scene(1)).tobytes()


# ------------------------------------------------------------------------------------------------ schema and metrics


def test_schema_describes_observations_and_actions(chunks):
    _, port = chunks
    schema = json.loads(request(port, "GET", "/schema")[1])
    assert schema["observation"]["streams"] == {
        "instruction": {"kind": "text", "shape": [24], "dtype": "uint8", "max_bytes": 24},
        "rgb": {"kind": "image", "shape": [3, 16, 16], "dtype": "uint8", "size": "any"},
        "state": {"kind": "vector", "shape": [4], "dtype": "float32"},
        "wrist_rgb": {"kind": "image", "shape": [3, 16, 16], "dtype": "uint8", "size": "any"},
    }
    assert schema["action"] == {
        "kind": "box",
        "shape": [2],
        "dtype": "float32",
        "low": [-0.5, -2.0],
        "high": [0.5, 1.0],
    }
    assert (schema["chunk_length"], schema["recurrent"], schema["mode"]) == (CHUNK, False, "action")
    assert request(port, "GET", "/health") == (200, b'{"status":"ok"}')


def test_metrics_count_messages_and_errors():
    with served(network()) as (_, port), PolicyClient(address(port)) as client:
        for step in range(3):
            client.get_action(vector(step))
        with pytest.raises(PolicyError):
            client.get_action(np.zeros(4))
        found = json.loads(request(port, "GET", "/metrics")[1])
    assert (found["clients"], found["messages"], found["errors"]) == (1, 4, 1)
    assert 0 < found["inference_p50_ms"] <= found["p50_ms"] <= found["p99_ms"]
    assert found["hz"] > 0


# -------------------------------------------------------------------------------------------------------- bad messages


def changed(**streams):
    return {"observation": encode({**scene(0), **streams})}


BAD = {
    "not JSON": ("{", "not JSON"),
    "no object": ("[]", "send an object"),
    "missing stream": ({"observation": {"rgb": 1}}, "the policy reads"),
    "one array": ({"observation": [1.0]}, "the policy reads"),
    "shape": (changed(state=np.zeros(5)), "stream 'state' is float64 (5,), the policy reads float32 (4,)"),
    "dtype": (changed(rgb=np.zeros((16, 16, 3))), "stream 'rgb' is float64"),
    "channels": (changed(rgb=np.zeros((16, 16, 2), np.uint8)), "stream 'rgb'"),
    "empty image": (changed(rgb=np.zeros((3, 0, 0), np.uint8)), "stream 'rgb'"),
    "NaN": (changed(state=np.full(4, np.nan)), "infinite or not a number"),
    "infinite": (changed(state=np.full(4, np.inf)), "infinite or not a number"),
    "beyond float32": (changed(state=np.full(4, 1e300)), "infinite or not a number"),
    "NaN in JSON": ('{"observation": [NaN]}', "NaN is not a finite number"),
    "long text": (changed(instruction="a" * 25), "25 bytes does not fit"),
    "number as text": (changed(instruction=5), "stream 'instruction'"),
    "null": ({"observation": None}, "null"),
}


def test_a_bad_message_is_one_error_and_the_connection_and_its_state_survive(chunks):
    _, port = chunks
    policy = tiny()
    with connect(address(port)) as connection:
        connection.recv()
        for step, (name, (message, words)) in enumerate(BAD.items()):
            connection.send(message if isinstance(message, str) else json.dumps(message))
            answer = json.loads(connection.recv(10))
            assert list(answer) == ["error"], name
            assert words in answer["error"], name
            connection.send(json.dumps({"observation": encode(scene(step)), "id": step}))  # between the bad ones
            answer = json.loads(connection.recv(10))
            assert answer["id"] == step
            wanted = policy.get_action(scene(step))
            assert np.asarray(answer["action"], np.float32).tobytes() == wanted.tobytes(), name
        connection.send(b"\x80\x04")  # a pickle
        assert "binary" in json.loads(connection.recv(10))["error"]
        connection.send(json.dumps({"reset": True, "id": "x"}))
        assert json.loads(connection.recv(10)) == {"id": "x", "reset": True}


def test_asynchronous_mode_checks_observations_that_it_does_not_use(chunks):
    _, port = chunks
    with PolicyClient(address(port, "async")) as client:
        client.get_action(scene(0))
        with pytest.raises(PolicyError, match="the policy reads"):
            client.get_action({"rgb": scene(0)["rgb"]})
        client.get_action(scene(1))


def test_discrete_observations_out_of_range():
    with served(network(observation=spaces.Discrete(4))) as (_, port), PolicyClient(address(port)) as client:
        for bad in (4, -1, 0.5):
            with pytest.raises(PolicyError, match="the observation"):
                client.get_action(np.asarray(bad))
        client.get_action(np.int64(3))


def test_damaged_weights_are_an_error_of_the_message():
    policy = network()
    with torch.no_grad():
        next(iter(policy.policy.towers.parameters())).fill_(float("nan"))
    with served(policy) as (_, port), PolicyClient(address(port)) as client:
        for _ in range(2):
            with pytest.raises(PolicyError, match="not finite"):
                client.get_action(vector(0))


def test_an_unexpected_failure_is_answered_too(monkeypatch):
    with served(network()) as (_, port), PolicyClient(address(port)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(LoadedPolicy, "get_action", lambda *_: 1 / 0)
            with pytest.raises(PolicyError, match="the server failed: ZeroDivisionError"):
                client.get_action(vector(0))
        client.get_action(vector(0))


# -------------------------------------------------------------------------------------------------------------- limits


def test_a_message_that_is_too_large_closes_its_connection_only(chunks):
    _, port = chunks
    with PolicyClient(address(port)) as other:
        with connect(address(port)) as connection:
            connection.recv()
            connection.send("x" * 200_000)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(10)
            assert closed.value.rcvd.code == 1009
        other.get_action(scene(0))
    status, answer = post(port, "x" * 200_000)
    assert (status, "larger than" in answer["error"]) == (413, True)


def test_more_clients_than_allowed_are_rejected_until_one_leaves(chunks):
    server, port = chunks
    clients = [PolicyClient(address(port)) for _ in range(3)]
    with pytest.raises(PolicyError, match="3 clients"):
        PolicyClient(address(port))
    clients.pop().close()
    deadline = time.monotonic() + 5
    while server.num_clients > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    clients.append(PolicyClient(address(port)))
    for client in clients:
        client.get_action(scene(0))
        client.close()


def test_websites_and_other_kinds_of_requests_are_rejected(chunks):
    _, port = chunks
    body = json.dumps({"observation": encode(scene(0))})
    assert request(port, "GET", "/schema", Host="evil.example")[0] == 400
    for method, path in (("GET", "/schema"), ("GET", "/health"), ("GET", "/metrics"), ("POST", "/chunk")):
        assert request(port, method, path, Origin="http://evil.example")[0] == 403
    assert post(port, body, Origin="http://evil.example")[0] == 403
    assert post(port, body, **{"content-type": "text/plain"})[0] == 415
    assert request(port, "GET", "/chunk")[0] == 405
    assert request(port, "GET", "/../etc/passwd")[0] == 404
    with pytest.raises(Exception, match="403"):
        connect(address(port), origin="http://evil.example")
    with pytest.raises(PolicyError, match="mode 'best' is not one of"):
        PolicyClient(address(port, "best"))
    assert post(port, "{")[0] == 400


def test_http_rejects_policies_with_memory():
    with served(network(memory_hidden=8)) as (_, port):
        status, answer = post(port, json.dumps({"observation": [0, 0, 0]}))
        assert (status, "memory" in answer["error"]) == (409, True)


def test_a_port_in_use_and_an_unknown_host_are_bad_input():
    in_use = pytest.raises(InputError, match=r"cannot be used \(Address already in use\)")
    with socket.create_server(("127.0.0.1", 0)) as taken, in_use:
        server_module.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="cannot be used"):
        server_module.listen("no.such.host.invalid", 0)


# ----------------------------------------------------------------------------------------- clients that break off


def half_message(port):
    """A client that is killed in the middle of a frame."""
    raw = socket.create_connection(("127.0.0.1", port))
    raw.sendall(
        f"GET /act HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101" in raw.recv(4096)
    raw.sendall(bytes([0x81, 0x80 | 126, 4, 0]) + b"\0\0\0\0" + b"{" * 10)  # 1,024 bytes are announced, 10 sent
    raw.close()


def test_clients_that_break_off_leave_nothing_behind(chunks):
    server, port = chunks
    for _ in range(5):
        half_message(port)
        with connect(address(port)) as connection:  # leaves without reading its answer
            connection.recv()
            connection.send(json.dumps({"observation": encode(scene(0))}))
            connection.socket.close()
    broken = socket.create_connection(("127.0.0.1", port))
    broken.sendall(b"POST /chunk HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    broken.close()
    deadline = time.monotonic() + 5
    while server.num_clients and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.num_clients == 0
    with PolicyClient(address(port)) as client:
        client.get_action(scene(0))


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "cartpole"
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-timesteps", 64, "--rollout-steps", 32, "--batch-size", 32]
    words += ["--n-epochs", 1, "--eval-freq", 0, "--device", "cpu", "--output-dir", folder, "--json"]
    assert cli.main([str(word) for word in words]) == 0
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_command_serves_a_run_and_ends_cleanly_at_a_signal(trained, number):
    words = [sys.executable, "-m", "deft", "serve", str(trained), "--port", "0", "--json", "--threads", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"127\.0\.0\.1:(\d+)/act", process.stdout.readline())[1])
        observation = gymnasium.make("CartPole-v1").reset(seed=0)[0]
        with PolicyClient(address(port)) as client:
            assert client.get_action(observation) == load_policy(trained, device="cpu").get_action(observation)
            for _ in range(3):  # requests are running while the signal arrives
                client._socket.send(json.dumps({"observation": encode(observation)}))
            process.send_signal(number)
            output, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    results = json.loads(output.splitlines()[-1])
    assert results["messages"] >= 1
    assert results["p99_ms"] > 0


def test_a_stop_before_the_first_message_is_not_lost():
    server = server_module.PolicyServer(network(), ServeConfig(path="-"))
    with server_module._stop_signals(server.stop):
        signal.raise_signal(signal.SIGTERM)  # between the address that is printed and the server's own handlers
    thread = threading.Thread(target=server.run, args=(server_module.listen("127.0.0.1", 0),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/run"], "/no/such/run"),
        (["RUN", "--mode", "ensemble"], "mode ensemble is for chunks"),
        (["RUN", "--mode", "best"], "mode"),
        (["RUN", "--port", "70000"], "port"),
        (["RUN", "--max-message-mib", "0"], "--max-message-mib: 0.0 is out of range"),
        (["RUN", "--target-return", "5"], "only a Decision Transformer"),
    ],
)
def test_bad_input_of_the_command(trained, capsys, words, message):
    words = [str(trained) if word == "RUN" else word for word in words]
    assert cli.main(["serve", *words, *([] if "--port" in words else ["--port", "0"])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_other_hosts_are_served_with_a_warning(trained, monkeypatch, caplog):
    monkeypatch.setattr(server_module.PolicyServer, "run", lambda self, listener: None)
    assert cli.main(["serve", str(trained), "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "every machine that can reach this port" in caplog.text
    caplog.clear()
    assert cli.main(["serve", str(trained), "--port", "0"]) == 0
    assert not caplog.text


def test_a_missing_package_is_named_with_the_command_that_installs_it(trained, monkeypatch, capsys):
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None if name == "websockets" else name)
    assert cli.main(["serve", str(trained)]) == 2
    assert 'needs websockets, which is not installed: in Deft\'s folder run `pip install -e ".[serve]"`' in (
        capsys.readouterr().err
    )
