"""The server of the lab answers its own page, and no other.

Oracle: the status of requests as another page, or another host, would make them.
"""

import http.client
import json
import re
import socket
import subprocess
import sys
import threading

import pytest

from fshard.errors import FshardError
from fshard.laboratory import command
from fshard.laboratory.engine import Engine
from fshard.laboratory.server import LabServer
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from fshard.plan.models import Transformer

TINY = Transformer(
    layers=2, hidden=32, ffn=64, heads=4, kv_heads=4, vocab=64, sequence=16, gated=False
)


@pytest.fixture(scope="module")
def server():
    # Without a proof: 32 devices are more than one runs on.
    with LabServer(Engine(Subject(), LabState(model=TINY, devices=32))) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def request(server, method, path, body=None, **headers):
    """Return the status and the content of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    content = body if isinstance(body, str | None) else json.dumps(body)
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


MESSAGE = {"id": 1, "slot": "A", "state": None}


def test_server_sends_the_page(server):
    path = server.address.partition(str(server.server_port))[2]

    status, text = request(server, "GET", path)

    assert status == 200
    assert text.lower().startswith("<!doctype html>")


def test_server_answers_a_message(server):
    status, text = request(server, "POST", f"/answer?token={server.token}", MESSAGE)

    assert status == 200
    assert json.loads(text)["kind"] == "answer"


@pytest.mark.parametrize("token", ["", "?token=", "?token=other", "?token=%C3%BC"])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("POST", "/answer"), ("GET", "/events")]
)
def test_server_refuses_another_token(server, method, path, token):
    status, text = request(server, method, path + token, MESSAGE)

    assert status == 403
    assert text == "Forbidden: open the address that `fshard lab` printed, with its token."


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "lab.example"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://lab.example"},
        {"Origin": "null"},
    ],
    ids=str,
)
def test_server_refuses_another_host_or_origin(server, headers):
    status, _ = request(server, "POST", f"/answer?token={server.token}", MESSAGE, **headers)

    assert status == 403


@pytest.mark.parametrize("body", ["{", "[]", '{"id": "x"}'], ids=["no json", "a list", "an id"])
def test_server_refuses_what_is_no_message(server, body):
    status, _ = request(server, "POST", f"/answer?token={server.token}", body)

    assert status == 400


def test_server_has_no_other_paths(server):
    assert request(server, "GET", f"/etc/passwd?token={server.token}")[0] == 404
    assert request(server, "POST", f"/?token={server.token}", MESSAGE)[0] == 404


def test_server_sends_proofs_as_events(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", f"/events?token={server.token}")
    events = connection.getresponse()

    request(server, "POST", f"/answer?token={server.token}", {**MESSAGE, "id": 2})

    line = events.readline().decode()
    connection.close()
    message = json.loads(line.removeprefix("data: "))
    assert (message["kind"], message["verdict"], message["id"]) == ("proof", "none", 2)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "open"])
def test_server_prints_the_errors_of_open_pages_alone(server, is_closed, monkeypatch, capsys):
    sent = threading.Event()
    ended = threading.Event()
    shutdown_request = server.shutdown_request

    def reply(message):
        sent.wait(60)
        if is_closed:
            return {"large": "x" * 10**7}  # more than the system buffers of a connection
        raise KeyError("a fault")

    def end(request):
        shutdown_request(request)
        ended.set()

    monkeypatch.setattr(server.engine, "reply", reply)
    monkeypatch.setattr(server, "shutdown_request", end)
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        head = f"POST /answer?token={server.token} HTTP/1.1\r\nContent-Length: 2\r\n"
        connection.sendall(f"{head}Host: 127.0.0.1:{server.server_port}\r\n\r\n{{}}".encode())
        if is_closed:
            connection.close()
        sent.set()
        assert ended.wait(60)

    printed = capsys.readouterr().err
    assert printed == "" if is_closed else "KeyError: 'a fault'" in printed


def test_command_prints_its_address_at_once_into_a_file():
    command_line = [sys.executable, "-m", "fshard", "lab", "--no-browser"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        process.kill()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S+\n", line)


def test_command_imports_no_slow_module_before_its_address():
    """DTensor, which proofs need, takes as long to import as the half of torch."""
    code = (
        "import sys, fshard.command, fshard.laboratory.command\n"
        "print({'torch.distributed.tensor', 'sympy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_command_refuses_a_port_that_is_none():
    with pytest.raises(FshardError, match="--port"):
        command.run(["--no-browser", "--port", "70000"])
