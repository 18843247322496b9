"""Has a policy answer held-out prompts: in a run, beside its steps or between them, or without one.

What is measured of the answers is `enginehouse_rl.evaluation.validation`.
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
from enginehouse_rl.episodes.sampling import row_seed, step_seed
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
"""What held-out prompts are played for."""


def load_validations(plan: PlayPlan, reader: PromptReader, counted: Counted) -> dict[str, Validation]:
    """Read the held-out prompts of a plan by the kinds of tasks that they are: those of files, and each benchmark's."""
    validation = Validation.load(plan.config, reader.read)
    validations = {} if validation is None else {KIND: validation}
    for benchmark in plan.benchmarks:
        read = Validation.read_benchmark(plan, benchmark, reader.tokenizer, counted)
        validations[f"{KIND} {benchmark.name}"] = read
    return validations


def list_kinds(validations: Mapping[str, Validation]) -> dict[str, TaskKind]:
    """Return how the prompts of each kind are played."""
    return {
        kind: TaskKind(validation.sampling, len(validation.prompts), is_benchmark=validation.is_benchmark)
        for kind, validation in validations.items()
    }


@dataclass(slots=True)
class _RunningEvaluation:
    """Held-out prompts that are being answered.

    Attributes:
        step: whose weights answer them.
        playing: the tasks.
        whole: those that ended with all their episodes.
    """

    step: int
    playing: RunningTasks
    whole: list[ScoredGroup] = field(default_factory=list)


class Evaluator:
    """Has held-out prompts answered, and writes and shows what came of it. One evaluation at a time: `begin`, `wait`,
    `report`.

    Args:
        validations: the prompts, by their kinds.
        runners: play them.
        add_scores: adds the scores of a reward model, if there is one.
        run: where it is written.
        progress: where it is shown.
        seed: the run's.
        tokenizer: has the text of each token.
        most_tokens: of how many tokens all is written; as of `sample_rows`.
        writes_samples: whether the answers are written, besides their figures.
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
        """Of the evaluation under way; None: none is."""
        return self._running.step if self._running else None

    @property
    def is_ended(self) -> bool:
        """Whether one is under way, and there is nothing to wait for any more."""
        return self._running is not None and self._running.playing.is_ended

    def begin(self, step: int, fleet: RolloutFleet) -> None:
        """Have the prompts answered by a fleet, which serves the weights of a step. None may be under way."""
        seed = step_seed(self._seed, (1 << 31) + step)

        def named(task: Task) -> tuple[str, int]:
            return f"{KIND}-{step}-{task.serial}", row_seed(seed, task.serial)

        runners: list[TaskRunner] = []
        tasks: list[Task] = []
        for (kind, validation), first in zip(self._validations.items(), self._firsts, strict=True):
            runners.append(self._runners.make_runner(kind, fleet, named))
            tasks += make_tasks(validation.prompts, range(first, first + len(validation.prompts)))

        def play(task: Task) -> Awaitable[ScoredGroup]:
            return runners[bisect.bisect_right(self._firsts, task.serial) - 1].play_group(task)

        self._running = _RunningEvaluation(step, RunningTasks(self._runners.event_loop, tasks, play))

    def wait(self) -> None:
        """Wait until all are answered and scored. Again after an interrupt, if it is not cancelled.

        Raises:
            EnginehouseError: what ended it; see `EpisodeRunner.play`.
        """
        now, each = self._current, self._first.sampling.n
        answers = each * self._prompts
        for group in self._progress.count(now.playing, "samples", answers, lambda group: len(group.rewards)):
            if len(group.rewards) == each:
                now.whole.append(group)

    def wait_for(self, seconds: float) -> bool:
        """Whether there is nothing to wait for any more, within some seconds."""
        return self._current.playing.wait(seconds)

    def report(self) -> tuple[int, dict[str, float]]:
        """Write and show what came of it, after `wait`; returns its step and its figures."""
        now, metrics, rows = self._current, dict[str, float](), list[Iterator[dict[str, Any]]]()
        now.whole.sort(key=lambda group: group.task.serial)
        for validation, first in zip(self._validations.values(), self._firsts, strict=True):
            last = first + len(validation.prompts)
            whole = [group for group in now.whole if first <= group.task.serial < last]
            batch, answered = collect_rows(whole), [group.task.serial - first for group in whole]
            samples = (batch if validation.is_benchmark else self._add_scores(batch)).fetch()
            validation.warn_of_dropped(now.step, answered)
            metrics |= validation.measure(samples, answered)
            rows.append(validation.list_rows(samples, answered, self._tokenizer, self._most_tokens))
        if self._writes_samples:
            self._run.write_samples(now.step, itertools.chain.from_iterable(rows), "validation")
        with defer_interrupt():  # it is written once
            self._run.log_validation(now.step, metrics, self._first.how)
            self._running = None
        return now.step, metrics

    def cancel(self) -> None:
        """End what is under way, if anything is, and forget it."""
        if self._running is not None:
            self._running.playing.cancel()
        self._running = None

    @property
    def _first(self) -> Validation:
        """One of them: responses to all prompts are drawn alike, but for their length and what ends them."""
        return next(iter(self._validations.values()))

    @property
    def _current(self) -> _RunningEvaluation:
        assert self._running is not None  # `begin` came before
        return self._running


class StandaloneEvaluation:
    """Evaluates a model without a run: no role is trained, and replicas load the model's files.

    Args:
        plan: checked.
        run: everything is written to it.
        progress: where progress is shown.
    """

    def __init__(self, plan: EvalPlan, run: RunDirectory, progress: Progress):
        self._plan, self._run, self._progress = plan, run, progress
        run.observers += [progress, PluginHooks(self)]
        with progress.task("reading data"):
            reader = PromptReader(plan, progress)
            self._validations = load_validations(plan, reader, progress.count)
        self._tokenizer = reader.tokenizer
        self._runners = EpisodeRunners(plan, list_kinds(self._validations), reader.tokenizer)

    def run(self) -> None:
        """Evaluate it.

        Raises:
            EnginehouseError: whatever ended it; no figures were written then.
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
        """The figures, a line a part."""
        return self._progress.history.validations.table()

    def _check_weights(self, fleet: RolloutFleet) -> None:
        """Compare what replicas serve with the model's files, where they can be read back, and say it."""
        if not self._plan.reads_back:
            self._progress.note("weights: loaded by the engine from the model's files; it cannot read them back")
            return
        with self._progress.task("comparing weights"):
            spec = self._plan.roles["rollout"].model
            found = compare_with_files(fleet.weight_state(), Path(spec.path), spec.dtype, fleet.name)
        self._run.record.update(evaluated={**self._run.record.content["evaluated"], "checksum": found.checksum})
        self._progress.note(
            f"weights: {found.compared:,} of {found.served:,} tensors are served as the model's files have them; "
            f"checksum {found.checksum}"
        )
