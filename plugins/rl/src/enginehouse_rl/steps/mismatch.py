"""How far the logprobs that the rollout reported are from what the actor computes, on the same tokens and weights.

Two engines never compute quite the same. Small differences make the samples slightly off-policy; large ones are how
stale weights, a wrong temperature or a broken kernel show. With d = log p_actor(token) - log p_rollout(token), over
the tokens of `loss_mask`:

| metric | |
|---|---|
| `mismatch/absolute_mean`, `mismatch/absolute_max` | of abs(d), in nats |
| `mismatch/kl` | mean of k3, exp(d) - 1 - d: the divergence of the actor from the rollout, in nats |
| `mismatch/ratio` | mean of exp(d), the importance ratio; near 1 also where single tokens are far off |
| `mismatch/outside` | part of the tokens with exp(d) below 1 / `RATIO_BOUND` or above `RATIO_BOUND` |
| `mismatch/sequence_ratio` | mean over responses of exp(sum of d): how much likelier the actor finds a response |
| `mismatch/compared` | part of the tokens looked at that count: those of the weight version that was served |

Rows of another weight version, or of several, differ because of the weights, not because of the engines, and are left
out. Where nothing is left to compare, `mismatch/compared` is 0 and the others are missing.

Where the actor computes `old_logprobs` anew, all tokens of a step are compared, by `mismatch`, those of older weights
apart: `mismatch/behind_1/kl` is of rows whose first token is one version behind. Otherwise nothing is
computed for it: `measured` wraps the loss of a step's first optimizer step, whose forward pass still is by the weights
that were served. With several mini-batches that is the first mini-batch, rows drawn at random; what later ones compute
is by other weights, and says nothing about the engines.
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

OF_OLDER = ("mismatch/kl", "mismatch/ratio", "mismatch/sequence_ratio")
"""Figures of rows of older weights, by how many versions they are behind."""
RATIO_BOUND = 2.0
"""`mismatch/outside` counts the tokens that one engine finds more than so many times as likely as the other."""


COMPARED = ("loss_mask", "rollout_logprobs", "old_logprobs", "first_version", "weight_version")


def mismatch(samples: DistributedBatch, version: int) -> Metrics:
    """Compare a step's samples with the actor's logprobs of them.

    Args:
        samples: `loss_mask`, `rollout_logprobs`, `first_version` and `weight_version`, as the rollout returned them;
            and `old_logprobs`, the actor's by the weights of `version`: float32, aligned with `rollout_logprobs`.
        version: the weight version that was served; rows of others do not count.
    """
    return merge_metrics(_of_part(part, version) for part in samples.select(COMPARED).shards())


def _of_part(samples: Batch, version: int) -> dict[str, Mean | Max]:
    mask, drawn, logprobs = samples["loss_mask"], samples["rollout_logprobs"], samples["old_logprobs"]
    tokens = int(mask.values.sum())

    def figures(rows: torch.Tensor) -> dict[str, Mean | Max]:
        compared = mask.values & rows[mask.row]
        return _figures(logprobs.values[compared], drawn.values[compared], mask.row[compared], len(samples), tokens)

    found = figures(_drawn_from(samples, version))
    behind = version - samples["first_version"]
    for age in sorted(set(behind[behind > 0].tolist())):
        older = figures(behind == age)
        found |= {name.replace("/", f"/behind_{age}/"): older[name] for name in OF_OLDER if name in older}
    return found


def measuring(loss: LossSpec, version: int) -> LossSpec:
    """The same loss, which also compares its logprobs with the rollout's, and reports the entropy; see `measured`."""
    arguments = {"loss": loss.name, "arguments": dict(loss.arguments), "version": version}
    outputs = loss.outputs
    if not outputs.entropy:
        outputs = replace(outputs, entropy=True, entropy_gradient=False)
    return replace(
        loss, name="enginehouse_rl.steps.mismatch:measured", arguments=arguments, outputs=outputs, wraps=loss.name
    )


def measured(view: TokenView, *, loss: str, arguments: Mapping[str, Any], version: int) -> LossValue:
    """Compute a loss, compare the logprobs it is computed from with the rollout's, and report the mean `entropy`.

    Args:
        view: what `loss` needs; columns `rollout_logprobs` float32 `(tokens,)`, `first_version` and `weight_version`
            int64 `(rows,)`.
        loss: a registered name or `"module:function"`.
        arguments: its keyword arguments.
        version: the weight version the logprobs are computed with; rows of others do not count.
    """
    value = plugins().function("loss", loss)(view, **arguments)
    with torch.no_grad():
        mask = view.columns["loss_mask"]
        compared = mask & _drawn_from(view.columns, version)[view.row]
        figures = _figures(
            view.outputs["logprobs"][compared],
            view.columns["rollout_logprobs"][compared],
            view.row[compared],
            view.rows,
            int(mask.sum()),
        )
        if "entropy" in view.outputs:
            figures["entropy"] = Mean(float(view.outputs["entropy"][mask].sum()), float(mask.sum()))
    return replace(value, metrics={**figures, **value.metrics})


def _drawn_from(columns: Batch | Mapping[str, torch.Tensor], version: int) -> torch.Tensor:
    """Which rows were drawn from one weight version from the first token to the last."""
    return (columns["first_version"] == version) & (columns["weight_version"] == version)


def _figures(
    actor: torch.Tensor, rollout: torch.Tensor, row: torch.Tensor, rows: int, tokens: int
) -> dict[str, Mean | Max]:
    """The metrics of some tokens.

    Args:
        actor: the actor's logprobs, float32 `(compared,)`.
        rollout: the rollout's, alike.
        row: int64 `(compared,)`, the row of each.
        rows: number of rows.
        tokens: how many tokens were looked at.
    """
    count = len(actor)
    if not tokens:
        return {}
    figures: dict[str, Mean | Max] = {"mismatch/compared": Mean(float(count), float(tokens))}
    if not count:
        return figures
    actor, rollout = actor.double(), rollout.double()
    difference = actor - rollout
    ratio = cap_log_ratios(difference).exp()
    of_row = torch.zeros(rows, dtype=difference.dtype, device=difference.device).index_add_(0, row, difference)
    occupied = row.bincount(minlength=rows) > 0
    absolute = difference.abs()
    inside = (ratio >= 1 / RATIO_BOUND) & (ratio <= RATIO_BOUND)
    sums = (
        absolute.max(),
        absolute.sum(),
        token_kl(rollout, actor, "k3").sum(),
        ratio.sum(),
        (~inside).sum(),  # a NaN is not inside
        cap_log_ratios(of_row[occupied]).exp().sum(),
        occupied.sum(),
    )
    # one transfer from the device
    highest, total, kl, ratios, outside, products, sequences = torch.stack([value.double() for value in sums]).tolist()
    return figures | {
        "mismatch/absolute_mean": Mean(total, count),
        "mismatch/absolute_max": Max(highest),
        "mismatch/kl": Mean(kl, count),
        "mismatch/ratio": Mean(ratios, count),
        "mismatch/outside": Mean(outside, count),
        "mismatch/sequence_ratio": Mean(products, sequences),
    }
