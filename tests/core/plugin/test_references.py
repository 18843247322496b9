"""What records name is looked for without importing it."""

import ast
import gc
import importlib
import sys

import pytest

from enginehouse.plugin.records import ResolveError
from enginehouse.plugin.references import find_definition, find_missing_methods

ENGINE = """
raise RuntimeError("imported")

import json as reader
from elsewhere import Borrowed

try:
    class Guarded: ...
except Exception:
    Fallback = None

class Whole:
    async def start(self): ...
    stop = start

class Half(object):
    def start(self): ...

class Heir(Borrowed):
    def start(self): ...

def make(): ...
"""


class Protocol:
    def start(self): ...

    def stop(self): ...


@pytest.fixture
def engines(tmp_path, monkeypatch):
    (tmp_path / "engines_to_read").mkdir()
    (tmp_path / "engines_to_read" / "__init__.py").write_text("")
    (tmp_path / "engines_to_read" / "engine.py").write_text(ENGINE)
    (tmp_path / "engines_to_read" / "open.py").write_text("from elsewhere import *")
    (tmp_path / "engines_to_read" / "torn.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "engines_to_read"
    sys.modules.pop("engines_to_read", None)


@pytest.mark.parametrize("name", ["Whole", "Borrowed", "Guarded", "Fallback", "reader", "make"])
def test_what_a_module_binds_is_found_and_the_module_not_imported(engines, name):
    find_definition(f"{engines}.engine:{name}")
    assert f"{engines}.engine" not in sys.modules


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("engine:Hole", "no 'Hole' (asked for by 'engines_to_read.engine:Hole'). Did you mean 'Whole'?"),
        ("engin:Whole", "there is no module 'engines_to_read.engin'"),
        ("torn:f", "SyntaxError"),
    ],
)
def test_what_is_not_there_is_an_error(engines, reference, said):
    with pytest.raises(ResolveError) as caught:
        find_definition(f"{engines}.{reference}")
    assert said in str(caught.value)


def test_a_package_that_is_not_there_is_an_error():
    with pytest.raises(ResolveError, match="no_such_package"):
        find_definition("no_such_package.engine:Engine")


def test_what_reading_cannot_tell_counts_as_there(engines):
    assert find_definition(f"{engines}.open:Anything") is None


def test_methods_that_a_class_lacks_are_told_where_it_has_no_other_class_to_take_them_from(engines):
    found = {
        name: find_definition(f"{engines}.engine:{name}") for name in ("Whole", "Half", "Heir", "Borrowed", "make")
    }
    assert {name: find_missing_methods(one, Protocol) for name, one in found.items()} == {
        "Whole": [], "Half": ["stop"], "Heir": [], "Borrowed": [], "make": [],
    }  # fmt: skip
    assert find_missing_methods(Protocol, Protocol) == []
    assert find_missing_methods(object, Protocol) == ["start", "stop"]


def test_a_finalizer_that_reads_source_meanwhile_does_no_harm(tmp_path, monkeypatch):
    """CPython up to 3.11 counts the depth of all syntax trees in one place; a traceback written by a finalizer makes
    one too (https://github.com/python/cpython/issues/106905)."""

    class Dropped:
        def __init__(self):
            self.itself = self

        def __del__(self):
            (lambda: (lambda: ast.parse("x = [1]"))())()

    (tmp_path / "long_module.py").write_text("def make(): ...\n" + "x = [[1], [2], [3]]\n" * 5_000)
    monkeypatch.syspath_prepend(tmp_path)
    limits = gc.get_threshold()
    gc.set_threshold(5_000, *limits[1:])
    try:
        Dropped()
        assert find_definition("long_module:make").name == "make"
    finally:
        gc.set_threshold(*limits)
