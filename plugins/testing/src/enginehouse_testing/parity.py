"""Compares two logprobs of each generated token: one reported by the rollout engine, one computed by the actor.

Both engines start as in a run of the config, and get the same weights by one verified update. Nothing is trained. The
report has the metrics of `enginehouse_rl.steps.mismatch` and the distribution of the differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.controller import DistributedBatch
from enginehouse.engines.train import metric_values
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.generation import sort_samples
from enginehouse.roles.placement import place
from enginehouse_rl.data.prompts import PromptDataset
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.episodes.sampling import make_sampling_outputs, make_sampling_params, make_step_seed
from enginehouse_rl.runs.jsonlines import replace_infinite
from enginehouse_rl.steps.mismatch import mismatch
from enginehouse_testing.model_under_test import mean_difference

if TYPE_CHECKING:
    from enginehouse.data import Batch, Ragged
    from enginehouse_rl.plan.plan import Plan

DECADES = tuple(range(-8, 2))
"""Exponents of the powers of ten at the histogram's edges."""

WORST = 10
"""Number of tokens to keep: the tokens whose logprobs differ most."""

VERSION = 1
"""Weight version of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token, and its logprobs by the rollout engine and by the training engine.

    Attributes:
        row: index of the sample.
        position: position of the token in the sample, prompt included.
        token: the token's id.
    """

    row: int
    position: int
    token: int
    rollout: float
    train: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Metrics of a comparison. Differences are absolute, of logprobs, in nats, over the generated tokens.

    Attributes:
        tokens: number of tokens.
        sequences: number of samples.
        mean: mean difference.
        p50: median difference.
        p99: 99th percentile, with linear interpolation.
        max: largest difference.
        kl: mean k3 estimate of the training engine's divergence from the rollout.
        ratio: mean importance ratio, exp(train - rollout).
        sequence_ratio: mean over samples of the ratio of the whole sample.
        outside: fraction of the tokens whose ratio is out of bounds (`mismatch.RATIO_BOUND`).
        histogram: number of tokens in each interval of the difference. The intervals end at `10 ** DECADES[i]`; the
            last interval has no upper end.
        worst: the tokens that differ most, the worst first.
    """

    tokens: int
    sequences: int
    mean: float
    p50: float
    p99: float
    max: float
    kl: float
    ratio: float
    sequence_ratio: float
    outside: float
    histogram: tuple[int, ...]
    worst: tuple[TokenDifference, ...]

    @classmethod
    def of(cls, samples: Batch, logprobs: Ragged, version: int = VERSION) -> Parity:
        """Compare samples with the training engine's logprobs.

        Args:
            samples: columns `input_ids`, `loss_mask`, `rollout_logprobs`, `first_version` and `weight_version` as the
                rollout returned them.
            logprobs: the training engine's logprobs, float32, aligned with `input_ids`.
            version: the weight version that both engines must have.

        Raises:
            EnginehouseError: there is nothing to compare, or a sample has another version.
        """
        mask = samples["loss_mask"]
        versions = sorted(set(samples["weight_version"].tolist()))
        if versions != [version]:
            raise EnginehouseError(
                f"the rollout was given weights of version {version}, but returned samples of "
                f"{', '.join(f'version {number}' for number in versions) or 'none'}"
            )
        drawn = mask.values.nonzero().squeeze(-1)
        if not len(drawn):
            raise EnginehouseError("the rollout generated no tokens, so there is nothing to compare")
        compared = DistributedBatch.of([samples.with_columns(old_logprobs=logprobs)])
        figures = metric_values(mismatch(compared, version))
        row, position = mask.row[drawn], drawn - mask.offsets[mask.row[drawn]]
        token = samples["input_ids"].values[drawn]
        rollout, train = samples["rollout_logprobs"].values[drawn].double(), logprobs.values[drawn].double()
        differences = (train - rollout).abs()
        order = torch.nan_to_num(differences, nan=torch.inf).argsort(descending=True, stable=True)[:WORST]
        edges = torch.tensor([10.0**exponent for exponent in DECADES], dtype=torch.float64)
        counts = torch.bucketize(differences, edges).bincount(minlength=len(DECADES) + 1)
        median, high = np.percentile(differences.numpy(), [50, 99])
        columns = (row, position, token, rollout, train)
        return cls(
            tokens=len(drawn),
            sequences=len(row.unique()),
            mean=figures["mismatch/absolute_mean"],
            p50=float(median),
            p99=float(high),
            max=figures["mismatch/absolute_max"],
            kl=figures["mismatch/kl"],
            ratio=figures["mismatch/ratio"],
            sequence_ratio=figures["mismatch/sequence_ratio"],
            outside=figures["mismatch/outside"],
            histogram=tuple(counts.tolist()),
            worst=tuple(
                TokenDifference(row=a, position=b, token=c, rollout=d, train=e)
                for a, b, c, d, e in zip(*(column[order].tolist() for column in columns), strict=True)
            ),
        )

    def within(self, tolerance: float) -> bool:
        """Return True if the mean difference is a number of at most `tolerance`."""
        return self.mean <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A comparison, and a description of the compared engines.

    Attributes:
        train: description of the training engine.
        rollout: description of the rollout engine.
        transport: weight transport between them.
        model: the model's name and the source of its weights.
        dtype: dtype of the model.
        temperature: temperature of the samples.
        tolerance: largest mean absolute difference allowed, in nats.
        found: result of the comparison.
        roles: description of each worker, as in a run's record.
    """

    train: str
    rollout: str
    transport: str
    model: str
    dtype: str
    temperature: float
    tolerance: float
    found: Parity
    roles: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """True if the mean difference is within the tolerance."""
        return self.found.within(self.tolerance)

    def write(self, directory: str | Path) -> Path:
        """Write `parity.json` into an existing directory; figures that are not finite are null."""
        path = Path(directory) / "parity.json"
        content = {"passed": self.passed, **asdict(self), "histogram_edges": [10.0**exponent for exponent in DECADES]}
        path.write_text(json.dumps(replace_infinite(content), indent=2) + "\n", encoding="utf-8")
        return path


def compare_engines(plan: Plan, prompts: int, tolerance: float | None = None, model: str = "") -> ParityReport:
    """Start the engines of a plan, send the actor's weights to the rollout, and score samples by both.

    Args:
        plan: the checked config.
        prompts: number of prompts, from the beginning of the training file. Each prompt gets
            `rollout.samples_per_prompt` samples.
        tolerance: largest mean absolute difference; None: the value of `mean_difference` for the rollout.
        model: the model's name in the report; empty: the name of its directory.

    Raises:
        EnginehouseError: an engine could not be started or called, or could not get the weights.
    """
    config = plan.config
    data, sampling, dtype = config.data, config.rollout.sampling, plan.roles["actor"].model.dtype
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code, data.template_arguments)
    dataset = PromptDataset.load(
        data.train,
        tokenizer,
        data.prompt,
        plan.prompt_limit,
        data.chat_template,
        data.overlong_prompts,
        system=data.system,
        tools=data.tools,
        columns=data.columns,
    )
    chosen = dataset.all(prompts)
    requests = chosen.select(["prompt_ids"]).with_columns(prompt_index=torch.arange(len(chosen)))
    with place(plan.roles, plan.launch) as roles:
        workers = roles.describe()
        roles.sync.publish(VERSION)
        params = make_sampling_params(sampling, config.rollout.samples_per_prompt)
        samples = sort_samples(roles.rollout.generate_each(requests, params, seed=make_step_seed(config.train.seed, 0)))
        roles.turns.train()
        scored = roles.actor.forward(
            samples.select(["input_ids", "loss_mask"]), make_sampling_outputs(sampling)
        ).fetch()
    return ParityReport(
        train=_describe(workers["actor"]),
        rollout=_describe(workers["rollout"]),
        transport=plan.roles["rollout"].transport or "",
        model=model or Path(config.model.path).name,
        dtype=dtype,
        temperature=sampling.temperature,
        tolerance=mean_difference(plan.roles["rollout"]) if tolerance is None else tolerance,
        found=Parity.of(samples, scored["logprobs"]),
        roles=workers,
    )


def _describe(workers: list[Mapping[str, Any]]) -> str:
    first = workers[0]
    versions = [f"{name} {first[name]}" for name in ("torch", "transformers") if first.get(name)]
    return f"{first['backend']} x{len(workers)} ({', '.join(dict.fromkeys([first['engine'], *versions]))})"
