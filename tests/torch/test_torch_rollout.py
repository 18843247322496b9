"""The torch rollout engine generates what the model would: tokens, logprobs, ends. Oracle: plain forward passes."""

import asyncio
import math

import numpy as np
import pytest
import torch
from checkpoint_forms import tower_beside
from torch_rollout_driver import (
    generate,
    generate_once,
    launched,
    plain_greedy,
    plain_logits,
    plain_logprobs,
    posted,
    random_prompts,
)

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, RolloutEngine, SamplingParams
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse_testing.models import CHARACTERS, EOS_ID, SPECIAL_TOKENS, VOCABULARY_SIZE, tiny_model
from enginehouse_torch import decoding_rows, running_batch
from enginehouse_torch.fused import FusedForward
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.rollout import TorchRolloutEngine

SHAPES = [(family, tied) for family in ("qwen3", "llama") for tied in (True, False)]
every_shape = pytest.mark.parametrize(("family", "tied"), SHAPES)
both_paths = pytest.mark.parametrize("fused", [True, False])


def save_model(config, path) -> str:
    """A model of another architecture, with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


def test_it_is_a_rollout_engine():
    assert isinstance(TorchRolloutEngine(), RolloutEngine)


@every_shape
@both_paths
def test_greedy_equals_full_forward_passes(family, tied, fused):
    path = tiny_model(family, tied)
    prompts = random_prompts(5)
    results = generate_once(path, *prompts, options={"fused": fused}, temperature=0, max_tokens=9)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.completions[0].token_ids == plain_greedy(path, prompt, 9, [EOS_ID])


@every_shape
@both_paths
@pytest.mark.parametrize("equal", [False, True])
def test_logprobs_equal_a_plain_forward_pass(family, tied, fused, equal):
    path = tiny_model(family, tied)
    prompts = random_prompts(6, seed=1, equal=equal)
    sampling = {"max_tokens": 15, "n": 3, "seed": 7, "temperature": 0.7, "prompt_logprobs": True}
    for prompt, result in zip(
        prompts, generate_once(path, *prompts, options={"fused": fused}, **sampling), strict=True
    ):
        for completion in result.completions:
            expected = plain_logprobs(path, [*prompt, *completion.token_ids], temperature=0.7)
            found = [*result.prompt_logprobs[1:], *completion.logprobs]
            torch.testing.assert_close(torch.tensor(found), expected, atol=2e-4, rtol=0)
        assert result.prompt_logprobs[0] == 0


@both_paths
def test_small_caches_small_batches_and_cut_prefills_change_nothing(fused, monkeypatch):
    path = tiny_model()
    prompts = random_prompts(7, seed=2)
    sampling = {"max_tokens": 12, "n": 3, "seed": 3}
    whole = generate_once(path, *prompts, options={"fused": fused}, **sampling)
    monkeypatch.setattr(running_batch, "FIRST_COLUMNS", 2)
    monkeypatch.setattr(running_batch, "COMPACT_BELOW", 1.0)
    monkeypatch.setattr(decoding_rows, "FIRST_WIDTH", 2)
    cut = generate_once(path, *prompts, options={"fused": fused, "max_running": 4, "prefill_tokens": 9}, **sampling)
    assert [c.token_ids for r in cut for c in r.completions] == [c.token_ids for r in whole for c in r.completions]


def test_a_request_larger_than_the_batch_is_served_in_parts():
    path = tiny_model()
    sampling = {"max_tokens": 5, "n": 7, "seed": 3}
    (whole,) = generate_once(path, [5, 6, 7], **sampling)
    (parts,) = generate_once(path, [5, 6, 7], options={"max_running": 2}, **sampling)
    assert [c.token_ids for c in parts.completions] == [c.token_ids for c in whole.completions]


async def test_requests_of_one_gather_run_as_one_batch():
    sizes = []
    async with launched(tiny_model()) as engine:
        engine.loop.at_boundary = lambda: sizes.append(engine.loop.running)
        await generate(engine, *random_prompts(32), n=8, max_tokens=4, ignore_eos=True)
    assert set(sizes) == {0, 256}


async def test_a_request_that_arrives_while_others_run_joins_them():
    path = tiny_model()
    long, late = [5, 6, 7], [9, 8, 7, 6, 5, 4]
    from torch_rollout_driver import Gate

    async with launched(path) as engine:
        gate = Gate(engine, after=3)
        first = await posted(generate(engine, long, temperature=0, max_tokens=12, ignore_eos=True))
        await gate.reached()
        second = await posted(generate(engine, late, temperature=0, max_tokens=3, ignore_eos=True))
        finished = []
        first.add_done_callback(lambda _: finished.append("first"))
        second.add_done_callback(lambda _: finished.append("second"))
        gate.open()
        assert (await second)[0].completions[0].token_ids == plain_greedy(path, late, 3)
        assert (await first)[0].completions[0].token_ids == plain_greedy(path, long, 12)
        # The long request has 12 - 3 tokens to go when the late one, of 3 tokens, joins.
        assert finished == ["second", "first"]


def chi_square_excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic lies above its mean; rare tokens are put together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = (~rare).sum()
    return (((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_sampling_follows_the_distribution(temperature):
    path = tiny_model(initializer_range=0.1)
    (result,) = generate_once(path, [5, 6, 7], n=4000, max_tokens=1, temperature=temperature, seed=11)
    counts = np.bincount([c.token_ids[0] for c in result.completions], minlength=VOCABULARY_SIZE)
    expected = torch.softmax(plain_logits(path, [5, 6, 7])[-1] / temperature, -1).double().numpy()
    assert chi_square_excess(counts, expected) < 4


def test_later_tokens_are_drawn_independently_of_earlier_ones():
    path = tiny_model(initializer_range=0.02)  # nearly uniform, whatever comes before
    (result,) = generate_once(path, [5, 6, 7], n=4000, max_tokens=2, seed=5, ignore_eos=True)
    pairs = np.zeros((4, 4))
    for completion in result.completions:
        first, second = (token * 4 // VOCABULARY_SIZE for token in completion.token_ids)
        pairs[first, second] += 1
    independent = np.outer(pairs.sum(1), pairs.sum(0)) / pairs.sum() ** 2
    assert chi_square_excess(pairs.ravel(), independent.ravel()) < 4


@pytest.mark.parametrize(
    ("knobs", "kept"), [({"top_k": 3}, "k"), ({"top_p": 0.6}, "p"), ({"top_k": 4, "top_p": 0.7}, "kp")]
)
def test_top_k_and_top_p_draw_only_what_they_keep(knobs, kept):
    path = tiny_model()
    prompt = [5, 6, 7]
    (result,) = generate_once(path, prompt, n=600, max_tokens=1, seed=2, temperature=2.0, **knobs)
    logprobs = torch.log_softmax(plain_logits(path, prompt)[-1] / 2.0, -1)
    ordered, order = logprobs.exp().sort(descending=True)
    if "k" in kept:
        ordered, order = ordered[: knobs["top_k"]], order[: knobs["top_k"]]
    if "p" in kept:
        reached = ordered.cumsum(0) / ordered.sum()
        size = int((reached < knobs["top_p"]).sum()) + 1
        order = order[:size]
    assert {c.token_ids[0] for c in result.completions} == set(order.tolist())
    for completion in result.completions:
        assert completion.logprobs[0] == pytest.approx(logprobs[completion.token_ids[0]].item(), abs=2e-4)


async def test_sampling_knobs_differ_by_request_in_one_batch():
    path = tiny_model()
    prompt = [5, 6, 7]
    greedy = plain_greedy(path, prompt, 8, [EOS_ID])
    async with launched(path) as engine:
        params = [
            SamplingParams(max_tokens=8, temperature=0),
            SamplingParams(max_tokens=8, top_k=1, temperature=3.0),
        ]
        params.append(SamplingParams(max_tokens=8, top_p=1e-6))
        results = await asyncio.gather(*(engine.generate(GenerateRequest("r", prompt, p)) for p in params))
    for result in results:
        assert result.completions[0].token_ids == greedy


async def test_a_seed_gives_the_same_completions_whatever_runs_beside():
    path = tiny_model()
    request = GenerateRequest("seeded", [5, 6, 7], SamplingParams(max_tokens=10, n=4, seed=123))
    async with launched(path) as engine:
        alone = await engine.generate(request)
        others = generate(engine, *random_prompts(9, longest=20), n=3, max_tokens=15, top_k=5, temperature=1.3)
        _, beside = await asyncio.gather(others, engine.generate(request))
    assert [c.token_ids for c in beside.completions] == [c.token_ids for c in alone.completions]
    assert len({tuple(c.token_ids) for c in alone.completions}) == 4


def test_without_a_seed_completions_differ():
    first, second = generate_once(tiny_model(), [5, 6, 7], [5, 6, 7], max_tokens=20, temperature=2.0)
    assert first.completions[0].token_ids != second.completions[0].token_ids


def test_more_tokens_or_samples_with_a_seed_extend_what_fewer_gave():
    path = tiny_model()
    (short,) = generate_once(path, [5, 6, 7], n=2, max_tokens=5, seed=9)
    (longer,) = generate_once(path, [5, 6, 7], n=3, max_tokens=9, seed=9)
    for a, b in zip(short.completions, longer.completions, strict=False):
        assert b.token_ids[: len(a.token_ids)] == a.token_ids


def test_n_completions_come_in_sample_order():
    (result,) = generate_once(tiny_model(), [5, 6], n=5, max_tokens=3)
    assert len(result.completions) == 5
    assert all(len(c.token_ids) == len(c.logprobs) for c in result.completions)


def greedy_run(path: str, prompt: list[int], max_tokens: int = 12) -> list[int]:
    return plain_greedy(path, prompt, max_tokens)


def test_a_stop_token_ends_a_completion_and_is_its_last():
    path, prompt = tiny_model(), [5, 6, 7]
    run = greedy_run(path, prompt)
    stop = next(token for token in run[2:] if token != EOS_ID)
    (result,) = generate_once(path, prompt, temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    completion = result.completions[0]
    assert completion.token_ids == run[: run.index(stop) + 1]
    assert completion.finish_reason == "stop"


def test_a_stop_string_over_two_tokens_ends_a_completion_and_is_kept():
    path = tiny_model()
    characters = (*SPECIAL_TOKENS, *CHARACTERS)
    for prompt in random_prompts(20, seed=4):
        run = greedy_run(path, prompt)
        if len(set(run[:4])) == 4 and min(run[:4]) >= len(SPECIAL_TOKENS):
            break
    stop = "".join(characters[token] for token in run[2:4])
    with_it, without = generate_once(path, prompt, [9, 9], temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    assert with_it.completions[0].token_ids == run[:4]
    assert with_it.completions[0].finish_reason == "stop"
    assert len(without.completions[0].token_ids) > 0


@both_paths
@pytest.mark.parametrize("as_list", [False, True])
def test_the_models_end_of_sequence_stops_unless_ignored(fused, as_list, tmp_path):
    from transformers import AutoModelForCausalLM, GenerationConfig

    prompt = [5, 6, 7]
    end = greedy_run(tiny_model(), prompt)[2]
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    model.generation_config = GenerationConfig(eos_token_id=[2, end] if as_list else end)
    model.save_pretrained(tmp_path)
    path, options = str(tmp_path), {"fused": fused}
    run = greedy_run(path, prompt)
    (ended,) = generate_once(path, prompt, options=options, temperature=0, max_tokens=12)
    assert (ended.completions[0].token_ids, ended.completions[0].finish_reason) == (run[: run.index(end) + 1], "stop")
    (ignored,) = generate_once(path, prompt, options=options, temperature=0, max_tokens=12, ignore_eos=True)
    assert (ignored.completions[0].token_ids, ignored.completions[0].finish_reason) == (run, "length")


def test_zero_tokens_scores_the_prompt_only():
    path = tiny_model()
    prompts = random_prompts(3, seed=6)
    for prompt, result in zip(prompts, generate_once(path, *prompts, max_tokens=0, prompt_logprobs=True), strict=True):
        torch.testing.assert_close(
            torch.tensor(result.prompt_logprobs[1:]), plain_logprobs(path, prompt), atol=2e-4, rtol=0
        )
        assert len(result.prompt_logprobs) == len(prompt)
        assert (list(result.completions[0].token_ids), result.completions[0].finish_reason) == ([], "length")


async def test_a_prompt_too_long_fails_alone_and_says_the_lengths():
    async with launched(tiny_model(max_positions=32)) as engine:
        too_long = engine.generate(GenerateRequest("long one", [5] * 30, SamplingParams(max_tokens=3)))
        fits = engine.generate(GenerateRequest("fits", [5] * 30, SamplingParams(max_tokens=2)))
        error, result = await asyncio.gather(too_long, fits, return_exceptions=True)
        await engine.health()
    assert isinstance(error, EnginehouseError)
    assert all(word in str(error) for word in ("'long one'", "30", "3", "33", "32"))
    assert len(result.completions[0].token_ids) in (1, 2)


def test_max_model_tokens_lowers_the_models_limit():
    with pytest.raises(EnginehouseError, match="takes 8"):
        generate_once(tiny_model(), [5] * 6, options={"max_model_tokens": 8}, max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "empty prompt"),
        ([5, 1000], {}, "token id 1000"),
        ([-1], {}, "token id -1"),
        ([5], {"n": 0}, "n 0"),
        ([5], {"temperature": -1.0}, "temperature -1"),
        ([5], {"top_p": 0.0}, "top_p 0"),
        ([5], {"stop": ("",)}, "stop"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(prompt, sampling, said):
    with pytest.raises(EnginehouseError, match=said):
        generate_once(tiny_model(), prompt, **sampling)


def test_the_longest_sequence_runs_to_the_models_last_position():
    path = tiny_model(max_positions=32)
    prompts = [[5, 6], list(range(3, 23))]
    long, full = generate_once(path, *prompts, temperature=0, max_tokens=12, ignore_eos=True)
    assert full.completions[0].token_ids == plain_greedy(path, prompts[1], 12)
    assert long.completions[0].token_ids == plain_greedy(path, prompts[0], 12)


def gpt2():
    from transformers import GPT2Config

    return GPT2Config(vocab_size=31, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=1, bos_token_id=1)


def windowed():
    from transformers import MistralConfig

    return MistralConfig(
        vocab_size=31, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, initializer_range=0.2, eos_token_id=1,
        max_position_embeddings=64,
    )  # fmt: skip


def biased():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=31, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, eos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip


def scaled_rotary():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, initializer_range=0.2, eos_token_id=1, max_position_embeddings=64, attention_bias=True,
        mlp_bias=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )  # fmt: skip


@pytest.mark.parametrize(("config", "fused"), [(gpt2, False), (windowed, False), (biased, True), (scaled_rotary, True)])
async def test_other_architectures_give_the_models_own_logprobs(config, fused, tmp_path):
    path = save_model(config(), tmp_path)
    prompts = random_prompts(5, seed=8)
    async with launched(path) as engine:
        name, results = engine.forward_name, await generate(engine, *prompts, n=2, max_tokens=12)
    assert (name == FusedForward.__name__) is fused
    for prompt, result in zip(prompts, results, strict=True):
        for completion in result.completions:
            expected = plain_logprobs(path, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)


async def test_a_fused_path_that_disagrees_is_not_used(monkeypatch, caplog):
    right = FusedForward.__call__
    monkeypatch.setattr(FusedForward, "__call__", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    path = tiny_model()
    async with launched(path) as engine:
        name, (result,) = engine.forward_name, await generate(engine, [5, 6, 7], temperature=0, max_tokens=5)
    assert name == "ModelForward"
    assert "differs by" in caplog.text
    assert result.completions[0].token_ids == plain_greedy(path, [5, 6, 7], 5, [EOS_ID])


def test_a_model_with_other_state_than_keys_and_values_is_refused(tmp_path):
    path = tower_beside(tmp_path)  # it has layers of linear attention
    with pytest.raises(ModelError, match="choose another rollout engine"):
        generate_once(str(path), [5, 6, 7])


def test_a_value_model_is_refused():
    spec = ModelSpec(tiny_model(), head="value")
    with pytest.raises(ModelError, match="generates text"):
        asyncio.run(TorchRolloutEngine().launch(spec, TorchRolloutOptions(), ProcessContext("rollout")))


@both_paths
async def test_bfloat16_is_served(fused):
    path = tiny_model(initializer_range=0.1)
    async with launched(path, dtype="bfloat16", fused=fused) as engine:
        name, results = engine.forward_name, await generate(engine, *random_prompts(4), max_tokens=8, n=2)
    assert name == ("FusedForward" if fused else "ModelForward")
    for prompt, result in zip(random_prompts(4), results, strict=True):
        for completion in result.completions:
            expected = plain_logprobs(path, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.1, rtol=0)
