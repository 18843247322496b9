"""Whatever an agent does, what is trained on is what was drawn: random agents over random completions.

They go on with conversations, branch, edit what was said, ask for several answers, stream, ask at once, and go away.
"""

import asyncio
import functools
import random

import httpx
import openai
import pytest
from agent_plays import MOST_TOKENS, Scripted, assert_as_drawn
from chat_templates import CHATML, LLAMA, MISTRAL, QWEN, make_tokenizer

from enginehouse.engines.environment import Scored
from enginehouse.engines.rollout import SamplingParams
from enginehouse_environments.endpoint import AgentEndpoint
from enginehouse_environments.recording import Limits, PolicyRequest, Recording, Templates
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.drawn_tokens import DrawnTokens
from enginehouse_rl.episodes.policies import FleetPolicy

tokenizer = functools.cache(make_tokenizer)
TEMPLATES = {"qwen": QWEN, "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "take")
]
CALLS = {
    QWEN: '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>',
    CHATML: '<tool_call>\n{"arguments": {"at": 1}, "name": "take"}\n</tool_call>',
    LLAMA: '{"name": "look", "parameters": {"at": 1}}',
    MISTRAL: '[TOOL_CALLS][{"name": "take", "arguments": {"at": 1}}]',
}


def random_answer(chance: random.Random, template: str):
    """Text, calls, or tokens that no text is encoded as."""
    kind = chance.random()
    if kind < 0.2:
        return CALLS[template] * chance.choice([1, 1, 2])
    if kind < 0.4:
        return "".join(chance.choice(["yes", " the", "<think>", "</think>", "\n\n", '{"', ""]) for _ in range(4))
    drawn = [chance.randrange(256) for _ in range(chance.randrange(8))]
    return [*drawn, tokenizer(template).eos_token_id] if chance.random() < 0.7 else drawn


REFUSALS = (None, "context_length_exceeded")
"""What a template does not take has no code."""


class RandomAgent:
    """Asks `model` at random."""

    def __init__(self, model: openai.AsyncOpenAI, chance: random.Random):
        self.model, self.chance = model, chance
        self.conversations: list[list[dict]] = []

    async def act(self, steps: int) -> None:
        await self.ask([{"role": "user", "content": "begin"}], plain=True)
        for _ in range(steps):
            asked = [self.ask(self.messages()) for _ in range(self.chance.choice([1, 1, 1, 3]))]
            await asyncio.gather(*asked)

    def messages(self) -> list[dict]:
        chance = self.chance
        if chance.random() < 0.1:
            return [{"role": chance.choice(["user", "developer"]), "content": chance.choice(["begin", "other"])}]
        messages = list(chance.choice(self.conversations))
        if calls := messages[-1].get("tool_calls"):
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": str(chance.random())} for call in calls
            ]
        if not calls or (chance.random() < 0.1):
            messages.append({"role": "user", "content": chance.choice(["more", "and", "why"])})
        if chance.random() < 0.2:
            self.edit(messages)
        return messages

    def edit(self, messages: list[dict]) -> None:
        chance = self.chance
        place = chance.randrange(len(messages))
        edits = [
            lambda: messages.insert(0, {"role": "system", "content": "Be odd."}),
            lambda: messages.__delitem__(slice(0, place)),
            lambda: messages.__delitem__(slice(place + 1, None)),
            lambda: messages.insert(place, {"role": "assistant", "content": "said"}),
            lambda: messages.__setitem__(place, {"role": "user", "content": "a summary"}),
        ]
        chance.choice(edits)()

    async def ask(self, messages: list[dict], plain: bool = False) -> None:
        chance = self.chance
        given = {
            name: chance.choice(values)
            for name, values in {
                "n": [2, 3], "max_tokens": [1, 3], "stop": ["e"], "temperature": [0.5], "tools": [TOOLS, TOOLS[:1]],
                "tool_choice": ["none"], "top_p": [0.9], "logprobs": [True],
            }.items()
            if chance.random() < (0.6 if name == "tools" else 0.1) and not plain
        }  # fmt: skip
        if "tools" not in given:
            given.pop("tool_choice", None)
        streams, leaves = chance.random() < 0.3, chance.random() < 0.05 and not plain
        asking = asyncio.create_task(self.answered(messages, streams, given))
        if leaves:
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        try:
            self.conversations += [[*messages, said] for said in await asking]
        except openai.BadRequestError as error:
            if plain or error.code not in REFUSALS:
                raise

    async def answered(self, messages: list[dict], streams: bool, given: dict) -> list[dict]:
        completions = self.model.chat.completions
        if not streams:
            answer = await completions.create(model="policy", messages=messages, **given)
            return [choice.message.model_dump() for choice in answer.choices]
        said = [{"role": "assistant", "content": "", "tool_calls": []} for _ in range(given.get("n", 1))]
        async for chunk in await completions.create(model="policy", messages=messages, stream=True, **given):
            (choice,) = chunk.choices
            said[choice.index]["content"] += choice.delta.content or ""
            said[choice.index]["tool_calls"] += [
                {name: value for name, value in call.model_dump().items() if name != "index"}
                for call in choice.delta.tool_calls or ()
            ]
        return said


def acted(seed: int, template: str, steps: int = 12):
    """What a random agent leaves: its episode, and who drew."""

    async def played():
        chance = random.Random(seed)
        fleet = Scripted(tokenizer(template), lambda text, number: random_answer(chance, template))
        drawn = DrawnTokens()
        policy = drawn.record(FleetPolicy(fleet, fleet.tokenizer, SamplingParams(max_tokens=60), "task", seed))
        recording = Recording(policy, Templates(fleet.tokenizer), Limits(10_000, None, MOST_TOKENS))
        endpoint = AgentEndpoint(fleet.tokenizer)
        transport = httpx.ASGITransport(endpoint.app)
        with endpoint.record(recording) as key:
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(base_url="http://policy/v1", api_key=key, http_client=http) as model,
            ):
                await RandomAgent(model, chance).act(steps)
        episode = recording.episode(Scored(0.0), "stop")
        EpisodeChecks("agent", len(fleet.tokenizer), MOST_TOKENS, True, 1.0).check([episode], 1, drawn, "task")
        return episode, fleet

    return asyncio.run(played())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(5))
def test_what_is_chosen_is_what_was_drawn_whatever_the_agent_does(name: str, seed: int):
    episode, fleet = acted(seed, TEMPLATES[name])
    assert_as_drawn([episode], fleet)


def test_random_agents_do_what_they_are_to_do():
    """Else nothing would be shown by them."""
    figures = [acted(seed, QWEN)[0].score.figures for seed in range(3)]
    assert any(of["edits"] > 0 for of in figures)
    assert all(1 < of["segments"] < of["calls"] for of in figures)


async def test_a_long_conversation_renders_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    encoded = []
    encode = tokenizer(QWEN).encode
    monkeypatch.setattr(
        tokenizer(QWEN), "encode", lambda text, **given: encoded.append(len(text)) or encode(text, **given)
    )
    fleet = Scripted(tokenizer(QWEN), lambda text, number: [5, 6, 7])
    policy = FleetPolicy(fleet, fleet.tokenizer, SamplingParams(max_tokens=60), "task", 0)
    recording = Recording(policy, Templates(fleet.tokenizer), Limits(10_000))
    messages = []
    for _ in range(30):
        messages.append({"role": "user", "content": "more"})
        (answer,) = await recording.answer(PolicyRequest(messages))
        messages.append(answer.message)
    assert max(encoded[-10:]) < 200
