"""What the recipes of chats begin from: data that can be won, demonstrations that hardly do, and one template."""

import json
import random
import re
from pathlib import Path

import pytest
from chat_fleets import ChatFleet, play

from enginehouse.engines.environment import Scored, Task
from enginehouse_environments.agents import OpenAIAgent
from enginehouse_environments.calls import find_call_format
from enginehouse_environments.dialogue import ChatTemplate, Dialogue
from enginehouse_environments.functions import make_tools
from enginehouse_recipes import chat

NAMES = ("guessing_game", "calculator", "gym")
TOKENIZER = chat.make_tokenizer()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All but the model, of fewer rows."""
    directory = tmp_path_factory.mktemp("chat")
    with pytest.MonkeyPatch.context() as patch:
        for name, count in {"ROWS": 64, "VALIDATION_ROWS": 16, "DEMONSTRATIONS": 100, "WALKS": 100}.items():
            patch.setattr(chat, name, count)
        chat.make_data(directory)
    return directory


def rows(made: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (made / f"{name}.jsonl").read_text().splitlines()]


def test_no_question_is_asked_twice_nor_held_out_and_trained_on(made: Path):
    for name in NAMES:
        asked = [
            json.dumps([row["prompt"], row.get("seed")]) for row in rows(made, name) + rows(made, f"{name}_validation")
        ]
        assert len(asked) == len(set(asked)) == 80


def test_every_game_can_be_won(made: Path):
    for row in rows(made, "guessing_game"):
        numbers = [int(one) for one in re.findall(r"\d+", row["prompt"][0]["content"])]
        assert numbers == sorted(numbers)
        assert row["secret"] in numbers
    for row in rows(made, "calculator"):
        assert int(row["answer"]) == eval(row["prompt"][0]["content"].removeprefix("What is "))
    for place in chat.best_moves():
        for _ in range(chat.TURNS):
            place = chat.step(place, chat.best_moves()[place][0]) if chat.tile(place) == "S" else place
        assert chat.tile(place) == "G"


def test_demonstrations_are_one_row_a_turn_in_tokens_the_tokenizer_knows(made: Path):
    for row in rows(made, "demonstrations"):
        tokens = TOKENIZER.encode(row["prompt"] + row["response"])
        assert TOKENIZER.unk_token_id not in tokens
        assert TOKENIZER.decode(tokens) == row["prompt"] + row["response"]
        assert row["prompt"].endswith("<|im_start|>assistant\n")
        assert len(tokens) < 256


def test_what_is_said_often_is_one_token():
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
    assert len(TOKENIZER.encode(call)) == 1 + 5 + 1
    assert len(TOKENIZER.encode("<|im_start|>assistant\nleft<|im_end|>\n")) == 4


def test_demonstrated_turns_are_what_the_environments_ask():
    """Token for token: the tool as the real one is written, an answer as a dialogue goes on after it."""
    rng = random.Random(0)
    for game, tools in (
        (chat._play_product(next(chat._draw_products(rng)), rng), make_tools(["calculator"])),
        (chat._play_guesses(next(chat._draw_guesses(rng)), rng), []),
        (chat._play_walk(rng), []),
    ):
        template = ChatTemplate(TOKENIZER, [tool.schema for tool in tools])
        dialogue = Dialogue(template, game[:1])
        assert dialogue.transcript.tokens == rendered(game[:1], tools)
        for turn in range(1, len(game) - 1, 2):
            dialogue.transcript.add_given([*TOKENIZER.encode(game[turn]["content"]), TOKENIZER.eos_token_id])
            dialogue.say([game[turn + 1]])
            assert dialogue.transcript.tokens == rendered(game[: turn + 2], tools)


def rendered(messages: list[dict], tools: list) -> list[int]:
    given = chat.TOOLS if tools else None
    return TOKENIZER.encode(
        TOKENIZER.apply_chat_template(messages, tools=given, add_generation_prompt=True, tokenize=False)
    )


def test_the_agent_of_the_recipe_asks_with_its_tool_and_answers_by_it():
    """What the model is asked are the tokens that the demonstrations begin with."""
    messages = [{"role": "user", "content": "What is 12 * 34"}]
    calls = {"expression": "12 * 34"}
    said = [ChatTemplate(TOKENIZER, chat.TOOLS).call("calculator", calls), "408"]
    fleet = ChatFleet(TOKENIZER, said)
    task = Task(3, rendered(messages, []), "What is 12 * 34", messages, {"answer": "408"})
    answered = []
    agent = OpenAIAgent("enginehouse_environments.calculating_agent:calculate")

    async def right(rows: list) -> list[Scored]:
        answered.extend(row["response"] for row in rows)
        return [Scored(1.0)]

    (episode,) = play(agent, fleet, task, scorer=right)
    assert answered == ["408"]
    first, second = (list(request.prompt_ids) for request in fleet.requests)
    assert first == rendered(messages, ["a tool"])
    turns = [chat._make_assistant(said[0]), {"role": "tool", "content": "408"}]
    assert second == rendered([*messages, *turns], ["a tool"])
    assert sum(episode.mask) == sum(len(TOKENIZER.encode(one)) + 1 for one in said)


def test_calls_are_written_as_hermes_writes_them_and_read_so():
    (calculator,) = make_tools(["calculator"])
    template = ChatTemplate(TOKENIZER, [calculator.schema])
    assert find_call_format(template).name == "hermes"
    assert template.call("calculator", {"expression": "2 * 3"}) == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * 3"}}\n</tool_call>'
    )
