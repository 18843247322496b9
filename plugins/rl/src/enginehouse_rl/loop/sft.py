"""The loop of supervised training, which uses the same training engines as reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse.controller import Balanced
from enginehouse.engines.train import LossSpec, Outputs
from enginehouse.roles.sequence_scores import row_sums
from enginehouse_rl.data.demonstrations import DemonstrationDataset
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.loop.loop import Loop
from enginehouse_rl.loop.running_updates import Update

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import SFTPlan


class SFTTrainer(Loop):
    """Trains the actor of a plan on demonstrations. Takes the arguments of `Loop`."""

    plan: SFTPlan

    def prepare(self) -> None:
        config, progress = self.plan.config, self.progress
        data, train, model = config.data, config.train, config.model
        with progress.task("reading data"):
            tokenizer = load_tokenizer(model.path, model.trust_remote_code, data.template_arguments)
            demonstrations, held_out = (
                DemonstrationDataset.load(
                    paths,
                    tokenizer,
                    data.prompt,
                    data.response,
                    self.plan.row_limit,
                    data.chat_template,
                    progress.count,
                    data.system,
                    data.tools,
                    data.conversation,
                )
                if paths
                else None
                for paths in (data.train, data.validation)
            )
        assert demonstrations is not None
        self.held_out = held_out
        self.rows = demonstrations.make_sampler(train.rows_per_step, train.seed)

    def run_step(self, step: int) -> Mapping[str, float]:
        with self.clock.phase("data"):
            batch = self.rows.next()
        figures = {"tokens": float(batch["input_ids"].tokens), **self.rows.metrics()}
        with self.clock.phase("update"):
            rows = batch.select(["input_ids", "loss_mask"])
            metrics = self.update(step, Update(rows, LossSpec("supervised")), figures)
        if self.held_out is not None and self.validates(step):
            with self.clock.phase("validation"):
                metrics["validation/loss"] = self.validate(self.held_out)
        return metrics

    def validate(self, held_out: DemonstrationDataset) -> float:
        """Return the current loss on all held-out demonstrations, as the mean over their tokens."""
        total, tokens, batch_rows = 0.0, 0.0, self.rows.rows_per_step
        for start in range(0, len(held_out), batch_rows):
            rows = held_out.rows(range(len(held_out))[start : start + batch_rows])
            scored = self.roles.actor.forward(Balanced(rows, by="input_ids"), Outputs())
            total -= row_sums(scored["logprobs"]).sum().item()
            tokens += row_sums(rows["loss_mask"]).sum().item()
        return total / tokens

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows.load_state_dict(state["rows"])
