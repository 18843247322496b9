"""Plugins that were built as wheels while the contract was 1.0 and 1.1, beside `plugin_1_0`: what they use still works.

An engine of 1.0 has addresses that have moved since: it certifies, is warned, and the doctor says where they are.
"""

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from enginehouse.data import Ragged
from enginehouse.engines.declared import find_faults
from enginehouse.plugin import PluginManager, load_plugins, process
from enginehouse.plugin.deprecation import ContractDeprecation
from enginehouse_testing.doctor.imports import imports_of, off_contract
from enginehouse_testing.given import Given
from enginehouse_testing.running import certify

WHEELS = Path(__file__).parent / "wheels"
OLD = {"plugin_1_0_engine": "1.0", "plugin_1_1": "1.1"}
"""The contract that each says."""


@pytest.fixture(params=OLD)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginManager]:
    """All plugins, the one of the test from its wheel among them."""
    zipfile.ZipFile(next(WHEELS.glob(f"{name}-*.whl"))).extractall(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = load_plugins(enabled=[name, "torch"], strict=True)
    monkeypatch.setattr(process, "_current", found)
    yield found
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[module]


def test_it_is_loaded_and_all_that_it_names_is_there(loaded: PluginManager, name: str):
    (plugin,) = [one for one in loaded.plugins if one.name == name]
    assert (plugin.status, plugin.protocol, plugin.note) == ("ok", OLD[name], "")
    for record in plugin.records:
        assert list(find_faults(record)) == []


@pytest.mark.parametrize("name", ["plugin_1_0_engine"], indirect=True)
def test_the_doctor_says_of_a_moved_name_where_it_is_now_and_where_it_is_used(loaded: PluginManager, tmp_path: Path):
    file = tmp_path / "plugin_1_0_engine" / "training.py"
    said = {one.where: off_contract(one) for one in imports_of([file])}
    line = next(
        n for n, text in enumerate(file.read_text().splitlines(), 1) if "engines.weights import checksum" in text
    )
    address = "it imports enginehouse.engines.weights.checksum, which is now enginehouse.weights.checksum"
    assert said[f"{file}:{line}"] == (False, f"{address}; contract 2.0 removes the old import path")
    assert not any(fails for fails, _ in said.values())


def test_what_has_moved_is_given_at_its_old_address_with_a_warning():
    with pytest.warns(ContractDeprecation, match=r"use enginehouse\.weights\.checksum"):
        from enginehouse.engines.weights import checksum
    assert checksum(torch.ones(3)) == importlib.import_module("enginehouse.weights").checksum(torch.ones(3))
    with pytest.warns(ContractDeprecation, match=r"use enginehouse_testing\.TrainEngineSuite"):
        from enginehouse.testing import TrainEngineSuite
    assert TrainEngineSuite is importlib.import_module("enginehouse_testing").TrainEngineSuite
    with pytest.raises(ImportError, match="cannot import name 'Suites'"):
        from enginehouse.testing import Suites  # noqa: F401
    column = Ragged.from_list([[5, 6, 7], [], [8]])
    with pytest.warns(ContractDeprecation, match="pad_sequence"):
        assert column.to_padded(0).tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    with pytest.warns(ContractDeprecation):
        assert column.to_padded(-1, "left").tolist() == [[5, 6, 7], [-1, -1, -1], [-1, -1, 8]]


@pytest.mark.parametrize("name", ["plugin_1_1"], indirect=True)
@pytest.mark.parametrize("kind", ["tracker", "environment", "reward"])
def test_what_came_with_1_1_certifies(loaded: PluginManager, kind: str):
    examples = ({"prompt": "1+1=", "response": "2", "answer": "2"},)
    certificate = certify(loaded.get(kind, "middle"), given=Given(examples=examples if kind == "reward" else ()))
    assert certificate.clean, certificate.as_markdown()


@pytest.mark.parametrize("name", ["plugin_1_1"], indirect=True)
def test_a_filter_and_an_observer_of_1_1_do_what_they_did(loaded: PluginManager, tmp_path: Path):
    assert loaded.function("filter", "middle")(SimpleNamespace())
    loaded.observe("run_recorded", directory=str(tmp_path), outcome="finished")
    assert (tmp_path / "middle.txt").read_text() == "recorded finished\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plugin_1_0_engine"], indirect=True)
def test_an_engine_of_1_0_certifies_with_a_warning_where_a_check_came_later(loaded: PluginManager):
    certificate = certify(loaded.get("train", "early"))
    assert certificate.passed, certificate.as_markdown()
    assert [one.name for one in certificate.checks if one.outcome == "warning"] == ["finite_weights"]
