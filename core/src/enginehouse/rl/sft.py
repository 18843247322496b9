"""The supervised loop, on the same engines: for warm starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.data.demonstrations import DemonstrationDataset, DemonstrationSampler
from enginehouse.engines.train import LossSpec
from enginehouse.rl.placement import load_tokenizer, place_actor
from enginehouse.rl.samples import plain

if TYPE_CHECKING:
    from enginehouse.config.plan import SFTPlan
    from enginehouse.runs import Progress, RunDirectory


class SFTTrainer:
    """Trains the actor of a plan on demonstrations.

    Args:
        plan: a config that was checked against plugins, data and model.
        run: the run directory everything is written to.
        progress: where progress is shown.
    """

    def __init__(self, plan: SFTPlan, run: RunDirectory, progress: Progress):
        self.plan, self.run_directory, self.progress = plan, run, progress
        config = plan.config
        tokenizer = load_tokenizer(config.model)
        data = config.data
        demonstrations = DemonstrationDataset.load(
            data.train, tokenizer, data.prompt, data.response, data.max_tokens, data.chat_template
        )
        self.rows = DemonstrationSampler(demonstrations, config.train.rows_per_step, config.train.seed)

    def run(self) -> None:
        """Run every step, then save the model.

        Raises:
            EnginehouseError: whatever ended the run; what was written until then is kept.
        """
        config, run, clock = self.plan.config, self.run_directory, self.run_directory.clock
        with self.progress.task("starting workers"), place_actor(self.plan) as actor:
            run.describe({"actor": actor.call("describe")})
            self.progress.start(config.train.steps)
            for step in range(1, config.train.steps + 1):
                with clock.step(step):
                    with clock.phase("data"):
                        batch = self.rows.next()
                    with clock.phase("update"):
                        updated = actor.update(batch.select(["input_ids", "loss_mask"]), LossSpec("supervised"))
                metrics = plain(updated) | clock.metrics()
                metrics["tokens_per_second"] = batch["input_ids"].tokens / metrics["time/step"]
                run.log(step, metrics)
                self.progress.update(step, metrics)
            staged = run.model_path(config.train.steps)
            actor.call("export_hf", str(staged))
            run.model_saved(config.train.steps, staged)
