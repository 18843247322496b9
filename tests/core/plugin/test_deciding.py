"""Hooks that decide: the weight transport of a run, and who runs a step."""

import pytest

from enginehouse.errors import UserError
from enginehouse.plugin import (
    Placement,
    PluginLookupError,
    RolloutBackend,
    TrainBackend,
    Transport,
    discovery,
    load_plugins,
)
from enginehouse.weights.transports.plugin import enginehouse_pick_transport


def pick(manager, placement: Placement) -> str:
    train, rollout = manager.get(TrainBackend, "torch"), manager.get(RolloutBackend, "torch")
    return manager.pick_transport(train, rollout, placement).name


def test_core_picks_the_shortest_reach_that_suffices():
    manager = load_plugins(enabled=["torch"])
    assert pick(manager, Placement(colocated=True)) == "inproc"
    assert pick(manager, Placement(colocated=False)) == "shared_memory"
    assert pick(manager, Placement(colocated=False, hosts=2)) == "collective"


def test_between_hosts_ranks_that_share_the_model_send_their_own_parts():
    manager = load_plugins(enabled=["torch"])
    assert pick(manager, Placement(colocated=False, hosts=2, training_ranks=2)) == "point_to_point"
    assert pick(manager, Placement(colocated=False, training_ranks=2)) == "shared_memory"


def test_without_the_package_of_transports_a_broadcast_serves_and_a_name_of_it_says_what_brings_it(monkeypatch):
    core = [one for one in discovery.find_entry_points() if one.name != "transports"]
    monkeypatch.setattr(discovery, "find_entry_points", lambda: core)
    manager = load_plugins(enabled=["torch"])
    assert pick(manager, Placement(colocated=False, hosts=2, training_ranks=2)) == "collective"
    with pytest.raises(PluginLookupError, match=r"Not installed: transports \(pip install .*transports"):
        manager.get(Transport, "point_to_point")


def test_no_transport_that_reaches_is_the_users_to_solve():
    near = [Transport(name="near", transport="a:B", capabilities={"same_process"})]
    with pytest.raises(UserError, match=r"several hosts.*cross_host.*near \(same_process\)"):
        enginehouse_pick_transport(Placement(colocated=False, hosts=2), near)


FAR = """
@hookimpl
def enginehouse_register_transports(register):
    register(Transport(name="far", transport="a:B", capabilities={"cross_host"}))
"""


def test_a_plugin_decides_before_core_and_may_decline(distributions):
    distributions.add(
        "chooser",
        FAR
        + """
@hookimpl
def enginehouse_pick_transport(train, rollout, cluster, transports):
    return "far" if cluster.device == "cuda" else None
""",
    )
    manager = load_plugins(enabled=["torch", "chooser"])
    assert pick(manager, Placement(colocated=False, device="cuda")) == "far"
    assert pick(manager, Placement(colocated=False, device="cpu")) == "shared_memory"


def test_a_plugin_that_picks_what_is_not_there_is_told(distributions):
    distributions.add("chooser", "@hookimpl\ndef enginehouse_pick_transport(): return 'shared_memroy'")
    with pytest.raises(PluginLookupError, match="Did you mean 'shared_memory'"):
        pick(load_plugins(enabled=["torch", "chooser"]), Placement(colocated=True))


class Run:
    def run_step(self, step: int) -> dict[str, float]:
        return {"step": step}


def test_core_runs_the_step_where_no_plugin_does():
    assert load_plugins(enabled=[]).run_step(Run(), 4) == {"step": 4}


def test_a_plugin_wraps_the_step_or_runs_it_itself(distributions):
    distributions.add(
        "profiler",
        """
        @hookimpl(wrapper=True)
        def enginehouse_run_step(run, step):
            metrics = yield
            return {**metrics, "profiled": 1.0}
        """,
    )
    distributions.add(
        "runner", "@hookimpl\ndef enginehouse_run_step(step): return {'mine': step} if step == 5 else None"
    )
    manager = load_plugins(enabled=["profiler", "runner"])
    assert manager.run_step(Run(), 4) == {"step": 4, "profiled": 1.0}
    assert manager.run_step(Run(), 5) == {"mine": 5, "profiled": 1.0}
