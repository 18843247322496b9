"""How far two engines are apart: what the rollout reports for the tokens it draws, and what the actor computes for it.

Both are started as a run of the config would start them, and given the same weights by one verified update. Nothing is
trained. The figures are those of `enginehouse_rl.steps.mismatch`, with the distribution of the difference besides.
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
from enginehouse_rl.episodes.sampling import outputs_as_sampled, sampling_params, step_seed
from enginehouse_rl.runs.jsonlines import finite
from enginehouse_rl.steps.mismatch import mismatch

if TYPE_CHECKING:
    from enginehouse.data import Batch, Ragged
    from enginehouse_rl.plan.plan import Plan

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest mean absolute difference in nats for two engines that compute in this dtype, each in its own way."""

DECADES = tuple(range(-8, 2))
"""Exponents of ten of the histogram's edges."""

WORST = 10
"""How many of the tokens that differ most are kept."""

VERSION = 1
"""What the update calls the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token of which the two engines think differently.

    Attributes:
        row: the sample's number.
        position: the token's place in the sample, prompt included.
        token: its id.
        rollout: its logprob as the rollout reported it.
        train: its logprob as the training engine computed it.
    """

    row: int
    position: int
    token: int
    rollout: float
    train: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was found. All differences are of logprobs, in nats, absolute, over the drawn tokens.

    Attributes:
        tokens: tokens compared.
        sequences: samples they are of.
        mean: mean difference.
        p50: median difference.
        p99: 99th percentile, between neighbours linearly.
        max: largest difference.
        kl: mean k3 estimate of the training engine's divergence from the rollout.
        ratio: mean importance ratio, exp(train - rollout).
        sequence_ratio: mean over samples of the ratio of the whole sample.
        outside: part of the tokens whose ratio is out of bounds (`mismatch.RATIO_BOUND`).
        histogram: tokens up to each edge `10 ** DECADES[i]` and above the one before; last those above all.
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
            samples: `input_ids`, `loss_mask`, `rollout_logprobs`, `first_version`, `weight_version`, as the rollout
                returned them.
            logprobs: the training engine's, float32, aligned with `input_ids`.
            version: the weight version both are to be of.

        Raises:
            EnginehouseError: there is nothing to compare, or a sample is of another version.
        """
        mask = samples["loss_mask"]
        versions = sorted(set(samples["weight_version"].tolist()))
        if versions != [version]:
            raise EnginehouseError(
                f"the rollout was given weights of version {version} and returned samples of "
                f"{', '.join(f'version {one}' for one in versions) or 'none'}"
            )
        drawn = mask.values.nonzero().squeeze(-1)
        if not len(drawn):
            raise EnginehouseError("the rollout drew no tokens: there is nothing to compare")
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
        """Whether the mean difference is a number of at most `tolerance`."""
        return self.mean <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A comparison and what was compared.

    Attributes:
        train: the training engine, in words.
        rollout: the rollout engine, in words.
        transport: what brought the weights from one to the other.
        dtype: what the model was loaded in.
        temperature: the samples'.
        tolerance: largest mean absolute difference allowed, in nats.
        found: the figures.
        roles: what each worker runs on, as in a run's record.
    """

    train: str
    rollout: str
    transport: str
    dtype: str
    temperature: float
    tolerance: float
    found: Parity
    roles: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether the mean difference is within the tolerance."""
        return self.found.within(self.tolerance)

    def write(self, directory: str | Path) -> Path:
        """Write `parity.json` into a directory that is there; figures that are not finite are null."""
        path = Path(directory) / "parity.json"
        content = {"passed": self.passed, **asdict(self), "histogram_edges": [10.0**one for one in DECADES]}
        path.write_text(json.dumps(finite(content), indent=2) + "\n", encoding="utf-8")
        return path


def compare_engines(plan: Plan, prompts: int, tolerance: float | None = None) -> ParityReport:
    """Start the engines of a plan, bring the actor's weights to the rollout, draw samples and score them by the actor.

    Args:
        plan: the checked config.
        prompts: how many of the training prompts to answer, `rollout.samples_per_prompt` times each; the file's first.
        tolerance: largest mean absolute difference; None: by the model's dtype, `TOLERANCES`.

    Raises:
        EnginehouseError: an engine could not be started, given the weights, or asked.
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
    )
    chosen = dataset.all(prompts)
    asked = chosen.select(["prompt_ids"]).with_columns(prompt_index=torch.arange(len(chosen)))
    with place(plan.roles, plan.launch) as roles:
        said = roles.describe()
        roles.sync.publish(VERSION)
        drawn = sampling_params(sampling, config.rollout.samples_per_prompt)
        samples = sort_samples(roles.rollout.generate_each(asked, drawn, seed=step_seed(config.train.seed, 0)))
        roles.turns.train()
        scored = roles.actor.forward(samples.select(["input_ids", "loss_mask"]), outputs_as_sampled(sampling)).fetch()
    return ParityReport(
        train=_in_words(said["actor"]),
        rollout=_in_words(said["rollout"]),
        transport=plan.roles["rollout"].transport or "",
        dtype=dtype,
        temperature=sampling.temperature,
        tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        found=Parity.of(samples, scored["logprobs"]),
        roles=said,
    )


def _in_words(workers: list[Mapping[str, Any]]) -> str:
    first = workers[0]
    versions = [f"{name} {first[name]}" for name in ("torch", "transformers") if first.get(name)]
    return f"{first['backend']} x{len(workers)} ({', '.join(dict.fromkeys([first['engine'], *versions]))})"
