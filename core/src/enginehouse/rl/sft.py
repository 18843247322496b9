"""The supervised loop, on the same engines: for warm starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from enginehouse.data.demonstrations import DemonstrationDataset, DemonstrationSampler
from enginehouse.data.rendering import load_tokenizer
from enginehouse.engines.train import LossSpec
from enginehouse.rl.loop import Loop, Update
from enginehouse.rl.placement import place

if TYPE_CHECKING:
    from enginehouse.config.plan import SFTPlan
    from enginehouse.runs import Progress, RunDirectory


class SFTTrainer(Loop):
    """Trains the actor of a plan on demonstrations. Arguments as of `Loop`."""

    def __init__(self, plan: SFTPlan, run: RunDirectory, progress: Progress):
        super().__init__(plan, run, progress)
        self.plan = plan
        data, train = plan.config.data, plan.config.train
        model = plan.config.model
        with progress.task("reading data"):
            demonstrations = DemonstrationDataset.load(
                data.train,
                load_tokenizer(model.path, model.trust_remote_code),
                data.prompt,
                data.response,
                plan.row_limit,
                data.chat_template,
                progress.counted,
            )
        self.rows = DemonstrationSampler(demonstrations, train.rows_per_step, train.seed)
        if plan.resumed:
            self.restore(plan.resumed.loop)

    @contextmanager
    def workers(self) -> Iterator[None]:
        with place(self.plan) as self.roles:
            yield

    def run_step(self, step: int) -> Mapping[str, float]:
        """One step: the next demonstrations, one update."""
        with self.clock.phase("data"):
            batch = self.rows.next()
        figures = {"tokens": float(batch["input_ids"].tokens), **self.rows.metrics()}
        with self.clock.phase("update"):
            rows = batch.select(["input_ids", "loss_mask"])
            return self.update(step, {"actor": Update(rows, LossSpec("supervised"))}, lambda: figures)

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows.load_state_dict(state["rows"])
