"""Critics: a model with a value head."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginehouse.engines.train import Outputs
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Check, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train.reference import STEPS, TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.checks.train.weights import stored_tensors
from enginehouse_testing.comparison import larger, largest_difference
from enginehouse_testing.oracle import VALUE_HEAD, Oracle
from enginehouse_testing.problem import CRITICS, SQUARED_ERROR, batch, model_path
from enginehouse_testing.rank import Rank, weights_of


def _train(rank: Rank) -> dict[str, Any]:
    found = {}
    for model in CRITICS:
        with rank.engine(model, head="value", **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            before = weights_of(engine)
            scored = engine.forward(shard, Outputs(logprobs=False, values=True))
            for _ in range(STEPS):
                step(engine, shard, SQUARED_ERROR)
            values = None if scored is None else scored.ragged("values").values.cpu()
            found[model] = (before, values, weights_of(engine))
    return found


@functools.lru_cache(maxsize=8)
def _right(model: str, head: tuple[float, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    oracle = Oracle(model_path(model), torch.tensor(head)[None])
    values = oracle.scores(batch())["values"]
    oracle.train(batch(), STEPS, TRAINING)
    return values, oracle.weights()


def _judge(seen: list[Seen]) -> Measured:
    measured = []
    for model in CRITICS:
        head = seen[0].value[model][0].get(VALUE_HEAD)
        if head is None:
            return Measured(float("inf"), f"{model} model: weights hold no {VALUE_HEAD}")
        values, weights = _right(model, tuple(head[0].tolist()))
        found = torch.cat([value[model][1] for value in outputs_of(seen)])
        # An error of the values counts tenfold: their tolerance is 1e-5.
        one = largest_difference({"values": found}, {"values": values})
        measured.append(Measured(10 * one.error, f"{one.detail} before training, times 10; {model} model"))
        for rank, of_rank in enumerate(seen):
            two = largest_difference(of_rank.value[model][2], weights)
            measured.append(Measured(two.error, f"{two.detail} after training; {model} model, rank {rank}"))
    return larger(*measured)


def _write(rank: Rank) -> dict[str, Any]:
    """Values after training, of engines of the export and of a checkpoint; on rank 0 what transformers makes of it."""
    found: dict[str, Any] = {}
    for model in CRITICS:
        values = []
        saved = rank.path(f"{model} checkpoint")
        for made in ("trained", "exported", "loaded"):
            with rank.engine(rank.path(model) if made == "exported" else model, head="value", **TRAINING) as engine:
                shard = rank.shard(engine, batch())
                if made == "trained":
                    step(engine, shard, SQUARED_ERROR)
                    engine.export_hf(rank.path(model))
                    engine.save(saved)
                elif made == "loaded":
                    engine.load(saved)
                scored = engine.forward(shard.drop(["loss_mask"]), Outputs(logprobs=False, values=True))
                values.append(None if scored is None else scored.ragged("values").values.cpu())
        found[model] = values
        if rank.context.rank == 0:
            found[f"{model} exported"] = (sorted(stored_tensors(rank.path(model))), _scored(rank.path(model)))
    return found


def _scored(directory: str) -> tuple[dict[str, Any], torch.Tensor]:
    """What transformers lacks and leaves of an export, and the scores it gives every row but for the last token."""
    from transformers import AutoModelForSequenceClassification

    found: tuple[Any, dict[str, Any]] = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    model, loaded = found
    rows = [batch().row(row)["input_ids"].tolist()[:-1] for row in range(len(batch()))]
    pad = model.config.pad_token_id
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    wrong_keys = {kind: sorted(loaded[kind]) for kind in ("missing_keys", "unexpected_keys") if loaded[kind]}
    return wrong_keys, logits


def _judge_written(seen: list[Seen]) -> Measured:
    measured = []
    last = batch().ragged("input_ids").offsets[1:] - 1
    for model in CRITICS:
        stored, (wrong_keys, logits) = seen[0].value[f"{model} exported"]
        if wrong_keys or VALUE_HEAD not in stored or "lm_head.weight" in stored or logits.shape != (len(last), 1):
            return wrong(f"{model} model: the export is no classifier of one label: {stored}, {wrong_keys}")
        of_ranks = [value[model] for value in outputs_of(seen)]
        before, again, loaded = (torch.cat([values[which] for values in of_ranks]) for which in range(3))
        measured.append(largest_difference({"values": again}, {"values": before}))
        measured.append(largest_difference({"values of a checkpoint": loaded}, {"values of a checkpoint": before}))
        measured.append(largest_difference({"scores": before[last]}, {"scores": logits[:, 0]}))
    return larger(*measured)


CHECKS = (
    Check(
        name="value_head",
        capability=capabilities.VALUE_HEAD,
        claim=f"Values (to 1e-5), and weights after {STEPS} steps on squared errors, are the oracle's",
        tolerance=1e-4,
        acts=(_train,),
        judge=_judge,
    ),
    Check(
        name="value_head_files",
        since="1.1",
        capability=capabilities.VALUE_HEAD,
        claim="Transformers loads the export as a classifier of one label, and scores as the engine and its checkpoint",
        tolerance=1e-5,
        acts=(_write,),
        judge=_judge_written,
    ),
)
