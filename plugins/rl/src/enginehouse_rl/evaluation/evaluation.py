"""Lets a policy answer held-out prompts: during the steps of a run, between them, or outside a run.

`enginehouse_rl.evaluation.validation` measures the responses.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.controller.interruption import defer_interrupt
from enginehouse.roles.placement import place
from enginehouse.weights.files import compare_with_files
from enginehouse_rl.episodes.feed import RunningTasks
from enginehouse_rl.episodes.runner import TaskKind
from enginehouse_rl.episodes.runners import EpisodeRunners
from enginehouse_rl.episodes.sampling import make_row_seed, make_step_seed
from enginehouse_rl.episodes.scored_group import collect_rows, make_tasks
from enginehouse_rl.episodes.tasks import PromptReader
from enginehouse_rl.evaluation.validation import Validation
from enginehouse_rl.runs.observer import PluginHooks
from enginehouse_rl.steps.reward_model import add_model_scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.environment import Task
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse_rl.data.rendering import Counted
    from enginehouse_rl.episodes.runner import TaskRunner
    from enginehouse_rl.episodes.scored_group import ScoredGroup
    from enginehouse_rl.plan.plan import EvalPlan, PlayPlan
    from enginehouse_rl.runs import Progress, RunDirectory

KIND = "validation"
"""The kind of the tasks of held-out prompts."""


def load_validations(plan: PlayPlan, reader: PromptReader, counted: Counted) -> dict[str, Validation]:
    """Read the held-out prompts of a plan. The keys of the result are kinds of tasks: one for the prompts of files, and
    one for each benchmark."""
    validation = Validation.load(plan.config, reader.read)
    validations = {} if validation is None else {KIND: validation}
    for benchmark in plan.benchmarks:
        benchmark_validation = Validation.read_benchmark(plan, benchmark, reader.tokenizer, counted)
        validations[f"{KIND} {benchmark.name}"] = benchmark_validation
    return validations


def list_kinds(validations: Mapping[str, Validation]) -> dict[str, TaskKind]:
    return {
        kind: TaskKind(validation.sampling, len(validation.prompts), is_benchmark=validation.is_benchmark)
        for kind, validation in validations.items()
    }


@dataclass(slots=True)
class _RunningEvaluation:
    """Held-out prompts that are being answered.

    Attributes:
        step: Step whose weights answer the prompts.
        whole: Groups that ended with all their episodes.
    """

    step: int
    playing: RunningTasks
    whole: list[ScoredGroup] = field(default_factory=list)


class Evaluator:
    """Lets a policy answer held-out prompts, and writes and shows the results.

    For each evaluation, call `begin`, `wait` and `report`. Only one evaluation may run at a time.

    Args:
        add_scores: Adds the scores of a reward model, if there is one.
        most_tokens: Maximum total number of tokens whose text and values are written (`sample_rows`).
        writes_samples: True if the responses are written in addition to the metrics.
    """

    def __init__(
        self,
        validations: Mapping[str, Validation],
        runners: EpisodeRunners,
        add_scores: Callable[[DistributedBatch], DistributedBatch],
        run: RunDirectory,
        progress: Progress,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        most_tokens: int,
        writes_samples: bool = True,
    ):
        self._validations, self._runners, self._add_scores = validations, runners, add_scores
        sizes = [len(validation.prompts) for validation in validations.values()]
        *self._firsts, self._prompts = itertools.accumulate(sizes, initial=0)
        self._run, self._progress = run, progress
        self._seed, self._writes_samples = seed, writes_samples
        self._tokenizer, self._most_tokens = tokenizer, most_tokens
        self._running: _RunningEvaluation | None = None

    @property
    def step(self) -> int | None:
        """Step that is being evaluated, or None."""
        return self._running.step if self._running else None

    @property
    def is_ended(self) -> bool:
        """True if an evaluation is running whose prompts are all answered and scored."""
        return self._running is not None and self._running.playing.is_ended

    def begin(self, step: int, fleet: RolloutFleet) -> None:
        """Let a fleet, which serves the weights of a step, answer the prompts. No other evaluation may be running."""
        seed = make_step_seed(self._seed, (1 << 31) + step)

        def name_request(task: Task) -> tuple[str, int]:
            return f"{KIND}-{step}-{task.serial}", make_row_seed(seed, task.serial)

        runners: list[TaskRunner] = []
        tasks: list[Task] = []
        for (kind, validation), first in zip(self._validations.items(), self._firsts, strict=True):
            runners.append(self._runners.make_runner(kind, fleet, name_request))
            tasks += make_tasks(validation.prompts, range(first, first + len(validation.prompts)))

        def play(task: Task) -> Awaitable[ScoredGroup]:
            return runners[bisect.bisect_right(self._firsts, task.serial) - 1].play_group(task)

        self._running = _RunningEvaluation(step, RunningTasks(self._runners.event_loop, tasks, play))

    def wait(self) -> None:
        """Wait until all prompts are answered and scored. May be called again after an interrupt.

        Raises:
            EnginehouseError: The error that ended the evaluation; see `EpisodeRunner.play`.
        """
        evaluation, samples = self._current, self._first.sampling.n
        answers = samples * self._prompts
        for group in self._progress.count(evaluation.playing, "samples", answers, lambda group: len(group.rewards)):
            if len(group.rewards) == samples:
                evaluation.whole.append(group)

    def wait_for(self, seconds: float) -> bool:
        """Wait at most `seconds`, and return True if all prompts are answered and scored."""
        return self._current.playing.wait(seconds)

    def report(self) -> tuple[int, dict[str, float]]:
        """Write and show the results after `wait`. Returns the step and the metrics."""
        evaluation, metrics, rows = self._current, dict[str, float](), list[Iterator[dict[str, Any]]]()
        evaluation.whole.sort(key=lambda group: group.task.serial)
        for validation, first in zip(self._validations.values(), self._firsts, strict=True):
            last = first + len(validation.prompts)
            groups = [group for group in evaluation.whole if first <= group.task.serial < last]
            batch, answered = collect_rows(groups), [group.task.serial - first for group in groups]
            samples = (batch if validation.is_benchmark else self._add_scores(batch)).fetch()
            validation.warn_of_dropped(evaluation.step, answered)
            metrics |= validation.measure(samples, answered)
            rows.append(validation.list_rows(samples, answered, self._tokenizer, self._most_tokens))
        if self._writes_samples:
            self._run.write_samples(evaluation.step, itertools.chain.from_iterable(rows), "validation")
        with defer_interrupt():  # so that it is written exactly once
            self._run.log_validation(evaluation.step, metrics, self._first.how)
            self._running = None
        return evaluation.step, metrics

    def cancel(self) -> None:
        if self._running is not None:
            self._running.playing.cancel()
        self._running = None

    @property
    def _first(self) -> Validation:
        """The first validation. The validations have equal sampling parameters, except for the maximum length and the
        stop texts of responses."""
        return next(iter(self._validations.values()))

    @property
    def _current(self) -> _RunningEvaluation:
        assert self._running is not None  # `begin` came before
        return self._running


class StandaloneEvaluation:
    """Evaluates a model outside a run. No role is trained, and replicas load the model's files."""

    def __init__(self, plan: EvalPlan, run: RunDirectory, progress: Progress):
        self._plan, self._run, self._progress = plan, run, progress
        run.observers += [progress, PluginHooks(self)]
        with progress.task("reading data"):
            reader = PromptReader(plan, progress)
            self._validations = load_validations(plan, reader, progress.count)
        self._tokenizer = reader.tokenizer
        self._runners = EpisodeRunners(plan, list_kinds(self._validations), reader.tokenizer)

    def run(self) -> None:
        """Evaluate the model.

        Raises:
            EnginehouseError: The error that ended the evaluation, before any metrics were written.
        """
        plan, outcome = self._plan, "failed"
        self._run.record.update(evaluated={"model": plan.written.model.path, "step": plan.step})
        try:
            with (
                self._progress.task("starting workers"),
                self._runners.start(place(plan.roles, plan.launch, came=self._progress.report_arrival)) as roles,
            ):
                self._run.record.update(roles={**roles.describe(), **self._runners.describe()})
                self._check_weights(roles.rollout)
                self._progress.state = lambda: str(self._runners.activity)
                self._run.tell("run_started")
                weight, config = plan.config.reward_model.weight, plan.config
                evaluator = Evaluator(
                    self._validations,
                    self._runners,
                    lambda samples: add_model_scores(samples, roles, weight),
                    self._run,
                    self._progress,
                    config.train.seed,
                    self._tokenizer,
                    config.train.samples_tokens,
                )
                with self._progress.task("evaluating"):
                    evaluator.begin(plan.step, roles.rollout)
                    evaluator.wait()
                    evaluator.report()
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            self._run.tell("run_finished", outcome=outcome)

    def table(self) -> list[str]:
        """Return the metrics as a table with a line for each file, benchmark and value of `evaluation.by`."""
        return self._progress.history.validations.table()

    def _check_weights(self, fleet: RolloutFleet) -> None:
        """Compare the served weights with the model's files if the engine can read them back, and report the result."""
        if not self._plan.reads_back:
            self._progress.note(
                "weights: the engine loaded the model's files; it did not read its weights back for a comparison"
            )
            return
        with self._progress.task("comparing weights"):
            spec = self._plan.roles["rollout"].model
            result = compare_with_files(fleet.weight_state(), Path(spec.path), spec.dtype, fleet.name)
        self._run.record.update(evaluated={**self._run.record.content["evaluated"], "checksum": result.checksum})
        self._progress.note(
            f"weights: {result.compared:,} of {result.served:,} served tensors are equal to the model's files; "
            f"checksum {result.checksum}"
        )
