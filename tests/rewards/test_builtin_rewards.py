"""Core's own rewards, called as the pool calls them: by name."""

import asyncio
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Literal

import pytest

from enginehouse_rewards.builtin.exact_match import exact_match
from enginehouse_rewards.builtin.format import format
from enginehouse_rewards.builtin.length import length
from enginehouse_rewards.builtin.math import math
from enginehouse_rewards.builtin.numeric import numeric
from enginehouse_rewards.builtin.served import served
from enginehouse_rewards.program import TIMEOUT


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So it is 42.", "42"),
        ("First 7, then 42", 42),
        ("... #### 1,234", "She has 1,200 and 34 more.\n#### 1234"),
        ("#### 5\nThe 7 dwarfs", "5"),
        ("that makes $1,234,567.50 in all", "1234567.5"),
        (r"\boxed{1{,}234} and not 5", "1234"),
        (r"\boxed{3} or rather \boxed{\text{about } \frac{3}{4}}", "0.75"),
        (r"\boxed{\boxed{8}}", "8"),
        ("3/4", ".75"),
        (r"3\frac{1}{2}", "3.5"),
        (r"it is $-2 \tfrac12$", "-2.5"),
        (r"$-\frac12$", "-0.5"),
        (r"\dfrac{1}{3}", "0.33333333"),
        ("x = \N{MINUS SIGN}5", "-5"),
        ("10-3", "3"),
        ("75%", "0.75"),
        ("75%", "75"),
        ("0.75", "75%"),
        (r"75\%", "75 %"),
        ("1.5e3", "1500"),
        ("6.0", "6"),
    ],
)
def test_numbers_are_compared_by_value(response, answer):
    assert numeric(response=response, answer=answer)["reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("41", "42"),
        ("none at all", "0"),
        ("", "1"),
        ("42", "no number"),
        (r"42, so \boxed{x}", "42"),
        ("1000001", "1000000"),
        ("12345678901234567891", "12345678901234567890"),
        ("75%", "7500"),
        ("1/0", "0"),
        ("1e999999999", "1"),
        ("9" * 10_000, "9"),
        ("-5", "5"),
        (r"\boxed{" * 20_000, "1"),
    ],
)
def test_another_number_or_none_is_wrong(response, answer):
    assert numeric(response=response, answer=answer)["reward"] == 0.0


def test_how_far_a_number_may_be_off_is_an_argument():
    scores = [numeric(response="3.14", answer="3.14159", tolerance=tolerance) for tolerance in (0.01, 0.001)]
    assert [score["reward"] for score in scores] == [1, 0]


def test_rewards_that_look_for_an_answer_say_which_it_is():
    assert numeric(response="#### 1,234.50", answer="7") == {"reward": 0.0, "answer": "2469/2"}
    assert numeric(response="none", answer="7") == {"reward": 0.0, "answer": ""}
    assert exact_match("1+1=", " 2 ", answer="2") == {"reward": 1.0, "answer": "2"}


@pytest.mark.parametrize(
    ("response", "match", "expected"),
    [
        ("<think>a\nb</think> <answer>1</answer>", "full", 1.0),
        ("  <think></think><answer></answer>\n", "full", 1.0),
        ("Well: <think></think><answer></answer>", "full", 0.0),
        ("Well: <think></think><answer></answer>", "search", 1.0),
        ("<think></think>", "search", 0.0),
    ],
)
def test_the_form_of_a_response_is_a_regular_expression(response, match, expected):
    assert format(response=response, pattern=r"<think>.*</think>\s*<answer>.*</answer>", match=match) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1), (10**9, -1)]
)
def test_the_soft_overlong_punishment_is_that_of_dapo(tokens, expected):
    assert length(response_tokens=tokens, max_tokens=20480, buffer_tokens=4096) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(100, 0), (50, -0.5), (125, -0.25), (900, -1), (0, -1)])
def test_a_target_length_is_missed_by_a_share(tokens, expected):
    assert length(response_tokens=tokens, target=100) == expected


def test_math_keeps_time_by_alarms_in_the_main_thread_alone(monkeypatch):
    """Elsewhere the library would raise: only a main thread may set a signal's handler."""
    stub = ModuleType("math_verify")
    seconds = []

    def parse(text, *, parsing_timeout):
        seconds.append(parsing_timeout)
        return text

    def verify(gold, target, *, timeout_seconds):
        seconds.append(timeout_seconds)
        return gold == r"\boxed{1/2}" and target == "1/2"

    stub.parse, stub.verify = parse, verify
    monkeypatch.setitem(sys.modules, "math_verify", stub)
    scores = [math(response="1/2", answer="1/2")]
    thread = threading.Thread(target=lambda: scores.append(math(response="1/3", answer="1/2")))
    thread.start()
    thread.join()
    assert [score["reward"] for score in scores] == [1.0, 0.0]
    assert all(seconds[:3])
    assert seconds[3:] == [None] * 3


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"Thus \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"Thus $x = 2\sqrt{3}$", r"\sqrt{12}", 1.0),
        (r"\boxed{(1, 2)}", r"(1,2)", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
        (r"\boxed{\frac{1}{", "4", 0.0),
        (r"\boxed{7}", 7, 1.0),
        (r"First \boxed{5}, and so the answer is \boxed{7}", "7", 1.0),
        (r"First \boxed{7}, and so the answer is \boxed{5}", "7", 0.0),
    ],
)
def test_math_compares_what_is_equal_though_written_otherwise(response, answer, expected):
    pytest.importorskip("math_verify")
    assert math(response=response, answer=answer)["reward"] == expected


class Classifier(http.server.BaseHTTPRequestHandler):
    """Stands in for a server of a reward model: it answers in the form of the one that is asked for."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked.get("input", asked.get("text"))
        score = [float(len(text))] * (2 if "labels" in text else 1)
        answer = {"data": [{"probs": score}]} if asked.get("use_activation") is False else {"embedding": score}
        status = 404 if self.path != "/classify" or "refuse" in text else 200
        self.send_response(status)
        self.end_headers()
        if text.endswith("hang"):
            self.server.ended.wait(60)  # type: ignore[attr-defined]
        if text.endswith("drip"):
            with suppress(OSError):
                while not self.server.ended.wait(0.02):  # type: ignore[attr-defined]
                    self.wfile.write(b" ")
        if text.endswith("long"):
            self.wfile.write(b" " * 2**21)
        if text.endswith("deep"):
            self.wfile.write(b"[" * 100_000)
        self.wfile.write(json.dumps(answer if status == 200 else {"error": "no such model"}).encode())

    def log_message(self, format, *arguments): ...


@pytest.fixture(scope="module")
def classifier() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Classifier) as server:
        server.daemon_threads, server.ended = True, threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.ended.set()  # type: ignore[attr-defined]
        server.shutdown()


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_served_reward_models_score_is_taken_whatever_the_server(classifier: str, server: Literal["vllm", "sglang"]):
    assert asyncio.run(served("ab", "cde", url=classifier + "/", server=server, ending="!")) == 6.0


@pytest.mark.parametrize(
    ("text", "url", "said"),
    [
        ("labels", "", "/classify must return a single score, as a reward model on vllm does"),
        ("refuse", "", "/classify rejected the request with status 404.*no such model"),
        ("", "/v1", "/v1/classify rejected the request with status 404"),
    ],
)
def test_a_server_that_has_no_score_is_named(classifier: str, text: str, url: str, said: str):
    with pytest.raises(RuntimeError, match=said):
        asyncio.run(served("a", text, url=classifier + url))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hang", "/classify failed: timed out"),
        ("drip", r"/classify failed: its answer did not end within 0\.09 s"),
        ("long", "/classify failed: its answer is longer than 1048576 bytes"),
        ("deep", "/classify failed: maximum recursion depth"),
    ],
)
def test_a_server_whose_answer_has_no_end_is_named_before_the_rows_time_is_up(classifier, monkeypatch, text, said):
    monkeypatch.setenv(TIMEOUT, "30" if text in ("long", "deep") else "0.1")
    with pytest.raises(RuntimeError, match=said):
        asyncio.run(served("a", text, url=classifier))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:1/classify failed"):
        asyncio.run(served("a", "b", url="http://127.0.0.1:1"))
