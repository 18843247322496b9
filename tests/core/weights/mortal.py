"""Rollout workers that die, or fall ill, where a test says so: it leaves a mark in a directory they look at.

In a module of its own: worker processes import it.
"""

import asyncio
import os
import signal
from pathlib import Path

from enginehouse.controller import register
from enginehouse.roles.workers import RolloutWorker

MARKS = "ENGINEHOUSE_TEST_MARKS"
"""Variable with the directory."""


class MortalRolloutWorker(RolloutWorker):
    """Does what a mark `what-replica` says.

    `die-METHOD` kills the process with SIGKILL, once, in that method; `ill` makes the engine raise until it is started
    again; `unfit` makes `launch` fail; `wait` holds answers back until there is a mark `go`; `tell` has the next
    answer leave that mark.
    """

    def marked(self, what: str, take: bool = True) -> bool:
        mark = Path(os.environ[MARKS], f"{what}-{self.replica}")
        if not mark.exists():
            return False
        if take:
            mark.unlink()
        return True

    def die_if_told(self, method: str) -> None:
        if self.marked(f"die-{method}"):
            os.kill(os.getpid(), signal.SIGKILL)

    ill = False

    @register
    async def launch(self):
        if self.marked("unfit", take=False):
            raise RuntimeError("the engine does not start")
        return await super().launch()

    @register
    async def draw(self, requests, aborted=()):
        self.ill = self.ill or self.marked("ill")
        if self.ill:
            raise RuntimeError("the engine is dead")
        if self.marked("angry"):
            raise ValueError("such rows I do not draw")
        answer = await super().draw(requests, aborted)
        self.die_if_told("generate")  # drawn, and lost
        go = Path(os.environ[MARKS], "go")
        while self.marked("wait", take=False) and not go.exists():
            await asyncio.sleep(0.02)
        if self.marked("tell"):
            go.touch()
        return answer

    @register(urgent=True)
    async def receive_weights(self, version, deadline_seconds, pause="wait"):
        self.die_if_told("receive")
        return await super().receive_weights(version, deadline_seconds, pause)

    @register(urgent=True)
    async def commit_weights(self, version):
        self.die_if_told("commit")
        return await super().commit_weights(version)

    @register(urgent=True)
    async def resume_weights(self, version):
        self.die_if_told("resume")
        await super().resume_weights(version)

    @register(urgent=True)
    async def health(self):
        if self.ill:
            raise RuntimeError("the engine is dead")
        return await super().health()
