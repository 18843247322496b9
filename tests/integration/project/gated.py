"""An environment whose first validation waits for a step that trains beside it, and whose second for a file."""

import asyncio
from pathlib import Path

from enginehouse_rl.environments.single_turn import SingleTurn


class Gated:
    """As `single_turn`, but that held-out prompts, those whose `answer` is `held`, wait.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: str):
        self._directory, self._played = Path(directory), SingleTurn()

    async def run(self, task, policy, context):
        if task.columns.get("answer") == "held":
            validated = self._lines("validation.jsonl")
            while not (validated > 1 or (self._lines("metrics.jsonl") if validated == 0 else Path("go").exists())):
                await asyncio.sleep(0.02)
        return await self._played.run(task, policy, context)

    def _lines(self, name: str) -> int:
        path = self._directory / name
        return path.read_text().count("\n") if path.exists() else 0
