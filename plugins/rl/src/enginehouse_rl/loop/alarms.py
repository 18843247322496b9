"""Alarms find problems of a run in its metrics. Each is reported once, with advice.

An alarm compares the metrics of the first and the last steps (`History`) and returns a description of the problem, or
an empty text. Metrics are noisy. Therefore a change counts only if three quarters of the last values are beyond a
limit, which is derived from the first values. A state counts only if it lasts for `WINDOW` steps. Alarms do not end a
run, because most problems may pass. The run ends only after several steps without a finite gradient.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.errors import EnginehouseError
from enginehouse_rl.runs.history import KEPT, WINDOW, History
from enginehouse_rl.runs.waits import WORDS, split_waits

if TYPE_CHECKING:
    from enginehouse_rl.loop.alarm_inputs import AlarmInputs
    from enginehouse_rl.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

MOST_SKIPPED = 3
"""The run ends after this many consecutive steps in which no gradient was finite, so that all optimizer steps were
skipped."""
LEAST_STEPS = WINDOW // 2
"""Minimum number of first steps, and of last steps, that must have a metric so that a change is measured."""
COLLAPSE_FACTOR = 10.0
"""Factor by which the entropy must have fallen since the first steps to count as collapsed. A policy that finds the
best responses also becomes certain of them, so three more conditions must hold: at least the fraction `ALL_EQUAL` of
the groups have equal rewards; the mean reward is below the best reward by more than the fraction `MISSED` of the range
of rewards; and the mean reward has not risen during the last `KEPT` steps. If each prompt has a single sample, the
first condition says nothing. Then `LOST` replaces `MISSED`, and there must be `KEPT` steps."""
ALL_EQUAL, MISSED, LOST = 0.8, 0.1, 0.5
FAR_FROM_REFERENCE = 1.0
"""KL, in nats per token, from which the policy counts as running away. If twice the entropy of the first steps is
larger, it is the limit instead: a policy that has learned to always give its most likely response has about this KL."""
GROWTH_FACTOR = 3.0
"""Factor by which a mismatch or a KL must have grown. A mismatch must also reach a tenth of the permitted mismatch."""
CUT_ALL = 0.95
"""An alarm is raised if at least this fraction of the responses is cut off at max_tokens."""
CUT_MANY = 0.5
"""The same alarm is raised if at least this fraction of the responses is cut off, and these responses get a higher
reward than responses that ended."""
SLOW_FACTOR = 2.0
"""A replica counts as slow if it takes at least this many times as long as the others."""
NO_ROLES = ("reward", "environment", "controller")
"""Causes of waiting during which no role works."""
UNEXPLAINED, UNEXPLAINED_SECONDS = 0.5, 0.5
"""Minimum wait for one of `NO_ROLES` that is reported: a fraction of the step's time, and a number of seconds."""


class StepsSkipped(EnginehouseError):
    """In several consecutive steps no gradient was finite, so these steps changed no weights."""


class Alarm(NamedTuple):
    """A problem that a run may have.

    Attributes:
        name: Name in `alarms.jsonl`.
        look: Describes the current problem, with numbers; empty if there is none.
        after: Names of alarms that explain this alarm. If one of them is raised, this alarm is not reported.
    """

    name: str
    look: Callable[[History, AlarmInputs], str]
    advice: str
    after: tuple[str, ...] = ()


class Alarms:
    """Checks a run after each step, and reports problems in the log, on the display and in `alarms.jsonl`.

    Args:
        run: Run directory to which alarms are written. Alarms that it already contains are not reported again.
        progress: Shows the alarms, and holds the history of metrics.
    """

    def __init__(self, run: RunDirectory, progress: Progress, inputs: AlarmInputs):
        self._run, self._progress, self._inputs = run, progress, inputs
        self._reported = {row.get("alarm") for row in run.alarms}
        progress.alarms = list(run.alarms)

    def check(self, step: int) -> None:
        """Check the run after a step.

        Raises:
            StepsSkipped: In the last `MOST_SKIPPED` steps no gradient was finite.
        """
        history, raised = self._progress.history, set[str]()
        for role in ("actor", *self._inputs.other_roles):
            _check_skips(history, role)
        for alarm in ALARMS:
            if raised.intersection(alarm.after) or not (problem := alarm.look(history, self._inputs)):
                continue
            raised.add(alarm.name)
            if alarm.name not in self._reported:
                self._reported.add(alarm.name)
                self._run.log_alarm(step, alarm.name, problem, alarm.advice)
                log.warning("step %d: %s. %s", step, problem, alarm.advice)


# Changes of metrics


class Change(NamedTuple):
    """A metric in the first steps, and its median in the last steps."""

    before: float
    now: float
    over: int
    step: int

    def __str__(self) -> str:
        first, last = f"steps 1 to {self.over}", f"steps {self.step - self.over + 1} to {self.step}"
        return f"from {self.before:.3g} ({first}) to {self.now:.3g} ({last})"


def measure_change(
    history: History, name: str, of_first: Callable[[Sequence[float]], float]
) -> tuple[Change, list[float]] | None:
    """Return how a metric changed, and its values in the last steps. None if the first or the last steps have too few
    values.

    Args:
        of_first: Reduces the values in the first steps to one number. Use the minimum or maximum if the metric may
            change within these steps, and a quartile if noise matters.
    """
    steps = min(WINDOW, history.step // 2)
    first, last = _list_finite(history.first[:steps], name), _list_finite(history.recent(steps), name)
    if min(len(first), len(last)) < LEAST_STEPS:
        return None
    return Change(of_first(first), statistics.median(last), steps, history.step), last


def holds_throughout(history: History, holds: Callable[[Mapping[str, float]], bool]) -> bool:
    """True if `holds` is true for each of the last `WINDOW` steps."""
    return len(history.last) >= WINDOW and all(map(holds, history.recent()))


def find_recent_median(history: History, name: str) -> float:
    """Return the median of the last `WINDOW` steps, or NaN if fewer steps have the metric."""
    values = _list_finite(history.recent(), name)
    return statistics.median(values) if len(values) == WINDOW else math.nan


def _list_finite(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _find_lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _find_upper_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[2]


def _name_steps(history: History) -> str:
    return f"in steps {history.step - WINDOW + 1} to {history.step}"


# Problems


def _check_skips(history: History, role: str) -> None:
    last = history.recent(MOST_SKIPPED)
    if len(last) < MOST_SKIPPED or not all(_measure_skipped(row, role) == 1.0 for row in last):
        return
    suffix = f" of the {role}" if role != "actor" else ""
    raise StepsSkipped(
        f"every optimizer step{suffix} of steps {history.step - MOST_SKIPPED + 1} to {history.step} was skipped, as "
        f"their gradient was not finite ({_list_losses(last[-1], role)}): nothing is learned any more, and weights are "
        f"as after step {history.step - MOST_SKIPPED}. {_NOT_FINITE}"
    )


def _make_prefix(role: str) -> str:
    return "" if role == "actor" else f"{role}/"


def _measure_skipped(row: Mapping[str, float], role: str) -> float:
    """Return the fraction of a role's optimizer steps that were skipped because the gradient was not finite."""
    finite = math.isfinite(row.get(f"{_make_prefix(role)}grad_norm", math.nan))
    return 0.0 if finite else row.get(f"{_make_prefix(role)}skipped", 0.0)


def _list_losses(row: Mapping[str, float], role: str) -> str:
    names = [f"{_make_prefix(role)}loss", f"{_make_prefix(role)}grad_norm", "reward/max", "reward/min"]
    return ", ".join(f"{name} {row[name]:.3g}" for name in names if name in row)


def _find_skipped_steps(history: History, inputs: AlarmInputs) -> str:
    row = history.last[-1]
    for role in ("actor", *inputs.other_roles):
        if share := _measure_skipped(row, role):
            steps = row.get(f"{_make_prefix(role)}optimizer_steps", 1.0)
            suffix = f" of the {role}" if role != "actor" else ""
            return (
                f"{max(round(share * steps), 1)} of {round(steps)} optimizer steps{suffix} were skipped, as their "
                f"gradient was not finite ({_list_losses(row, role)})"
            )
    return ""


def _find_off_policy(history: History, inputs: AlarmInputs) -> str:
    compared = history.last[-1].get("mismatch/compared", 1.0)
    if inputs.stale or compared >= 1:
        return ""
    return (
        f"{100 * (1 - compared):.3g}% of the step's tokens were generated with other weights than the last weights "
        "sent to the rollout, according to the version of each row: these tokens are off-policy, and mismatch/* does "
        "not cover them (mismatch/compared)"
    )


def _find_engines_apart(history: History, inputs: AlarmInputs) -> str:
    difference = history.last[-1].get("mismatch/absolute_mean", 0.0)
    if difference <= inputs.most_apart:
        return ""
    return (
        f"the rollout's logprobs differ from the actor's by {difference:.3g} nats on average (more than "
        f"{inputs.most_apart:g}), although both report the same weight version"
    )


def _find_mismatch_growth(history: History, inputs: AlarmInputs) -> str:
    change = measure_change(history, "mismatch/absolute_mean", _find_upper_quartile)
    if change is None or _find_lower_quartile(change[1]) < max(
        GROWTH_FACTOR * change[0].before, inputs.most_apart / 10
    ):
        return ""
    return (
        f"the rollout's logprobs drift away from the actor's logprobs: mismatch/absolute_mean rose {change[0]}, in nats"
    )


_PAID, _ENDED = "response/truncated_reward", "response/stopped_reward"


def _find_cut_responses(history: History, inputs: AlarmInputs) -> str:
    cut, tokens = find_recent_median(history, "response/truncated"), find_recent_median(history, "response/tokens_mean")
    problem = (
        f"{100 * cut:.3g}% of the responses {_name_steps(history)} were cut at their token limit, "
        f"after {tokens:.3g} tokens"
    )
    if cut >= CUT_ALL:
        return problem
    rows = [row for row in history.recent() if {_PAID, _ENDED} <= row.keys()]
    if not (inputs.rewarded and cut >= CUT_MANY and len(rows) >= LEAST_STEPS):
        return ""
    if _find_lower_quartile([row[_PAID] - row[_ENDED] for row in rows]) <= 0:
        return ""
    paid, ended = (statistics.median(_list_finite(rows, name)) for name in (_PAID, _ENDED))
    return (
        f"{problem}; their reward was {paid:.3g}, but the reward of complete responses was {ended:.3g}, so the policy "
        "learns not to end its responses"
    )


def _find_entropy_collapse(history: History, inputs: AlarmInputs) -> str:
    change = measure_change(history, "entropy", max)
    rows = [*history.first, *history.last]
    best, least = _list_finite(rows, "reward/max"), _list_finite(rows, "reward/min")
    fell = change is not None and _find_upper_quartile(change[1]) <= change[0].before / COLLAPSE_FACTOR
    if change is None or not fell or not inputs.rewarded or not best or not least:
        return ""
    reward, top = find_recent_median(history, "reward/mean"), max(best)
    cost = (top - reward) / max(top - min(least), 1e-9)
    means = _list_finite(history.recent(KEPT), "reward/mean")
    half = len(means) // 2
    if inputs.grouped:
        collapsed = find_recent_median(history, "reward/groups_all_equal") >= ALL_EQUAL and cost > MISSED
    else:
        collapsed = len(means) == KEPT and cost > LOST
    if not collapsed or statistics.median(means[half:]) > statistics.median(means[:half]):
        return ""
    return (
        f"the entropy collapsed, {change[0]}, in nats per token, while the mean reward is {reward:.3g} and the best "
        f"reward of a response was {top:.3g}: the policy no longer explores"
    )


def _find_kl_runaway(history: History, inputs: AlarmInputs) -> str:
    change, entropies = measure_change(history, "kl", min), _list_finite(history.first, "entropy")
    far = max(FAR_FROM_REFERENCE, 2 * max(entropies, default=0.0))
    if change is None or _find_lower_quartile(change[1]) < max(GROWTH_FACTOR * change[0].before, far):
        return ""
    return f"the policy runs away from its reference: kl rose {change[0]}, in nats per token"


def _find_zero_rewards(history: History, inputs: AlarmInputs) -> str:
    all_zero = inputs.rewarded and holds_throughout(
        history, lambda row: row.get("reward/max") == row.get("reward/min") == 0.0
    )
    return f"every reward {_name_steps(history)} was 0: nothing can be learned from them" if all_zero else ""


def _find_equal_rewards(history: History, inputs: AlarmInputs) -> str:
    all_equal = inputs.compares and holds_throughout(history, lambda row: row.get("reward/groups_all_equal") == 1.0)
    consequence = "only the KL term distinguishes them" if inputs.kl_in_reward else "comparing them teaches nothing"
    return f"all samples of each prompt had the same reward {_name_steps(history)}: {consequence}" * all_equal


def _find_uncounted_tokens(history: History, inputs: AlarmInputs) -> str:
    none_counted = holds_throughout(
        history, lambda row: row.get("skipped") == 1.0 and not _measure_skipped(row, "actor")
    )
    return f"no token counted in the loss {_name_steps(history)}, so every optimizer step was skipped" * none_counted


def _find_zero_gradient(history: History, inputs: AlarmInputs) -> str:
    all_zero = holds_throughout(history, lambda row: row.get("grad_norm") == 0.0 and not row.get("skipped"))
    return f"the gradient was exactly 0 {_name_steps(history)}, so only weight decay changes the weights" * all_zero


def _find_slow_replica(history: History, inputs: AlarmInputs) -> str:
    rows = [row for row in history.recent() if "rollout/slowest" in row]
    if len(rows) < WINDOW:
        return ""
    replica, *other_replicas = {row["rollout/slowest_replica"] for row in rows}
    times = statistics.median(row["rollout/slowest"] for row in rows)
    if other_replicas or times < SLOW_FACTOR:  # a different replica each time is chance
        return ""
    return (
        f"rollout replica {replica:.0f} takes {times:.2g} times as long per token as the others "
        f"({_name_steps(history)}), and each step waits for this replica"
    )


def _find_controller_bound(history: History, inputs: AlarmInputs) -> str:
    rows = [row for row in history.recent() if "time/step" in row and "rollout/utilisation" in row]
    if len(rows) < WINDOW:
        return ""
    waits_of_steps = [split_waits(row, scored=inputs.scored) for row in rows]
    seconds = {cause: statistics.median(waits.get(cause, 0.0) for waits in waits_of_steps) for cause in NO_ROLES}
    cause, step_seconds = max(NO_ROLES, key=seconds.__getitem__), statistics.median(row["time/step"] for row in rows)
    if seconds[cause] < max(UNEXPLAINED_SECONDS, UNEXPLAINED * step_seconds):
        return ""
    return (
        f"{seconds[cause]:.2g} of the {step_seconds:.2g} seconds of a step ({_name_steps(history)}) are spent "
        f"waiting for {WORDS[cause]}: meanwhile no model generates, trains or scores, and no weights are sent"
    )


_NOT_FINITE = (
    "Look for rewards or advantages that are not finite or beyond float32 (samples/ has them), for a loss of your own "
    "that divides by 0 or takes log(0), and for logprobs far apart (mismatch/*); try a smaller "
    "actor.engine.options.lr, or model.dtype=float32"
)

ALARMS = (
    Alarm(
        "steps_skipped",
        _find_skipped_steps,
        f"A skipped optimizer step changes no weights. The run ends if all optimizer steps of {MOST_SKIPPED} steps "
        f"in a row are skipped. {_NOT_FINITE}",
    ),
    Alarm(
        "off_policy",
        _find_off_policy,
        "Without train.staleness, no row should be off-policy: the rollout engine of a plugin may report a wrong "
        "version (`enginehouse certify` checks this). algorithm.old_logprobs=actor corrects for such rows",
    ),
    Alarm(
        "engines_apart",
        _find_engines_apart,
        "A replica may serve other weights than it reports, or the engines compute differently: `enginehouse parity` "
        "compares them. Check each update with weights.effect_check_every=1; try model.dtype=float32, or "
        "algorithm.old_logprobs=actor. For later steps, see mismatch/* in the metrics",
    ),
    Alarm(
        "mismatch_growing",
        _find_mismatch_growth,
        "Either the rollout does not load the weights as they are sent (check each update with "
        "weights.effect_check_every=1), or the engines round differently for the policy as it is now: try a smaller "
        "actor.engine.options.lr, model.dtype=float32, or algorithm.old_logprobs=actor, which trains with the "
        "actor's own logprobs",
        after=("engines_apart",),
    ),
    Alarm(
        "responses_cut",
        _find_cut_responses,
        "Raise rollout.sampling.max_tokens; if cut responses have the higher reward, let the reward read "
        "finish_reason; if the model never ends a response, set rollout.sampling.stop, or train it with `enginehouse "
        "sft` first. algorithm.mask_truncated=true keeps cut responses out of the loss",
    ),
    Alarm(
        "entropy_collapse",
        _find_entropy_collapse,
        "Start again from an earlier model, with a smaller actor.engine.options.lr, a larger "
        "algorithm.loss.arguments.clip_high, an algorithm.loss.arguments.entropy_coefficient above 0 (for example "
        "0.001), or a larger algorithm.kl.coefficient; and check in samples/ whether the reward pays for the same "
        "answer to every prompt",
    ),
    Alarm(
        "kl_runaway",
        _find_kl_runaway,
        "Raise algorithm.kl.coefficient (with algorithm.kl.place=reward, algorithm.kl.target adapts it); lower "
        "actor.engine.options.lr or algorithm.epochs; and check in samples/ whether unnatural text wins the reward",
    ),
    Alarm(
        "reward_zero",
        _find_zero_rewards,
        "Is reward.function right (samples/ has the scored responses), and is an answer of the model ever right? Begin "
        "with easier prompts (data.order_by), or train on demonstrations with `enginehouse sft` first",
    ),
    Alarm(
        "reward_all_equal",
        _find_equal_rewards,
        "Prompts may be too easy or too hard, or rollout.sampling.temperature too low; a larger "
        "rollout.samples_per_prompt makes differences more likely",
        after=("reward_zero",),
    ),
    Alarm(
        "no_token_counted",
        _find_uncounted_tokens,
        "Either the responses have no tokens, or the loss masks all of them, as algorithm.mask_truncated does if all "
        "are cut (raise rollout.sampling.max_tokens). samples/ has the responses",
        after=("reward_zero", "reward_all_equal"),
    ),
    Alarm(
        "gradient_zero",
        _find_zero_gradient,
        "Are all advantages 0, or all ratios clipped (clip_fraction)? Then lower algorithm.epochs or "
        "algorithm.minibatches",
        after=("reward_zero", "reward_all_equal", "no_token_counted"),
    ),
    Alarm(
        "replica_slow",
        _find_slow_replica,
        "Check what else runs on its node and device, which run.json names; on CPUs also check "
        "cluster.threads_per_process. With a larger train.staleness or with rollout.extra_groups, a step need not "
        "wait for the slowest replica; but rollout.extra_groups prefers shorter responses",
    ),
    Alarm(
        "controller_bound",
        _find_controller_bound,
        "For the reward, raise reward.processes or reward.concurrency; for an environment, raise "
        "environment.processes. Time that no metric explains counts as time of the controller, for example if an "
        "environment plays all episodes of a task together; timeline.json shows more. With train.staleness, the next "
        "samples are generated meanwhile. `enginehouse bottleneck` lists all parts",
    ),
)
"""All alarms. Each alarm comes after the alarms that explain it (`Alarm.after`)."""
