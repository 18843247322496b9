"""A chat whose weights change between its answers and within one, drawn by a real engine: plain transformers says what
each token's logprob was, of the very weights that its version names."""

import numpy as np
import pytest
from chat_templates import QWEN, make_tokenizer
from torch_rollout_driver import Gate, launched, plain_logprobs, plain_model, posted

from enginehouse.engines.environment import Group, Scored, Task
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightUpdate
from enginehouse_environments.dialogue import ChatTemplate, Dialogue
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.scored_group import build_batch
from enginehouse_testing.models import tiny_model

TURNS, TOKENS = 4, 12


class Talk:
    """Asks on; answers are cut, so that each has to be closed."""

    async def run(self, task, policy, context):
        async def play(number, policy):
            chat = Dialogue(ChatTemplate(policy.tokenizer), task.messages)
            for turn in range(TURNS):
                if turn:
                    chat.say([{"role": "user", "content": f"And {turn}?"}])
                await chat.answer(policy)
            return chat.episode(Scored(1.0))

        return await context.each(play)


class Updated:
    """An engine whose weights change before its second answer, and in the middle of the third."""

    def __init__(self, engine, paths):
        self._engine, self._paths, self._answers = engine, paths, 0

    async def generate(self, request):
        number, self._answers = self._answers, self._answers + 1
        if number == 1:
            await self._engine.pause("keep")
            await self._update(1)
        if number != 2:
            return await self._engine.generate(request)
        gate = Gate(self._engine, TOKENS // 2)
        generating = await posted(self._engine.generate(request))
        await gate.reached()
        pausing = await posted(self._engine.pause("keep"))
        gate.open()
        await pausing
        await self._update(2)
        return await generating

    async def _update(self, version):
        weights = {name: one.detach() for name, one in plain_model(self._paths[version]).named_parameters()}
        await self._engine.start_weight_update(WeightUpdate(version, [ParamMeta.of(*one) for one in weights.items()]))
        await self._engine.update_weights(WeightChunk(list(weights.items())))
        await self._engine.finish_weight_update(version)
        await self._engine.resume()


@pytest.mark.slow
async def test_logprobs_and_versions_are_those_of_the_weights_that_drew():
    tokenizer = make_tokenizer(QWEN)
    paths = [tiny_model(vocabulary=len(tokenizer), max_positions=1024, seed=seed) for seed in range(3)]
    task = Task(3, [1], "?", [{"role": "user", "content": "So?"}], {})
    async with launched(paths[0]) as engine:
        policy = FleetPolicy(Updated(engine, paths), tokenizer, SamplingParams(max_tokens=TOKENS), "task", 5)
        checks = EpisodeChecks("talk", len(tokenizer), 1024, True, 1.0)
        (episode,) = await EpisodeRunner(Talk(), lambda task: policy, None, 1, checks=checks).play(task)
    batch = build_batch([Group(task, [episode])])
    ids, mask, logprobs = (batch.ragged(name)[0].numpy() for name in ("input_ids", "loss_mask", "rollout_logprobs"))
    versions = np.asarray(episode.versions)
    begins = np.flatnonzero(mask & ~np.roll(mask, 1))
    assert len(begins) == TURNS
    by_version = [np.concatenate([[0.0], plain_logprobs(path, ids.tolist()).numpy()]) for path in paths]
    wanted = np.choose(versions, by_version)
    third = np.arange(begins[2], begins[3])
    known = mask.copy()
    known[third[1:]] = False  # at which token of the third they changed is not said
    assert set(versions[mask]) == {0, 1, 2}
    np.testing.assert_allclose(logprobs[known], wanted[known], atol=1e-4)
    assert (batch["first_version"].item(), batch["weight_version"].item()) == (0, 2)
    ends = third[mask[third]]
    assert (versions[ends[0]], versions[ends[-1]]) == (1, 2)
    assert not logprobs[~mask].any()
    others = np.choose((versions + 1) % 3, by_version)
    assert not np.allclose(logprobs[known], others[known], atol=1e-2)  # the weights do differ
