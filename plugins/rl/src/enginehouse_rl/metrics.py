"""Every metric that a run writes: its unit, its meaning, its normal range, and what to do outside that range.

`docs/metrics.md` is generated from this table. A placeholder in angle brackets stands for many names: `reward/<name>`.
Metrics of plugins are not listed here, but a run writes them too.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric of `metrics.jsonl` or `validation.jsonl`.

    Attributes:
        name: The name in the file, possibly with placeholders.
        unit: The unit; empty for a number without a unit.
        about: The quantity that the metric measures, as a noun phrase.
        normal: The values to expect; empty if any value may be right.
        cure: Advice on other values.
    """

    name: str
    unit: str
    about: str
    normal: str = ""
    cure: str = ""


class Section(NamedTuple):
    """Metrics that belong together.

    Attributes:
        about: The runs that write these metrics, and when they do.
        metrics: The metrics. Exact names come before placeholders that would match them.
    """

    title: str
    about: str
    metrics: tuple[Metric, ...]


LINES = Section(
    "Every line",
    "Each line of both files begins with its step. All commands write them.",
    (
        Metric("step", "steps", "Number of the step, from 1. A validation before the first step has 0."),
        Metric(
            "elapsed_seconds",
            "s",
            "Time since the run was opened, without the time between an interruption and its `--resume`. "
            "Only in `metrics.jsonl`.",
        ),
    ),
)

REWARDS = Section(
    "Rewards",
    "Written by `enginehouse train` at each step. They count episodes, masked failures included, and contain no KL "
    "term.",
    (
        Metric(
            "reward/mean",
            "reward",
            "Mean reward of the step's episodes, the quantity that training maximizes.",
            "Rises over tens of steps; a single step is noisy.",
            "Read `samples/`, then compare `validation/reward`. If every reward is 0, see alarm `reward_zero`.",
        ),
        Metric(
            "reward/std", "reward", "Standard deviation of the rewards.", "Above 0.", "See `reward/groups_all_equal`."
        ),
        Metric("reward/max", "reward", "Largest reward of the step."),
        Metric("reward/min", "reward", "Smallest reward of the step."),
        Metric(
            "reward/groups_all_equal",
            "fraction",
            "Fraction of groups whose responses all have the same reward. Advantages that compare the responses of a "
            "group learn nothing from such a group.",
            "Well below 1.",
            "Choose prompts of medium difficulty, raise `rollout.samples_per_prompt` or filter groups with "
            "`rollout.keep`. Alarm `reward_all_equal`.",
        ),
        Metric(
            "reward/failures",
            "count",
            "Number of responses for which the reward function returned no score.",
            "0.",
            "`samples/` holds each message as `reward_failure`. `reward.on_error` decides what becomes of the row.",
        ),
        Metric(
            "reward/model", "reward", "Mean score of the reward model, before its weight. Only with a reward model."
        ),
        Metric(
            "reward/<name>",
            "set by the reward",
            "Mean of a further number that a reward function or an environment returns under this name. Of several "
            "reward functions, also the mean score of each.",
        ),
    ),
)

RESPONSES = Section(
    "Responses",
    "Written by `enginehouse train` at each step. Lengths count rows; the other metrics count episodes. Episodes "
    "without a generated token count only in `response/failed` and in the rewards.",
    (
        Metric(
            "response/tokens_mean",
            "tokens",
            "Mean length of a response.",
            "Changes slowly, and stays well below `rollout.sampling.max_tokens`.",
            "A reward that pays for length makes it grow; look at `samples/`.",
        ),
        Metric("response/tokens_max", "tokens", "Length of the longest response."),
        Metric(
            "response/stopped",
            "fraction",
            "Fraction of responses that ended by themselves.",
            "Near 1.",
            "See `response/truncated`.",
        ),
        Metric(
            "response/truncated",
            "fraction",
            "Fraction of responses that were cut at their token limit.",
            "Near 0.",
            "Raise `rollout.sampling.max_tokens`, or teach the model to stop with `enginehouse sft`. "
            "Alarm `responses_cut`.",
        ),
        Metric(
            "response/stopped_reward",
            "reward",
            "Mean reward of the responses that ended by themselves.",
            "Above `response/truncated_reward`.",
            "The reward pays for not ending; have it read `finish_reason`.",
        ),
        Metric("response/truncated_reward", "reward", "Mean reward of the responses that were cut."),
        Metric(
            "response/failed",
            "fraction",
            "Fraction of episodes without a generated token, because they failed. Written only if there are any.",
            "Absent.",
            "See `feed/failed_error` and the metrics beside it.",
        ),
        Metric(
            "response/rows_mean",
            "rows",
            "Mean number of rows of an episode. Written only if an episode has several rows.",
        ),
        Metric(
            "response/left_over_tokens_mean",
            "tokens",
            "Mean length of the responses to prompts that an earlier step left over (`rollout.extra_groups`).",
            "Above `response/tokens_mean`, because long responses come late.",
        ),
    ),
)

VERSIONS = Section(
    "Weight versions",
    "Written by `enginehouse train` at each step. Each weight update has a version, one higher than the last.",
    (
        Metric(
            "weights/version",
            "version",
            "Oldest version with which a response of the step ended.",
            "Equal to the step without `train.staleness`.",
        ),
        Metric(
            "staleness/mean",
            "versions",
            "Mean number of versions between the trainer's weights and those that generated a row's first token.",
            "0 without `train.staleness`, and at most its value with it.",
            "If training becomes unstable, lower `train.staleness` or set `algorithm.old_logprobs: actor`.",
        ),
        Metric("staleness/max", "versions", "The same for the oldest row.", "At most `train.staleness`."),
    ),
)

EPISODES = Section(
    "Episodes",
    "Written by `enginehouse train` if the environment plays each episode by itself.",
    (
        Metric("episode/turns", "turns", "Mean number of requests to the policy in an episode."),
        Metric("episode/seconds_mean", "s", "Mean duration of an episode."),
        Metric(
            "episode/seconds_max",
            "s",
            "Duration of the longest episode.",
            "Close to the mean.",
            "A step waits for its longest episode. `timeline.json` shows it; `rollout.episode_seconds` limits it.",
        ),
        Metric(
            "episode/in_tools",
            "fraction",
            "Fraction of the episodes' time in their environment and its tools, without the wait for the configured "
            "reward.",
            "Small.",
            "Speed up the tools, or raise `environment.processes`. Alarm `controller_bound`.",
        ),
    ),
)

UPDATES = Section(
    "Training",
    "Written at each step by every command that trains. Metrics of a loss are means over the tokens that count. While "
    "`critic.warmup_steps` last, only the critic's are written.",
    (
        Metric(
            "loss",
            "",
            "Mean loss. With `sft` the cross-entropy in nats per token; with `dpo` and `rm` the loss before the step's "
            "update. With `train` its size says little, because each step has other advantages.",
            "Falls with `sft`, `dpo` and `rm`. Finite.",
            "See `skipped`.",
        ),
        Metric(
            "grad_norm",
            "",
            "Norm of the gradient before it is clipped to `max_grad_norm`.",
            "Steady, with single peaks.",
            "If it grows over many steps, lower `lr`. If it is exactly 0, see alarm `gradient_zero`.",
        ),
        Metric("lr", "", "Learning rate of the step, as `schedule` and `warmup_steps` set it."),
        Metric(
            "skipped",
            "fraction",
            "Fraction of the step's optimizer steps that were skipped, because the gradient was not finite or no token "
            "counted.",
            "0.",
            "Alarms `steps_skipped` and `no_token_counted`.",
        ),
        Metric(
            "optimizer_steps",
            "optimizer steps",
            "Number of optimizer steps; with `train` it is `algorithm.epochs` times `algorithm.minibatches`.",
        ),
        Metric(
            "entropy",
            "nats/token",
            "Mean entropy of the policy at the tokens that count.",
            "Falls slowly, and stays above 0.",
            "Lower `lr`, or set the loss's `entropy_coefficient`. Alarm `entropy_collapse`.",
        ),
        Metric(
            "kl",
            "nats/token",
            "Estimated divergence from the reference, with a KL term. The estimator `k1` may be negative. With the "
            "loss `kto` of `dpo` it is the loss's zero point, in nats per response.",
            "Below 1, growing slowly.",
            "Raise `algorithm.kl.coefficient` or lower `lr`. Alarm `kl_runaway`.",
        ),
        Metric(
            "kl_coefficient",
            "",
            "Coefficient of the KL term at this step. Only with `algorithm.kl.target`, which adapts it.",
            "Settles.",
            "If it keeps growing, the target cannot be held; lower `lr`.",
        ),
        Metric(
            "policy_kl",
            "nats/token",
            "Estimated divergence (k3) of the policy from the one that the loss compares with (`old_logprobs`).",
            "Small; about 0 with one optimizer step per step.",
            "Lower `lr`, `algorithm.epochs` or `algorithm.minibatches`.",
        ),
        Metric(
            "ratio",
            "ratio",
            "Mean importance ratio of the policy to `old_logprobs`.",
            "Near 1.",
            "See `policy_kl`; with one optimizer step per step see `mismatch/ratio`.",
        ),
        Metric(
            "clip_fraction",
            "fraction",
            "Fraction of tokens whose ratio moved so far that the loss clips it.",
            "About 0 with one optimizer step per step; else a few percent.",
            "Lower `lr`, `algorithm.epochs` or `algorithm.minibatches`.",
        ),
        Metric(
            "gate",
            "fraction",
            "Mean slope of SAPO's gate, 1 at ratio 1. Only with the loss `sapo`.",
            "Near 1.",
            "See `ratio`.",
        ),
        Metric(
            "importance_weight",
            "ratio",
            "Mean weight that corrects the mismatch between rollout and trainer. Only with `importance_cap`.",
            "Near 1.",
            "See `mismatch/ratio`.",
        ),
        Metric(
            "importance_capped",
            "fraction",
            "Fraction of tokens whose weight was above `importance_cap`.",
            "Near 0.",
            "See `mismatch/outside`.",
        ),
        Metric(
            "critic/value_mean",
            "reward",
            "Mean value that the critic predicts.",
            "Follows `critic/return_mean`.",
            "Raise `critic.warmup_steps` or the critic's `lr`.",
        ),
        Metric("critic/return_mean", "reward", "Mean return that the critic is trained to predict."),
        Metric(
            "critic/clip_fraction",
            "fraction",
            "Fraction of tokens whose value moved beyond the clip range, so that the clipped error counts.",
            "A few percent.",
            "Raise the loss's `clip`, or lower the critic's `lr`.",
        ),
        Metric(
            "critic/<metric>", "as there", "A metric of this section, of the critic: `critic/loss`, `critic/grad_norm`."
        ),
    ),
)

MISMATCH = Section(
    "Rollout against trainer",
    "Written by `enginehouse train` at each step. They compare the logprobs that the rollout engine and the actor "
    "compute for the same tokens; d is the actor's logprob minus the rollout's. Unless `algorithm.old_logprobs` is "
    "`actor`, the step's first optimizer step measures them, so with several mini-batches they cover the first one.",
    (
        Metric(
            "mismatch/absolute_mean",
            "nats",
            "Mean of abs(d).",
            "At most 0.02 in float32 and 0.05 in bfloat16, and not growing.",
            "Run `enginehouse parity`, try `model.dtype: float32` or `algorithm.old_logprobs: actor`. Alarms "
            "`engines_apart` and `mismatch_growing`.",
        ),
        Metric("mismatch/absolute_max", "nats", "Largest abs(d)."),
        Metric(
            "mismatch/kl",
            "nats/token",
            "Mean of exp(d) - 1 - d, an estimate of the divergence of the actor from the rollout.",
            "Near 0.",
            "See `mismatch/absolute_mean`.",
        ),
        Metric(
            "mismatch/ratio",
            "ratio",
            "Mean of exp(d), the importance ratio. It is near 1 even if single tokens are far off.",
            "Near 1.",
            "See `mismatch/absolute_mean`.",
        ),
        Metric(
            "mismatch/outside",
            "fraction",
            "Fraction of tokens that one engine finds more than twice as likely as the other.",
            "Near 0.",
            "Set the loss's `importance_cap` with `algorithm.old_logprobs: actor`.",
        ),
        Metric(
            "mismatch/sequence_ratio",
            "ratio",
            "Mean over rows of exp(sum of d), the ratio of a whole row's probabilities.",
            "Near 1; further away for long responses.",
            "See `mismatch/absolute_mean`.",
        ),
        Metric(
            "mismatch/compared",
            "fraction",
            "Fraction of tokens that the served weight version generated. Only these are compared; at 0 "
            "the metrics above are absent.",
            "1 without `train.staleness`.",
            "Without `train.staleness`, a replica reports a wrong version; check it with `enginehouse certify`. Alarm "
            "`off_policy`.",
        ),
        Metric(
            "mismatch/behind_<n>/kl",
            "nats/token",
            "Like `mismatch/kl`, for rows whose first token is n versions old, if the actor recomputes logprobs.",
            "Larger than `mismatch/kl`, because the weights differ.",
            "If it grows over the run, lower `train.staleness`.",
        ),
        Metric("mismatch/behind_<n>/ratio", "ratio", "Like `mismatch/ratio`, for those rows.", "Near 1."),
        Metric(
            "mismatch/behind_<n>/sequence_ratio",
            "ratio",
            "Like `mismatch/sequence_ratio`, for those rows.",
            "Near 1.",
        ),
    ),
)

WEIGHTS = Section(
    "Weight updates",
    "Written by `enginehouse train` at each step, after the new weights are served.",
    (
        Metric("weights/mib", "MiB", "Size of the weights, each counted once.", "Constant."),
        Metric(
            "weights/mib_moved",
            "MiB",
            "Data that the weight update brought to all replicas. Only if the transport tells.",
            "Close to `weights/mib_minimum`.",
        ),
        Metric(
            "weights/mib_minimum",
            "MiB",
            "Least data that the weight update could have brought. Only if the transport tells.",
        ),
        Metric(
            "weights/effect",
            "nats",
            "Mean absolute difference between the logprobs of the actor and of the replica that differs most. "
            "Only if the weight update is checked (`weights.effect_check_every`).",
            "At most `weights.effect_tolerance`; beyond it the replica answers no requests.",
        ),
        Metric(
            "weights/taken",
            "fraction",
            "Smallest fraction of the actor's change that a replica shows. Only if the weight update is checked, and "
            "changed more than rounding does.",
            "Near 1; below 0.5 the replica answers no requests.",
            "The rollout engine drops weight updates; run `enginehouse certify` on it.",
        ),
        Metric(
            "weights/least_taken",
            "fraction",
            "Smallest fraction so far of a change that a replica can have taken, over all replicas and weight updates.",
            "At least 0.9.",
            "The rollout engine may drop a part of each weight update, such as one layer's weights.",
        ),
        Metric(
            "turns/<role>/freed_mib",
            "MiB",
            "Most memory that the role's processes freed at once for another role. Only for roles that share devices, "
            "and if their engine can tell.",
        ),
    ),
)

FEED = Section(
    "Data and groups",
    "The epochs are written by `train` and `sft`, the others by `train`. A group is all episodes of one prompt.",
    (
        Metric(
            "data/epoch",
            "passes",
            "How often each row of the data was used so far, on average.",
            "",
            "Many passes over few prompts overfit; compare with `validation/reward`.",
        ),
        Metric("data/<source>/epoch", "passes", "The same for one of several sources of `data.train`."),
        Metric(
            "feed/under_way",
            "groups",
            "Groups that were begun and not yet trained on when the step's metrics were made.",
            "0 without `train.staleness` and `rollout.extra_groups`.",
        ),
        Metric(
            "feed/refused",
            "count",
            "Groups that the filter refused; other prompts took their place.",
            "A fraction of `train.prompts_per_step`.",
            "Each refused group is generated in vain. Choose prompts of medium difficulty.",
        ),
        Metric(
            "feed/dropped",
            "count",
            "Groups that were dropped because no episode of theirs was left (`rollout.on_failure`).",
            "0.",
            "See the failures below.",
        ),
        Metric(
            "feed/left_over",
            "count",
            "Groups that were ended before they were complete, because the step had enough. Their prompts come again.",
            "At most `rollout.extra_groups`.",
        ),
        Metric(
            "feed/failed_error",
            "count",
            "Episodes that failed because the environment raised an error. Each attempt counts.",
            "0.",
            "The log describes the first failure of each step. `rollout.on_failure` decides what happens next.",
        ),
        Metric(
            "feed/failed_time",
            "count",
            "Episodes that took longer than `rollout.episode_seconds`.",
            "0.",
            "Raise the limit, or find what is slow in `timeline.json`.",
        ),
        Metric(
            "feed/failed_replica",
            "count",
            "Episodes whose requests were lost with several replicas.",
            "0.",
            "See `rollout/restarts`.",
        ),
        Metric(
            "feed/failed_worker",
            "count",
            "Episodes that were lost with their environment process.",
            "0.",
            "The environment ends or blocks its process; look at its code.",
        ),
        Metric(
            "feed/failed_unscored",
            "count",
            "Episodes that were left out because nobody scored them (`reward.on_error`).",
            "0.",
            "See `reward/failures`.",
        ),
        Metric(
            "feed/worker_restarts",
            "count",
            "Restarts of environment processes. Only with `environment.processes`.",
            "0.",
            "See `feed/failed_worker`.",
        ),
    ),
)

ROLLOUT = Section(
    "Rollout replicas",
    "Written by `enginehouse train` at each step, for the time since the step before.",
    (
        Metric(
            "rollout/replicas",
            "replicas",
            "Replicas that serve.",
            "`rollout.replicas`.",
            "A replica is restarting or lost; the log says why.",
        ),
        Metric("rollout/restarts", "count", "Restarts of replicas.", "0.", "The log holds the reason of each death."),
        Metric(
            "rollout/retries", "count", "Requests that were sent to another replica.", "0.", "See `rollout/restarts`."
        ),
        Metric("rollout/busy_seconds", "s", "Time during which a replica had requests, averaged over the replicas."),
        Metric(
            "rollout/utilisation",
            "fraction",
            "The busy time, as a fraction of the time with requests in progress anywhere.",
            "Near 1.",
            "Some replicas wait for the longest responses; `enginehouse bottleneck` names a key to change.",
        ),
        Metric(
            "rollout/queued",
            "responses",
            "Most responses that waited for a replica at once.",
            "Small.",
            "The replicas are full. Add replicas if `time/generate` dominates.",
        ),
        Metric(
            "rollout/slowest",
            "ratio",
            "How many times as long as the others the slowest replica takes. Only with several replicas.",
            "Below 2.",
            "Look at what else runs on its node. Alarm `replica_slow`.",
        ),
        Metric("rollout/slowest_replica", "number", "Number of that replica, from 0.", "Another one each time."),
        Metric(
            "rollout/kv_cache_usage",
            "fraction",
            "Used fraction of the KV cache at the last health check. Only with vLLM.",
            "Below 1.",
            "At 1 requests wait for memory. Give the engine more memory, or lower `rollout.sampling.max_tokens`.",
        ),
        Metric(
            "rollout/prefix_cache_hit_rate",
            "fraction",
            "Fraction of prompt tokens found in the prefix cache since the launch. Only with vLLM.",
            "High for groups and for episodes of several turns.",
        ),
        Metric("rollout/<name>", "set by the engine", "A metric of the rollout engine, averaged over the replicas."),
    ),
)

TIME = Section(
    "Time",
    "Written at each step; 0 or absent for what the run does not do. `enginehouse bottleneck RUN` explains them and "
    "names the key that would change most.",
    (
        Metric(
            "tokens_per_second",
            "tokens/s",
            "Tokens of the step's rows, prompts included, divided by `time/step`.",
            "Steady; comparable only between runs with the same data and model.",
        ),
        Metric("time/step", "s", "Duration of the step, without what lies between steps (validations, checkpoints)."),
        Metric("time/generate", "s", "Wait for the step's responses.", "Usually the largest part."),
        Metric(
            "time/reward",
            "s",
            "Wait for scores after the last response, and the reward model.",
            "Near 0.",
            "Raise `reward.processes` or `reward.concurrency`. Alarm `controller_bound`.",
        ),
        Metric("time/old_logprobs", "s", "The actor's forward pass for `algorithm.old_logprobs: actor`."),
        Metric("time/reference", "s", "The reference's forward pass and the KL term in the reward."),
        Metric("time/values", "s", "The critic's forward pass."),
        Metric("time/advantage", "s", "Computation of the advantages."),
        Metric("time/stages/<stage>", "s", "A stage of a plugin."),
        Metric("time/update", "s", "Training of all roles, until the last one is done."),
        Metric("time/sync", "s", "Transfer and verification of the new weights."),
        Metric("time/turns", "s", "Time to hand devices from role to role. Only for roles that share devices."),
        Metric("time/data", "s", "Reading of the step's rows, in `sft`, `dpo` and `rm`.", "Near 0."),
        Metric("time/score", "s", "Forward passes before the update, in `dpo` and `rm`."),
        Metric("time/validation", "s", "Scoring of held-out rows within a step, in `sft`, `dpo` and `rm`."),
        Metric("busy/generate", "s", "The same as `rollout/busy_seconds`."),
        Metric(
            "busy/update",
            "s",
            "Time that the actor's ranks spent in the update, averaged over the ranks.",
            "Close to `time/update`.",
            "The rest is the wait for other roles, or for the controller.",
        ),
        Metric("busy/update/<role>", "s", "The same for another trained role, such as `busy/update/critic`."),
    ),
)

PREFERENCES = Section(
    "Preferences",
    "Written by `enginehouse dpo` and `enginehouse rm` at each step, measured before its update. The line of a step "
    "with a validation also holds the metrics of the held-out rows.",
    (
        Metric(
            "accuracy",
            "fraction",
            "Fraction of pairs whose chosen response has the higher reward; a tie counts half. With `kto`, fraction of "
            "responses on the right side of the zero point.",
            "Rises from 0.5.",
            "Train longer, or raise `lr`. If `validation/accuracy` falls meanwhile, stop earlier.",
        ),
        Metric(
            "margin",
            "reward",
            "Mean difference between the rewards of chosen and rejected responses.",
            "Rises from 0.",
            "See `accuracy`.",
        ),
        Metric(
            "rewards/chosen",
            "reward",
            "Mean reward of the chosen responses. A policy's reward is beta times its log ratio to the reference; that "
            "of a reward model is its score.",
        ),
        Metric(
            "rewards/rejected",
            "reward",
            "Mean reward of the rejected responses.",
            "Falls below `rewards/chosen`.",
        ),
        Metric(
            "validation/loss",
            "",
            "Loss of the held-out rows, in `sft`, `dpo` and `rm`.",
            "Falls.",
            "If it rises, stop earlier.",
        ),
        Metric("validation/accuracy", "fraction", "The same as `accuracy`, of the held-out rows."),
        Metric("validation/margin", "reward", "The same as `margin`, of the held-out rows."),
        Metric("validation/rewards/chosen", "reward", "The same as `rewards/chosen`, of the held-out rows."),
        Metric("validation/rewards/rejected", "reward", "The same as `rewards/rejected`, of the held-out rows."),
        Metric("validation/kl", "nats/response", "The zero point of `kto`, of the held-out rows."),
    ),
)

VALIDATION = Section(
    "Validation",
    "Written to `validation.jsonl` by `train` and `eval`, a line for each validation. `K` is "
    "`evaluation.samples_per_prompt`; a response passes if its reward reaches `evaluation.pass_threshold`.",
    (
        Metric(
            "validation/reward",
            "reward",
            "Mean over the prompts of the mean reward of their responses.",
            "Rises with `reward/mean`.",
            "If it falls while `reward/mean` rises, the policy overfits. `train.save_best` keeps the best model.",
        ),
        Metric(
            "validation/reward_stderr",
            "reward",
            "Standard error of that mean over the prompts.",
            "Small beside the differences that matter.",
            "Use more prompts or a larger `evaluation.samples_per_prompt`.",
        ),
        Metric(
            "validation/mean@<k>",
            "reward",
            "The same as `validation/reward`, under its usual name. Only with K above 1.",
        ),
        Metric(
            "validation/pass@<k>",
            "fraction",
            "Estimated chance that at least one of k responses passes (Chen et al. 2021, equation 1), for k = 1, 2, 4 "
            "and so on to K. Only with K above 1.",
        ),
        Metric("validation/pass@<k>_stderr", "fraction", "Standard error of that chance over the prompts."),
        Metric(
            "validation/majority@<k>",
            "fraction",
            "Fraction of prompts whose most frequent answer passes. Only with K above 1, and if the reward tells the "
            "answers.",
        ),
        Metric("validation/tokens_mean", "tokens", "Mean length of a response, over all rows of its episode."),
        Metric(
            "validation/truncated",
            "fraction",
            "Fraction of responses that were cut at their token limit.",
            "Near 0.",
            "Raise `evaluation.sampling.max_tokens`.",
        ),
        Metric(
            "validation/failures",
            "count",
            "Responses for which the reward function returned no score.",
            "0.",
            "See `reward/failures`.",
        ),
        Metric(
            "validation/dropped",
            "count",
            "Prompts that the other metrics leave out, because their episodes failed.",
            "0.",
            "The log names the prompts.",
        ),
        Metric(
            "validation/<name>",
            "set by the reward",
            "Mean of a further number that a reward function, an environment or a benchmark's metric returns.",
        ),
        Metric(
            "validation/<part>/<metric>",
            "as there",
            "A metric of this section for a part of the prompts: for a file if `data.validation` names several, for a "
            "benchmark, or for a value of the column `evaluation.by`.",
        ),
    ),
)

SECTIONS = (
    *(LINES, REWARDS, RESPONSES, VERSIONS, EPISODES, UPDATES, MISMATCH, WEIGHTS, FEED, ROLLOUT, TIME, PREFERENCES),
    VALIDATION,
)
"""All sections, in the order of the page."""
METRICS = tuple(metric for section in SECTIONS for metric in section.metrics)
_BY_NAME = {metric.name: metric for metric in METRICS}
_PATTERNS = {"n": r"\d+", "k": r"\d+", "part": ".+", "metric": ".+"}
"""Patterns of placeholders. Any other placeholder stands for a name without a slash."""


def _make_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<(\w+)>", lambda found: _PATTERNS.get(found[1], "[^/]+"), name))


_FAMILIES = [(_make_pattern(metric.name), metric) for metric in METRICS if "<" in metric.name]


def find_metric(name: str) -> Metric | None:
    """Return the description of a metric; None for a metric that only a plugin knows."""
    families = (metric for pattern, metric in _FAMILIES if pattern.fullmatch(name))
    return _BY_NAME.get(name) or next(families, None)
