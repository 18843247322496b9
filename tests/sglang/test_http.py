"""Requests to an HTTP server: what comes back, and what is said where nothing whole does."""

import asyncio
import contextlib
import sys

import pytest

from enginehouse.errors import ConfigError
from enginehouse_sglang.http import Address, HTTPStatusError, NoAnswer
from enginehouse_sglang.process import ServerProcess, SGLangFailed


def ask(answer: bytes, body=None):
    """What a call gives to which a server sends these bytes, and what the server was sent."""

    async def run():
        got = []

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            got.append(head + await reader.readexactly(length))
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await Address(f"http://127.0.0.1:{port}/base/").call("POST", "/x", body), got[0]

    return asyncio.run(run())


def test_json_goes_out_and_comes_back():
    said, got = ask(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}', {"ids": [1, 2]})
    assert said == {"a": 1}
    assert got.startswith(b"POST /base/x HTTP/1.0\r\n")
    assert got.endswith(b'{"ids":[1,2]}')


def test_an_empty_answer_is_one():
    assert ask(b"HTTP/1.1 200 OK\r\n\r\n")[0] == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"error": {"message": "too long"}}', "too long"), (b'{"detail": "Not Found"}', "Not Found"), (b"no", "no")],
)
def test_what_a_server_refuses_is_said_in_its_words(content, said):
    with pytest.raises(HTTPStatusError, match=f"/x: {said}") as refused:
        ask(b"HTTP/1.1 404 Not Found\r\n\r\n" + content)
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "before the answer was complete"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP server"),
    ],
)
def test_half_an_answer_is_none(answer, said):
    with pytest.raises(NoAnswer, match=said):
        ask(answer)


async def test_nobody_there_is_no_answer():
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(NoAnswer, match="onnect"):
        await Address(f"http://127.0.0.1:{port}").call("GET", "/x")


@pytest.mark.parametrize("url", ["127.0.0.1:3", "ftp://a", "http://", "http://a:b", "http://a/?q=1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="not the URL of a server"):
        Address(url)


async def test_a_request_that_is_cancelled_closes_its_connection():
    begun, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        begun.set()
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)  # to the end of what the client sends, which is its end
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        task = asyncio.create_task(Address(f"http://127.0.0.1:{port}").call("GET", "/x"))
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_a_server_that_cannot_be_started_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(
        SGLangFailed, match=r"rollout replica 0: sglang's server could not be started: .*/nowhere/python"
    ):
        ServerProcess({}, {}, "rollout replica 0")
