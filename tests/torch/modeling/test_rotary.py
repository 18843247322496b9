"""A row's result does not depend on the rows beside it, whatever its rotary positions take their frequencies from."""

from unittest import mock

import pytest
import torch
from checkpoint_forms import TEXT, made, saved
from fsdp_train_cases import make_sharded
from packed_attention import stand_ins
from torch_train_cases import POLICY, batch_of, make_engine, oracle_outputs, plain_model

from enginehouse.engines.train import Outputs
from enginehouse_torch.modeling.attention import AttentionChoices

ENGINES = {"torch": make_engine, "fsdp": make_sharded}
FIRST = 16
"""Positions that a model had before it was stretched."""
ROPES = {
    "default": ("Llama", {"rope_type": "default"}),
    "yarn": ("Llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": FIRST}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 4.0}),
    "longrope": (
        "Phi3",
        {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [6.0] * 4,
            "original_max_position_embeddings": FIRST,
        },
    ),
}  # fmt: skip
LENGTHS, PROMPT = (13, 30, 16, 17, 60, 40, 14, 33), 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = {}

    def model(kind: str) -> str:
        if kind not in found:
            family, rope = ROPES[kind]
            own = {**TEXT, "head_dim": 8, "max_position_embeddings": FIRST if kind == "dynamic" else 128}
            if family == "Phi3":
                own |= {"original_max_position_embeddings": FIRST}
            settings = {**own, "rope_parameters": {**rope, "rope_theta": 1e4}}
            found[kind] = str(saved(made(family, settings), tmp_path_factory.mktemp(kind)))
        return found[kind]

    return model


def rows(order):
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 30, (PROMPT,), generator=draw).tolist()
    ids = [[*prompt, *torch.randint(3, 30, (length - PROMPT,), generator=draw).tolist()] for length in LENGTHS]
    chosen = [ids[row] for row in order]
    return batch_of(chosen, [[False] * PROMPT + [True] * (len(row) - PROMPT) for row in chosen])


def scores(engine, order):
    found = engine.forward(rows(order).drop(["loss_mask"]), Outputs())
    return {row: found.row(place)["logprobs"] for place, row in enumerate(order)}


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("kind", ROPES)
def test_a_row_scores_alike_alone_beside_others_and_in_another_micro_batch(model, kind, backend):
    path, everything = model(kind), range(len(LENGTHS))
    whole = ENGINES[backend](path, tokens_per_microbatch=4096)
    apart = ENGINES[backend](path, tokens_per_microbatch=64)
    together = [scores(whole, everything), scores(apart, everything), scores(whole, list(everything)[::-1])]
    together.append({row: scores(whole, [row])[row] for row in everything})
    for row in everything:
        ids = rows([row]).row(0)["input_ids"]
        alone, _ = oracle_outputs(plain_model(path), ids)  # loaded anew: `dynamic` remembers longer rows
        for found in together:
            torch.testing.assert_close(found[row], alone.detach(), atol=2e-5, rtol=0)
    whole.shutdown()
    apart.shutdown()


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("kind", ROPES)
def test_a_step_is_alike_however_the_rows_are_cut_and_joined(model, kind, backend):
    found = []
    for options in ({}, {"tokens_per_microbatch": 64}, {"share_prompts": "never"}):
        engine = ENGINES[backend](model(kind), **options)
        engine.forward_backward(rows(range(len(LENGTHS))), POLICY)
        found.append(engine.optim_step()["grad_norm"])
        engine.shutdown()
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("kind", ROPES)
def test_rows_behind_one_another_score_as_each_does_alone(model, kind):
    everything, packing = range(len(LENGTHS)), AttentionChoices("rows_apart")
    with stand_ins(), mock.patch("enginehouse_torch.modeling.sharing.choose_attention", return_value=packing):
        engine = make_engine(model(kind), tokens_per_microbatch=4096)
        assert engine._token_model._attention == packing
        found = scores(engine, everything)
    for row, score in scores(make_engine(model(kind), tokens_per_microbatch=1), everything).items():
        torch.testing.assert_close(found[row], score, atol=2e-5, rtol=0)
