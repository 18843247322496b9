"""A vLLM replica generates what the model would. Oracle: plain forward passes of transformers, in this process."""

import json
import shutil

import pytest
import torch
from torch_rollout_driver import plain_greedy, plain_logprobs, random_prompts
from vllm_acts import PROMPT

from enginehouse.controller import RemoteError
from enginehouse_testing.models import EOS_ID, char_tokenizer, tiny_model

pytestmark = pytest.mark.slow

KNOBS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_p": 0.8},
    {"temperature": 1.6, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 5},
    {"temperature": 0.0},
]
ENDS = [EOS_ID, 9]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose heads vLLM's CPU attention takes, that says in its generation config that token 9 ends as well."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tiny_model(hidden=128, max_positions=16384), made)
    settings = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ENDS}))
    return str(made)


@pytest.fixture(scope="module")
def act(replica, path):
    """Runs an act of `vllm_acts` on one replica for the whole module."""
    with replica() as group:
        group.call("launch", path, {})
        yield lambda name, *args: group.call("act", name, *args)[0]


def generate(act, *prompts, **sampling):
    return act("generate", list(prompts), sampling)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature(act, path, knobs):
    prompts = random_prompts(6, seed=1)
    sampling = {"max_tokens": 12, "n": 3, "prompt_logprobs": True, "ignore_eos": True, **knobs}
    for seed in (None, 7):
        for prompt, result in zip(prompts, generate(act, *prompts, seed=seed, **sampling), strict=True):
            assert len(result.completions) == 3
            assert result.prompt_logprobs[0] == 0
            for completion in result.completions:
                ids = [*prompt, *completion.token_ids]
                expected = plain_logprobs(path, ids, knobs["temperature"] or 1.0)[len(prompt) - 1 :]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)
            scored = torch.tensor(result.prompt_logprobs[1:])
            torch.testing.assert_close(scored, plain_logprobs(path, prompt), atol=2e-4, rtol=0)


def test_greedy_equals_full_forward_passes(act, path):
    prompts = random_prompts(5)
    for prompt, result in zip(prompts, generate(act, *prompts, temperature=0, max_tokens=9), strict=True):
        assert list(result.completions[0].token_ids) == plain_greedy(path, prompt, 9, ENDS)


def test_seeded_requests_of_more_prompt_tokens_than_a_step_takes_are_served(act):
    prompts = [[3 + (row + at) % 20 for at in range(70)] for row in range(300)]
    results = generate(act, *prompts, seed=5, max_tokens=2, ignore_eos=True)
    assert {len(result.completions[0].token_ids) for result in results} == {2}


def test_a_prompt_is_scored_without_generating(act, path):
    for prompt in ([5], [5, 6, 7, 8]):
        (result,) = generate(act, prompt, max_tokens=0, prompt_logprobs=True)
        expected = [0.0, *plain_logprobs(path, prompt).tolist()]
        assert result.prompt_logprobs == pytest.approx(expected, abs=2e-4)
        assert [(len(c.token_ids), c.finish_reason) for c in result.completions] == [(0, "length")]


def test_a_seed_gives_the_same_samples_whatever_runs_beside_and_its_neighbour_gives_others(act):
    sampling = {"n": 4, "max_tokens": 12, "temperature": 1.6, "ignore_eos": True}
    (alone,) = generate(act, PROMPT, seed=9, **sampling)
    beside = generate(act, PROMPT, *random_prompts(9), seed=9, **sampling)[0]
    (neighbour,) = generate(act, PROMPT, seed=10, **sampling)
    (truncated,) = generate(act, PROMPT, seed=9, top_k=1, **sampling)
    samples = [tuple(c.token_ids) for c in (*alone.completions, *neighbour.completions)]
    assert [c.token_ids for c in beside.completions] == [c.token_ids for c in alone.completions]
    assert len(set(samples)) == 8
    assert len({tuple(c.token_ids) for c in truncated.completions}) == 1


def test_every_end_of_the_generation_config_ends_a_completion_and_is_its_last_token(act):
    results = generate(act, *random_prompts(8), n=8, max_tokens=200, temperature=1.6, seed=1)
    ended = [c for result in results for c in result.completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == set(ENDS)
    assert all(not set(c.token_ids[:-1]) & set(ENDS) for result in results for c in result.completions)


def test_a_stop_token_ends_a_completion_and_is_its_last(act, path):
    run = plain_greedy(path, PROMPT, 12)
    stop = next(token for token in run[2:] if token not in ENDS)
    (result,) = generate(act, PROMPT, temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    assert list(result.completions[0].token_ids) == run[: run.index(stop) + 1]
    assert result.completions[0].finish_reason == "stop"


def test_a_stop_string_ends_a_completion_and_its_tokens_are_kept(act, path):
    run = plain_greedy(path, PROMPT, 40)
    tokenizer = char_tokenizer()
    words = [tokenizer.decode(run[at : at + 2]) for at in range(6, 12)]
    stop = next(word for word in words if len(word) == 2)
    (result,) = generate(act, PROMPT, temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,))
    tokens = list(result.completions[0].token_ids)
    assert tokens == run[: len(tokens)]
    assert tokenizer.decode(tokens).index(stop) == len(tokens) - 2
    assert len(result.completions[0].logprobs) == len(tokens)


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "empty prompt"),
        ([999], {}, "vocabulary"),
        ([5] * 16380, {"max_tokens": 7}, "the model takes 16384"),
        ([5], {"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_replica_goes_on(act, prompt, sampling, said):
    with pytest.raises(RemoteError, match=said):
        generate(act, prompt, **sampling)
    assert len(generate(act, [5], max_tokens=2, ignore_eos=True)[0].completions[0].token_ids) == 2


def test_abort_returns_what_there_was_and_leaves_the_others(act, path):
    seen = act("abort")
    assert seen["other_ran_on"]
    for name, prompt in (("aborted", PROMPT), ("other", [9, 8])):
        (completion,) = seen[name].completions
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < 16000
        assert len(completion.logprobs) == len(completion.token_ids)
        assert list(completion.token_ids[:8]) == plain_greedy(path, prompt, 8)[: len(completion.token_ids)]


def test_requests_aborted_as_they_come_end_all_the_same(act):
    for result in act("abort_at_once"):
        assert [c.finish_reason for c in result.completions] == ["abort"]


def test_a_cancelled_call_frees_its_place(act):
    assert act("cancel").waiting == 0


def test_pause_abort_ends_what_runs_with_what_it_has(act):
    result, health = act("pause_abort")
    assert result.completions[0].finish_reason == "abort"
    assert len(result.completions[0].token_ids) > 0
    assert (health.paused, health.running, health.waiting) == (True, 0, 0)


def test_pause_wait_lets_what_runs_finish_and_what_comes_wait(act, path):
    result, health, waited = act("pause_wait")
    assert waited
    assert len(result.completions[0].token_ids) == 300
    assert (health.paused, health.running, health.waiting) == (True, 0, 1)


def test_pause_keep_freezes_what_runs_and_it_goes_on_after(act, path):
    result, health, frozen = act("pause_keep")
    assert frozen
    assert (health.paused, health.running, health.waiting) == (True, 1, 1)
    tokens = list(result.completions[0].token_ids)
    assert tokens[:40] == plain_greedy(path, PROMPT, 40)[: len(tokens)]


def test_health_and_metrics_say_what_runs(act):
    busy, figures, idle = act("load")
    assert (busy.running, busy.waiting, busy.version) == (2, 0, 0)
    assert figures["running"] == 2
    assert 0 < figures["kv_cache_usage"] < 1
    assert (idle.running, idle.waiting) == (0, 0)


def test_without_the_option_nothing_of_a_server_is_imported(act):
    assert act("imported", "vllm.entrypoints.launchers.api_server.entry", "uvicorn") == []
