"""The contract is what was written down of it, and changes only as its version says. Names here are stand-ins."""

import functools
from typing import Any

import griffe
import pytest
from tools.contract.page import FOLDER, pages
from tools.contract.surface import PROMISED, RAISED, Name, entry_of, kept, names_of, problem, promised, surface

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
    written = {path: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert written == pages(kept()), "write them again: make contract"


def test_what_the_doctor_reads_of_the_contract_is_that_of_today():
    assert PROMISED.read_text(encoding="utf-8") == promised(surface()), "write it anew: make contract"


def test_nothing_is_to_do_where_nothing_changed():
    assert problem(BEFORE, TODAY, (1, 3)) == ""


@pytest.mark.parametrize("what", ADDED)
def test_what_is_added_raises_the_minor_version(what: str):
    assert "raise CONTRACT in plugin/hookspecs.py to (1, 4)" in problem(BEFORE, TODAY | ADDED[what], (1, 3))
    assert problem(BEFORE, TODAY | ADDED[what], (1, 4)) == RAISED


def test_only_a_guarded_literal_may_get_more_values():
    for address, harmless in (("enginehouse.engines.PauseMode", True), ("enginehouse.engines.FinishReason", False)):
        before = {"names": BEFORE["names"] | {address: {"since": "1.0", "says": "= Literal['abort', 'wait']"}}}
        for now, more in (("= Literal['abort', 'wait', 'keep']", True), ("= Literal['abort', 'keep']", False)):
            found = problem(BEFORE | before, TODAY | {address: Name(now)}, (1, 4))
            assert found == RAISED if harmless and more else "these break plugins" in found


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


SOURCE = {
    "plugin/hookspecs.py": """
@hookspec(firstresult=True)
def enginehouse_pick(run, step): ...
@hookspec
def enginehouse_seen(run): ...
""",
    "plugin/records.py": """
from dataclasses import dataclass, field
__all__ = ["Loss"]
@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    function: str
    output: str = "logprobs"
""",
    "engines/__init__.py": """
from dataclasses import dataclass, field
__all__ = ["Bare", "Episode", "Options", "Rows", "draw", "pull"]
@dataclass(frozen=True, slots=True)
class Episode:
    score: float
    prompt: str = ""
    response: str = ""
class Rows:
    def __init__(self, given: list[int]): ...
    def __getitem__(self, row: int) -> int: ...
    @classmethod
    def of(cls, rows: list[int]) -> Rows: ...
class Bare: ...
class Options(BaseModel):
    seed: int = 0
def draw(n: int, b: int = 2, *, c: int = 3) -> int: ...
def pull() -> int: ...
""",
}
"""The source of a contract of which each case below edits one piece."""
BREAKING = {
    "an argument of __init__": ("given: list[int])", "given: list[int], serial: int)"),
    "an __init__ that there was not": ("class Bare: ...", "class Bare:\n    def __init__(self, given: int): ..."),
    "a special method is gone": ("    def __getitem__(self, row: int) -> int: ...\n", ""),
    "the order of fields": ('prompt: str = ""\n    response: str', 'response: str = ""\n    prompt: str'),
    "fields by keyword alone": ("slots=True)", "slots=True, kw_only=True)"),
    "fields by position too": ("slots=True, kw_only=True)", "slots=True)"),
    "the first result": ("@hookspec(firstresult=True)", "@hookspec"),
    "a class method": ("    @classmethod\n    def of(cls", "    def of(self"),
    "a tuple that a record needs": ("function: str", "function: str\n    needs: tuple[str, ...]"),
    "a union that a record needs": ("function: str", "function: str\n    needs: str | None"),
    "a field that a dataclass needs": ("score: float", "score: float\n    seed: int"),
    "a field that a model needs": ("seed: int = 0", "seed: int = 0\n    steps: list[int] | None"),
    "an argument before another": ("(n: int, b", "(n: int, a: int = 1, b"),
    "an argument by keyword that is needed": ("c: int = 3", "c: int = 3, d: int"),
    "by position alone": ("(n: int, b", "(n: int, /, b"),
    "async, and an argument": ("def draw(n: int, b: int = 2,", "async def draw(n: int, b: int = 2, d: int = 4,"),
    "a hook's argument is gone": ("(run, step)", "(run)"),
}
GROWN = {
    "a last argument": ("b: int = 2,", "b: int = 2, d: int = 4,"),
    "a first argument": ("pull()", "pull(n: int = 1)"),
    "an argument by keyword": ("*, c", "*, d: int = 4, c"),
    "further arguments": ("c: int = 3", "c: int = 3, **more: int"),
    "a record's field": ("function: str", 'function: str\n    also: str = ""'),
    "a dataclass's last field": ('response: str = ""', 'response: str = ""\n    finish: str = ""'),
    "an argument of a hook": ("(run, step)", "(run, seconds, step)"),
}
GOES = 'deprecated("what", since="1.4", instead="that")'
DEPRECATES = {
    "hook": ("@hookspec\n", f"@hookspec(warn_on_impl={GOES})\n"),
    "argument": ("firstresult=True", f'firstresult=True, warn_on_impl_args={{"step": {GOES}}}'),
    "field": ('= "logprobs"', f'= field(default="logprobs", metadata={{DEPRECATED: {GOES}}})'),
    "name": (
        "def draw(",
        f'__getattr__ = moved(__name__, {{"draw": ("enginehouse.engines:sample", {GOES})}})\ndef sample(',
    ),
    "name of a package of names imported when used": (
        "def draw(",
        f'__getattr__ = moved(__name__, {{"draw": ("enginehouse.engines:sample", {GOES})}}, exports(__name__, {{}}))\n'
        "def sample(",
    ),
}
"""The lines that `plugin/deprecation.py` says to write."""


@functools.cache
def names(old: str = "", new: str = "") -> dict[str, Name]:
    """The promised names of `SOURCE` with one piece edited."""
    assert all(sum(text.count(old) for text in SOURCE.values()) == 1 for old in [old] if old), old
    edited = {path: text.replace(old, new) if old else text for path, text in SOURCE.items()}
    packages = dict.fromkeys(("__init__.py", "plugin/__init__.py"), "")
    with griffe.temporary_visited_package("enginehouse", packages | edited) as package:
        return names_of([package])


def written() -> dict[str, Any]:
    """The snapshot of `SOURCE`, as contract 1.3."""
    return {"contract": "1.3", "names": {one: {"since": "1.0"} | entry_of(name) for one, name in names().items()}}


def test_a_source_that_is_as_it_was_asks_for_nothing():
    assert problem(written(), names(), (1, 3)) == ""
    assert "enginehouse.engines.Rows.__getitem__" in names()


@pytest.mark.parametrize("what", BREAKING)
def test_what_breaks_plugins_is_seen_in_the_source(what: str):
    assert "these break plugins of this major version" in problem(written(), names(*BREAKING[what]), (1, 4))


@pytest.mark.parametrize("what", GROWN)
def test_what_merely_grows_is_seen_in_the_source(what: str):
    assert "raise CONTRACT" in problem(written(), names(*GROWN[what]), (1, 3))
    assert problem(written(), names(*GROWN[what]), (1, 4)) == RAISED


@pytest.mark.parametrize("what", DEPRECATES)
def test_what_is_deprecated_breaks_nothing(what: str):
    assert problem(written(), names(*DEPRECATES[what]), (1, 3)) == ""


def test_a_moved_name_may_leave_the_list_of_its_module():
    source = SOURCE["engines/__init__.py"].replace(*DEPRECATES["name"]).replace(', "draw"', "")
    with griffe.temporary_visited_package("enginehouse", {"__init__.py": "", "engines/__init__.py": source}) as package:
        assert names_of([package])["enginehouse.engines.draw"] == names()["enginehouse.engines.draw"]


def test_a_reward_that_init_wrote_before_the_trainer_was_a_plugin_is_imported(tmp_path, monkeypatch):
    (tmp_path / "written_by_init.py").write_text("from enginehouse.rl.rewards.builtin.numeric import numeric\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(FutureWarning, match="use enginehouse_rewards"):
        import written_by_init
    from enginehouse_rewards.builtin.numeric import numeric

    assert written_by_init.numeric is numeric
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import enginehouse.rl.nowhere  # noqa: F401
