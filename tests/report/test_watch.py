"""`enginehouse watch`: who may ask, and that a page is told what is new, whatever becomes of the run's files."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import CONFIG, make_run, sample, take_step

from enginehouse_report.server import LiveRun, RunServer
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs import RunDirectory


@pytest.fixture
def server(run: RunDirectory) -> Iterator[RunServer]:
    with RunServer(run.path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(server: RunServer, what: str) -> Any:
    status, text = get(server.url + what)
    assert status == 200, text
    return json.loads(text)


def test_the_page_asks_its_own_server_and_no_other(server: RunServer):
    status, text = get(server.url)
    assert status == 200
    assert "connect-src 'self'" in text
    assert f'data-live="/{server.token}/"' in text


@pytest.mark.parametrize("path", ["", "x/", "x/data", "data", "{part}/data", "%00/data"])
def test_who_has_not_the_token_is_told_nothing(server: RunServer, path: str):
    root = server.url.removesuffix(f"{server.token}/")
    status, text = get(root + path.format(part=server.token[:-1]))
    assert (status, text) == (403, "Use the address that `enginehouse watch` printed.")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]:80"])
def test_a_name_that_somebody_had_point_here_is_refused(server: RunServer, host: str):
    assert get(server.url, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "127.0.0.1:1"])
def test_a_tunnel_of_another_port_is_served(server: RunServer, host: str):
    assert get(server.url, Host=host)[0] == 200


def test_it_listens_on_this_machine_alone(server: RunServer):
    assert server.server_address[0] == "127.0.0.1"


def test_only_what_is_new_is_sent(server: RunServer, run: RunDirectory):
    first = ask(server, "data")
    assert first["whole"]
    assert first["part"]["metrics"]["columns"]["step"] == [1, 2, 3]
    assert first["samples"]["rows"] == 12
    cursors = urllib.parse.urlencode(first["next"])
    again = ask(server, f"data?{cursors}")
    assert (again["whole"], again["part"]["metrics"]["rows"], again["samples"]["rows"]) == (False, 0, 0)
    take_step(run, 4)
    run.finish("finished")
    later = ask(server, f"data?{cursors}")
    assert later["part"]["metrics"]["columns"]["step"] == [4]
    assert later["part"]["validations"]["columns"]["step"] == [4]
    assert set(later["samples"]["columns"]["step"]) == {4}
    assert later["part"]["facts"]["status"] == "finished"


def test_every_row_is_reachable_whole(server: RunServer):
    ask(server, "data")
    assert ask(server, "sample?file=step-000002.jsonl&line=3") == sample(2)


@pytest.mark.parametrize(
    "query", ["file=step-000002.jsonl&line=9", "file=../run.json&line=1", "file=/etc/passwd&line=1", "", "line=1"]
)
def test_no_other_file_is_reachable(server: RunServer, query: str):
    ask(server, "data")
    status, text = get(f"{server.url}sample?{query}")
    assert (status, text) == (404, "There is no such row any more.")


def test_what_is_nested_beyond_reading_is_left_out(server: RunServer, run: RunDirectory):
    begin = len(ask(server, "data")["samples"])
    deep = "[" * 100_000
    for file in (run.path / "samples" / "step-000009.jsonl", run.path / "timeline.json"):
        with file.open("a") as lines:
            lines.write(f"\n{deep}\n")
    assert get(f"{server.url}data")[0] == get(f"{server.url}timeline")[0] == 200
    assert len(ask(server, "data")["samples"]) == begin


def test_what_is_no_number_is_an_answer_and_not_the_end(server: RunServer):
    assert get(f"{server.url}sample?line=x")[0] == 500
    assert ask(server, "data?metrics=-1&samples=x&generation=zz")["whole"]
    assert get(f"{server.url}nothing")[0] == 404


def test_a_browser_that_goes_away_is_not_spoken_of(server, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(server, "shutdown_request", lambda request: ended.set())
    with socket.create_connection(server.server_address) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as one that is killed
        browser.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert ended.wait(30)
    assert capfd.readouterr().err == ""
    assert get(server.url)[0] == 200


def test_the_timeline_is_what_is_there_now(server: RunServer, run: RunDirectory):
    assert len(ask(server, "timeline")["columns"]["begin"]) == 6
    take_step(run, 4)
    assert len(ask(server, "timeline")["columns"]["begin"]) == 8


def test_a_large_answer_is_compressed_for_who_takes_it(server: RunServer):
    import gzip

    request = urllib.request.Request(server.url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert b"</html>" in gzip.decompress(answer.read())


def test_a_run_that_has_not_begun_is_shown_once_it_does(tmp_path: Path):
    live = LiveRun(tmp_path / "later")
    first = live.news({})
    assert first["part"]["facts"]["status"] == "not begun"
    run = make_run(tmp_path / "later", steps=1)
    later = live.news(first["next"])
    assert later["part"]["metrics"]["columns"]["step"] == [1]
    assert later["samples"]["rows"] == 4
    run.finish("finished")
    assert live.news(later["next"])["part"]["facts"]["status"] == "finished"


def checkpoint(run: RunDirectory, step: int) -> Checkpoint:
    """As `--resume` finds one."""
    path, record = run.path / "checkpoints" / f"step-{step:06d}", read_record(run.path)
    return Checkpoint(path, step, 1.0, loop={}, config={}, kind="train", record=record)


def test_a_resumed_run_that_cut_its_files_back_is_sent_whole(run: RunDirectory):
    live = LiveRun(run.path)
    first = live.news({})
    run.finish("failed", "it broke")
    resumed = RunDirectory.create(run.path, CONFIG, resumed=checkpoint(run, step=1))
    cut = live.news(first["next"])
    assert cut["whole"]
    assert cut["part"]["metrics"]["columns"]["step"] == [1]
    assert set(cut["samples"]["columns"]["step"]) == {1}
    take_step(resumed, 2)
    later = live.news(cut["next"])
    assert (later["whole"], later["part"]["metrics"]["columns"]["step"]) == (False, [2])


def test_another_run_in_its_place_is_sent_whole(run: RunDirectory):
    record = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(record | {"pid": record["pid"] + 1}))  # this one makes the other too
    live = LiveRun(run.path)
    first = live.news({})
    run.finish("finished")
    make_run(run.path, steps=4, overwrite=True)
    again = live.news(first["next"])
    assert again["whole"]
    assert again["part"]["metrics"]["columns"]["step"] == [1, 2, 3, 4]


def test_samples_that_are_written_anew_are_sent_whole(run: RunDirectory):
    live = LiveRun(run.path)
    first = live.news({})
    run.write_samples(3, [sample(9)])
    again = live.news(first["next"])
    assert again["whole"]
    assert again["samples"]["rows"] == 9


def test_samples_that_take_long_come_with_later_answers(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    live = LiveRun(run.path)
    monkeypatch.setattr("enginehouse_report.server.READ_SECONDS", 0.0)
    assert live.news({})["samples"]["unread"] == ["step-000001.jsonl", "step-000002.jsonl", "step-000003.jsonl"]
    monkeypatch.setattr("enginehouse_report.server.READ_SECONDS", 60.0)
    answer = live.news({})
    assert (answer["samples"]["rows"], answer["samples"]["unread"]) == (12, [])


def test_ctrl_c_ends_it_in_order(run: RunDirectory):
    program = [sys.executable, "-m", "enginehouse.cli.main", "watch", str(run.path)]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    said = process.stdout.readline()
    url = said.split(": ", 1)[1].strip()
    assert get(url)[0] == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_port_that_is_taken_is_one_error(server: RunServer, run: RunDirectory):
    from click.testing import CliRunner

    from enginehouse.cli.main import main

    result = CliRunner().invoke(main, ["watch", str(run.path), "--port", str(server.server_address[1])])
    assert result.exit_code == 2
    assert "Name another, or leave it out" in result.output
