"""The reward pool, with functions that behave and functions that do not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.rewards.reward_functions import NUMBERS

from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.ray_access import ray_access
from enginehouse_rewards.pool import RewardError, RewardPool
from enginehouse_rewards.processes import TIMEOUTS_AT_FIRST
from enginehouse_rewards.program import MARK

FUNCTIONS = "tests.rewards.reward_functions"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def rows(*responses):
    return [{"prompt": "p", "messages": None, "response": response, "finish_reason": "stop"} for response in responses]


def scores(rewards, *responses):
    return [score.reward for score in rewards.score(rows(*responses))]


def failures(rewards, *responses):
    return [score.failure for score in rewards.score(rows(*responses)) if score.failure]


@pytest.fixture
def pool():
    pools = []

    def make(function, **kwargs):
        pools.append(RewardPool(f"{FUNCTIONS}:{function}", python_path=[ROOT], **kwargs))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def test_scores_come_back_in_order(pool):
    rewards = pool("length", arguments={"scale": 2.0}, processes=2)
    responses = ["x" * (i % 7) for i in range(100)]
    expected = [2.0 * len(response) for response in responses]
    for _ in range(3):  # more rows go out at once as the cost of a row becomes known
        assert scores(rewards, *responses) == expected
    assert rewards.score([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", "raised ValueError: no digits in it"),
        ("hang", "did not return within 2 s"),
        ("die", "took its process down"),
        ("text", "returned '1.0' \\(str\\) instead of a number"),
        ("numbered", "returned 42 \\(int\\) as 'answer', which must be text"),
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("large", "returned 1e\\+39, but a reward must not exceed"),
        ("GeneratorExit", "raised GeneratorExit"),
        ("KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)
def test_a_row_without_a_score_fails_the_step_and_is_named(pool, response, said):
    rewards = pool("troubled", timeout_seconds=2)
    with pytest.raises(RewardError, match=said) as caught:
        rewards.score(rows("good", "good", response, "good"))
    for word in ("role reward", f"{FUNCTIONS}:troubled", os.uname().nodename, "sample 2 of 4", "on_error=zero"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "response",
    [
        "raise",
        pytest.param("hang", marks=pytest.mark.slow),
        pytest.param("die", marks=pytest.mark.slow),
        "text",
        "nan",
        "large",
        "KeyboardInterrupt",
    ],
)
def test_a_row_without_a_score_can_count_as_zero(pool, response):
    rewards = pool("troubled", timeout_seconds=2, on_error="zero")
    scored = rewards.score(rows("good", response, "good"))
    assert [score.reward for score in scored] == [1.0, 0.0, 1.0]
    assert [bool(score.failure) for score in scored] == [False, True, False]


def test_the_functions_own_traceback_is_shown(pool):
    with pytest.raises(RewardError, match="in troubled"):
        pool("troubled").score(rows("raise"))


def test_whatever_float_takes_is_a_reward(pool):
    assert scores(pool("number"), *NUMBERS) == [float(value) for value in NUMBERS.values()]


@pytest.mark.parametrize(("function", "said"), [("peculiar", "Peculiar: quite odd"), ("leaves", "SystemExit: 3")])
def test_any_exception_costs_only_its_row(pool, function, said):
    rewards = pool(function, on_error="zero", max_failures=1)
    assert scores(rewards, "a", "b") == [0.0, 0.0]
    with pytest.raises(RewardError, match=said):
        pool(function).score(rows("a"))


# Deadlines


def calls(marks: Path) -> list[str]:
    return marks.read_text().split()


@pytest.mark.slow
def test_slow_rows_are_computed_once(pool, tmp_path):
    marks = tmp_path / "marks"
    rewards = pool("slow", arguments={"seconds": {"r": 0.45}, "marks": str(marks)}, timeout_seconds=2)
    for count in (1, 5):  # with the cost of a row unknown, and known: all together take longer than one may
        rewards.score(rows(*(f"r{i}" for i in range(count))))
    assert calls(marks) == ["r0", *(f"r{i}" for i in range(5))]


@pytest.mark.slow
def test_a_hanging_row_among_slow_ones_ends_after_one_deadline(pool, tmp_path):
    marks = tmp_path / "marks"
    seconds = {"r": 0.1, "hang": 3600}
    rewards = pool("slow", arguments={"seconds": seconds, "marks": str(marks)}, timeout_seconds=1.0, on_error="zero")
    for _ in range(2):
        assert scores(rewards, "r0", "r1", "hang", "r2") == [1.0, 1.0, 0.0, 1.0]
    assert sorted(calls(marks)) == sorted(["r0", "r1", "hang", "r2"] * 2)


@pytest.mark.slow
def test_a_hanging_row_among_cheap_ones_costs_only_itself(pool, tmp_path):
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600}, "marks": str(marks)}
    rewards = pool("slow", arguments=arguments, timeout_seconds=2, on_error="zero")
    cheap = [f"r{i}" for i in range(50)]
    rewards.score(rows(*cheap))
    assert scores(rewards, *cheap, "hang", *cheap) == [1.0] * 50 + [0.0] + [1.0] * 50
    assert sorted(calls(marks)) == sorted([*cheap * 3, "hang"])


def test_a_row_that_takes_its_process_down_among_cheap_ones_is_told_from_them(pool, tmp_path):
    (tmp_path / "marks").touch()
    rewards = pool("waits", arguments={"gates": str(tmp_path)}, on_error="zero")
    cheap = [f"r{i}" for i in range(50)]
    rewards.score(rows(*cheap))  # from now on all go to the process at once, and are answered together
    (tmp_path / "marks").unlink()
    scored = rewards.score(rows(*cheap, "die", *cheap))
    assert [bool(score.failure) for score in scored] == [False] * 50 + [True] + [False] * 50
    assert calls(tmp_path / "marks").count("die") == 2
    assert max(calls(tmp_path / "marks").count(one) for one in cheap) <= 4  # each is there twice


@pytest.mark.slow
@pytest.mark.parametrize(("warm", "made"), [(False, TIMEOUTS_AT_FIRST), pytest.param(True, 2, marks=pytest.mark.slow)])
def test_a_reward_that_hangs_on_every_row_ends_the_step(pool, tmp_path, monkeypatch, warm, made):
    monkeypatch.setattr("enginehouse_rewards.processes.TIMEOUTS_LATER", 2)
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600, "r": 0.01}, "marks": str(marks)}
    rewards = pool("slow", arguments=arguments, timeout_seconds=2 if warm else 0.2, on_error="zero")
    marks.touch()
    if warm:  # hangs come as a surprise, in chunks of several rows
        rewards.score(rows("r", "r", "r", "r"))
    with pytest.raises(RewardError, match=f"seems to hang on every row: {made} calls"):
        rewards.score(rows(*["hang"] * 200))
    assert calls(marks).count("hang") <= made


@pytest.mark.slow
@pytest.mark.parametrize("between", [[], ["raise"]])
def test_rows_that_hang_are_no_hanging_reward_where_all_may_fail_or_others_end_in_between(pool, monkeypatch, between):
    monkeypatch.setattr("enginehouse_rewards.processes.TIMEOUTS_AT_FIRST", 2)
    monkeypatch.setattr("enginehouse_rewards.processes.TIMEOUTS_LATER", 2 if between else 3)
    rewards = pool("troubled", timeout_seconds=2 if between else 0.2, on_error="zero", max_failures=1)
    assert len(failures(rewards, "hang", *between, "hang")) == 2 + len(between)


# Processes


@pytest.mark.parametrize("on_error", ["fail", "zero"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no licence here')", "OSError: no licence here"),
        ("raise SystemExit('sorry')", "SystemExit: sorry"),
        ("print('oh no', flush=True), os._exit(7)", r"end before they score a row \(exit code 7\)(.|\n)*oh no"),
    ],
)
def test_a_module_that_fails_only_in_the_pool_is_named(tmp_path, on_error, source, said):
    (tmp_path / "elsewhere.py").write_text(
        f"import os\nif '{MARK}' in os.environ: {source}\ndef f(**columns): return 1.0\n"
    )
    rewards = RewardPool("elsewhere:f", python_path=[str(tmp_path)], on_error=on_error)
    try:
        with pytest.raises(RewardError, match=said) as caught:
            rewards.score(rows("a", "b"))
        for word in ("role reward", "elsewhere:f", os.uname().nodename):
            assert word in str(caught.value)
    finally:
        rewards.close()


@pytest.mark.slow
def test_closing_ends_a_pool_that_is_stuck(tmp_path):
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600}, "marks": str(marks)}
    rewards = RewardPool(f"{FUNCTIONS}:slow", arguments, python_path=[ROOT], timeout_seconds=3600)
    large = [{"prompt": "p" * 2**20, "response": "hang", "finish_reason": "stop"} for _ in range(8)]  # fills the pipe

    raised = []

    def score():
        try:
            rewards.score(large)
        except Exception as error:
            raised.append(error)

    scoring = threading.Thread(target=score, daemon=True)
    scoring.start()
    while not marks.exists():
        time.sleep(0.01)
    pids = children(rewards)
    rewards.close()
    scoring.join(10)
    assert [type(error) for error in raised] == [RewardError]
    assert not any(map(psutil.pid_exists, pids))


def test_a_pool_that_was_closed_says_so():
    rewards = RewardPool(f"{FUNCTIONS}:length", python_path=[ROOT])
    rewards.close()
    with pytest.raises(RewardError, match="the pool was closed"):
        rewards.score(rows("a"))


def children(rewards):
    return [process.pid for process in rewards._workers.processes]


def befall(rewards, number):
    """Send a signal to the pool's processes and wait until it has come to them."""
    for pid in children(rewards):
        os.kill(pid, number)
        while psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.fault(
    area="rewards",
    what="an idle reward process is killed (for example by the OOM killer), terminated or stopped",
    happens="another process takes its place. Nothing is computed twice",
    exit_code="0",
    kept="everything",
    noticed="at the next row",
)
def test_a_process_that_dies_or_stops_while_idle_costs_nothing(pool, tmp_path, number, processes):
    marks = tmp_path / "marks"
    arguments = {"seconds": {}, "marks": str(marks)}
    rewards = pool("slow", arguments=arguments, processes=processes, timeout_seconds=3600)
    scores(rewards, "a", "b")
    befall(rewards, number)
    assert scores(rewards, "c", "d", "e") == [1.0] * 3
    assert sorted(calls(marks)) == ["a", "b", "c", "d", "e"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.fault(
    area="rewards",
    what="a reward process is killed, terminated or stopped while it scores a row",
    happens="the row is scored again, in another process",
    exit_code="0",
    kept="everything",
    noticed="at once; if stopped, after `reward.timeout_seconds`",
)
def test_a_process_that_dies_or_stops_at_work_costs_its_row_a_second_try(pool, tmp_path, number):
    rewards = pool("once", arguments={"marks": str(tmp_path), "number": int(number)}, timeout_seconds=2)
    (tmp_path / "good").touch()
    assert scores(rewards, "good", "a", "good") == [1.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "good"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.fault(
    area="rewards",
    what="a reward ends its process on half of its rows (`on_error=zero`)",
    happens="these rows score 0, the others as usual",
    exit_code="0",
    kept="everything",
    noticed="at once, counted in `reward/failures`",
)
def test_a_reward_that_ends_its_process_on_half_of_its_rows_costs_these(pool, processes):
    rewards = pool("troubled", on_error="zero", processes=processes)
    for _ in range(2):
        assert scores(rewards, *["die", "good"] * 3) == [0.0, 1.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "response"), [("detached", "die"), ("orphaned", "good"), ("forked", "die")])
def test_what_a_reward_starts_ends_with_its_process(tmp_path, kind, response):
    mark = str(tmp_path / "mark")
    arguments = {"kind": kind, "mark": mark}
    rewards = RewardPool(f"{FUNCTIONS}:starts", arguments, python_path=[ROOT], on_error="zero", max_failures=1)
    try:
        rewards.score(rows(response))
    finally:
        rewards.close()
    assert os.path.exists(mark)
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if mark in "".join(process.info["cmdline"] or ())
    ]


@pytest.mark.slow
@pytest.mark.fault(
    area="rewards",
    what="the run is killed while a reward is busy and has started processes of its own",
    happens="the reward's process and those processes end",
    exit_code="-9",
    kept="what was written until then",
    noticed="at once; a busy process gets 2 s to end",
)
def test_nothing_of_a_reward_outlives_a_run_that_is_killed(tmp_path):
    mark = str(tmp_path / "mark")
    pool = f"RewardPool({FUNCTIONS + ':starts'!r}, { ({'kind': 'detached', 'mark': mark})!r}, python_path=[{ROOT!r}])"
    source = f"from enginehouse_rewards.pool import RewardPool; {pool}.score({rows('hang')!r})"
    run = subprocess.Popen([sys.executable, "-c", source])
    while not os.path.exists(mark):
        assert run.poll() is None
        time.sleep(0.01)
    (reward,) = psutil.Process(run.pid).children()
    (started,) = reward.children()
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs([reward, started], timeout=60)
    assert not alive


def test_a_child_that_comes_back_from_a_fork_does_not_answer(pool):
    assert scores(pool("forks"), *["exit", "return"] * 5) == [1.0] * 10


@pytest.mark.parametrize("response", ["raise", "die", "none"])
def test_what_a_row_prints_is_shown_with_its_failure_alone(pool, capfd, response):
    with pytest.raises(RewardError) as caught:
        pool("prints").score(rows("quiet", "much", response, "quiet"))
    message = str(caught.value)
    assert f"from a shell: {response}" in message
    assert f"from Python: {response}" in message or response == "die"  # its buffer died with it
    assert "quiet" not in message.partition("printed:")[2]
    assert ("Segmentation fault" in message) == (response == "die")
    assert len(message) < 10_000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", ["prints", "prints_a_batch", "prints_and_waits"])
@pytest.mark.parametrize("response", ["raise", "none"])
def test_what_a_reward_prints_is_shown_when_it_fails_for_most_rows(pool, function, response):
    with pytest.raises(RewardError, match=r"reward\.max_failures") as caught:
        pool(function).score(rows(*[response] * 4))
    assert f"from Python: {response}" in str(caught.value).partition("printed:")[2]


@pytest.mark.slow
def test_what_a_reward_prints_is_shown_when_it_seems_to_hang(pool):
    with pytest.raises(RewardError, match="seems to hang") as caught:
        pool("prints", timeout_seconds=0.5, on_error="zero").score(rows(*["hang"] * 9))
    assert "from Python: hang" in str(caught.value).partition("printed:")[2]


def test_a_cluster_that_is_lost_is_noticed_while_rows_are_scored(pool, monkeypatch):
    def lost() -> None:
        raise ClusterLost("the control service ended")

    rewards = pool("troubled", timeout_seconds=600)
    monkeypatch.setattr(ray_access, "look", lost)
    with pytest.raises(ClusterLost):
        rewards.score(rows("hang"))


# A reward that is broken, and single rows that are


@pytest.mark.parametrize("on_error", ["fail", "zero"])
@pytest.mark.fault(
    area="rewards",
    what="a reward fails for more than `reward.max_failures` of a step's or validation's rows",
    happens="the run ends with the first failure's row, traceback and output",
    exit_code="1",
    kept="all up to the step",
    noticed="at once",
)
def test_a_reward_that_fails_for_most_rows_ends_the_step_and_is_not_advised_to_be_zeroed(pool, on_error):
    rewards = pool("troubled", on_error=on_error, max_failures=0.25)
    with pytest.raises(RewardError, match=r"reward\.max_failures=0\.25") as caught:
        rewards.score(rows("good", "raise", "nan", "text", "good", "good"))
    message = str(caught.value)
    assert "sample 1 of 6 raised ValueError: no digits in it" in message
    assert "in troubled" in message
    assert "on_error" not in message


def test_one_or_two_rows_without_a_score_are_single_rows_however_few_there_are(pool):
    assert len(failures(pool("troubled", on_error="zero"), "raise", "nan")) == 2
    with pytest.raises(RewardError, match="on_error=zero"):
        pool("troubled").score(rows("raise", "nan"))
    with pytest.raises(RewardError, match=r"reward\.max_failures=0 allows"):
        pool("troubled", on_error="zero", max_failures=0).score(rows("raise", *["good"] * 9))


def test_as_many_failures_as_are_allowed_are_zeros(pool):
    rewards = pool("troubled", on_error="zero", max_failures=0.5)
    assert failures(rewards, "good", "raise", "nan", "good")[0] == "raised ValueError: no digits in it"


def test_the_first_failure_is_said_once_and_kept(pool, tmp_path, caplog):
    record = tmp_path / "reward_error.txt"
    rewards = pool("troubled", on_error="zero", record=record)
    for _ in range(2):
        scores(rewards, "good", "raise", "nan", "good")
    (warning,) = caplog.messages
    assert "sample 1 of 4 raised ValueError: no digits in it" in warning
    assert str(record) in warning
    assert "in troubled" in record.read_text()


# What a reward may take and return


def test_a_reward_may_return_named_figures(pool):
    rewards = pool("figures", on_error="zero")
    assert [score.figures for score in rewards.score(rows("a", "bcd"))] == [{"format": 1.0}, {"format": 3.0}]
    (failure,) = failures(rewards, "a", "")
    assert failure == "returned a mapping that must have the key 'reward', but has 'score', 'acc'"


def test_a_reward_gets_what_it_takes(pool):
    rewards = pool("frugal")
    assert [score.reward for score in rewards.score([{**row, "answer": 5, "other": 7} for row in rows("a", "bc")])] == [
        6,
        7,
    ]
    assert scores(rewards, "a") == [1]


def test_async_rewards_run_at_once(pool):
    assert scores(pool("meets", timeout_seconds=60), "a", "b", "c", "d") == [1.0] * 4


@pytest.mark.slow
def test_async_rewards_have_a_deadline_each_and_fail_alone(pool):
    rewards = pool("meets", timeout_seconds=2, on_error="zero")
    assert scores(rewards, "a", "hang", "b", "SystemExit", "c") == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_threads_of_an_async_reward_are_as_many_as_its_rows_at_once(pool):
    scored = pool("asks_in_a_thread", timeout_seconds=60, concurrency=12).score(rows(*"abcdefghijkl"))
    assert {score.reward for score in scored} == {1.0}
    assert {score.figures["limit"] for score in scored} == {60.0}


@pytest.mark.slow
def test_threads_that_hang_hold_up_no_rows_to_come(pool):
    rewards = pool("asks_in_a_thread", timeout_seconds=4, concurrency=12, on_error="zero", max_failures=1.0)
    processes = set()
    for _ in range(4):
        scored = rewards.score(rows(*"abcdefghijkl", *["hang"] * 6))
        assert [score.reward for score in scored] == [1.0] * 12 + [0.0] * 6
        processes |= {score.figures["process"] for score in scored if score.reward}
    assert len(processes) > 1, "one whose threads hang is replaced"


@pytest.mark.slow
def test_an_async_reward_that_blocks_its_process_is_found(pool, monkeypatch):
    monkeypatch.setattr("enginehouse_rewards.process.GRACE_SECONDS", 0.1)
    rewards = pool("meets", timeout_seconds=2, on_error="zero", concurrency=2, arguments={"meeting": [1, 2, 3]})
    assert scores(rewards, "a", "block", "b") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("trouble", ["raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_batched_reward_gets_lists_and_a_bad_row_costs_itself(pool, trouble):
    rewards = pool("lengths", arguments={"scale": 2.0}, on_error="zero", timeout_seconds=2)
    extra = [{**row, "extra": 1} for row in rows("a", "bcd", trouble)]
    assert [score.reward for score in rewards.score(extra)] == [2.0, 6.0, 0.0]


def test_a_batched_reward_returns_a_value_a_row(pool):
    with pytest.raises(RewardError, match="returned 1 values for 3 rows; a batched reward must return a list"):
        pool("lengths").score([{**row, "extra": 1} for row in rows("a", "short", "b")])


def test_a_batched_reward_may_have_arguments_filled_in(pool):
    scored = pool("twice_lengths").score([{**row, "extra": 1} for row in rows("a", "bcd")])
    assert [score.reward for score in scored] == [2.0, 6.0]


def test_a_batched_reward_may_be_async_and_give_figures(pool):
    scored = pool("lengths_later", processes=2).score(rows("a", "bc", "d"))
    assert [score.reward for score in scored] == [1, 2, 1]
    assert {score.figures["calls"] for score in scored} <= {1, 2, 3}
