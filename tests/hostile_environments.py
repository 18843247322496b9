"""An environment of two turns that turns on whoever plays it, in one way, where a task says so (`"hostile": true`)."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Scored, Task
from enginehouse.engines.transcript import Transcript

LEFT_BEHIND = 2_000


class Hostile:
    """Args: way: in which it does it, the name of a method."""

    def __init__(self, way: str):
        self.way = getattr(self, way)
        self.ended = threading.Event()

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        async def play(number: int, policy: Policy) -> Episode:
            said = Transcript(task.prompt_ids)
            said.add_drawn(await policy.generate(said.tokens))
            said.add_given([1])
            if task.columns.get("hostile"):
                await self.way(task, policy, said)
            said.add_drawn(await policy.generate(said.tokens))
            episode = said.episode(Scored(float(len(said.tokens))), task.prompt)
            return self.edited(episode) if task.columns.get("hostile") else episode

        episodes = list(await context.each(play))
        return self.returned(episodes) if task.columns.get("hostile") else episodes

    def edited(self, episode: Episode) -> Any:
        edit = getattr(self.way, "edit", None)
        return edit(episode) if edit else episode

    def returned(self, episodes: list[Episode]) -> Any:
        return episodes[1:] if self.way == self.loses_one else episodes

    # What fails

    async def raises(self, *_: Any) -> None:
        raise KeyError("no such tool")

    async def hangs(self, *_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def ignores_cancelling(self, *_: Any) -> None:
        while not self.ended.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def never_stops_asking(self, task: Task, policy: Policy, said: Transcript) -> None:
        while True:
            await policy.generate(task.prompt_ids)

    async def asks_with_a_huge_result(self, task: Task, policy: Policy, said: Transcript) -> None:
        said.add_given([1] * 100_000)

    # What ends a run

    async def exits(self, *_: Any) -> None:
        raise SystemExit(3)

    async def returns_texts(self, *_: Any) -> None: ...

    returns_texts.edit = lambda episode: replace(episode, tokens=[str(token) for token in episode.tokens])  # type: ignore[attr-defined]

    async def returns_a_huge_result(self, *_: Any) -> None: ...

    returns_a_huge_result.edit = lambda episode: replace(  # type: ignore[attr-defined]
        episode,
        **{name: [*getattr(episode, name), *[0] * 100_000] for name in ("tokens", "mask", "logprobs", "versions")},
    )

    async def edits_history(self, task: Task, policy: Policy, said: Transcript) -> None:
        said.tokens[len(task.prompt_ids)] += 1

    async def returns_no_number(self, *_: Any) -> None: ...

    returns_no_number.edit = lambda episode: replace(episode, score=Scored(float("nan")))  # type: ignore[attr-defined]

    async def loses_one(self, *_: Any) -> None: ...

    async def changes_its_task(self, task: Task, *_: Any) -> None:
        task.columns["seen"].append(1)  # type: ignore[attr-defined]

    async def adds_to_its_prompt(self, task: Task, *_: Any) -> None:
        task.prompt_ids.append(1)  # type: ignore[attr-defined]

    # What costs nobody anything

    async def leaves_tasks_behind(self, *_: Any) -> None:
        self.left = [asyncio.create_task(self.hangs()) for _ in range(LEFT_BEHIND)]

    async def leaves_an_exit_behind(self, *_: Any) -> None:
        self.left = [asyncio.create_task(self.exits())]
        await asyncio.sleep(0)

    async def leaves_threads_behind(self, *_: Any) -> None:
        for _ in range(20):
            threading.Thread(target=self.ended.wait, daemon=True).start()

    async def changes_what_it_returned(self, *_: Any) -> None: ...

    # What takes its process with it, or its loop

    async def ends_its_process(self, *_: Any) -> None:
        os._exit(3)

    async def is_killed(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def blocks(self, *_: Any) -> None:
        time.sleep(3600)
