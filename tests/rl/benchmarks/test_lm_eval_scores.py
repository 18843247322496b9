"""Benchmarks: prompts and scores of each of 200 items are those of lm-eval, run whole; `make test-benchmarks`."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmark_items import ITEMS, make_answers, make_data_set
from hub_server import Hub

from enginehouse_rewards.pool import RewardPool
from enginehouse_rl.benchmarks.names import BENCHMARKS, FILES
from enginehouse_rl.benchmarks.ratios import OF, RIGHT
from enginehouse_rl.hub.names import HubName
from enginehouse_rl.hub.snapshots import fetch

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[2]


class Compared(NamedTuple):
    """What both made of the same answers.

    Attributes:
        items: the items as our runs read them.
        scores: our scores of the answers to them.
        reference: lm-eval's samples of each item, by the name of the filter.
        results: lm-eval's results.
    """

    items: Any
    scores: Any
    reference: list[dict[str, Any]]
    results: dict[str, Any]


@pytest.fixture(autouse=True)
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data by which NLTK tells sentences apart: they know no abbreviations, and come from no network."""
    folder = tmp_path / "nltk_data"
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).write_text("")
    monkeypatch.setattr("nltk.data.path", [str(folder)])
    monkeypatch.setenv("NLTK_DATA", str(folder))


def read(name: str, hub: Hub, is_chat: bool = False) -> list[Any]:
    """Return the items of a made benchmark, as our runs read them."""
    from enginehouse_rl.benchmarks.lm_eval_tasks import read_items

    benchmark = BENCHMARKS[name]
    hub.add_dataset(benchmark.repository, make_data_set(name))
    folder = fetch(HubName("dataset", benchmark.repository), "evaluation.benchmarks", FILES).path
    return list(read_items(name, folder, None, is_chat).items)


def compare(name: str, hub: Hub, tmp_path: Path) -> Compared:
    benchmark, items = BENCHMARKS[name], read(name, hub)
    answers = make_answers(name, [item.doc for item in items])
    pool = RewardPool("enginehouse_rl.benchmarks.scoring:score")
    try:
        rows = [
            {"response": answer, "benchmark": name, "task": item.task, "doc": item.doc}
            for item, answer in zip(items, answers, strict=True)
        ]
        scores = pool.score(rows)
    finally:
        pool.close()
    by_task = defaultdict(list)
    for item, answer in zip(items, answers, strict=True):
        by_task[item.task].append(answer)
    ended = run_reference({"task": benchmark.task, "folder": benchmark.folder, "answers": by_task}, tmp_path)
    samples = {(sample["task"], sample["number"], sample["filter"]): sample for sample in ended["samples"]}
    filters = sorted({sample["filter"] for sample in ended["samples"]})
    numbers = [number for several in by_task.values() for number in range(len(several))]
    reference = [
        {key: samples[item.task, number, key] for key in filters} for item, number in zip(items, numbers, strict=True)
    ]
    return Compared(items, scores, reference, ended["results"])


def run_reference(given: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Run lm-eval in a process of its own, with a cache of its own."""
    (tmp_path / "given.json").write_text(json.dumps(given))
    words = [sys.executable, str(TESTS / "reference_scores.py"), "given.json", "result.json"]
    variables = {**os.environ, "HF_HOME": str(tmp_path / "reference")}
    ended = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads((tmp_path / "result.json").read_text())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_item_has_the_prompt_and_the_scores_of_lm_eval(name: str, hub: Hub, tmp_path: Path):
    compared = compare(name, hub, tmp_path)
    assert len(compared.items) == ITEMS
    assert [item.prompt for item in compared.items] == [
        next(iter(samples.values()))["prompt"] for samples in compared.reference
    ]
    chosen, several = BENCHMARKS[name], len(compared.reference[0]) > 1
    for item, ours, samples in zip(compared.items, compared.scores, compared.reference, strict=True):
        assert not ours.failure
        assert item.doc == next(iter(samples.values()))["doc"]
        expected: dict[str, float] = {}
        for key, sample in samples.items():
            for metric, value in sample["metrics"].items():
                figure = f"{metric}.{key}" if several else metric
                if isinstance(value, list):
                    expected |= {figure + RIGHT: sum(value), figure + OF: len(value)}
                else:
                    expected[figure] = float(value)
        assert dict(ours.figures) == expected, item.doc
        assert ours.reward == float(samples[chosen.filter]["metrics"][chosen.metric])
    rewards = [ours.reward for ours in compared.scores]
    assert 0.1 < sum(rewards) / len(rewards) < 0.9  # else the answers would show little
    mean = compared.results[chosen.task][f"{chosen.metric},{chosen.filter}"]
    assert sum(rewards) / len(rewards) == pytest.approx(mean)


@pytest.mark.parametrize("name", ["gsm8k", "mmlu_pro"])
def test_chats_are_those_of_lm_eval(name: str, hub: Hub, tmp_path: Path):
    """Shots are earlier turns, and what describes the task is the system message."""
    items = read(name, hub, is_chat=True)
    answers = {task: [""] * ITEMS for task in {item.task for item in items}}
    benchmark = BENCHMARKS[name]
    given = {"task": benchmark.task, "folder": benchmark.folder, "answers": answers, "chat": True}
    samples = run_reference(given, tmp_path)["samples"]
    by_task = defaultdict(list)
    for item in items:
        by_task[item.task].append(item.prompt)
    chats = {(task, number): chat for task, several in by_task.items() for number, chat in enumerate(several)}
    asked = {(sample["task"], sample["number"]): json.loads(sample["prompt"]) for sample in samples}
    assert asked == chats
    assert len(chats) == ITEMS
    assert [message["role"] for message in items[0].prompt][-3:] == ["user", "assistant", "user"]
