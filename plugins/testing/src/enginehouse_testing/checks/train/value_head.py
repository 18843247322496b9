"""Checks critics, which are models with a value head."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginehouse.engines.train import Outputs
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train.outgoing import values_of
from enginehouse_testing.checks.train.reference import STEPS, TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, located
from enginehouse_testing.models import stored_tensors
from enginehouse_testing.oracle import VALUE_HEAD, Oracle
from enginehouse_testing.problem import CRITICS, SQUARED_ERROR, batch, model_path
from enginehouse_testing.rank import Rank, weights_of

VALUES = Outputs(logprobs=False, values=True)

CHECKS = Checks(capability=capabilities.VALUE_HEAD)


def _train(rank: Rank) -> dict[str, Any]:
    trained = {}
    for model in CRITICS:
        with rank.engine(model, head="value", **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            before = weights_of(engine)
            values = values_of(engine.forward(shard, VALUES), "values")
            for _ in range(STEPS):
                step(engine, shard, SQUARED_ERROR)
            trained[model] = (before, values, weights_of(engine))
    return trained


@functools.lru_cache(maxsize=8)
def _train_oracle(model: str, head: tuple[float, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the oracle's values before training, and its weights afterwards."""
    oracle = Oracle(model_path(model), torch.tensor(head)[None])
    values = oracle.scores(batch())["values"]
    oracle.train(batch(), STEPS, TRAINING)
    return values, oracle.weights()


@CHECKS.judge(_train, tolerance=1e-4)
def value_head(seen: list[Seen]) -> Measured:
    """Values (to 1e-5), and weights after 5 steps with squared errors as the loss, agree with the oracle."""
    measured = []
    for model in CRITICS:
        head = seen[0].value[model][0].get(VALUE_HEAD)
        if head is None:
            return wrong(f"{model} model: weights hold no {VALUE_HEAD}")
        right, weights = _train_oracle(model, tuple(head[0].tolist()))
        values = torch.cat([value[model][1] for value in outputs_of(seen)])
        # An error of the values counts tenfold: their tolerance is 1e-5.
        difference = largest_difference({"values": values}, {"values": right})
        measured.append(
            Measured(10 * difference.error, f"{difference.detail} before training, times 10; {model} model")
        )
        for rank, result in enumerate(seen):
            difference = largest_difference(result.value[model][2], weights)
            measured.append(located(difference, f" after training; {model} model, rank {rank}"))
    return larger(*measured)


def _write(rank: Rank) -> dict[str, Any]:
    """Return the values of the trained engine, of its export and of its checkpoint, and on rank 0 also the export."""
    written: dict[str, Any] = {}
    for model in CRITICS:
        written[model] = []
        saved = rank.path(f"{model} checkpoint")
        for origin in ("trained", "exported", "loaded"):
            with rank.engine(rank.path(model) if origin == "exported" else model, head="value", **TRAINING) as engine:
                shard = rank.shard(engine, batch())
                if origin == "trained":
                    step(engine, shard, SQUARED_ERROR)
                    engine.export_hf(rank.path(model))
                    engine.save(saved)
                elif origin == "loaded":
                    engine.load(saved)
                written[model].append(values_of(engine.forward(shard.drop(["loss_mask"]), VALUES), "values"))
        if rank.context.rank == 0:
            written[f"{model} exported"] = (sorted(stored_tensors(rank.path(model))), _classify(rank.path(model)))
    return written


def _classify(directory: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Load an export in transformers. Return the keys that are missing or unexpected, and the scores of the rows, each
    computed without the row's last token."""
    from transformers import AutoModelForSequenceClassification

    loaded: tuple[Any, dict[str, Any]] = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    rows = [batch().row(row)["input_ids"].tolist()[:-1] for row in range(len(batch()))]
    pad = model.config.pad_token_id
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    wrong_keys = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys") if report[kind]}
    return wrong_keys, logits


@CHECKS.judge(_write, since="1.1", tolerance=1e-5)
def value_head_files(seen: list[Seen]) -> Measured:
    """Transformers loads the export as a classifier with one label, and computes the same scores as the engine and its
    checkpoint."""
    measured = []
    last = batch().ragged("input_ids").offsets[1:] - 1
    for model in CRITICS:
        stored, (wrong_keys, logits) = seen[0].value[f"{model} exported"]
        if wrong_keys or VALUE_HEAD not in stored or "lm_head.weight" in stored or logits.shape != (len(last), 1):
            return wrong(f"{model} model: the export is not a classifier with one label: {stored}, {wrong_keys}")
        before, again, loaded = (torch.cat(values) for values in zip(*(value[model] for value in outputs_of(seen))))
        measured.append(largest_difference({"values": again}, {"values": before}))
        measured.append(largest_difference({"values of a checkpoint": loaded}, {"values of a checkpoint": before}))
        measured.append(largest_difference({"scores": before[last]}, {"scores": logits[:, 0]}))
    return larger(*measured)
