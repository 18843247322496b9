"""The same episodes as a run plays them: players on the controller's event loop, a fleet of one replica over Ray.

`episodes` starts it in the benchmark's environment; the replica runs under its engine's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.dispatch_side import own_and_resident, serve
from benchmarks.episodes_tool import Tool, prompt
from benchmarks.machine import cpu_seconds, wanted_seconds_below
from enginehouse.controller import WorkerSpec, start_ray
from enginehouse.controller.launchers.event_loop import event_loop
from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Scored, Task
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.transcript import Transcript
from enginehouse.fleet.fleet import RolloutFleet, samples_in_flight
from enginehouse.roles.workers import RolloutWorker
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.feed import RunningTasks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.scored_group import collect_rows

TIMEOUT_SECONDS = 600.0
NO_LOOKS_SECONDS = 3600.0
"""Seconds between checks of the replica's health: it is stopped during the other side's turns, and would seem ill."""


class UsesTool:
    """An environment whose episodes call the tool between turns.

    Attributes:
        most: largest number of episodes that were in progress at once.
    """

    def __init__(self, task: dict[str, Any]):
        self._turns, self._tool = task["turns"], Tool(task)
        self._under_way = self.most = 0

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """See `enginehouse.engines.environment`."""

        async def play(number: int, policy: Policy) -> Episode:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            episode, said = task.serial * context.samples + number, Transcript(task.prompt_ids)
            for turn in range(self._turns):
                if turn:
                    await asyncio.sleep(self._tool.seconds(episode, turn - 1))
                    said.add_given(self._tool.answer(episode, turn - 1))
                said.add_drawn(await policy.generate(said.tokens))
            self._under_way -= 1
            return said.episode(Scored(0.0), task.prompt)

        return await context.each(play)


class Ours:
    """A fleet, and the objects with which a run plays episodes; for `task` see `episodes.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._task, self._open = task, ExitStack()
        self._environment = UsesTool(task)

    def start(self) -> dict[str, str]:
        """Start Ray and the replica; return a description of the engine."""
        task, stack = self._task, self._open
        options = {name: task[name] for name in ("max_running", "max_model_tokens", "kv_cache_mib", "native")}
        worker = WorkerSpec(RolloutWorker, "vllm", ModelSpec(task["model"]), options)
        stack.enter_context(start_ray())
        self._loop = stack.enter_context(event_loop())
        self._fleet = RolloutFleet(
            worker.options(python=task["python"], env=task["env"]), 1, timeout=TIMEOUT_SECONDS,
            start_timeout=TIMEOUT_SECONDS, device=task["device"], health_every=NO_LOOKS_SECONDS,
            samples_in_flight=samples_in_flight(task["max_running"]),
        )  # fmt: skip
        stack.callback(self._fleet.shutdown)
        (engine,) = self._fleet.launch()
        return {"engine": engine}

    def greedy(self, tasks: int) -> list[list[int]]:
        """Return the tokens of the first tasks' episodes, sampled greedily."""
        rows = self._rows(tasks, 0.0, 0)["input_ids"]
        return [rows[number].tolist() for number in range(len(rows))]

    def run(self, seed: int) -> dict[str, float]:
        """Play all episodes at once; return the figures."""
        task, (replica,) = self._task, self._fleet.pids
        engine, worker, own = wanted_seconds_below(replica), cpu_seconds(replica), cpu_seconds(os.getpid())
        self._environment.most = 0
        begun = time.perf_counter()
        rows = self._rows(task["episodes"] // task["samples"], 1.0, seed)
        seconds = time.perf_counter() - begun
        had, waited = wanted_seconds_below(replica)
        return {
            "seconds": seconds,
            "tokens": int(rows["response_tokens"].sum()),
            "engine_cpu_seconds": had - engine[0],
            "engine_waited_seconds": waited - engine[1],
            "worker_cpu_seconds": cpu_seconds(replica) - worker,
            "own_cpu_seconds": cpu_seconds(os.getpid()) - own,
            "most_at_once": self._environment.most,
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes in use while nothing is in progress: this process's, the replica's, and in Ray's store."""
        gc.collect()
        (replica,) = self._fleet.pids
        return {
            "controller": own_and_resident(os.getpid())[0],
            "replica": own_and_resident(replica)[0],
            "object_store": object_store_bytes(),
        }

    def _rows(self, tasks: int, temperature: float, seed: int) -> Any:
        """Play the first tasks at once; return their episodes as the batch of a step."""
        task = self._task
        sampling = SamplingParams(task["max_tokens"], task["samples"], temperature, ignore_eos=True)

        def policy_of(one: Task) -> FleetPolicy:
            return FleetPolicy(self._fleet, None, sampling, f"task-{one.serial}", seed * 10**6 + one.serial)

        checks = EpisodeChecks("episodes", task["vocabulary"], task["max_model_tokens"], False, temperature)
        player = EpisodeRunner(
            self._environment, policy_of, scored_by_nobody, task["samples"], seconds=TIMEOUT_SECONDS, checks=checks
        )
        asked = [Task(number, prompt(number, task["prompt_tokens"]), "", None, {}) for number in range(tasks)]
        groups = sorted(RunningTasks(self._loop, asked, player.play_group), key=lambda group: group.task.serial)
        return collect_rows(groups).fetch()

    def close(self) -> None:
        """End the fleet and Ray."""
        self._open.close()


async def scored_by_nobody(rows: Sequence[Any]) -> Sequence[Scored]:
    """A reward that no episode asks for."""
    raise AssertionError(f"{len(rows)} rows were to be scored")


def object_store_bytes() -> int:
    """Return the bytes of Ray's object store that are in use."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=argparse.FileType())
    serve(Ours(json.load(parser.parse_args().task)))
