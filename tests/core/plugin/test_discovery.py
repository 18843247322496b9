"""Which plugins are loaded, what becomes of each, and that one plugin's failure is its own."""

import sys

import pytest

from enginehouse.plugin import CONTRACT, PluginLookupError, TrainBackend, discovery, load_plugins
from enginehouse.runtimes.readiness import plugin_states


@pytest.fixture
def sound(distributions):
    """A plugin that works, to be found working beside each that does not."""
    distributions.backend("sound", backend="sound")


def plugin_of(manager, name):
    return next(plugin for plugin in manager.plugins if plugin.name == name)


def lookup_error(manager, kind, name) -> PluginLookupError:
    with pytest.raises(PluginLookupError) as caught:
        manager.get(kind, name)
    return caught.value


def test_an_installed_plugin_is_found_and_its_backend_usable(sound):
    manager = load_plugins(enabled=["sound"])
    assert plugin_states(manager)["sound"] == "ok"
    assert manager.get(TrainBackend, "sound").engine == "nowhere:Engine"
    assert (plugin_of(manager, "sound").distribution, plugin_of(manager, "sound").version) == ("sound", "0.1.0")


def test_what_records_name_is_not_imported_until_it_is_used(distributions):
    (distributions.site / "engine_of_lazy.py").write_text("class Engine: ...\nclass Options: ...\n")
    distributions.add(
        "lazy",
        """
        @hookimpl
        def enginehouse_register_backends(register):
            register(TrainBackend(name="lazy", engine="engine_of_lazy:Engine", options="engine_of_lazy:Options"))
        """,
    )
    manager = load_plugins(enabled=["lazy"])
    assert plugin_states(manager)["lazy"] == "ok"
    assert manager.get("train", "lazy").engine == "engine_of_lazy:Engine"
    assert "engine_of_lazy" not in sys.modules


def test_cores_own_plugins_are_always_there_and_come_first():
    manager = load_plugins(enabled=[])
    assert {state for name, state in plugin_states(manager).items() if name.startswith("enginehouse.")} == {"ok"}
    assert manager.plugins[0].internal
    assert manager.get("advantage", "grpo").name == "grpo"


def test_a_plugin_that_raises_at_import_is_broken_and_the_others_work(distributions, sound):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    manager = load_plugins(enabled=["fragile", "sound"])
    fragile = plugin_of(manager, "fragile")
    assert plugin_states(manager)["fragile"] == "broken"
    assert fragile.problem == "RuntimeError: no luck today"
    assert "Traceback" in fragile.traceback
    assert "fragile_" in fragile.traceback
    assert manager.get("train", "sound")


def test_a_plugin_that_exits_at_import_does_not_end_the_program(distributions, sound):
    distributions.add("leaver", "import sys; sys.exit(3)")
    manager = load_plugins(enabled=["leaver", "sound"])
    assert plugin_states(manager)["leaver"] == "broken"
    assert manager.get("train", "sound")


def test_the_error_of_a_broken_plugin_is_shown_where_its_backend_is_asked_for(distributions):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    error = lookup_error(load_plugins(enabled=["fragile"]), "train", "fragile")
    assert error.reason == "broken"
    assert "no luck today" in str(error)
    assert "Traceback" in str(error)


@pytest.mark.parametrize(
    ("said", "state"),
    [("9.0", "incompatible"), ("0.9", "incompatible"), ("1.0", "ok"), ("1.1", "ok"), ("", "incompatible")],
)
def test_the_contract_version_is_checked(distributions, sound, said, state):
    distributions.add("dated", f"enginehouse_protocol = {said!r}" if said else "del enginehouse_protocol")
    manager = load_plugins(enabled=["dated", "sound"])
    assert plugin_states(manager)["dated"] == state
    assert plugin_of(manager, "dated").protocol == said
    assert manager.get("train", "sound")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("enginehouse_protocol = '9.0'", "upgrade enginehouse to a version that offers 9.0, or install an older dated"),
        ("enginehouse_protocol = '0.9'", "upgrade dated to a version for 1.1, or install an older enginehouse"),
        ("del enginehouse_protocol", 'add the line enginehouse_protocol = "1.1" to it'),
    ],
)
def test_what_is_incompatible_is_told_which_side_to_change(distributions, line, told):
    distributions.add("dated", line)
    assert told in plugin_of(load_plugins(enabled=["dated"]), "dated").problem


def test_a_newer_minor_version_is_incompatible(distributions):
    distributions.add("eager", f"enginehouse_protocol = '{CONTRACT[0]}.{CONTRACT[1] + 1}'")
    assert plugin_states(load_plugins(enabled=["eager"]))["eager"] == "incompatible"


def test_an_incompatible_plugin_names_both_versions_and_declares_nothing(distributions):
    distributions.add(
        "dated",
        """
        enginehouse_protocol = "9.0"

        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="dated", function="nowhere:loss"))
        """,
    )
    manager = load_plugins(enabled=["dated"])
    problem = plugin_of(manager, "dated").problem
    assert "9.0" in problem
    assert "1.1" in problem
    assert [loss.name for loss in manager.all("loss") if loss.name == "dated"] == []
    assert lookup_error(manager, "loss", "dated").reason == "incompatible"


def test_a_contract_version_that_is_none_is_incompatible_and_quoted(distributions):
    distributions.add("odd", "enginehouse_protocol = 'latest'")
    manager = load_plugins(enabled=["odd"])
    assert plugin_states(manager)["odd"] == "incompatible"
    assert "'latest'" in plugin_of(manager, "odd").problem


def test_a_contract_version_that_is_a_number_is_refused(distributions):
    distributions.add("number", "enginehouse_protocol = 1.1")
    plugin = plugin_of(load_plugins(), "number")
    assert (plugin.status, plugin.problem) == (
        "incompatible",
        'enginehouse_protocol must be a text, not 1.1; write enginehouse_protocol = "1.1"',
    )


def test_a_blocked_plugin_is_not_imported(distributions, sound):
    module = distributions.backend("heavy")
    manager = load_plugins(enabled=["heavy", "sound"], blocked=["heavy"])
    assert plugin_states(manager)["heavy"] == "blocked"
    assert module not in sys.modules
    assert lookup_error(manager, "train", "heavy").reason == "blocked"
    assert manager.get("train", "sound")


def test_plugins_that_are_not_enabled_are_not_imported(distributions, sound):
    module = distributions.backend("heavy")
    manager = load_plugins(enabled=["sound"])
    assert plugin_states(manager)["heavy"] == "blocked"
    assert "plugins.enabled" in str(lookup_error(manager, "train", "heavy"))
    assert module not in sys.modules


def test_no_plugin_but_cores_own_is_loaded_when_none_is_enabled(distributions, sound):
    manager = load_plugins(enabled=[])
    assert plugin_states(manager)["sound"] == "blocked"
    assert all(provided.plugin.internal for provided in manager.providers())


def test_switches_take_a_distributions_name_in_any_spelling(distributions):
    distributions.add("Fast-Engines", "", name="fast")
    assert plugin_states(load_plugins(blocked=["fast_engines"]))["fast"] == "blocked"
    assert plugin_states(load_plugins(enabled=["fast-engines"]))["fast"] == "ok"


def test_plugins_load_in_the_order_of_their_names(distributions):
    for name in ("cherry", "apple", "banana"):
        distributions.add(name, "")
    names = [
        plugin.name for plugin in load_plugins(enabled=["apple", "banana", "cherry"]).plugins if not plugin.internal
    ]
    assert [name for name in names if name in ("apple", "banana", "cherry")] == ["apple", "banana", "cherry"]


PARTIAL = """
@hookimpl
def enginehouse_register_advantages(register):
    register(Advantage(name="first", function="nowhere:first"))

@hookimpl
def enginehouse_register_backends(register):
    register(TrainBackend(name="half", engine="nowhere:Engine", options="nowhere:Options"))
    raise ValueError("second thoughts")

@hookimpl
def enginehouse_step_finished(step):
    raise AssertionError("an observer of a plugin that was taken back")
"""


def test_all_that_a_failing_plugin_declared_is_taken_back(distributions, sound):
    distributions.add("hasty", PARTIAL)
    manager = load_plugins(enabled=["hasty", "sound"], strict=True)
    assert plugin_states(manager)["hasty"] == "broken"
    assert plugin_of(manager, "hasty").records == []
    assert not [one for one in manager.providers() if one.plugin.name == "hasty"]
    assert not manager.observes("step_finished")
    assert manager.get("train", "sound")


def test_asking_for_what_was_taken_back_shows_why(distributions):
    distributions.add("hasty", PARTIAL)
    error = lookup_error(load_plugins(enabled=["hasty"]), "train", "half")
    assert error.reason == "broken"
    assert "second thoughts" in str(error)


def test_a_plugin_with_unmet_requirements_is_installed_and_its_backend_is_not_usable(distributions, sound):
    distributions.backend("needy", backend="needy", requires="('no-such-distribution>=2', 'pluggy>=1')")
    manager = load_plugins(enabled=["needy", "sound"])
    assert plugin_states(manager)["needy"] == "requirements missing"
    error = lookup_error(manager, "train", "needy")
    assert error.reason == "requirements missing"
    assert "needs no-such-distribution>=2, but it is not installed" in str(error)
    assert 'pip install "no-such-distribution>=2"' in str(error)
    assert "pluggy" not in str(error)
    assert manager.get("train", "sound")


def test_two_plugins_with_one_entry_point_name_are_told_apart(distributions):
    distributions.add("north-engines", "", name="twin")
    distributions.add("south-engines", "raise OSError", name="twin")
    states = plugin_states(load_plugins(enabled=["twin"]))
    assert states["north-engines:twin"] == "ok"
    assert states["south-engines:twin"] == "broken"


def test_metadata_is_read_once_until_a_folder_of_the_path_changes(distributions, monkeypatch):
    read, groups = discovery.metadata.entry_points, []

    def counted(group: str):
        groups.append(group)
        return read(group=group)

    monkeypatch.setattr(discovery.metadata, "entry_points", counted)
    distributions.backend("early")
    for _ in range(3):
        assert "early" in {entry_point.name for entry_point in discovery.find_entry_points()}
    assert len(groups) == 1
    distributions.backend("late")
    assert "late" in {entry_point.name for entry_point in discovery.find_entry_points()}
    assert len(groups) == 2
