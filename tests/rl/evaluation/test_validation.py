"""Validation: which prompts, drawn how, and what is measured of the answers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from enginehouse.data import Batch
from enginehouse.errors import DataError
from enginehouse_rl.config.schema import Config
from enginehouse_rl.data.prompts import PromptDataset
from enginehouse_rl.episodes.samples import encode_texts
from enginehouse_rl.episodes.scored_group import build_batch
from enginehouse_rl.evaluation.validation import MOST_VALUES, Validation, estimate_pass_at
from enginehouse_rl.runs.validations import Validations
from enginehouse_testing.models import char_tokenizer


def made(tmp_path: Path, validation: Any, evaluation: dict | None = None, **sampling: Any) -> Validation | None:
    rollout = {"sampling": {"max_tokens": 9, "temperature": 0.7, "top_p": 0.5, "stop": ["."], **sampling}}
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t.jsonl", "validation": validation},
            "reward": {"function": "f:g"},
            "rollout": rollout,
            "evaluation": evaluation or {},
        }
    )
    return Validation.load(config, lambda path: PromptDataset.load(tmp_path / path, char_tokenizer()))


def write(tmp_path: Path, name: str, rows: list[dict]) -> None:
    (tmp_path / name).write_text("".join(json.dumps({"prompt": f"{n}+1="} | row) + "\n" for n, row in enumerate(rows)))


def answered(rewards: list[float], tokens: list[int], reasons: list[str], answers: list[str] | None = None) -> Batch:
    """Samples, as far as figures need them."""
    return Batch(
        {
            "response_tokens": torch.tensor(tokens),
            "reward": torch.tensor(rewards),
            "episode": torch.arange(len(rewards)),
            "finish_reason": reasons,
            "prompt": ["p"] * len(rewards),
            "response": ["r"] * len(rewards),
            "answer": answers or [""] * len(rewards),
            "reward_figures": [{}] * len(rewards),
            "reward_failure": [""] * len(rewards),
            "trace": [None] * len(rewards),
        }
    )


def test_validation_is_greedy_of_all_rows_and_keeps_the_rollouts_length_and_stops(tmp_path):
    write(tmp_path, "v.jsonl", [{}] * 300)
    validation = made(tmp_path, "v.jsonl")
    assert validation is not None
    assert len(validation.prompts) == 300
    sampling = validation.sampling
    assert (sampling.temperature, sampling.n, sampling.top_p) == (0.0, 1, 1.0)
    assert (sampling.max_tokens, sampling.stop) == (9, (".",))
    assert validation.how == "greedy"
    assert made(tmp_path, None) is None


def test_a_validation_can_be_drawn_otherwise_and_limited(tmp_path):
    write(tmp_path, "v.jsonl", [{}] * 5)
    evaluation = {
        "max_prompts": 3,
        "samples_per_prompt": 4,
        "sampling": {"temperature": 0.6, "max_tokens": 20, "stop": [], "top_k": 5},
    }
    validation = made(tmp_path, "v.jsonl", evaluation)
    assert validation is not None
    assert len(validation.prompts) == 3
    assert (validation.sampling.n, validation.sampling.max_tokens, validation.sampling.stop) == (4, 20, ())
    assert validation.how == "temperature 0.6, 4 samples a prompt"


def test_figures_of_single_answers(tmp_path):
    write(tmp_path, "v.jsonl", [{}] * 4)
    validation = made(tmp_path, "v.jsonl")
    assert validation is not None
    samples = answered([1.0, 0.0, 0.5, 0.5], [1, 2, 3, 6], ["stop", "length", "stop", "length"])
    figures = validation.measure(samples, range(len(samples)))
    error = torch.tensor([1.0, 0.0, 0.5, 0.5]).std().item() / 2
    assert figures == {
        "validation/reward": 0.5,
        "validation/reward_stderr": pytest.approx(error),
        "validation/tokens_mean": 3.0,
        "validation/truncated": 0.5,
        "validation/failures": 0.0,
        "validation/dropped": 0.0,
    }


def test_several_answers_have_mean_at_k_and_pass_at_k(tmp_path):
    write(tmp_path, "v.jsonl", [{}] * 2)
    evaluation = {"samples_per_prompt": 3, "pass_threshold": 0.6, "sampling": {"temperature": 1.0}}
    validation = made(tmp_path, "v.jsonl", evaluation)
    assert validation is not None
    figures = validation.measure(answered([0.5, 0.6, 0.0, 0.5, 0.5, 0.5], [1] * 6, ["stop"] * 6), range(2))
    assert figures["validation/mean@3"] == figures["validation/reward"] == pytest.approx(2.6 / 6)
    assert {name: value for name, value in figures.items() if "pass@" in name} == {
        "validation/pass@1": pytest.approx(1 / 6),
        "validation/pass@1_stderr": pytest.approx(1 / 6),  # of two chances, half of how far they are apart
        "validation/pass@2": pytest.approx(1 / 3),
        "validation/pass@2_stderr": pytest.approx(1 / 3),
        "validation/pass@3": 0.5,
        "validation/pass@3_stderr": pytest.approx(0.5),
    }


def test_majority_at_k_is_the_share_of_prompts_that_agree_on_a_right_answer(tmp_path):
    write(tmp_path, "v.jsonl", [{"kind": kind} for kind in "aabcb"])
    evaluation = {"samples_per_prompt": 4, "sampling": {"temperature": 1.0}, "by": "kind"}
    validation = made(tmp_path, "v.jsonl", evaluation)
    assert validation is not None
    prompts = {
        "7 7 8 9": [1, 1, 0, 0],
        "7 8 8 7": [0, 1, 1, 0],  # as many: the first seen
        "- - - 5": [0, 0, 0, 1],  # who has no answer has no vote
        "- - - -": [1, 1, 1, 1],
        "1 2 2 -": [1, 0, 0, 0],
    }
    answers = ["" if answer == "-" else answer for row in prompts for answer in row.split()]
    samples = answered([float(one) for row in prompts.values() for one in row], [1] * 20, ["stop"] * 20, answers)
    for given in (samples, encode_texts(samples)):
        figures = validation.measure(given, range(5))
        majority = {name: value for name, value in figures.items() if "majority" in name}
        assert majority == {
            "validation/majority@4": pytest.approx(2 / 5),
            "validation/a/majority@4": pytest.approx(1 / 2),
            "validation/b/majority@4": pytest.approx(1 / 2),
            "validation/c/majority@4": 0.0,
        }
    unsaid = validation.measure(answered([1.0] * 20, [1] * 20, ["stop"] * 20), range(5))
    assert not any("majority" in name for name in unsaid)
    rows = list(validation.list_rows(samples, range(5)))
    assert rows[11]["answer"] == "5"
    assert "answer" not in rows[10]


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_all_choices_that_pass(samples):
    for passed in range(samples + 1):
        for k in range(1, samples + 1):
            choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
            assert estimate_pass_at(k, samples, passed) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_files_and_the_values_of_a_column_have_figures_of_their_own(tmp_path):
    write(tmp_path, "a.jsonl", [{"kind": "x"}, {"kind": "y"}, {"kind": "x"}])
    write(tmp_path, "b.jsonl", [{"kind": 7, "answer": 2}])
    validation = made(tmp_path, {"aime": "a.jsonl", "gsm": "b.jsonl"}, {"by": "kind"})
    assert validation is not None
    samples = answered([1.0, 0.0, 0.0, 0.25], [1] * 4, ["stop"] * 4)
    samples = samples.with_columns(reward_figures=[{}, {"format": 0.5}, {}, {"format": 1.0}])
    figures = validation.measure(samples, range(len(samples)))
    assert (figures["validation/aime/format"], figures["validation/gsm/format"]) == (0.5, 1.0)
    assert {name: value for name, value in figures.items() if name.endswith("/reward")} == {
        "validation/aime/reward": pytest.approx(1 / 3),
        "validation/aime/x/reward": 0.5,
        "validation/aime/y/reward": 0.0,
        "validation/gsm/reward": 0.25,
        "validation/gsm/7/reward": 0.25,
    }
    rows = list(validation.list_rows(samples, range(4)))
    assert [(row["file"], row["row"], row["reward"]) for row in rows] == [
        ("a.jsonl", 0, 1.0),
        ("a.jsonl", 1, 0.0),
        ("a.jsonl", 2, 0.0),
        ("b.jsonl", 0, 0.25),
    ]
    assert [row.get("reference") for row in rows] == [None, None, None, 2]


def test_figures_are_of_the_prompts_that_were_answered_and_the_others_are_named(tmp_path, caplog):
    write(tmp_path, "a.jsonl", [{"kind": "x"}, {"kind": "y"}, {"kind": "x"}])
    write(tmp_path, "b.jsonl", [{"kind": "x"}])
    validation = made(tmp_path, {"a": "a.jsonl", "b": "b.jsonl"}, {"by": "kind", "samples_per_prompt": 2})
    assert validation is not None
    samples = answered([1.0, 0.0, 0.0, 0.0], [1] * 4, ["stop"] * 4)  # of rows 0 and 2 of the first
    figures = validation.measure(samples, [0, 2])
    assert {name: value for name, value in figures.items() if name.endswith(("/reward", "/dropped"))} == {
        "validation/a/reward": 0.25,
        "validation/a/dropped": 1.0,
        "validation/a/x/reward": 0.25,
        "validation/b/dropped": 1.0,
    }
    assert [(row["file"], row["row"]) for row in validation.list_rows(samples, [0, 2])] == [("a.jsonl", 0)] * 2 + [
        ("a.jsonl", 2)
    ] * 2
    validation.warn_of_dropped(3, [0, 2])
    assert "step 3: 2 of 4 prompts are left out" in caplog.text
    assert "row 2 of a.jsonl, row 1 of b.jsonl" in caplog.text


def test_an_episode_of_several_rows_is_one_sample(tmp_path):
    write(tmp_path, "v.jsonl", [{}, {}])
    validation = made(tmp_path, "v.jsonl", {"samples_per_prompt": 2, "pass_threshold": 1.0})
    assert validation is not None
    plain = answered([1.0, 0.0, 1.0, 1.0], [3, 1, 2, 2], ["length", "stop", "stop", "stop"], ["a", "b", "a", "a"])
    rows = answered([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [1, 1, 1, 1, 2, 1, 1], ["length"] * 3 + ["stop"] * 4,
                    ["", "", "a", "b", "a", "", "a"])  # fmt: skip
    rows = rows.with_columns(episode=torch.tensor([0, 0, 0, 1, 2, 3, 3]))
    assert validation.measure(rows, [0, 1]) == validation.measure(plain, [0, 1])
    assert validation.measure(encode_texts(rows), [0, 1]) == validation.measure(plain, [0, 1])
    written = list(validation.list_rows(rows, [0, 1]))
    assert [row["row"] for row in written] == [0, 0, 0, 0, 1, 1, 1]
    assert [row["segment"] for row in written] == [0, 1, 2, 0, 0, 0, 1]


def test_a_validation_of_which_nothing_was_answered_says_so(tmp_path):
    write(tmp_path, "v.jsonl", [{}] * 2)
    validation = made(tmp_path, "v.jsonl")
    assert validation is not None
    figures = validation.measure(build_batch([]), [])
    assert figures == {"validation/dropped": 2.0}
    taken = Validations()
    taken.add(1, figures)
    assert taken.lines() == ["validation at step 1: dropped 2"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"kind": "x"}, {}], r"v\.jsonl, row 2 has no column 'kind'"),
        ([{"kind": ["x"]}], r"v\.jsonl, row 1 has a list as 'kind'"),
        ([{"kind": n} for n in range(MOST_VALUES + 1)], r"'kind' has 51 values .* at most 50"),
    ],
)
def test_a_column_that_does_not_sort_prompts_is_refused(tmp_path, rows, said):
    write(tmp_path, "v.jsonl", rows)
    with pytest.raises(DataError, match=said):
        made(tmp_path, "v.jsonl", {"by": "kind"})
