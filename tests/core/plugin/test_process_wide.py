"""The plugins of a process: switches from its environment and from the config."""

import logging

import pytest

from enginehouse.plugin import configure_plugins, plugins, process
from enginehouse.runtimes.readiness import plugin_states


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.delenv("ENGINEHOUSE_PLUGINS", raising=False)
    monkeypatch.delenv("ENGINEHOUSE_BLOCK_PLUGINS", raising=False)


@pytest.fixture(autouse=True)
def two(distributions):
    distributions.add("north", "")
    distributions.add("south", "")


def states() -> tuple[str, str]:
    return plugin_states(plugins())["north"], plugin_states(plugins())["south"]


def test_all_are_loaded_once_where_nothing_is_said():
    assert states() == ("ok", "ok")
    assert plugins() is plugins()


@pytest.mark.parametrize(
    ("enabled", "blocked", "expected"),
    [
        ("", None, ("blocked", "blocked")),
        ("south", None, ("blocked", "ok")),
        (" north , south ", None, ("ok", "ok")),
        (None, "south", ("ok", "blocked")),
        ("south", "south", ("blocked", "blocked")),
    ],
)
def test_the_environment_decides(monkeypatch, enabled, blocked, expected):
    if enabled is not None:
        monkeypatch.setenv("ENGINEHOUSE_PLUGINS", enabled)
    if blocked is not None:
        monkeypatch.setenv("ENGINEHOUSE_BLOCK_PLUGINS", blocked)
    assert states() == expected


def test_the_configs_switches_become_the_processs():
    configured = configure_plugins(enabled=["south"])
    assert plugins() is configured
    assert states() == ("blocked", "ok")


def test_switches_said_after_first_use_still_hold():
    assert states() == ("ok", "ok")
    configure_plugins(blocked=["north"])
    assert states() == ("blocked", "ok")


def test_the_same_switches_load_nothing_again():
    first = configure_plugins(blocked=["north"])
    assert configure_plugins(blocked=["north"]) is first


def test_the_environments_list_stands_in_for_the_configs_and_blocks_add_up(monkeypatch):
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", "north,south")
    monkeypatch.setenv("ENGINEHOUSE_BLOCK_PLUGINS", "north")
    configure_plugins(enabled=["south"], blocked=["south"])
    assert states() == ("blocked", "blocked")


@pytest.mark.parametrize("switches", [{}, {"enabled": ()}, {"enabled": ("south",), "blocked": ("north",)}])
def test_a_worker_gets_the_same_plugins_through_its_environment(monkeypatch, switches):
    controller = configure_plugins(**switches)
    expected = plugin_states(controller)
    for name, value in controller.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "_current", None)
    assert plugin_states(plugins()) == expected


def test_the_controller_is_warned_of_plugins_that_do_not_load_or_are_not_there(distributions, caplog):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    with caplog.at_level(logging.WARNING, logger="enginehouse"):
        configure_plugins(enabled=["fragile", "nroth"])
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "fragile" in said
    assert "no luck today" in said
    assert "nroth is enabled but not installed" in said
