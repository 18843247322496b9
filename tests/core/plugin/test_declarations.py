"""What a plugin may declare. A mistake breaks the plugin that made it, with a sentence for its author."""

import pytest

from enginehouse.plugin import TrainBackend, Transport, load_plugins
from enginehouse.runtimes.readiness import plugin_states

BACKEND = """
@hookimpl
def enginehouse_register_backends(register):
    register({record})
"""


def problem_of(distributions, source) -> str:
    """Load one plugin that declares wrongly beside one that works; return the problem of the first."""
    distributions.add("clumsy", source)
    distributions.backend("sound", backend="sound")
    manager = load_plugins(enabled=["clumsy", "sound"])
    assert plugin_states(manager)["clumsy"] == "broken"
    assert manager.get("train", "sound")
    assert not [one for one in manager.providers() if one.plugin.name == "clumsy"]
    return next(plugin.problem for plugin in manager.plugins if plugin.name == "clumsy")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("Loss(name='quiet', function='a:b')", "takes TrainBackend or RolloutBackend"),
        ("'swift'", "takes TrainBackend or RolloutBackend"),
        ("TrainBackend(name='a:b', engine='a:B', options='a:C')", "the name must consist of lower-case letters"),
        (
            "TrainBackend(name='swift', engine='a.B', options='a:C')",
            "engine must be of the form 'module:attribute', not 'a.B'",
        ),
        ("TrainBackend(name='swift', engine=dict, options='a:C')", "engine must be of the form"),
        (
            "TrainBackend(name='swift', engine='a:B', options='a:C', capabilities={'seed'})",
            "train 'swift': unknown capability 'seed'",
        ),
        ("TrainBackend(name='swift', engine='a:B', options='a:C', requires=('torch>=2.6'))", "must be a tuple of str"),
        (
            "TrainBackend(name='swift', engine='a:B', options='a:C', requires=('this is none',))",
            "train 'swift': requires contains 'this is none', which is not a valid requirement",
        ),
        ("TrainBackend(name='swift')", "engine"),
    ],
)
def test_a_record_that_cannot_be_right_breaks_its_plugin(distributions, record, said):
    assert said in problem_of(distributions, BACKEND.format(record=record))


@pytest.mark.parametrize(
    ("kinds", "record", "said"),
    [
        ("trackers", "Loss(name='quiet', function='a:b')", "takes Tracker"),
        ("trackers", "Tracker(name='quiet', tracker='a.B')", "must be of the form 'module:attribute', not 'a.B'"),
        ("trackers", "Tracker(name='quiet', tracker='a:B', requires=('not one',))", "'not one', which is not a valid"),
        ("losses", "Loss(name='quiet', function='a:b', requires=('not one',))", "'not one', which is not a valid "),
        ("losses", "Loss(name='quiet', function='a:b', requires=('torch'))", "requires must be a tuple of strings"),
        (
            "stages",
            "Stage(name='quiet', model='values')",
            "Stage.model must be 'logprobs', 'score' or empty, not 'values'",
        ),
        ("stages", "Stage(name='quiet')", "set function and adds together"),
        ("stages", "Stage(name='quiet', model='score', adds=('reward',))", "set function and adds together"),
        ("stages", "Stage(name='quiet', function='a:b', needs=('reward',))", "set function and adds together"),
    ],
)
def test_a_tracker_or_a_function_that_cannot_be_right_breaks_its_plugin(distributions, kinds, record, said):
    assert said in problem_of(distributions, BACKEND.replace("backends", kinds).format(record=record))


def test_a_name_declared_twice_by_one_plugin_is_a_mistake(distributions):
    source = """
    @hookimpl
    def enginehouse_register_losses(register):
        for _ in range(2):
            register(Loss(name="quiet", function="a:b"))
    """
    assert "loss 'quiet' is declared twice" in problem_of(distributions, source)


def test_an_unknown_hook_that_is_optional_is_for_a_later_version(distributions):
    distributions.add("ahead", "@hookimpl(optionalhook=True)\ndef enginehouse_of_tomorrow(thing): pass")
    assert plugin_states(load_plugins(enabled=["ahead"]))["ahead"] == "ok"


def test_a_hook_without_its_mark_is_not_overlooked(distributions):
    source = """
    def enginehouse_register_backends(register):
        pass
    """
    assert "enginehouse_register_backends is not marked with @hookimpl" in problem_of(distributions, source)


@pytest.mark.parametrize("hook", ["enginehouse_step_finished(step)", "enginehouse_pick_transport(train)"])
def test_only_the_step_may_be_wrapped(distributions, hook):
    source = f"""
    @hookimpl(wrapper=True)
    def {hook}:
        return (yield)
    """
    assert "cannot be wrapped" in problem_of(distributions, source)


def test_declaring_after_loading_is_a_mistake(distributions):
    module = distributions.add(
        "late",
        """
        @hookimpl
        def enginehouse_register_losses(register):
            global kept
            kept = register
        """,
    )
    import sys

    from enginehouse.plugin import Loss, PluginError

    load_plugins(enabled=["late"])
    with pytest.raises(PluginError, match="after the plugin was loaded"):
        sys.modules[module].kept(Loss(name="quiet", function="a:b"))


def test_every_kind_of_record_can_be_declared(distributions):
    distributions.add(
        "generous",
        """
        @hookimpl
        def enginehouse_register_backends(register):
            register(TrainBackend(name="given", engine="a:B", options="a:C"))
            register(RolloutBackend(name="given", engine="a:B", options="a:C"))

        @hookimpl
        def enginehouse_register_transports(register):
            register(Transport(name="given", transport="a:B", capabilities={"cross_host"}))

        @hookimpl
        def enginehouse_register_dispatch_modes(register):
            register(DispatchMode(name="given", dispatch="a:b", collect="a:c"))

        @hookimpl
        def enginehouse_register_advantages(register):
            register(Advantage(name="given", function="a:b"))

        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="given", function="a:b"))

        @hookimpl
        def enginehouse_register_rewards(register):
            register(Reward(name="given", function="a:b"))

        @hookimpl
        def enginehouse_register_filters(register):
            register(Filter(name="given", function="a:b"))

        @hookimpl
        def enginehouse_register_trackers(register):
            register(Tracker(name="given", tracker="a:B"))

        @hookimpl
        def enginehouse_register_environments(register):
            register(Environment(name="given", environment="a:B"))

        @hookimpl
        def enginehouse_register_stages(register):
            register(Stage(name="given", function="a:b", adds=["column"]))
        """,
    )
    from enginehouse.plugin import KINDS

    manager = load_plugins(enabled=["generous"])
    assert [type(manager.get(kind, "given")) for kind in KINDS] == list(KINDS)


def test_collections_of_a_record_become_immutable():
    backend = TrainBackend(name="swift", engine="a:B", options="a:C", capabilities={"lora"}, requires=["torch"])
    assert backend.capabilities == frozenset({"lora"})
    assert backend.requires == ("torch",)
    assert isinstance(Transport(name="swift", transport="a:B", capabilities=set()).capabilities, frozenset)
