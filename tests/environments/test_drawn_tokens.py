"""What is trained on of a chat is what replicas drew, id by id, whatever that was and whatever stood between.

Answers are random token ids and calls in tokens that no tokenizer would give; they end by any end, or are cut. Weights
change between the answers of an episode, and within one. Episodes go the way of a run: a player, its checks, a batch.
"""

import asyncio
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tool_functions
from chat_templates import CHATML, DEEPSEEK, ENDS, GEMMA, LLAMA, MISTRAL, QWEN, QWEN_CODER, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.engines.environment import Group, Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse_environments.dialogue import ChatTemplate, Dialogue
from enginehouse_environments.functions import Tool
from enginehouse_environments.tools import Tools
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.scored_group import build_batch

OTHER_ENDS = ["<|eom_id|>", "<|endoftext|>"]
TOKENIZERS = {template: make_tokenizer(template) for template in ENDS}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def chatml(name, arguments):
    return f'<tool_call>\n{{"arguments": {arguments}, "name": "{name}"}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def coder(name, arguments):
    return f"<tool_call><function={name}><parameter=text>{arguments}</parameter></function></tool_call>"


CALLED = {QWEN: hermes, CHATML: chatml, LLAMA: llama, MISTRAL: mistral, QWEN_CODER: coder, DEEPSEEK: hermes}
"""How each writes a call, given its name and the JSON of its arguments."""
BETWEEN = {QWEN: "\n", LLAMA: "; ", CHATML: ""}


class Replicas:
    """Draws whatever `answer` gives, of versions that go up now and then; keeps what it drew."""

    def __init__(self, answer, chance):
        self._answer, self._chance, self._version = answer, chance, 0
        self.drawn = {}  # by episode, in order: what was asked, and the completion

    async def generate(self, request):
        for _ in range(self._chance.randrange(3)):  # others' turn
            await asyncio.sleep(0)
        first = self._version = self._version + self._chance.randrange(2)
        last = self._version = self._version + self._chance.randrange(2)
        ids = self._answer(list(request.prompt_ids))[: request.sampling.max_tokens]
        stops = {*request.sampling.stop_token_ids, *TOKENIZERS[QWEN].convert_tokens_to_ids(OTHER_ENDS)}
        logprobs = [-self._chance.expovariate(1.0) for _ in ids]
        reason = "stop" if ids[-1] in stops else "length"
        completion = Completion(ids, logprobs, reason, first, last if len(ids) > 1 else first)
        name = request.id.rpartition("-")[0]
        self.drawn.setdefault(name, []).append((list(request.prompt_ids), completion))
        return SimpleNamespace(completions=[completion])


def played(environment, tokenizer, replicas, messages, samples=2, max_tokens=400):
    """The episodes of a task, as a run has them played and checked."""

    async def score(rows):
        return [Scored(float(len(row["response"]))) for row in rows]

    player = EpisodeRunner(
        environment,
        lambda task: FleetPolicy(replicas, tokenizer, SamplingParams(max_tokens=max_tokens), f"task-{task.serial}", 11),
        score,
        samples,
        checks=EpisodeChecks("tested", len(tokenizer), 3000, True, 1.0),
    )
    task = Task(3, [1], "?", messages, {})
    return Group(task, asyncio.run(player.play(task)))


def assert_is_what_was_drawn(group, replicas):
    """Each row of the batch of a group is what was asked last and drawn then, and all that was drawn is its mask."""
    batch = build_batch([group])
    ids, mask, logprobs = (batch.ragged(name) for name in ("input_ids", "loss_mask", "rollout_logprobs"))
    for row, episode in enumerate(group.episodes):
        drawn = replicas.drawn[f"task-3-episode-{row}"]
        asked, last = drawn[-1]
        tokens = [*asked, *last.token_ids]
        wanted = np.zeros(len(tokens)), np.zeros(len(tokens), bool), np.full(len(tokens), -1)
        for before, completion in drawn:
            here = slice(len(before), len(before) + len(completion.token_ids))
            assert tokens[: here.stop] == [*before, *completion.token_ids]  # nothing before was said otherwise
            assert not wanted[1][here].any()
            wanted[0][here], wanted[1][here] = completion.logprobs, True
            wanted[2][here] = completion.first_version
            wanted[2][here.stop - 1] = completion.last_version
        assert ids[row].tolist() == tokens
        assert mask[row].tolist() == wanted[1].tolist()
        assert logprobs[row].tolist() == wanted[0].astype(np.float32).tolist()
        assert np.where(wanted[1], episode.versions, -1).tolist() == wanted[2].tolist()
        assert batch["response_tokens"][row] == wanted[1].sum()
        assert batch["first_version"][row] == min(one.first_version for _, one in drawn)
        assert batch["weight_version"][row] == max(one.last_version for _, one in drawn)


def texts(**options):
    """Texts with all that may go wrong: ends and calls in them, halves of characters, what merges."""
    odd = st.sampled_from(
        ["<|im_end|>", "<|eot_id|>", "</s>", "<tool_call>", "</think>", "\n\n", "the", '{"', "é", "🙂", " "]
    )
    return st.lists(odd | st.text(max_size=4), max_size=6).map("".join)


def answers(template, chance):
    """What gives a random answer in tokens."""
    tokenizer = TOKENIZERS[template]
    ends = [ENDS[template], *OTHER_ENDS]

    def text():
        pieces = ["th", "e", "é", "<tool_call>", "{", "</think>", "<think>", "\n", " "]
        return "".join(chance.choice(pieces) for _ in range(chance.randrange(5)))

    def answer(before):
        kind = chance.randrange(9)
        if kind == 0:
            ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 30))]
            return [one for one in ids if one != tokenizer.convert_tokens_to_ids(ENDS[template])] or [5]
        written = CALLED.get(template, hermes)
        calls = [written("echo", json.dumps({"text": text()})) for _ in range(chance.randrange(1, 4))]
        said = BETWEEN.get(template, "").join(calls)
        said = said if template == LLAMA or kind < 5 else text() + said
        if kind == 1:
            said = said[: chance.randrange(1, 1 + len(said))]
        # in tokens that the tokenizer would not give: letter by letter, here and there
        ids = []
        for letter in [said] if chance.randrange(2) else said:
            ids += tokenizer.encode(letter, add_special_tokens=False)
        return [*ids, *tokenizer.encode(chance.choice(ends), add_special_tokens=False)]

    return answer


class Talk:
    """Asks on, some questions at once where the template takes that."""

    def __init__(self, chance, at_once):
        self._chance, self._at_once = chance, at_once

    async def run(self, task, policy, context):
        template = ChatTemplate(policy.tokenizer)

        async def play(number, policy):
            chat = Dialogue(template, task.messages)
            for _ in range(self._chance.randrange(1, 4)):
                if chat.answers:
                    asked = range(self._chance.randrange(1, self._at_once + 1))
                    chat.say(
                        [
                            {"role": "user", "content": self._chance.choice(["", "a", "\n\n", "the<|im_end|>"])}
                            for _ in asked
                        ]
                    )
                await chat.answer(policy, self._chance.choice([None, 3]))
            return chat.episode(Scored(1.0))

        return await context.each(play)


NAMES = {QWEN: "qwen", QWEN_CODER: "qwen_coder", CHATML: "chatml", LLAMA: "llama", MISTRAL: "mistral", GEMMA: "gemma"}
NAMES |= {DEEPSEEK: "deepseek"}
SEEDS = st.integers(0, 2**32).map(random.Random)


@pytest.mark.parametrize("template", CALLED, ids=NAMES.get)
@settings(max_examples=8)
@given(chance=SEEDS, question=texts(), system=st.none() | texts())
def test_a_chat_with_tools_is_trained_on_as_it_was_drawn(template, chance, question, system):
    replicas = Replicas(answers(template, chance), chance)
    messages = [{"role": "user", "content": question}]
    if system is not None and template != DEEPSEEK:
        messages.insert(0, {"role": "system", "content": system})
    form = "hermes" if template == DEEPSEEK else "auto"
    environment = Tools(["tool_functions:echo"], max_turns=5, max_result_tokens=20, format=form)
    group = played(environment, TOKENIZERS[template], replicas, messages, max_tokens=chance.choice([60, *[900] * 5]))
    assert_is_what_was_drawn(group, replicas)


@pytest.mark.parametrize("template", ENDS, ids=NAMES.get)
@settings(max_examples=8)
@given(chance=SEEDS, question=texts())
def test_a_chat_of_questions_is_trained_on_as_it_was_drawn(template, chance, question):
    replicas = Replicas(answers(template, chance), chance)
    environment = Talk(chance, 1 if template == GEMMA else 2)
    group = played(environment, TOKENIZERS[template], replicas, [{"role": "user", "content": question}])
    assert_is_what_was_drawn(group, replicas)


PLAIN = st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=6)
CALLS = st.lists(PLAIN.map(lambda text: {"text": f"r{text}"}), min_size=1, max_size=3)


@pytest.mark.parametrize("template", BETWEEN, ids=NAMES.get)
@settings(max_examples=15)
@given(turns=st.lists(CALLS, max_size=3), question=PLAIN, last=PLAIN)
def test_where_all_goes_as_the_template_writes_it_the_tokens_are_those_of_the_whole_chat(
    template, turns, question, last
):
    """The oracle: transformers, which renders and tokenises the conversation at once."""
    tokenizer = TOKENIZERS[template]
    turns = [calls[:1] if template == LLAMA else calls for calls in turns]
    said = [
        BETWEEN[template].join(CALLED[template]("echo", json.dumps(one, ensure_ascii=False)) for one in calls)
        for calls in turns
    ]
    script = iter([*said, f"So {last}"])
    replicas = Replicas(
        lambda before: [*tokenizer.encode(next(script), add_special_tokens=False), tokenizer.eos_token_id],
        random.Random(0),
    )
    environment = Tools(["tool_functions:echo"], max_turns=9)
    messages = [{"role": "user", "content": question}]
    (episode,) = played(environment, tokenizer, replicas, messages, samples=1).episodes
    assert episode.finish == "stop"
    for calls in turns:
        made = [{"type": "function", "function": {"name": "echo", "arguments": one}} for one in calls]
        messages += [{"role": "assistant", "content": "", "tool_calls": made}]
        messages += [{"role": "tool", "name": "echo", "content": one["text"]} for one in calls]
    messages += [{"role": "assistant", "content": f"So {last}"}]
    schemas = [Tool(tool_functions.echo).schema]
    whole = tokenizer.apply_chat_template(messages, tools=schemas, return_dict=False)
    assert list(episode.tokens) == whole[: len(episode.tokens)]
    assert tokenizer.decode(whole[len(episode.tokens) :]).strip() == ""
