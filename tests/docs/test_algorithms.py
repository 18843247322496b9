"""docs/algorithms.md says what the records, the docstrings and the comparisons say, and leaves none out."""

import json

from tools.algorithms import CASES, COMPARED, ELSEWHERE, MEANS, PAGE, compared_page, page

from enginehouse.plugin import load_plugins
from enginehouse_rl.losses.aggregate import AGGREGATIONS


def test_the_page_of_algorithms_is_that_of_today():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: make algorithms"
    assert COMPARED.read_text(encoding="utf-8") == compared_page(), "write it anew: make algorithms"


def test_every_advantage_and_loss_was_compared_with_something():
    compared = {case["name"] for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]} | ELSEWHERE.keys()
    internal = [one.record for one in load_plugins(enabled=[]).providers() if one.plugin.internal]
    assert {record.name for record in internal if record.kind in ("advantage", "loss")} <= compared


def test_every_mean_has_its_names():
    assert tuple(MEANS) == AGGREGATIONS
