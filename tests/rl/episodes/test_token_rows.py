"""Every token of a sample, as `samples/` has it."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch, Ragged
from enginehouse.engines.environment import Episode, Group, Scored, Segment, Task
from enginehouse.engines.rollout import Completion
from enginehouse_rl.advantages.grpo import grpo
from enginehouse_rl.environments.single_turn import SingleTurn
from enginehouse_rl.episodes import samples as samples_module
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.samples import sample_rows
from enginehouse_rl.episodes.scored_group import build_batch, make_tasks
from enginehouse_rl.episodes.token_rows import split_text
from enginehouse_rl.rewards.scorer import Scorer

TOKENIZER = make_tokenizer()
SPECIAL = ("<|im_end|>", "<tool_call>", "<s>")
ALL = 10**6


def decoded(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60))
@example([TOKENIZER.convert_tokens_to_ids("ð")] * 40)  # begins a character of four bytes, again and again
@settings(deadline=None)
def test_pieces_make_up_the_text_whatever_the_tokens_are(tokens):
    made = split_text(tokens, TOKENIZER)
    assert len(made) == len(tokens)
    assert "".join(made) == decoded(tokens)


@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(st.characters(exclude_categories=["Cs"])))))
@example(["the 日本語 🙂", "<|im_end|>", "é\n\n"])
@settings(deadline=None)
def test_each_token_has_its_text_and_a_character_of_several_is_the_last_ones(texts):
    """The oracle: a token of this tokenizer is a few bytes, which Python decodes as they come."""
    tokens = TOKENIZER("".join(texts).replace("\N{REPLACEMENT CHARACTER}", "?"), add_special_tokens=False)["input_ids"]
    decoder, expected = codecs.getincrementaldecoder("utf-8")(), []
    byte_of = {letter: byte for byte, letter in bytes_to_letters().items()}
    for name in TOKENIZER.convert_ids_to_tokens(tokens):
        own = name in TOKENIZER.get_added_vocab()
        expected.append(name if own else decoder.decode(bytes(byte_of[letter] for letter in name)))
    assert split_text(tokens, TOKENIZER) == expected


def bytes_to_letters() -> dict[int, str]:
    """How a byte is written in a vocabulary of bytes, as GPT-2's encoder has it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def test_a_space_that_is_not_written_where_a_text_begins_is_its_tokens_elsewhere():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<0xC3>": 2, "<0xA9>": 3}, unk_token="▁one"))
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert split_text([0, 1, 2, 3, 0], tokenizer) == ["one", " two", "", "é", " one"]


# Figures, from what the fleet returned


class Drawn:
    """A policy with prepared completions."""

    tokenizer = TOKENIZER

    def __init__(self, completions: list[Completion]):
        self.completions = completions

    async def samples(self, tokens: Any, n: int, sampling: Any = None) -> list[Completion]:
        return [self.completions.pop(0) for _ in range(n)]


REWARDS = [1.0, 0.0, 0.25, 0.25]


class Rated:
    function = "mine:rated"

    def __init__(self) -> None:
        self.left = list(REWARDS)

    def batch(self, rows: int) -> Rated:
        return self

    def submit_all(self, groups):
        from concurrent.futures import Future

        futures = []
        for rows in groups:
            futures.append(Future())
            futures[-1].set_result([Scored(self.left.pop(0)) for _ in rows])
        return futures


def drawn(*parts: tuple[str, list[float], int, int]) -> list[Completion]:
    return [
        Completion(TOKENIZER(text, add_special_tokens=False)["input_ids"], logprobs, "stop", first, last)
        for text, logprobs, first, last in parts
    ]


PARTS = (
    ("abc", [-0.123456, -2e-7, -1.0], 3, 3),
    ("é", [-1234.5678, -0.5], 2, 3),
    ("xyz", [-1.5, -2.5, -3.5], 1, 3),
    ("q", [float("nan")], 3, 3),
)


def played() -> Batch:
    """Two groups of two samples, through the loop's own player and environment."""
    prompts = Batch(
        {
            "prompt_ids": Ragged.from_list([TOKENIZER(text)["input_ids"] for text in ("to ", "fro")]),
            "prompt": ["to ", "fro"],
            "messages": [None, None],
            "columns": [{}, {}],
        }
    )
    policy: Any = Drawn(drawn(*PARTS))

    async def play() -> list[Group]:
        player = EpisodeRunner(SingleTurn(), lambda task: policy, Scorer(Rated(), 4), 2)  # type: ignore[arg-type]
        return [Group(task, await player.play(task)) for task in make_tasks(prompts, range(2))]

    return build_batch(asyncio.run(play()))


def test_each_token_has_what_the_fleet_returned_and_the_algorithm_made_of_it():
    rows = list(sample_rows(grpo(played()), TOKENIZER, ALL))
    one, two, three, four = (row["by_token"] for row in rows)
    assert one["text"] == ["t", "o", " ", "a", "b", "c"]
    assert one["mask"] == [0, 0, 0, 1, 1, 1]
    assert one["logprob"] == [None, None, None, -0.1235, -2e-7, -1.0]
    assert two["text"] == ["t", "o", " ", "", "é"]
    assert two["logprob"][3:] == [-1235.0, -0.5]
    assert four["logprob"] == [None] * 4
    deviation = 0.5 * math.sqrt(2)  # of 1 and 0 about their mean, with one degree of freedom less
    assert one["advantage"] == [None] * 3 + [round(0.5 / deviation, 4)] * 3
    assert two["advantage"] == [None] * 3 + [-round(0.5 / deviation, 4)] * 2
    assert three["advantage"] == [None] * 3 + [0.0] * 3
    assert one["version"] == [None] * 3 + [3] * 3
    assert two["version"] == [None] * 3 + [2, 3]
    assert three["version"] == [None] * 3 + [1, None, 3], "which of the two it was nobody says"
    assert [row["group"] for row in rows] == [0, 0, 1, 1]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_an_advantage_by_token_is_each_tokens_own():
    samples = played()
    values = torch.arange(len(samples["input_ids"].values)) / 3
    rows = sample_rows(samples.with_columns(advantages=samples["input_ids"].like(values)), TOKENIZER, ALL)
    found = [value for row in rows for value in row["by_token"]["advantage"] if value is not None]
    chosen = values[samples["loss_mask"].values].tolist()
    assert found == pytest.approx(chosen, rel=1e-3)


def test_rows_of_one_episode_have_what_is_their_own():
    task = Task(0, (1,), "p", None, {})
    ids = TOKENIZER("abcd")["input_ids"]
    early = Segment(ids[:2], [False, True], [0.0, -1.0], [0, 4])
    late = Episode(ids, [False, True, False, True], [0.0, -2.0, 0.0, -3.0], [0, 4, 0, 5], Scored(1.0), earlier=[early])
    samples = build_batch([Group(task, [late])])
    first, second = (row["by_token"] for row in sample_rows(samples, TOKENIZER, ALL))
    assert (first["text"], second["text"]) == (["a", "b"], ["a", "b", "c", "d"])
    assert second["version"] == [None, 4, None, 5], "each turn is of one version"
    assert "advantage" not in first, "a validation has none"


def test_only_tokens_of_rows_that_are_written_with_them_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples_module, "ROWS_READ_AT_ONCE", 2)
    read = []

    def fetch(self: DistributedBatch, names: Any = None) -> Batch:
        read.append((len(self), "input_ids" in names))
        return fetched(self, names)

    fetched = DistributedBatch.fetch
    samples = grpo(played())
    within = sum(len(ids) for ids in samples["input_ids"][:3])
    elsewhere = DistributedBatch.of([samples.drop(["advantages"])]).with_columns(advantages=samples["advantages"])
    monkeypatch.setattr(DistributedBatch, "fetch", fetch)
    rows = list(sample_rows(elsewhere, TOKENIZER, within))
    assert ["by_token" in row for row in rows] == [True, True, True, False]
    assert read == [(2, True), (1, True), (1, False)]
    monkeypatch.setattr(DistributedBatch, "fetch", fetched)
    assert rows == list(sample_rows(samples, TOKENIZER, within))
    assert not any("by_token" in row for row in sample_rows(elsewhere, TOKENIZER, 0))
    assert not any("by_token" in row for row in sample_rows(elsewhere))
