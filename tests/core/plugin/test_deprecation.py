"""A plugin that uses what will go is told so, by name and replacement. Nothing is deprecated yet: this stands in."""

import logging
import sys
import warnings
from dataclasses import dataclass, field
from types import ModuleType

import pytest
from click.testing import CliRunner

from enginehouse import data, lazy
from enginehouse.cli.main import main
from enginehouse.plugin import Loss, configure_plugins, hookspecs, load_plugins, process
from enginehouse.plugin.deprecation import DEPRECATED, ContractDeprecation, deprecated, moved

OLD_HOOK = deprecated("enginehouse_validated", since="1.2", instead="enginehouse_judged")
OLD_ARGUMENT = deprecated("enginehouse_step_finished(step)", since="1.2", instead="run.step")
OLD_FIELD = deprecated("OldLoss.shape", since="1.2", instead="Loss.output")
OLD_NAME = deprecated("stand_in.Old", since="1.2", instead="enginehouse.plugin.Loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLoss(Loss):
    shape: str = field(default="", metadata={DEPRECATED: OLD_FIELD})


@pytest.fixture(autouse=True)
def old_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract with a deprecated hook, argument, field and name."""

    @hookspecs.hookspec(warn_on_impl=OLD_HOOK)
    def enginehouse_validated(run, step, metrics): ...

    @hookspecs.hookspec(warn_on_impl_args={"step": OLD_ARGUMENT})
    def enginehouse_step_finished(run, step, metrics): ...

    monkeypatch.setattr(process, "_current", None)
    monkeypatch.delenv("ENGINEHOUSE_PLUGINS", raising=False)
    monkeypatch.setattr(hookspecs, "enginehouse_validated", enginehouse_validated)
    monkeypatch.setattr(hookspecs, "enginehouse_step_finished", enginehouse_step_finished)
    module = ModuleType("stand_in")
    module.__dict__.update(__getattr__=moved("stand_in", {"Old": ("enginehouse.plugin:Loss", OLD_NAME)}))
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setattr(module, "OldLoss", OldLoss, raising=False)


USES = {
    "hook": ("@hookimpl\ndef enginehouse_validated(run): ...", OLD_HOOK),
    "argument": ("@hookimpl\ndef enginehouse_step_finished(run, step): ...", OLD_ARGUMENT),
    "field": (
        "from stand_in import OldLoss\n@hookimpl\ndef enginehouse_register_losses(register):\n"
        "    register(OldLoss(name='mine', function='nowhere:mine', shape='flat'))",
        OLD_FIELD,
    ),
    "name": ("from stand_in import Old\nassert Old is Loss", OLD_NAME),
}
NEITHER = """
from stand_in import OldLoss
@hookimpl
def enginehouse_step_finished(run, metrics): ...
@hookimpl
def enginehouse_register_losses(register):
    register(OldLoss(name='mine', function='nowhere:mine'))
"""


@pytest.mark.parametrize("what", USES)
def test_what_a_plugin_uses_that_will_go_is_its_note(distributions, what: str):
    source, warning = USES[what]
    distributions.add("careless", source)
    (plugin,) = [one for one in load_plugins(enabled=["careless"]).plugins if one.name == "careless"]
    assert (plugin.status, plugin.note) == ("ok", str(warning))
    assert "is deprecated since contract 1.2, and 2.0 removes it: use " in plugin.note


def test_a_plugin_that_uses_nothing_old_is_told_nothing(distributions):
    distributions.add("careful", NEITHER)
    (plugin,) = [one for one in load_plugins(enabled=["careful"]).plugins if one.name == "careful"]
    assert (plugin.status, plugin.note) == ("ok", "")


def test_a_run_logs_it_once_with_the_plugin_and_its_distribution(distributions, caplog, monkeypatch):
    distributions.add("careless", USES["hook"][0] + "\n" + USES["argument"][0], name="careless", version="3.1")
    with caplog.at_level(logging.WARNING):
        configure_plugins(enabled=["careless"])
    said = [f"plugin careless (careless 3.1): {warning}" for warning in (OLD_HOOK, OLD_ARGUMENT)]
    assert sorted(record.getMessage() for record in caplog.records) == sorted(said)


def test_it_is_in_the_list_of_plugins(distributions, monkeypatch: pytest.MonkeyPatch):
    distributions.add("careless", USES["hook"][0])
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", "careless")
    configure_plugins()
    listed = CliRunner().invoke(main, ["plugins", "list"])
    assert "enginehouse_judged" in " ".join(listed.output.split())


def test_a_name_used_in_a_worker_warns_there():
    with pytest.warns(ContractDeprecation, match=r"stand_in\.Old is deprecated"):
        assert sys.modules["stand_in"].Old is Loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="'stand_in' has no attribute 'Odd'"):
            _ = sys.modules["stand_in"].Odd


def test_a_package_of_names_imported_when_used_keeps_them():
    names = lazy.exports("enginehouse.data", {"batch": ["Batch"]})
    given = moved("enginehouse.data", {"Old": ("enginehouse.plugin:Loss", OLD_NAME)}, names)
    assert given("Batch") is data.Batch
    with pytest.warns(ContractDeprecation, match=r"stand_in\.Old is deprecated"):
        assert given("Old") is Loss
    with pytest.raises(AttributeError, match=r"'enginehouse\.data' has no attribute 'Odd'"):
        given("Odd")
