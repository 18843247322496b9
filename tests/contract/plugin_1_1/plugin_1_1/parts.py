"""What this plugin declares names."""

from collections.abc import Mapping, Sequence

from enginehouse.engines.environment import Episode, EpisodeContext, Group, Policy, Scored, Task
from enginehouse.engines.tracker import RunFacts
from enginehouse.engines.transcript import Transcript


class Lines:
    """A line for each call, in a folder of the run."""

    def __init__(self, folder: str = "lines"):
        self.folder = folder

    def start(self, run: RunFacts) -> None:
        place = run.directory / self.folder
        place.mkdir(exist_ok=True)
        self.file = (place / "metrics.txt").open("a")

    def log(self, step: int, metrics: Mapping[str, float], kind: str) -> None:
        for name, value in metrics.items():
            self.file.write(f"{kind} {step} {name} {value!r}\n")
        self.file.flush()

    def finish(self, outcome: str) -> None:
        self.file.close()


class Once:
    """One answer to each prompt, a reward of its length."""

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        async def play(number: int, policy: Policy) -> Episode:
            said = Transcript(task.prompt_ids)
            drawn = said.add_drawn(await policy.generate(said.tokens))
            text = policy.tokenizer.decode(drawn, skip_special_tokens=True)
            return said.episode(Scored(float(len(text)), {"long": len(text) > 2}), task.prompt, text)

        return await context.each(play)


def right(prompt: str, response: str, answer: str) -> float:
    """Return 1 for the answer."""
    return float(response == answer)


def keep(group: Group) -> bool:
    """Keep every group."""
    return True
