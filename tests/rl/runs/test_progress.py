"""What a run shows: lines on a pipe, a display on a terminal, and the terminal given back."""

import io
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from enginehouse.fleet.replica import ReplicaStatus
from enginehouse_rl.runs import Progress, RunDirectory, describe_saved, summary_lines
from enginehouse_rl.runs.display import Display, describe_replicas, format_duration
from enginehouse_rl.runs.jsonlines import write_json_lines
from enginehouse_rl.runs.sparkline import MOST_POINTS, Series, draw_sparkline

METRICS = {"reward/mean": 0.25, "loss": 0.5, "tokens_per_second": 21034.4, "time/step": 0.1, "time/generate": 0.06}


def on_pipe() -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress("run", console=Console(file=stream, force_terminal=False, width=200)), stream


def on_terminal() -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress("run", console=Console(file=stream, force_terminal=True, width=100)), stream


def test_a_pipe_gets_plain_lines_now_and_then():
    progress, stream = on_pipe()
    with progress, progress.task("starting workers"):
        progress.start(100)
        for step in range(1, 101):
            progress.step_finished(step, METRICS)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "starting workers ..."
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 21  # the first, then every fifth
    assert steps[-1].startswith("step 100/100  reward 0.250 (mean of 10: 0.250)  loss 0.500 (mean of 10: 0.500)  tok")


@pytest.mark.parametrize("where", ["a pipe that nobody reads", "a full disk"])
def test_a_run_goes_on_without_an_output_that_takes_nothing(where, monkeypatch, caplog):
    """As of `| tee log`, where that ends first, and of `> log` on a disk that is full."""
    if where == "a pipe that nobody reads":
        reads, writes = os.pipe()
        os.close(reads)
    else:
        writes = os.open("/dev/full", os.O_WRONLY)
    with open(writes, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with Progress("run") as progress, progress.task("starting workers"):
            progress.start(2)
            progress.step_finished(1, METRICS)
            progress.note("a note")
            progress.step_finished(2, METRICS)
    assert caplog.text.count("the run continues without it") == 1
    assert progress.history.now("reward/mean") == METRICS["reward/mean"]


def test_a_task_in_another_says_that_the_other_is_done_and_what_comes_of_it_follows():
    progress, stream = on_pipe()
    with progress, progress.task("starting workers"):
        with progress.task("validating"):
            progress.validated(0, {"validation/reward": 0.5})
        progress.start(1)
        progress.step_finished(1, METRICS)
    said = [line.partition(" in ")[0].partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert said == [
        "starting workers ...",
        "starting workers: done",
        "validating ...",
        "validation at step 0: reward 0.500",
        "step 1/1",
    ]


def test_what_is_started_is_said_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress, stream = on_pipe()
    with progress, progress.task("starting workers"):
        now[0] += 12.5
        progress.report_arrival("2 processes of actor")
        assert progress.part == "2 processes of actor: ready after 12.5 s"
        progress.start(1)
        assert progress.part == ""
    assert stream.getvalue().splitlines()[:2] == ["starting workers ...", "  2 processes of actor: ready after 12.5 s"]


def test_slow_steps_get_a_line_each_minute(monkeypatch: pytest.MonkeyPatch):
    progress, stream = on_pipe()
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with progress:
        progress.start(10_000)
        for step in range(1, 5):
            now[0] += 61
            progress.step_finished(step, METRICS)
    assert len(stream.getvalue().splitlines()) == 4


def test_what_is_counted_shows_how_far_it_is_while_it_comes():
    progress, stream = on_terminal()
    with progress:
        progress.start(10)
        for part in progress.count([3, 4], "samples", 7, lambda part: part):
            stream.truncate(0)
            assert progress._live is not None
            progress._live.refresh()
            assert ("generating: 3 of 7 samples" in stream.getvalue()) == (part == 3)
        stream.truncate(0)
        progress._live.refresh()
        assert "samples" not in stream.getvalue()


def test_what_takes_longer_than_a_minute_gets_lines(monkeypatch: pytest.MonkeyPatch):
    progress, stream = on_pipe()
    now = [time.perf_counter()]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with progress:
        progress.start(10)
        for _ in progress.count(range(6), "samples", 6000, lambda part: 1000):
            now[0] += 31
    assert stream.getvalue().splitlines() == [
        "generating: 3,000 of 6,000 samples",
        "generating: 5,000 of 6,000 samples",
    ]


def test_a_note_stays_on_a_pipe_and_on_a_terminal():
    for progress, stream in (on_pipe(), on_terminal()):
        with progress:
            progress.note("replica 0 answers at [url]")
        assert "replica 0 answers at [url]\n" in stream.getvalue()


def test_quiet_says_nothing():
    stream = io.StringIO()
    progress = Progress(mode="quiet", console=Console(file=stream))
    with progress:
        progress.start(2)
        progress.step_finished(1, METRICS)
        progress.validated(1, {"validation/reward": 0.5})
        progress.note("nothing")
    assert stream.getvalue() == ""
    assert progress.history.now("reward/mean") == 0.25


def test_rewards_that_failed_are_shown_where_there_are_any():
    stream = io.StringIO()
    with Progress(mode="lines", console=Console(file=stream, width=200)) as progress:
        progress.start(3)
        for step, failures in ((1, 0.0), (2, 2.0), (3, 1.0)):
            progress.step_finished(step, METRICS | {"reward/failures": failures})
            progress.validated(step, {"validation/reward": 0.5, "validation/failures": failures})
    said = stream.getvalue().splitlines()
    assert "failures" not in said[0] + said[1]
    assert "episodes" not in stream.getvalue()
    assert "reward failures 2 in 2 steps" in said[2]
    assert said[3] == "validation at step 2: reward 0.500 -> 0.500  failures 2"
    assert "reward failures 3 in 3 steps" in said[4]


def test_a_line_has_the_steps_own_value_first_and_the_mean_beside_it():
    progress, stream = on_pipe()
    with progress:
        progress.start(3)
        for step, reward in enumerate((0.172, 0.139, 0.016), start=1):
            progress.step_finished(step, {"reward/mean": reward, "loss": reward, "entropy": reward})
    first, _, last = stream.getvalue().splitlines()
    assert first.startswith("step 1/3  reward 0.172  loss 0.172  entropy 0.172")
    assert last.startswith("step 3/3  reward 0.016 (mean of 3: 0.109)  loss 0.016 (mean of 3: 0.109)  entropy 0.016  ")


def test_a_line_says_how_many_episodes_of_the_step_failed():
    progress, stream = on_pipe()
    with progress:
        progress.start(2)
        failed = {"feed/failed_time": 6.0, "feed/failed_error": 2.0, "response/failed": 0.125}
        progress.step_finished(1, METRICS | failed)
        progress.step_finished(2, METRICS | {"feed/failed_time": 0.0})
    first, second = stream.getvalue().splitlines()
    assert "failed episodes 8 (12% of the step's)" in first
    assert "failed episodes" not in second


def test_a_validation_in_which_no_tool_was_called_is_noted_once():
    said = "no response called a tool"
    progress, stream = on_pipe()
    with progress:
        for step, calls in ((0, 0.5), (2, 0.0), (4, 0.0)):
            progress.validated(step, {"validation/reward": 0.5, "validation/tool_calls": calls})
            assert (said in stream.getvalue()) == (step > 0)
    assert stream.getvalue().count(said) == 1


def test_a_terminal_gets_a_display_with_reward_phases_and_time_left():
    progress, stream = on_terminal()
    with progress:
        progress.start(10)
        progress.step_finished(1, METRICS)
        progress.validated(1, {"validation/reward": 0.125})
        assert progress._live is not None
        progress._live.refresh()
    shown = stream.getvalue()
    for part in ("step 1/10", "0.250", "21,034", "generate 0.06", "reward 0.125", "elapsed 0 s", "left"):
        assert part in shown


FULL = METRICS | {
    "entropy": 1.5, "kl": 0.01, "response/tokens_mean": 7.0, "grad_norm": 0.3, "reward/failures": 1.0,
}  # fmt: skip
ALARM = {
    "step": 12,
    "alarm": "reward_zero",
    "said": "every reward was 0 奖励 " * 5,
    "advice": "begin with easier prompts",
}


def displayed(width: int, height: int, encoding: str = "utf-8") -> list[str]:
    """A display of all that there may be, as it is drawn."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", write_through=True)
    console = Console(file=stream, force_terminal=True, color_system=None, width=width, height=height)
    progress = Progress("a run's name 运行 that is far too long for a narrow terminal", console=console)
    progress.state = lambda: "episodes 812 under way, 40 in tools"
    progress.replicas = lambda: [ReplicaStatus(0, "up", 12, 34), ReplicaStatus(1, "restarting", None, 0)]
    progress.start(100)
    for step in range(1, 41):
        progress.step_finished(step, FULL | {"reward/mean": step / 100, "loss": -step})
        if step % 10 == 0:
            progress.validated(step, {"validation/reward": step / 50})
    progress.alarmed(ALARM)
    console.print(Display(progress))
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (200, 60), (40, 10), (24, 5), (8, 3), (1, 1)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_display_fits_any_terminal_with_what_matters_most(width: int, height: int, encoding: str):
    lines = displayed(width, height, encoding)
    assert 1 <= len(lines) <= max(height - 1, 1)
    assert max(map(cell_len, lines)) <= width
    shown = "\n".join(lines)
    wanted = ["step 40/100", "! step 12", "reward"] if height >= 5 else []
    if width >= 80:
        wanted += [
            "reward       0.400   mean 0.355",
            "validation",
            "entropy",
            "KL ",
            "length",
            "gradient",
            "tokens/s",
            "21,034",
        ]
        wanted += [
            "every reward was 0",
            "replica 0: up, weights v12, 34 requests; replica 1: restarting",
            "812 under way",
        ]
        wanted += ["generate 0.06", "validation at step 40", "reward failures 10 in 10 steps"]
        (reward,) = [line for line in lines if line.startswith("reward  ")]
        way = reward[33:].split()[0]
        assert "".join(dict.fromkeys(way)) == ("▁▂▃▄▅▆▇" if encoding == "utf-8" else "_.-=+*#")
    assert [part for part in wanted if part not in shown] == []


def test_an_alarm_is_wrapped_where_it_is_wider_than_the_terminal():
    lines = displayed(60, 40)
    first = next(number for number, line in enumerate(lines) if line.startswith("! step 12"))
    shown = "".join("".join(lines[first:]).split())
    assert shown == "".join(f"! step 12: {ALARM['said']}".split())
    assert len(lines) > first + 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "?"), (5.4, "5 s"), (119, "119 s"), (160, "2 min 40 s"), (11_100, "3 h 5 min"), (4e6, "1,111 h 6 min")],
)
def test_a_duration_is_in_seconds_then_minutes_then_hours(seconds: float | None, words: str):
    assert format_duration(seconds) == words


def test_many_replicas_are_counted_by_their_states():
    many = [ReplicaStatus(number, "up" if number else "lost", number or None, 2) for number in range(9)]
    assert describe_replicas(many) == "replicas: 1 lost, 8 up, weights from v1 on, 18 requests"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    assert Progress(console=Console(file=io.StringIO(), force_terminal=True)).mode == "lines"


def test_no_colour_is_used_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    progress, stream = on_terminal()
    progress.start(3)
    progress.step_finished(1, FULL)
    progress.console.print(Display(progress))
    assert "reward" in stream.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", stream.getvalue())


def test_a_sparkline_shows_the_whole_run_in_few_points():
    series = Series()
    for step in range(100_000):
        series.add(float(step))
    series.add(math.nan)
    assert MOST_POINTS // 2 <= len(series.points) < MOST_POINTS
    assert series.points == sorted(series.points)
    assert series.points[-1] > 97_000
    assert draw_sparkline(series.points, 7) == "▁▂▃▄▅▆▇"
    assert draw_sparkline([1.0, 1.0], 8) == "▁▁"
    assert draw_sparkline([], 8) == draw_sparkline([1.0], 0) == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_given_back_however_the_run_ends(error: type[BaseException]):
    progress, stream = on_terminal()
    progress.history.start(10)
    with pytest.raises(error), progress:
        raise error
    hidden, shown = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown


def test_taking_figures_in_costs_next_to_nothing():
    progress, _ = on_terminal()
    with progress:
        progress.start(100_000)
        started = time.thread_time()
        for step in range(1, 5001):
            progress.step_finished(step, METRICS)
        assert (time.thread_time() - started) / 5000 < 500e-6


def test_the_summary_says_outcome_figures_places_and_what_next(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "one", "")
    progress, _ = on_pipe()
    with progress:
        progress.validated(0, {"validation/reward": 0.1})
        progress.start(20)
        for step in range(1, 21):
            metrics = METRICS | {"reward/mean": step / 20}
            run.log(step, metrics)
            progress.step_finished(step, metrics)
        progress.validated(20, {"validation/reward": 0.9})
    run.write_samples(20, [{"prompt": "p"}])
    run.log_alarm(7, "reward_zero", "every reward was 0", "begin with easier prompts")
    run.log_alarm(9, "kl_runaway", "kl rose", "raise algorithm.kl.coefficient")
    staged = run.models.staging_path(20)
    staged.mkdir()
    run.models.keep(20, staged)
    said = "\n".join(summary_lines(run, progress.history, "finished"))
    for part in (
        "outcome: finished after 20 of 20 steps",
        "reward: 0.275 -> 0.775 (means of the first and the last 10 steps)",
        "validation/reward: 0.100 at step 0 -> 0.900 at step 20",
        "alarms: 2 alarms: reward_zero at step 7, kl_runaway at step 9 (what to try: ",
        "saved: metrics of 20 steps, the model of step 20",
        "samples/step-000020.jsonl",
        "timeline.json in https://ui.perfetto.dev",
        "from_pretrained",
        " s a step (20 steps in 0 s; 0 s with the start of the workers)",
    ):
        assert part in said
    assert "loss:" not in said, "it says nothing where there are rewards"


def test_a_run_that_ended_before_its_first_step_says_so(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "one", "")
    progress, _ = on_pipe()
    said = "\n".join(summary_lines(run, progress.history, "interrupted"))
    assert "interrupted before the first step ended" in said
    assert "no metrics yet, no model" in describe_saved(run)


def test_few_steps_are_not_counted_at_both_ends(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "one", "")
    progress, _ = on_pipe()
    with progress:
        progress.start(3)
        for step in range(1, 4):
            run.log(step, {})
            progress.step_finished(step, {"reward/mean": float(step)})
    assert "reward: 1.000 -> 3.000 (the first and the last step)" in summary_lines(run, progress.history, "finished")


def test_a_resumed_run_shows_all_its_steps_and_the_speed_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress, stream = on_pipe()
    rows: list[dict] = [
        {"step": n, "elapsed_seconds": 9.0, "reward/mean": 0.1, "loss": None if n == 1 else 1.0} for n in range(1, 7)
    ]
    run = RunDirectory.create(tmp_path / "one", "")
    write_json_lines(run.path / "metrics.jsonl", rows)
    run.log_validation(0, {"validation/reward": 0.1})
    with progress:
        progress.remember(run.path)
        progress.start(10, 6)
        now[0] = 2.0
        progress.step_finished(7, {"reward/mean": 0.9, "loss": 2.0})
        now[0] = 4.0
        progress.step_finished(8, {"reward/mean": 0.9, "loss": 2.0})
    assert progress.history.steps_per_second == 0.5
    assert progress.history.seconds_left == 4.0
    assert progress.history.first[0] == {"reward/mean": 0.1}
    assert progress.history.validations.rewards() == [0.1]
    run.last_step = 8
    said = summary_lines(run, progress.history, "finished")
    assert "reward: 0.100 -> 0.500 (means of the first and the last 4 steps)" in said
    assert "speed: 2.00 s a step (2 steps in 4 s; starting workers is not counted)" in said
    assert "step 6/" not in stream.getvalue()


def test_what_is_under_way_is_said_beside_what_is_counted(monkeypatch: pytest.MonkeyPatch):
    times = iter(range(0, 100_000, 61))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(times)))
    progress, stream = on_pipe()
    progress.state = lambda: "episodes 812 under way, 40 in tools"
    with progress:
        assert list(progress.count([1, 0], "samples", 4, int)) == [1, 0]
    assert "1 of 4 samples, episodes 812 under way, 40 in tools" in stream.getvalue()
    shown, stream = on_terminal()
    shown.state = progress.state
    with shown:
        shown.start(3)
        shown.console.print(Display(shown))
    assert "episodes 812 under way, 40 in tools" in stream.getvalue()
