"""The contract is what was written down of it, and changes only as its version says. Names here are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
from contract.page import PAGE, page
from contract.surface import RAISED, Name, kept, problem, surface

BEFORE: dict[str, Any] = {
    "contract": "1.3",
    "names": {
        "enginehouse.engines.draw": {"since": "1.0", "says": "(n: int) -> int", "arguments": ["n: int"]},
        "enginehouse.engines.TrainEngine": {"since": "1.0", "says": "class(Protocol)"},
        "enginehouse.plugin.Loss": {"since": "1.1", "says": "class(Record)"},
        "enginehouse.plugin.Loss.output": {"since": "1.1", "says": "str = 'logprobs'"},
    },
}
TODAY = {
    "enginehouse.engines.draw": Name("(n: int) -> int", ("n: int",)),
    "enginehouse.engines.TrainEngine": Name("class(Protocol)"),
    "enginehouse.plugin.Loss": Name("class(Record)"),
    "enginehouse.plugin.Loss.output": Name("str = 'logprobs'", owner="enginehouse.plugin.Loss"),
}
ENGINE, LOSS = "enginehouse.engines.TrainEngine", "enginehouse.plugin.Loss"
ADDED = {
    "a function": {"enginehouse.engines.sample": Name("() -> int")},
    "an argument with a default": {
        "enginehouse.engines.draw": Name("(n: int, k: int = 1) -> int", ("n: int", "k: int = 1"))
    },
    "a field with a default": {f"{LOSS}.kind": Name("str = ''", owner=LOSS)},
}
BROKEN = {
    "an argument without a default": {
        "enginehouse.engines.draw": Name("(n: int, k: int) -> int", ("n: int", "k: int"))
    },
    "another type": {"enginehouse.engines.draw": Name("(n: str) -> int", ("n: str",))},
    "another result": {"enginehouse.engines.draw": Name("(n: int) -> str", ("n: int",))},
    "a further method of a protocol": {f"{ENGINE}.save": Name("(path: str) -> None", ("path: str",), owner=ENGINE)},
    "a field that must be given": {f"{LOSS}.kind": Name("str", owner=LOSS)},
    "another default": {f"{LOSS}.output": Name("str = 'values'", owner=LOSS)},
}


def test_the_contract_is_what_was_written_down():
    assert problem(kept(), surface()) == ""


def test_the_page_of_the_contract_is_that_of_today():
    assert PAGE.read_text(encoding="utf-8") == page(kept()), "write it anew: make contract"


def test_nothing_is_to_do_where_nothing_changed():
    assert problem(BEFORE, TODAY, (1, 3)) == ""


@pytest.mark.parametrize("what", ADDED)
def test_what_is_added_raises_the_minor_version(what: str):
    assert "raise CONTRACT in plugin/hookspecs.py to (1, 4)" in problem(BEFORE, TODAY | ADDED[what], (1, 3))
    assert problem(BEFORE, TODAY | ADDED[what], (1, 4)) == RAISED


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_plugins_is_refused_but_by_a_major_version(what: str):
    for offered in ((1, 3), (1, 4)):
        assert "these break plugins of this major version" in problem(BEFORE, TODAY | BROKEN[what], offered)
    assert problem(BEFORE, TODAY | BROKEN[what], (2, 0)) == RAISED


OPEN = {
    "contract": "1.3",
    "published": "1.2",
    "names": BEFORE["names"] | {"enginehouse.engines.open": {"since": "1.3", "says": "() -> int"}},
}


def test_what_is_not_published_yet_may_change():
    today = TODAY | {"enginehouse.engines.open": Name("() -> int")}
    assert problem(OPEN, today, (1, 3)) == ""
    for changed in (TODAY, today | {"enginehouse.engines.open": Name("() -> str")}, today | ADDED["a function"]):
        assert problem(OPEN, changed, (1, 3)) == RAISED
    assert "these break plugins" in problem(OPEN, today | BROKEN["another type"], (1, 3))
    assert "raise CONTRACT" in problem(OPEN | {"published": "1.3"}, today | ADDED["a function"], (1, 3))


def test_what_is_gone_is_named():
    gone = {address: name for address, name in TODAY.items() if not address.endswith("draw")}
    assert "enginehouse.engines.draw is gone" in problem(BEFORE, gone, (1, 4))
