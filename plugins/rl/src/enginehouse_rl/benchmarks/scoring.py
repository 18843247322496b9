"""The reward of responses to a benchmark: lm-eval extracts the answer from a response and compares it."""

from __future__ import annotations

import importlib
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import postprocess_generated_text

from enginehouse_rl.benchmarks.lm_eval_tasks import make_scorer
from enginehouse_rl.benchmarks.names import BENCHMARKS
from enginehouse_rl.benchmarks.ratios import OF, RIGHT

INVALID = "[invalid]"
"""The result of an lm-eval filter that finds no answer."""


def score(response: str, benchmark: str, task: str, doc: dict[str, Any]) -> dict[str, Any]:
    """Return the score of a response by the benchmark's metric, and all lm-eval metrics of the response."""
    scorer, chosen = _find_scorer(benchmark, task, doc), BENCHMARKS[benchmark]
    request = scorer.construct_requests(doc=doc, ctx="", metadata=(task, 0, 1))
    assert isinstance(request, Instance)  # each of these tasks generates text
    request.resps = [postprocess_generated_text(response, (scorer.config.generation_kwargs or {}).get("until"), None)]
    scorer._instances = [request]  # `apply_filters` takes them from there, and has no argument
    scorer.apply_filters()
    figures: dict[str, Any] = {}
    for name, answer in request.filtered_resps.items():
        metrics = scorer.process_results(doc, [answer])
        if name == chosen.filter:
            figures |= {"reward": float(metrics[chosen.metric])} | _name_answer(answer, name)
        several = len(request.filtered_resps) > 1
        for metric, value in metrics.items():
            figures |= _list_figures(f"{metric}.{name}" if several else metric, value)
    return figures


def _list_figures(name: str, value: Any) -> dict[str, float]:
    """Return a metric of an item as numbers. For a list of verdicts, these are the number of right verdicts and the
    number of all verdicts."""
    if isinstance(value, list):
        return {name + RIGHT: float(sum(value)), name + OF: float(len(value))}
    return {name: float(value)}


def _name_answer(answer: Any, filter_name: str) -> dict[str, str]:
    """Return the answer that a filter extracted from a response; empty if the whole response is compared."""
    return {"answer": answer} if filter_name != "none" and answer != INVALID else {}


_scorers: dict[tuple[str, str], ConfigurableTask] = {}


def _find_scorer(benchmark: str, task: str, doc: dict[str, Any]) -> ConfigurableTask:
    """Return the scorer of a task's responses, which is created for the first response."""
    if (benchmark, task) not in _scorers:
        _scorers[benchmark, task] = make_scorer(benchmark, task, doc)
        if benchmark == "math500":
            # Its first call loads a grammar, which may exceed the time after which lm-eval calls an answer wrong.
            importlib.import_module("sympy.parsing.latex").parse_latex("1")
    return _scorers[benchmark, task]
