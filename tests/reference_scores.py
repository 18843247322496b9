"""Has lm-eval evaluate a benchmark whole, with answers that are given: a program that prints what it made of each item.

It fetches the data set itself, and runs as a user of lm-eval runs it: `simple_evaluate`.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.models.utils import postprocess_generated_text


class GivenAnswers(LM):
    """A model that gives answers by task and number of the item, cut as lm-eval's own models cut theirs."""

    def __init__(self, answers: dict[str, list[str]]):
        super().__init__()
        self._answers = answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [
            postprocess_generated_text(self._answers[request.task_name][request.doc_id], request.args[1]["until"], None)
            for request in requests
        ]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps(chat_history)

    @property
    def tokenizer_name(self) -> str:
        return "messages"

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(task: str, folder: str, answers: dict[str, list[str]], chat: bool = False) -> dict[str, Any]:
    """Return lm-eval's samples of a task or a group, and its results; prompts of a chat are its messages in JSON."""
    if folder == "minerva_math":  # its first call loads a grammar, which may take longer than lm-eval waits for it
        importlib.import_module("sympy.parsing.latex").parse_latex("1")
    place = Path(lm_eval.tasks.__file__).parent / folder
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(place))
    ended = lm_eval.simple_evaluate(
        GivenAnswers(answers), tasks=[task], task_manager=manager, bootstrap_iters=0, apply_chat_template=chat
    )
    assert ended is not None
    samples = [
        {
            "task": name,
            "number": sample["doc_id"],
            "filter": sample["filter"],
            "prompt": sample["arguments"][0][0],
            "doc": sample["doc"],
            "metrics": {metric: sample[metric] for metric in sample["metrics"]},
        }
        for name, several in ended["samples"].items()
        for sample in several
    ]
    return {"samples": samples, "results": {**ended["results"], **ended.get("groups", {})}}


if __name__ == "__main__":
    given, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(evaluate(**json.loads(given.read_text())), default=float))
