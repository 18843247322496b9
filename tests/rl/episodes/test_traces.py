"""What is told of episodes while they are played, and of their turns afterwards."""

import asyncio
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from enginehouse.engines.environment import Scored, Task
from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams
from enginehouse.engines.transcript import Transcript
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.samples import sample_rows
from enginehouse_rl.episodes.scored_group import collect_rows
from enginehouse_rl.episodes.traces import MOST_TRACED, ChatTurn, EpisodeActivity, Trace, draw_traces, measure_traces
from enginehouse_rl.runs.timeline import Timeline

TASK = Task(0, [1, 2], "a prompt", None, {})


class Clock:
    """A loop's and a program's time, which stands but when it is told to pass."""

    def __init__(self, monkeypatch):
        self.now, self.waiting = 100.0, []
        monkeypatch.setattr("enginehouse_rl.episodes.traces.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("enginehouse_rl.episodes.play_context.time", SimpleNamespace(monotonic=lambda: self.now))

    def passes(self, seconds):
        self.now += seconds


async def turns_of_the_loop():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_states_and_turns_are_seen_without_the_environments_help(monkeypatch):
    """Of three episodes one has one turn, and the others get another score and order after `each`."""
    clock, activity = Clock(monkeypatch), EpisodeActivity()
    gates = {name: asyncio.Event() for name in ("draw", "tool", "score")}

    class Fleet:
        async def generate(self, request):
            await gates["draw"].wait()
            clock.passes(1.0)
            return GenerateResult(request.id, (Completion([5, 6], [-0.5, -0.5], "stop", 3, 4),))

    class Environment:
        async def run(self, task, policy, context):
            async def play(number, policy):
                said = Transcript(task.prompt_ids)
                said.add_drawn(await policy.generate(said.tokens))
                if number:
                    await gates["tool"].wait()
                    clock.passes(10.0)
                    said.add_given([7])
                    said.add_drawn(await policy.generate(said.tokens))
                (score,) = await context.score([{}])
                return said.episode(score)

            made = await context.each(play)
            return [replace(one, score=Scored(2.0)) for one in reversed(made)]

    async def score(rows):
        await gates["score"].wait()
        return [Scored(1.0) for _ in rows]

    player = EpisodeRunner(
        Environment(), lambda _: FleetPolicy(Fleet(), None, SamplingParams(), "t", 1), score, 3,
        checks=EpisodeChecks("mine"), activity=activity,
    )  # fmt: skip
    playing = asyncio.create_task(player.play_group(TASK))
    for gate, said in (
        ("draw", "episodes: 3 in progress, 0 in tools"),
        ("tool", "episodes: 3 in progress, 2 in tools, 1 being scored"),
        ("score", "episodes: 3 in progress, 0 in tools, 3 being scored"),
    ):
        await turns_of_the_loop()
        assert str(activity) == said
        gates[gate].set()
    group = await playing
    assert (activity, str(activity)) == (EpisodeActivity(), "")
    two, one, short = group.traces
    assert [row["tokens"] for row in short.rows()] == [2]
    for trace, before in ((two, 10.0), (one, 10.0)):
        assert [row["tokens"] for row in trace.rows()] == [2, 2]
        assert [row["version"] for row in trace.rows()] == [4, 4]
        assert trace.rows()[1]["before"] >= before
    assert [row["turns"] for row in sample_rows(collect_rows([group]))] == [one.rows() for one in group.traces]
    figures = measure_traces(group.traces)
    assert figures["episode/turns"] == pytest.approx(5 / 3)
    assert 0.5 < figures["episode/in_tools"] < 1
    assert measure_traces([None]) == {}


@pytest.mark.parametrize(("whose", "share"), [("environment", 0.9), ("config", 0.0)])
def test_a_slow_reward_of_the_environments_is_time_in_tools_and_the_configured_one_is_not(monkeypatch, whose, share):
    clock = Clock(monkeypatch)

    class Fleet:
        async def generate(self, request):
            clock.passes(1.0)
            return GenerateResult(request.id, (Completion([5], [-0.5], "stop", 3, 3),))

    class OneTurn:
        async def run(self, task, policy, context):
            async def play(number, policy):
                said = Transcript(task.prompt_ids)
                said.add_drawn(await policy.generate(said.tokens))
                (score,) = await (context.score([{}]) if whose == "config" else judged([{}]))
                return said.episode(score)

            return await context.each(play)

    async def judged(rows):
        clock.passes(9.0)
        return [Scored(1.0) for _ in rows]

    player = EpisodeRunner(
        OneTurn(), lambda _: FleetPolicy(Fleet(), None, SamplingParams(), "t", 1), judged, 1,
        checks=EpisodeChecks("mine"), activity=EpisodeActivity(),
    )  # fmt: skip
    (trace,) = asyncio.run(player.play_group(TASK)).traces
    assert trace.seconds == 10.0
    assert measure_traces([trace])["episode/in_tools"] == pytest.approx(share)


def test_turns_beside_each_other_take_their_time_once():
    turns = (ChatTurn(0.0, 4.0, 1, 1), ChatTurn(1.0, 3.0, 1, 1), ChatTurn(2.0, 6.0, 1, 1))
    assert measure_traces([Trace(0.0, 8.0, turns)])["episode/in_tools"] == pytest.approx(0.25)


@pytest.mark.parametrize("fails", [True, False])
def test_a_group_that_is_played_together_is_counted_until_it_ends(fails):
    activity, seen = EpisodeActivity(), []

    class Fleet:
        async def generate(self, request):
            seen.append(replace(activity))
            return GenerateResult(request.id, tuple(Completion([5], [-0.5], "stop", 3, 3) for _ in range(2)))

    class Together:
        async def run(self, task, policy, context):
            drawn = await policy.samples(task.prompt_ids, 2)
            seen.append(replace(activity))
            if fails:
                raise KeyError("x")
            said = [Transcript(task.prompt_ids) for _ in drawn]
            for one, completion in zip(said, drawn, strict=True):
                one.add_drawn(completion)
            return [one.episode(Scored(1.0)) for one in said]

    player = EpisodeRunner(
        Together(), lambda _: FleetPolicy(Fleet(), None, SamplingParams(), "t", 1), None, 2, "drop",
        checks=EpisodeChecks("mine"), activity=activity,
    )  # fmt: skip
    group = asyncio.run(player.play_group(TASK))
    assert seen == [EpisodeActivity(2, 2), EpisodeActivity(2)]
    assert activity == EpisodeActivity()
    assert not any(group.traces)


def test_workers_are_counted_together():
    assert EpisodeActivity.sum([EpisodeActivity(3, 2, 0), EpisodeActivity(2, 0, 1)]) == EpisodeActivity(5, 2, 1)


def test_the_longest_episodes_of_a_step_are_drawn_on_lanes_of_their_own(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    begun = timeline._origin
    traces = [None] + [
        Trace(
            begun,
            begun + 10 + row,
            (ChatTurn(begun + 1, begun + 2, 5, 3), ChatTurn(begun + 8, begun + 9, 6, 3)),
            ((begun + 9, begun + 12),),
        )
        for row in range(MOST_TRACED + 5)
    ]
    draw_traces(timeline, traces)
    timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(tracks.values()) == {"episodes", *(f"episodes ({lane})" for lane in range(2, MOST_TRACED + 1))}
    whole = [event for event in events if event["name"] == "episode"]
    assert sorted(event["args"]["sample"] for event in whole) == list(range(6, MOST_TRACED + 6))
    (lane,) = (event["tid"] for event in whole if event["args"]["sample"] == 6)
    inner = [
        event for event in events if event.get("ph") == "X" and event["tid"] == lane and event["name"] != "episode"
    ]
    assert [(one["name"], one["ts"], one["dur"]) for one in inner] == [
        ("in tools", 0, 1e6), ("draw", 1e6, 1e6), ("in tools", 2e6, 6e6), ("draw", 8e6, 1e6), ("score", 9e6, 3e6),
        ("in tools", 12e6, 3e6),
    ]  # fmt: skip
    assert inner[1]["args"] == {"turn": 0, "tokens": 5, "version": 3}


def test_turns_beside_each_other_nest(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    at = timeline._origin
    turns = (ChatTurn(at + 1, at + 3, 1, 1), ChatTurn(at + 2, at + 6, 1, 1), ChatTurn(at + 7, at + 8, 1, 1))
    draw_traces(timeline, [Trace(at, at + 8, turns)])
    timeline.close()
    spans = [one for one in json.loads((tmp_path / "timeline.json").read_text()) if one["ph"] == "X"][1:]
    assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in itertools.pairwise(spans))
