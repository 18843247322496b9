"""The hand-written loops are only worth comparing with if they do the same task, and do it right."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import bare_ppo
from benchmarks.bare_grpo import Task, load, sample, score, train, warm_up

from enginehouse.data import Batch, Ragged
from enginehouse_recipes.sorting import make_task
from enginehouse_rl.advantages.gae import gae

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Model, tokenizer and task of the quickstart."""
    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    model, tokenizer = load(directory / "model")
    return model, tokenizer, Task.load(directory, tokenizer)


@pytest.mark.slow
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(made):
    model, _, task = made
    prompts = task.train[:3]
    tokens, logprobs = sample(model, prompts, samples=4)
    whole = torch.cat([prompts.repeat_interleave(4, dim=0), tokens], dim=1)
    with torch.no_grad():
        scores = model(whole[:, :-1]).logits[:, prompts.shape[1] - 1 :].log_softmax(-1)
    torch.testing.assert_close(logprobs, scores.gather(2, tokens[..., None])[..., 0], atol=2e-4, rtol=0)


def test_its_score_is_the_quickstarts_reward(made):
    _, tokenizer, task = made
    reward = runpy.run_path(str(QUICKSTART / "reward.py"))["sorted_digits"]
    prompts, eos = task.validation[:200], tokenizer.eos_token_id
    responses = task.answers(prompts)
    responses[::3, 2] = 5
    responses[1::3, -1] = 4
    scores, mask = score(task, prompts, responses, eos)
    for prompt, response, got, counted in zip(prompts, responses, scores, mask):
        ended = bool((response == eos).any())
        text = tokenizer.decode(response[counted.bool()], skip_special_tokens=True)
        assert got.item() == reward(tokenizer.decode(prompt), text, finish_reason="stop" if ended else "length")
    assert 0 < scores.mean() < 1


def test_tokens_after_the_end_do_not_count(made):
    _, tokenizer, task = made
    eos = tokenizer.eos_token_id
    response = torch.tensor([[4, 5, eos, 6, eos, 7, 8]])
    _, mask = score(task, task.train[:1], response, eos)
    assert mask.tolist() == [[1, 1, 1, 0, 0, 0, 0]]


def test_both_phases_change_the_weights(made):
    model, _, task = made
    before = model.lm_head.weight.detach().clone()
    warm_up(model, task, seed=0, steps=2)
    between = model.lm_head.weight.detach().clone()
    assert len(train(model, task, seed=0, steps=2)) == 2
    assert not torch.equal(before, between)


def test_ppos_advantages_are_those_of_gae():
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 3])
    mask = (torch.arange(4) < lengths[:, None]).float()
    values, reward = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0])
    advantages, returns = bare_ppo.credits(reward, values, mask)
    flat = mask.bool()
    ours = gae(
        Batch(
            {
                "reward": reward,
                "loss_mask": Ragged.from_lengths(torch.ones(8, dtype=torch.bool), lengths),
                "token_rewards": Ragged.from_lengths(torch.zeros(8), lengths),
                "values": Ragged.from_lengths(values[flat], lengths),
            }
        ),
        lam=0.95,
    )
    torch.testing.assert_close(returns[flat], ours.ragged("returns").values, atol=1e-5, rtol=0)
    torch.testing.assert_close(advantages[flat], ours.ragged("advantages").values, atol=1e-5, rtol=0)
    assert not advantages[~flat].any()


def test_a_step_of_ppo_changes_model_and_critic(made):
    model, tokenizer, task = made
    task = replace(task, answers=None)  # every token counts, so that an untrained model has rewards that differ
    critic = bare_ppo.load_critic(tokenizer.name_or_path)
    before = [model.lm_head.weight.detach().clone(), critic.score.weight.detach().clone()]
    assert len(bare_ppo.train(model, critic, task, seed=0, steps=1)) == 1
    assert not torch.equal(model.lm_head.weight, before[0])
    assert not torch.equal(critic.score.weight, before[1])
