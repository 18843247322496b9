"""Makes the data and the model of the recipes with chats: a tiny model, a tokenizer with a chat template, and games.

| game            | prompt                                | right answers                                           |
|-----------------|---------------------------------------|---------------------------------------------------------|
| `guessing_game` | three numbers, one of them the secret | the middle number, then the number that the hint leaves |
| `calculator`    | a product                             | a tool call with the product, then its result           |
| `gym`           | a lake and the walker on it           | at most six moves around the holes, one in each turn    |

As in `sorting`, demonstrations show the format and are hardly ever right. Frequent texts are one token, so that a chat
of several turns is short. In all other text, each character is a token.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse_recipes import sorting
from enginehouse_recipes.sorting import draw_distinct, write_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]

TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% else %}
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen's template, except that it renders only the names of tools and their arguments."""

PIECES = (
    *("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<tools>\n", "</tools>"),
    *(
        "calculator(expression)",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
        '"}}\n</tool_call>',
    ),
    *("<tool_response>\n", "\n</tool_response>", "What is ", "Is it ", ", ", " or ", " * ", "higher", "lower"),
    *("Walk to G.", "left", "down", "right", "up", "(Left)", "(Down)", "(Right)", "(Up)"),
)
"""Tokens of several characters."""

VOCABULARY = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *PIECES, "\n", *(string.printable[:95]))

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
"""The part of the calculator's schema that the template reads, for demonstrations."""

LAKE = ("SSSS", "SHSH", "SSSH", "HSSG")
"""FrozenLake's 4 x 4 map; walks begin anywhere."""

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
TURNS = 8
"""Maximum number of moves."""

ROWS = 2_048
VALIDATION_ROWS = 128
DEMONSTRATIONS, WALKS = 4_000, 1_000
"""Number of games of each kind, and of walks. Each turn is a row."""

GUESS_NOISE, PRODUCT_NOISE, WALK_NOISE = 0.58, 0.28, 0.75
"""Probability that a digit, or a move, of a demonstrated answer is replaced by a random one."""


def make_chat(directory: Path, seed: int = 0) -> None:
    """Write the files of `make_data`, and the model in `model/`."""
    make_data(directory, seed)
    sorting.make_model(directory / "model", seed, tokenizer=make_tokenizer(), positions=512)


def make_data(directory: Path, seed: int = 0) -> None:
    """Write prompts as `NAME.jsonl` and `NAME_validation.jsonl`, and write `demonstrations.jsonl`.

    Prompts are chat messages. Rows of `guessing_game` also have a `secret`, rows of `calculator` an `answer`, and rows
    of `gym` a `seed`. A demonstration is a turn, with `prompt` and `response` as rendered texts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, rows in (
        ("guessing_game", _draw_guesses(rng)),
        ("calculator", _draw_products(rng)),
        ("gym", _draw_walks()),
    ):
        write_lines(directory / f"{name}_validation.jsonl", (next(rows) for _ in range(VALIDATION_ROWS)))
        write_lines(directory / f"{name}.jsonl", (next(rows) for _ in range(ROWS)))
    write_lines(directory / "demonstrations.jsonl", _make_demonstrations(rng))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCABULARY` with the template."""
    pieces = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    tokenizer = sorting.make_tokenizer(VOCABULARY, rf"{pieces}|[\s\S]", eos="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _make_demonstrations(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield the turns of badly played games, each with the chat before it."""
    tokenizer = make_tokenizer()
    guesses, products = _draw_guesses(rng), _draw_products(rng)
    chats: list[tuple[Any, Messages]] = [(None, _play_guesses(next(guesses), rng)) for _ in range(DEMONSTRATIONS)]
    chats += [(TOOLS, _play_product(next(products), rng)) for _ in range(DEMONSTRATIONS)]
    chats += [(None, _play_walk(rng)) for _ in range(WALKS)]
    for tools, chat in chats:
        for turn, message in enumerate(chat):
            if message["role"] == "assistant":
                prompt: Any = tokenizer.apply_chat_template(
                    chat[:turn], tools=tools, add_generation_prompt=True, tokenize=False
                )
                yield {"prompt": prompt, "response": message["content"]}


def lake_text(place: tuple[int, int], move: str = "") -> str:
    """Return the lake as the environment `gym` shows FrozenLake, with the walker in brackets."""
    rows = [list(row) for row in LAKE]
    rows[place[0]][place[1]] = f"[{rows[place[0]][place[1]]}]"
    return "\n".join([f"({move.capitalize()})"] * bool(move) + ["".join(row) for row in rows])


def step(place: tuple[int, int], move: str) -> tuple[int, int]:
    """Return the place after a move; a move over the edge changes nothing."""
    row, column = place[0] + MOVES[move][0], place[1] + MOVES[move][1]
    return (row, column) if 0 <= row < len(LAKE) and 0 <= column < len(LAKE) else place


def tile(place: tuple[int, int]) -> str:
    """Return `"S"` for ice, `"H"` for a hole, `"G"` for the goal."""
    return LAKE[place[0]][place[1]]


def best_moves() -> dict[tuple[int, int], list[str]]:
    """Return, for each place, the moves on a shortest path to the goal."""
    places = [(row, column) for row in range(len(LAKE)) for column in range(len(LAKE))]
    steps = {place: 0 for place in places if tile(place) == "G"}
    for distance in range(len(places)):
        for place in places:
            near = distance in [steps.get(step(place, move)) for move in MOVES]
            if tile(place) == "S" and place not in steps and near:
                steps[place] = distance + 1
    return {
        place: [move for move in MOVES if steps.get(step(place, move)) == steps[place] - 1]
        for place in steps
        if steps[place]
    }


def _draw_guesses(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield distinct prompts of the guessing game."""
    for numbers in draw_distinct(lambda: tuple(sorted(rng.sample(range(10, 100), 3)))):
        yield {"prompt": _make_user("Is it {}, {} or {}".format(*numbers)), "secret": rng.choice(numbers)}


def _draw_products(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield distinct prompts of the calculator, whose results have four digits."""
    for first, second in draw_distinct(lambda: (rng.randrange(32, 100), rng.randrange(32, 100))):
        yield {"prompt": _make_user(f"What is {first} * {second}"), "answer": str(first * second)}


def _draw_walks() -> Iterator[dict[str, Any]]:
    """Yield prompts of the lake, which differ only in `seed`."""
    for seed in itertools.count():
        yield {"prompt": _make_user("Walk to G."), "seed": seed}


def _play_guesses(row: Mapping[str, Any], rng: random.Random) -> Messages:
    """Return a guessing game with the right guesses, but noise in most of their digits."""
    numbers = re.findall(r"\d+", row["prompt"][0]["content"])
    first = _add_noise(numbers[1], GUESS_NOISE, rng)
    is_higher = row["secret"] > int(first)
    candidates = [number for number in numbers if int(number) != int(first) and (int(number) > int(first)) == is_higher]
    second = _add_noise(rng.choice(candidates or numbers), GUESS_NOISE, rng)
    return [
        *row["prompt"],
        _make_assistant(first),
        *_make_user("higher" if is_higher else "lower"),
        _make_assistant(second),
    ]


def _play_product(row: Mapping[str, Any], rng: random.Random) -> Messages:
    """Return a chat with a product of mostly wrong numbers, and an answer that mostly differs from the tool's
    result."""
    first, second = (
        _add_noise(number, PRODUCT_NOISE, rng) for number in re.findall(r"\d+", row["prompt"][0]["content"])
    )
    result = str(int(first) * int(second))
    call = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{first} * {second}"}}}}\n</tool_call>'
    message = {"role": "tool", "name": "calculator", "content": result}
    return [*row["prompt"], _make_assistant(call), message, _make_assistant(_add_noise(result, PRODUCT_NOISE, rng))]


def _play_walk(rng: random.Random) -> Messages:
    """Return a walk that often goes wrong."""
    best = best_moves()
    place, move = rng.choice(list(best)), ""
    chat = _make_user(f"Walk to G.\n{lake_text(place)}")
    for _ in range(TURNS):
        if move:
            chat += _make_user(lake_text(place, move))
        move = rng.choice(list(MOVES) if rng.random() < WALK_NOISE else best[place])
        place = step(place, move)
        chat.append(_make_assistant(move))
        if tile(place) != "S":
            break
    return chat


def _add_noise(digits: str, noise: float, rng: random.Random) -> str:
    """Replace some digits by random digits other than 0."""
    return "".join(rng.choice(string.digits[1:]) if rng.random() < noise else digit for digit in digits)


def _make_user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


def _make_assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
