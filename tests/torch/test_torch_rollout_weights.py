"""Weight updates of the torch rollout engine: whole or not at all, versioned, and visible in checksums and effect."""

from copy import deepcopy

import pytest
import torch
from torch_rollout_driver import (
    Gate,
    generate,
    generate_once,
    launched,
    plain_greedy,
    plain_model,
    posted,
    random_prompts,
)

from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightState, WeightSyncError, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse_testing.models import EOS_ID, tiny_model
from enginehouse_torch.rollout import TorchRolloutEngine
from enginehouse_torch.served_weights import ServedWeights

PROMPT = [5, 6, 7]
every_engine = pytest.mark.parametrize(
    ("family", "tied", "fused"), [(f, t, u) for f in ("qwen3", "llama") for t in (True, False) for u in (True, False)]
)


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """The model's parameters by checkpoint name, tied ones once."""
    return {name: parameter.detach() for name, parameter in plain_model(path).named_parameters()}


def announce(weights: dict[str, torch.Tensor], version: int) -> WeightUpdate:
    metas = [ParamMeta.of(n, t) for n, t in weights.items()]
    return WeightUpdate(version, metas)


async def send(engine: TorchRolloutEngine, weights: dict[str, torch.Tensor]) -> None:
    """Send in chunks of two whose buffers are overwritten after each call, as a transport's are."""
    items = list(weights.items())
    for first in range(0, len(items), 2):
        chunk = [(name, tensor.clone()) for name, tensor in items[first : first + 2]]
        await engine.update_weights(WeightChunk(chunk))
        for _, buffer in chunk:
            buffer.fill_(float("nan"))


async def update(engine: TorchRolloutEngine, weights: dict[str, torch.Tensor], version: int) -> None:
    await engine.start_weight_update(announce(weights, version))
    await send(engine, weights)
    await engine.finish_weight_update(version)


@every_engine
async def test_after_an_update_the_new_model_is_served(family, tied, fused):
    old, new = tiny_model(family, tied), tiny_model(family, tied, seed=1)
    async with launched(old, fused=fused) as engine:
        await engine.pause()
        await update(engine, weights_of(new), 3)
        await engine.resume()
        state = await engine.weight_state()
        results = await generate(engine, *random_prompts(4), temperature=0, max_tokens=8)
    assert state.version == 3
    assert state.checksums == {name: checksum(tensor) for name, tensor in weights_of(new).items()}
    for prompt, result in zip(random_prompts(4), results, strict=True):
        completion = result.completions[0]
        assert completion.token_ids == plain_greedy(new, prompt, 8, [EOS_ID])
        assert (completion.first_version, completion.last_version) == (3, 3)


async def test_at_launch_version_0_and_the_checkpoints_checksums_are_served():
    path = tiny_model()
    async with launched(path) as engine:
        state = await engine.weight_state()
    assert state.version == 0
    assert state.checksums == {name: checksum(tensor) for name, tensor in weights_of(path).items()}


async def test_until_it_is_finished_an_update_changes_nothing():
    old, new = tiny_model(), tiny_model(seed=1)
    async with launched(old) as engine:
        before = await engine.weight_state()
        await engine.start_weight_update(announce(weights_of(new), 1))
        await send(engine, weights_of(new))
        during = await engine.weight_state()
        (result,) = await generate(engine, PROMPT, temperature=0, max_tokens=8)
        await engine.abort_weight_update()
        with pytest.raises(WeightSyncError, match="none was started"):
            await engine.finish_weight_update(1)
        assert before == during == await engine.weight_state()
    assert result.completions[0].token_ids == plain_greedy(old, PROMPT, 8, [EOS_ID])


def test_a_thread_that_still_stages_an_abandoned_update_does_not_reach_the_next_one():
    path = tiny_model()
    served = ServedWeights(deepcopy(plain_model(path)), path, "here")  # a copy: others use that model
    abandoned, new = weights_of(path), weights_of(tiny_model(seed=1))
    served.start(announce(abandoned, 1))
    served.stage(WeightChunk(list(abandoned.items())))
    served.commit(1)

    def late():
        served.discard()
        served.start(announce(new, 3))
        served.stage(WeightChunk(list(new.items())))
        yield from abandoned.items()

    served.start(announce(abandoned, 2))
    served.stage(WeightChunk(late()))
    served.commit(3)
    assert served.state() == WeightState(3, {name: checksum(tensor) for name, tensor in new.items()})


async def test_half_an_update_is_refused_by_name_and_the_old_version_serves():
    old, new = tiny_model(), weights_of(tiny_model(seed=1))
    lost = "model.layers.1.mlp.up_proj.weight"
    async with launched(old) as engine:
        await engine.pause()
        await engine.start_weight_update(announce(new, 1))
        await send(engine, {name: tensor for name, tensor in new.items() if name != lost})
        with pytest.raises(WeightSyncError, match=rf"lacks {lost}; version 0 keeps serving") as refused:
            await engine.finish_weight_update(1)
        await engine.resume()
        (result,) = await generate(engine, PROMPT, temperature=0, max_tokens=8)
        await update(engine, new, 1)
        state = await engine.weight_state()
    assert refused.value.parameters == (lost,)
    assert result.completions[0].token_ids == plain_greedy(old, PROMPT, 8, [EOS_ID])
    assert result.completions[0].last_version == 0
    assert state.version == 1


async def test_a_weight_corrupted_on_its_way_shows_in_weight_state():
    new = weights_of(tiny_model(seed=1))
    name = "model.layers.0.self_attn.k_proj.weight"
    corrupted = {**new, name: new[name].clone()}
    corrupted[name][3, 4] += 1e-6
    async with launched(tiny_model()) as engine:
        await update(engine, corrupted, 1)
        sums = (await engine.weight_state()).checksums
    assert [n for n in new if sums[n] != checksum(new[n])] == [name]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.7.mlp.up_proj.weight", torch.zeros(1), "no parameter 'model.layers.7.mlp.up_proj.weight'"),
        ("model.norm.weight", torch.zeros(31), r"float32 \(31,\)"),
        ("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16), r"bfloat16 \(32,\)"),
        ("lm_head.weight", torch.zeros(31, 32), "tied"),
    ],
)
async def test_a_weight_that_does_not_fit_is_refused_by_name(name, tensor, said):
    async with launched(tiny_model()) as engine:
        with pytest.raises(WeightSyncError, match=said) as refused:
            await engine.start_weight_update(announce({name: tensor}, 1))
        assert refused.value.parameters == (name,)
        await engine.start_weight_update(WeightUpdate(1, ()))
        with pytest.raises(WeightSyncError, match=said):
            await engine.update_weights(WeightChunk([(name, tensor)]))


async def test_a_weight_that_was_not_announced_is_refused_by_name():
    new = weights_of(tiny_model(seed=1))
    name, *rest = new
    async with launched(tiny_model()) as engine:
        await engine.start_weight_update(announce({one: new[one] for one in rest}, 1))
        with pytest.raises(WeightSyncError, match="was not announced") as refused:
            await engine.update_weights(WeightChunk([(name, new[name])]))
        assert refused.value.parameters == (name,)


async def test_weights_without_a_start_and_versions_that_do_not_rise_are_refused():
    new = weights_of(tiny_model(seed=1))
    async with launched(tiny_model()) as engine:
        with pytest.raises(WeightSyncError, match="no weight update was started"):
            await engine.update_weights(WeightChunk(list(new.items())))
        await update(engine, new, 5)
        with pytest.raises(WeightSyncError, match="version 5 is not newer"):
            await engine.start_weight_update(announce(new, 5))
        await engine.start_weight_update(announce(new, 6))
        with pytest.raises(WeightSyncError, match="version 6 was started"):
            await engine.finish_weight_update(7)


@pytest.mark.parametrize("mode", ["keep", "keep_cache"])
@pytest.mark.parametrize("fused", [True, False])
async def test_kept_sequences_go_on_with_the_new_weights_and_say_so(fused, mode):
    old, new = tiny_model(), tiny_model(seed=1)
    async with launched(old, fused=fused) as engine:
        gate = Gate(engine, after=4)
        running = await posted(generate(engine, PROMPT, [9, 8], temperature=0, max_tokens=10, ignore_eos=True))
        await gate.reached()
        pausing = await posted(engine.pause(mode))
        gate.open()
        await pausing
        assert (await engine.health()).running_tokens == len(PROMPT) + len([9, 8]) + 2 * 4
        await update(engine, weights_of(new), 2)
        await engine.resume()
        results = await running
    for prompt, result in zip((PROMPT, [9, 8]), results, strict=True):
        completion = result.completions[0]
        assert (completion.first_version, completion.last_version, completion.finish_reason) == (0, 2, "length")
        assert completion.token_ids[:4] == plain_greedy(old, prompt, 4)
        begun = list(completion.token_ids[:4])
        if mode == "keep":
            assert completion.token_ids[4:] == plain_greedy(new, prompt + begun, 6)
        else:
            assert completion.token_ids == mixed_greedy(old, new, prompt, 4, 10)


@torch.no_grad()
def mixed_greedy(old: str, new: str, prompt: list[int], switch: int, max_tokens: int) -> list[int]:
    """Greedy decoding whose first `switch` tokens, and the keys and values before them, are the old model's."""
    from transformers import DynamicCache

    cache = DynamicCache(config=plain_model(old).config)
    tokens: list[int] = []
    feed = prompt
    while len(tokens) < max_tokens:
        model = plain_model(old if len(tokens) < switch else new)
        logits = model(input_ids=torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1]
        tokens.append(int(logits.argmax()))
        feed = tokens[-1:]
    return tokens


async def test_same_seed_after_an_update_back_gives_the_same_completions():
    old, new = tiny_model(), tiny_model(seed=1)
    async with launched(old) as engine:
        first = await generate(engine, PROMPT, n=4, max_tokens=8, seed=1)
        await update(engine, weights_of(new), 1)
        other = await generate(engine, PROMPT, n=4, max_tokens=8, seed=1)
        await update(engine, weights_of(old), 2)
        again = await generate(engine, PROMPT, n=4, max_tokens=8, seed=1)
    first, other, again = ([c.token_ids for c in results[0].completions] for results in (first, other, again))
    assert first == again
    assert first != other


def test_the_engine_reads_its_own_copy_of_the_weights():
    path = tiny_model()
    before = {name: checksum(tensor) for name, tensor in weights_of(path).items()}
    generate_once(path, PROMPT, max_tokens=3)
    assert before == {name: checksum(tensor) for name, tensor in weights_of(path).items()}
