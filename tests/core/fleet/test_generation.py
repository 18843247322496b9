"""Requests and samples: against a plain per-token construction."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.data import Ragged
from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.generation import check_result, make_requests, row_seeds
from enginehouse.fleet.request_batches import assemble

tokens = st.lists(st.integers(0, 99), max_size=5)
completions = st.tuples(tokens, st.sampled_from(["stop", "length", "abort"]), st.integers(0, 9))


def as_list(row):
    return row


def as_array(row):
    return np.asarray(row)


@given(st.lists(st.tuples(tokens, st.lists(completions, max_size=3)), max_size=5), st.sampled_from([as_list, as_array]))
@settings(deadline=None)
def test_samples_are_prompt_and_response_token_by_token(rows, form):
    requests = [
        replace(request, sampling=SamplingParams(n=len(drawn)))
        for request, (_, drawn) in zip(
            make_requests(Ragged.from_list([p for p, _ in rows], dtype=torch.int64), SamplingParams(), None, "r"),
            rows,
            strict=True,
        )
    ]
    results = [
        GenerateResult(
            request.id, [Completion(form(ids), form([-float(t) for t in ids]), why, v, v + 1) for ids, why, v in drawn]
        )
        for request, (_, drawn) in zip(requests, rows, strict=True)
    ]
    samples = assemble(requests, results)
    flat = [(prompt, ids, why, v) for prompt, drawn in rows for ids, why, v in drawn]
    assert len(samples) == len(flat)
    for row, (prompt, ids, why, version) in enumerate(flat):
        assert samples["input_ids"][row].tolist() == prompt + ids
        assert samples["loss_mask"][row].tolist() == [False] * len(prompt) + [True] * len(ids)
        assert samples["rollout_logprobs"][row].tolist() == [0.0] * len(prompt) + [-float(t) for t in ids]
        assert samples["finish_reason"][row] == why
        assert samples["weight_version"][row] == version + 1
    dtypes = [samples[name].values.dtype for name in ("input_ids", "loss_mask", "rollout_logprobs")]
    assert dtypes == [torch.int64, torch.bool, torch.float32]


def one(token):
    return Completion([token], [-1.0], "stop", 1, 1)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [("r-0", [one(1)]), ("r-1", [one(2)] * 3)],
            "2 completion(s) of request 'r-0' and returned 1 of request 'r-0'",
        ),
        ([("r-1", [one(1)] * 2), ("r-0", [one(2)] * 2)], "of request 'r-0' and returned 2 of request 'r-1'"),
        ([("r-0", [one(1)] * 2), ("r-1", [one(2), replace(one(3), logprobs=[])])], "1 tokens with 0 logprobs"),
    ],
    ids=["one less and one more", "another order", "a logprob missing"],
)
def test_samples_that_are_not_those_asked_for_join_no_prompt(results, said):
    requests = make_requests(Ragged.from_list([[1, 2], [3]]), SamplingParams(n=2), None, "r")

    def check():
        for request, result in zip(requests, results):
            check_result(request, GenerateResult(*result), "mine 1.0 (rollout rank 0)")

    with pytest.raises(EnginehouseError) as caught:
        check()
    assert said in str(caught.value)
    assert str(caught.value).startswith("mine 1.0 (rollout rank 0)")


def test_requests_carry_each_rows_prompt_and_seed():
    requests = make_requests(Ragged.from_list([[1, 2], [3]]), SamplingParams(n=4, top_k=7), [11, 12], "r")
    assert [(r.prompt_ids, r.sampling.seed, r.sampling.n, r.sampling.top_k) for r in requests] == [
        ([1, 2], 11, 4, 7),
        ([3], 12, 4, 7),
    ]
    assert len({r.id for r in requests}) == 2


@given(st.integers(-(2**70), 2**70), st.lists(st.integers(0, 2**40), min_size=1, max_size=20, unique=True))
def test_a_rows_seed_depends_only_on_the_seed_and_its_number(seed, rows):
    seeds = row_seeds(seed, np.array(rows))
    assert seeds == [row_seeds(seed, np.array([row]))[0] for row in rows]
    assert all(0 <= one < 2**31 for one in seeds)


@pytest.mark.parametrize("other", [1, 2])
def test_seeds_of_neighbouring_rows_and_steps_differ(other):
    seeds = [*row_seeds(0, np.arange(1000)), *row_seeds(other, np.arange(1000))]
    assert len(set(seeds)) > 1990
