"""An environment that takes its time before it asks for anything."""

import asyncio

from enginehouse_rl.environments.single_turn import SingleTurn


class Slow:
    """As `single_turn`, `seconds` later."""

    def __init__(self, seconds: float):
        self._seconds, self._played = seconds, SingleTurn()

    async def run(self, task, policy, context):
        await asyncio.sleep(self._seconds)
        return await self._played.run(task, policy, context)
