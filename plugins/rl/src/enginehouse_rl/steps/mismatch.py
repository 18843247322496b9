"""The mismatch between the logprobs that the rollout engine and the actor compute for the same tokens and weights.

Two engines never compute exactly the same logprobs. Small differences make the samples slightly off-policy; stale
weights, a wrong temperature or a broken kernel cause large differences. `enginehouse_rl/metrics.md` describes each
metric.

Only rows that the compared weight version generated from the first token to the last are compared. In other rows the
logprobs differ because the weights differ. If no row is left, `mismatch/compared` is 0 and the other metrics are
missing.

If the actor recomputes `old_logprobs`, `mismatch` compares all tokens of a step. It reports rows of older weights under
separate names: `mismatch/behind_1/kl` covers the rows whose first token is one version behind. If the actor does not
recompute them, `add_measurement` wraps the loss of the first optimizer step, whose forward pass still uses the served
weights. With several mini-batches, only the first mini-batch is therefore measured; its rows are drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.train import LossSpec, LossValue, Max, Mean, Metrics, TokenView, merge_metrics
from enginehouse.plugin import plugins
from enginehouse_rl.losses.kl import cap_log_ratios, token_kl

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.data import Batch

OLDER_METRICS = ("mismatch/kl", "mismatch/ratio", "mismatch/sequence_ratio")
"""The metrics that are also reported for rows of older weights, for each number of versions that rows are behind."""
RATIO_BOUND = 2.0
"""`mismatch/outside` counts the tokens to which one engine gives more than this many times the probability that the
other engine gives."""


COMPARED_COLUMNS = ("loss_mask", "rollout_logprobs", "old_logprobs", "first_version", "weight_version")


def mismatch(samples: DistributedBatch, version: int) -> Metrics:
    """Compare the logprobs that the rollout and the actor computed for a step's samples.

    Args:
        samples: The columns `loss_mask`, `rollout_logprobs`, `first_version` and `weight_version` of the rollout, and
            `old_logprobs`, which the actor computed by the weights of `version`: float32, aligned with
            `rollout_logprobs`.
        version: The served weight version.
    """
    return merge_metrics(_compare_part(part, version) for part in samples.select(COMPARED_COLUMNS).shards())


def _compare_part(samples: Batch, version: int) -> dict[str, Mean | Max]:
    mask = samples.ragged("loss_mask")
    counted = mask.values.nonzero().squeeze(-1)
    row = mask.row[counted]
    logprobs, rollout = (samples.ragged(name).values[counted] for name in ("old_logprobs", "rollout_logprobs"))

    def figures(rows: torch.Tensor) -> dict[str, Mean | Max]:
        return _measure(logprobs, rollout, row, len(samples), rows[row])

    metrics = figures(_mask_version(samples, version))
    behind = version - samples["first_version"]
    for age in sorted(set(behind[behind > 0].tolist())):
        older = figures(behind == age)
        metrics |= {name.replace("/", f"/behind_{age}/"): older[name] for name in OLDER_METRICS if name in older}
    return metrics


def add_measurement(loss: LossSpec, version: int) -> LossSpec:
    """Wrap a loss in `measure_and_compute`, so that it also compares its logprobs with those of the rollout."""
    arguments = {"loss": loss.name, "arguments": dict(loss.arguments), "version": version}
    outputs = loss.outputs
    if not outputs.entropy:
        outputs = replace(outputs, entropy=True, entropy_gradient=False)
    return replace(
        loss,
        name="enginehouse_rl.steps.mismatch:measure_and_compute",
        arguments=arguments,
        outputs=outputs,
        wraps=loss.name,
    )


def measure_and_compute(view: TokenView, *, loss: str, arguments: Mapping[str, Any], version: int) -> LossValue:
    """Compute a loss, compare its logprobs with those of the rollout, and report the mean `entropy`.

    Args:
        view: The view that `loss` needs, with columns `rollout_logprobs` float32 `(tokens,)`, `first_version` and
            `weight_version` int64 `(rows,)`.
        loss: A registered name or `"module:function"`.
        arguments: The loss's keyword arguments.
        version: The weight version that computes the logprobs.
    """
    value = plugins().function("loss", loss)(view, **arguments)
    with torch.no_grad():
        counted = view.counted_tokens()
        row = view.row[counted]
        figures = _measure(
            view.outputs["logprobs"][counted],
            view.columns["rollout_logprobs"][counted],
            row,
            view.rows,
            _mask_version(view.columns, version)[row],
            view.outputs["entropy"][counted] if "entropy" in view.outputs else None,
        )
    return replace(value, metrics={**figures, **value.metrics})


def _mask_version(columns: Batch | Mapping[str, torch.Tensor], version: int) -> torch.Tensor:
    """Return a mask of the rows whose tokens were all generated by `version`."""
    return (columns["first_version"] == version) & (columns["weight_version"] == version)


def _measure(
    actor: torch.Tensor,
    rollout: torch.Tensor,
    row: torch.Tensor,
    rows: int,
    compared: torch.Tensor,
    entropy: torch.Tensor | None = None,
) -> dict[str, Mean | Max]:
    """Return the metrics of the compared tokens among the counted tokens, by one read from the device.

    Args:
        actor: The actor's logprobs, float32 `(counted,)`.
        rollout: The rollout's logprobs, float32 `(counted,)`.
        row: The row of each token, int64 `(counted,)`.
        rows: Number of rows.
        compared: The tokens to compare, bool `(counted,)`.
        entropy: The actor's entropy, float32 `(counted,)`; its mean is over all counted tokens.
    """
    tokens = len(actor)
    if not tokens:
        return {}
    actor, rollout = actor.double(), rollout.double()
    nothing = torch.zeros((), dtype=torch.float64, device=actor.device)
    difference = (actor - rollout).where(compared, nothing)
    ratio = cap_log_ratios(difference).exp()
    of_row = nothing.expand(rows).clone()
    occupied = of_row.index_add(0, row, compared.double()) > 0
    of_row = of_row.index_add(0, row, difference)
    absolute = difference.abs()
    inside = (ratio >= 1 / RATIO_BOUND) & (ratio <= RATIO_BOUND)
    sums = (
        compared.sum(),
        absolute.max(),
        absolute.sum(),
        token_kl(rollout, actor, "k3").where(compared, nothing).sum(),
        ratio.where(compared, nothing).sum(),
        (~inside & compared).sum(),  # so NaN counts as outside
        cap_log_ratios(of_row).exp().where(occupied, nothing).sum(),
        occupied.sum(),
        nothing if entropy is None else entropy.double().sum(),
    )
    read = torch.stack([value.double() for value in sums]).tolist()
    count, highest, total, kl, ratios, outside, products, sequences, entropies = read
    figures: dict[str, Mean | Max] = {"mismatch/compared": Mean(count, float(tokens))}
    if entropy is not None:
        figures["entropy"] = Mean(entropies, float(tokens))
    if not count:
        return figures
    return figures | {
        "mismatch/absolute_mean": Mean(total, count),
        "mismatch/absolute_max": Max(highest),
        "mismatch/kl": Mean(kl, count),
        "mismatch/ratio": Mean(ratios, count),
        "mismatch/outside": Mean(outside, count),
        "mismatch/sequence_ratio": Mean(products, sequences),
    }
