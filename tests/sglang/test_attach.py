"""Servers that somebody has started by hand: used and updated from here, where SGLang is not installed, and left."""

import asyncio
import http.server
import os
import shutil
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch_rollout_driver import plain_greedy, plain_logprobs

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, SamplingParams
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.errors import ConfigError, EnginehouseError, ModelError
from enginehouse_sglang.engine import SGLangRollout
from enginehouse_sglang.http import Address
from enginehouse_sglang.options import SGLangOptions
from enginehouse_sglang.process import SGLangFailed
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
MODEL = {"hidden": 128, "max_positions": 2048}


@pytest.fixture(scope="module")
def path():
    return tiny_model(**MODEL)


@pytest.fixture(scope="module")
def server(served, path):
    with served(path) as server:
        yield server


@asynccontextmanager
async def attached(path, *urls, replica=0):
    engine = SGLangRollout()
    context = ProcessContext("rollout", labels={"replica": replica})
    spec = path if isinstance(path, ModelSpec) else ModelSpec(path)
    await engine.launch(spec, SGLangOptions(endpoint=list(urls)), context)
    try:
        yield engine
    finally:
        await engine.shutdown()


async def greedy(engine, tokens=8):
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    (completion,) = (await engine.generate(GenerateRequest("greedy", PROMPT, sampling))).completions
    return completion


async def update(engine, path, version):
    weights = load_file(f"{path}/model.safetensors")
    await engine.pause("wait")
    metas = [ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    await engine.start_weight_update(WeightUpdate(version, metas))
    await engine.update_weights(WeightChunk(list(weights.items())))
    await engine.finish_weight_update(version)
    await engine.resume()


async def test_a_server_is_used_and_updated_and_left_running_and_the_next_run_begins_at_its_own_weights(server, path):
    new = tiny_model(**MODEL, seed=1)
    for _ in range(2):
        async with attached(path, server.url) as engine:
            first = await greedy(engine)
            await update(engine, new, 1)
            state = await engine.weight_state()
            after = await greedy(engine)
        assert list(first.token_ids) == plain_greedy(path, PROMPT, 8)
        for completion, model, version in ((first, path, 0), (after, new, 1)):
            assert completion.last_version == version
            expected = plain_logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)
        assert state.version == 1
        assert server.answers()


async def test_a_server_that_somebody_else_updates_is_noticed(server, path):
    async with attached(path, server.url) as mine:
        async with attached(path, server.url) as other:
            await update(other, tiny_model(**MODEL, seed=1), 5)
        state, drawn = await asyncio.gather(mine.weight_state(), greedy(mine), return_exceptions=True)
    assert isinstance(state, WeightSyncError)
    assert isinstance(drawn, EnginehouseError)
    assert all("another client changes its weights" in str(one) for one in (state, drawn))


async def test_a_request_that_somebody_else_ends_is_an_error_and_one_ended_here_is_not(server, path):
    long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)

    async def begun(engine, name, running):
        """A request on its way, in a turn of the event loop of its own: those of one turn are answered together."""
        asked = asyncio.create_task(engine.generate(GenerateRequest(name, PROMPT, long)))
        while (await engine.health()).running < running:
            await asyncio.sleep(0.01)
        return asked

    async with attached(path, server.url) as other, attached(path, server.url) as mine:
        running = await begun(mine, "one", 1)
        ended_here = await begun(mine, "two", 2)
        await other.abort()  # ends only what it asked for
        await mine.abort(["two"])
        assert (await ended_here).completions[0].finish_reason == "abort"
        assert not running.done()
        await Address(server.url).call("POST", "/abort_request", {"abort_all": True})
        with pytest.raises(EnginehouseError, match="sglang did not serve request"):
            await running


async def test_a_server_of_somebody_else_is_not_put_to_sleep(server, path):
    async with attached(path, server.url) as engine:
        with pytest.raises(EnginehouseError, match="cannot sleep: this run did not start it"):
            await engine.sleep()


async def launch(path, *urls, replica=0):
    async with attached(path, *urls, replica=replica):
        pass


@contextmanager
def other_service():
    """Something that answers HTTP, and is not SGLang."""
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{service.server_address[1]}"
        service.shutdown()


def test_a_wrong_url_is_a_clear_error(path):
    with other_service() as url, pytest.raises(ConfigError, match="is not an sglang server"):
        asyncio.run(launch(path, url))
    with pytest.raises(ConfigError, match=f"no sglang server at {url}"):  # nobody is there any more
        asyncio.run(launch(path, url))


def test_a_replica_without_a_url_is_a_clear_error(path):
    with pytest.raises(ConfigError, match="but replica 1 has none: the number of URLs is 1"):
        asyncio.run(launch(path, "http://127.0.0.1:1", replica=1))


def test_a_server_of_another_model_is_refused_and_not_touched(server, path, tmp_path):
    wide = tiny_model(hidden=64, max_positions=2048)
    with pytest.raises(ModelError, match=r"serves another model .*its hidden_size is 128, not 64"):
        asyncio.run(launch(wide, server.url))
    with pytest.raises(ModelError, match=r"serves another model .*Qwen3ForCausalLM, not LlamaForCausalLM"):
        asyncio.run(launch(tiny_model("llama", **MODEL), server.url))
    with pytest.raises(ModelError, match=r"computes in float32, and model\.dtype is bfloat16"):
        asyncio.run(launch(ModelSpec(path, dtype="bfloat16"), server.url))
    with pytest.raises(ModelError, match="not a model directory"):
        asyncio.run(launch(str(tmp_path), server.url))
    shutil.rmtree(tmp_path)
    asyncio.run(launch(path, server.url))


async def test_a_server_that_dies_in_the_midst_is_an_error_of_every_request(server, path):
    """The last test of this server."""
    async with attached(path, server.url) as engine:
        long = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
        running = asyncio.create_task(engine.generate(GenerateRequest("long", PROMPT, long)))
        await greedy(engine, 2)
        os.killpg(server.process.pid, 9)
        found = await asyncio.gather(running, engine.health(), greedy(engine), return_exceptions=True)
    assert [type(one) for one in found] == [SGLangFailed] * 3, found
    assert all(server.url in str(one) for one in found)
