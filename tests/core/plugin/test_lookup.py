"""Finding a record by name: each way it can fail is told apart, with what to do about it."""

import pytest

from enginehouse.errors import UserError
from enginehouse.plugin import Loss, PluginLookupError, RolloutBackend, TrainBackend, load_plugins
from enginehouse.runtimes.readiness import plugin_states


def lookup_error(manager, kind, name) -> PluginLookupError:
    with pytest.raises(PluginLookupError) as caught:
        manager.get(kind, name)
    return caught.value


def test_an_unknown_name_gets_the_nearest_choice():
    error = lookup_error(load_plugins(enabled=["torch"]), "train", "troch")
    assert error.reason == "unknown"
    assert "Did you mean 'torch'?" in str(error)
    assert isinstance(error, UserError)


def test_a_name_of_another_kind_is_said_to_be_one():
    error = lookup_error(load_plugins(enabled=[]), "loss", "grpo")
    assert error.reason == "unknown"
    assert "advantage" in str(error)


def test_a_first_party_backend_that_is_not_installed_gets_the_line_that_installs_it():
    error = lookup_error(load_plugins(entry_points=[]), "rollout", "vllm")
    assert error.reason == "not installed"
    assert "vllm" in str(error).partition("Try: pip install ")[2]  # from the checkout, or core's extra from an index


def test_training_and_rollout_backends_may_share_a_name():
    manager = load_plugins(enabled=["torch"])
    assert isinstance(manager.get("train", "torch"), TrainBackend)
    assert isinstance(manager.get("rollout", "torch"), RolloutBackend)


def test_two_providers_of_a_name_are_both_kept_and_the_config_decides(distributions):
    distributions.backend("north-engines", summary="'from the north'")
    distributions.backend("south-engines", summary="'from the south'")
    manager = load_plugins(enabled=["north-engines", "south-engines"])
    assert plugin_states(manager)["north-engines"] == plugin_states(manager)["south-engines"] == "ok"
    error = lookup_error(manager, "train", "swift")
    assert error.reason == "ambiguous"
    assert "'north-engines:swift' or 'south-engines:swift'" in str(error)
    assert manager.get("train", "south-engines:swift").summary == "from the south"
    assert manager.get("train", "North_Engines:swift").summary == "from the north"


def test_the_others_work_beside_two_of_a_name(distributions):
    distributions.backend("north-engines")
    distributions.backend("south-engines")
    distributions.backend("west-engines", backend="sound")
    manager = load_plugins(enabled=["north-engines", "south-engines", "west-engines"])
    assert manager.get("train", "sound")


def test_a_distribution_that_does_not_provide_the_name_is_unknown():
    assert lookup_error(load_plugins(enabled=[]), "train", "elsewhere:torch").reason == "unknown"
    assert load_plugins(enabled=["torch"]).get("train", "enginehouse-torch:torch").name == "torch"


def test_an_unknown_name_mentions_plugins_that_were_not_loaded(distributions):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    error = lookup_error(load_plugins(enabled=["fragile"]), "loss", "subtle")
    assert error.reason == "unknown"
    assert "fragile (broken)" in str(error)


def test_missing_requirements_name_the_version_there_is(distributions):
    distributions.backend("needy", backend="needy", requires="('pluggy>=900',)")
    import pluggy

    error = lookup_error(load_plugins(enabled=["needy"]), "train", "needy")
    assert f"needs pluggy>=900, but {pluggy.__version__} is installed" in str(error)


def test_missing_requirements_that_an_extra_covers_are_installed_by_that_extra(distributions):
    distributions.add(
        "enginehouse-swift",
        """
        @hookimpl
        def enginehouse_register_backends(register):
            register(TrainBackend(name="swift", engine="a:B", options="a:C", requires=("swift-engine>=3",)))
        """,
        metadata='Requires-Dist: swift-engine<4,>=3; extra == "engine"\nProvides-Extra: engine\n',
    )
    error = lookup_error(load_plugins(enabled=["enginehouse-swift"]), "train", "swift")
    assert 'pip install "enginehouse-swift[engine]"' in str(error)


def test_requirements_whose_marker_is_false_do_not_count(distributions):
    distributions.backend("needy", backend="needy", requires="('nothing>=1; python_version < \"3\"',)")
    assert load_plugins(enabled=["needy"]).get("train", "needy")


def test_all_gives_every_record_of_a_kind_usable_or_not(distributions):
    distributions.backend("needy", backend="needy", requires="('pluggy>=900',)")
    names = [backend.name for backend in load_plugins(enabled=["needy"]).all(TrainBackend)]
    assert names == ["needy"]


def test_a_kind_that_is_none_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="Did you mean 'rollout'"):
        load_plugins(enabled=[]).get("rolout", "torch")


def test_a_function_is_found_by_registered_name_or_by_module(distributions):
    module = distributions.add(
        "lossy",
        """
        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="constant", function=f"{__name__}:constant"))
            register(Loss(name="hollow", function=f"{__name__}:nothing"))

        def constant(view):
            return 1.5
        """,
    )
    manager = load_plugins(enabled=["lossy"])
    assert manager.function(Loss, "constant")(None) == 1.5
    assert manager.function(Loss, "lossy:constant")(None) == 1.5
    assert manager.function("loss", f"{module}:constant")(None) == 1.5


@pytest.mark.parametrize("name", ["no.such.module:loss", "json:loss", "clipped_polcy"])
def test_a_function_that_is_not_there_is_the_users_mistake(name):
    with pytest.raises(PluginLookupError, match=name.rpartition(":")[0] or "clipped_policy"):
        load_plugins(enabled=[]).function("loss", name)
