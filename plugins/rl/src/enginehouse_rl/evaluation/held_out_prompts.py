"""Decides when, and by which engine, the held-out prompts of a run are answered, and keeps the best model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from enginehouse.errors import ConfigError, nearest
from enginehouse_rl.evaluation.evaluation import Evaluator, list_kinds, load_validations

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse_rl.episodes.tasks import PromptReader
    from enginehouse_rl.loop.trainer import Trainer

log = logging.getLogger(__name__)


class HeldOutPrompts:
    """Validates a run: the policy answers the held-out prompts with the weights of a step that has just ended.

    The rollout answers them at once, or a separate engine answers them while the next steps train.

    Attributes:
        kinds: Kinds of tasks, for `EpisodeRunners`; empty if the run has no held-out prompts.
        evaluator: Lets the prompts be answered once the run's workers are up; None without held-out prompts.
    """

    def __init__(self, run: Trainer, reader: PromptReader):
        self._run, self._tokenizer = run, reader.tokenizer
        self._validations = load_validations(run.plan, reader, run.progress.count)
        self.kinds = list_kinds(self._validations)
        self.evaluator: Evaluator | None = None

    def open(self) -> None:
        """Create the evaluator. The run's `EpisodeRunners` must have started."""
        if self._validations:
            run, train = self._run, self._run.plan.config.train
            self.evaluator = Evaluator(
                self._validations,
                run.runners,
                self._add_scores,
                run.run_directory,
                run.progress,
                train.seed,
                self._tokenizer,
                train.samples_tokens,
                writes_samples=bool(train.samples_every),
            )

    def before_first_step(self) -> None:
        """Validate before the first step. A resumed run does so only if the validation at its checkpoint's step is due,
        and was not done before the interruption."""
        run, step = self._run, self._run.trained_step
        missed = step > run.run_directory.validated_step
        if self.evaluator is not None and (not step or (missed and run.validates(step))):
            with run.progress.task("validating"):
                self.validate(step)

    def after_step(self, step: int) -> None:
        """Report an earlier validation if it has ended. Then validate if a validation is due at this step."""
        due, evaluator = self._run.validates(step), self.evaluator
        if evaluator is not None and (evaluator.is_ended or (due and evaluator.step is not None)):
            if not evaluator.is_ended:
                log.warning(
                    "the run waits for the validation at step %d to end, because the validation at step %d is due. "
                    "Raise train.validate_every, or lower evaluation.max_prompts", evaluator.step, step,
                )  # fmt: skip
            self.finish()
        if due:
            self.validate(step)

    def validate(self, step: int) -> None:
        """Begin to answer the prompts with the weights of a step that has just ended.

        If the rollout generates the responses, wait for them. If a separate engine generates them, `finish` waits.
        """
        if (evaluator := self.evaluator) is None:
            return
        run = self._run
        with run.clock.phase("validate"):
            evaluator.begin(step, run.roles.prepare_evaluation())
            if "evaluation" in run.plan.roles:
                if run.plan.config.train.save_best is not None and step:
                    run.exports.keep_candidate(step)
                return
            try:
                with run.roles.sync.trainer_idle():
                    evaluator.wait()
            except BaseException:
                evaluator.cancel()
                raise
        self._report()

    def finish(self, before: int | None = None, seconds: float | None = None) -> None:
        """Wait for the validation that runs during the steps. Takes the arguments of `Loop.finish_beside`."""
        evaluator, step = self.evaluator, self.evaluator.step if self.evaluator else None
        if evaluator is None or step is None or (before is not None and step >= before):
            return
        if seconds is not None and not evaluator.wait_for(seconds):
            evaluator.cancel()
            log.warning(
                "the validation at step %d is not in validation.jsonl, because there was no time to finish it. "
                "`enginehouse eval` measures any saved model", step,
            )  # fmt: skip
            return
        with self._run.clock.phase("validate"):
            try:
                evaluator.wait()
            except Exception:
                evaluator.cancel()
                raise
        self._report()

    def _report(self) -> None:
        """Write and show the results of a validation, and keep the model if it is the best."""
        assert self.evaluator is not None
        run = self._run
        step, metrics = self.evaluator.report()
        if (best := run.plan.config.train.save_best) is None:
            return
        if best not in metrics:
            problem = f"train.save_best: the validation at step {step} has no metric {best!r}. {nearest(best, metrics)}"
            if not step and "/majority@" not in best:  # a model may learn to give answers later
                raise ConfigError(problem)
            log.warning("%s", problem)
        elif step:
            run.exports.save_best(step, best, metrics[best])

    def _add_scores(self, samples: DistributedBatch) -> DistributedBatch:
        for stage in (stage for stage in self._run.stages if stage.scores):
            samples = stage(samples, self._run.roles)
        return samples
