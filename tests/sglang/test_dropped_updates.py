"""An engine of this plugin that drops a weight update is found by the suite."""

import contextlib
import dataclasses

import pytest
from dropped_updates import assert_found
from staged_mutants import STALE_ADAPTERS

from enginehouse.plugin import Layout, RolloutBackend, plugins
from enginehouse.plugin.capabilities import OPENAI_ENDPOINT, SEED
from enginehouse_testing.checks import checks_of
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE
from enginehouse_testing.sites import RolloutSite

START_SECONDS = 600.0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["dropping_second", pytest.param("dropping", marks=pytest.mark.exhaustive)])
def test_a_dropped_update_is_found_at_a_learning_rate_of_one_millionth(mutant):
    assert_found("sglang", mutant)


@pytest.fixture(scope="module")
def judge_stale_adapter(ray_cluster, runtime, tmp_path_factory):
    """Call it with a way to serve an older adapter for what the suite says of it. One server serves all of them.

    On a CPU, SGLang has a prefix cache only without deterministic inference."""
    directory = tmp_path_factory.mktemp("stale")
    options = {"kv_cache_mib": 64, "deterministic": False}
    layout = Layout("cached", options=options, without=(OPENAI_ENDPOINT, SEED))
    record = dataclasses.replace(
        plugins().get(RolloutBackend, "sglang", elsewhere=True), engine="staged_mutants:sglang_stale_adapter"
    )
    (check,) = (check for check in checks_of("rollout") if check.name == "adapter_updates")
    env = {**runtime.env, "STALE_ADAPTER": str(directory / "way")}
    site = RolloutSite(runtime.python, env, "cpu", START_SECONDS)

    def judge(way: str):
        (directory / "way").write_text(way)
        return check.judge(site.act(record, check, 0, layout, str(directory)))

    with contextlib.closing(site):
        site.open()
        yield judge


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "said"),
    [
        *((way, "look ") for way in STALE_ADAPTERS[:2]),
        (STALE_ADAPTERS[2], "the checksum of base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
    ],
)
def test_an_engine_that_serves_an_older_adapter_is_found(judge_stale_adapter, way, said):
    found = judge_stale_adapter(way)
    assert not found.error <= LOGPROB_TOLERANCE
    assert said in found.detail


@pytest.mark.slow
def test_an_engine_that_serves_the_newest_adapter_is_not_taken_for_one_that_does_not(judge_stale_adapter):
    assert judge_stale_adapter("").error <= LOGPROB_TOLERANCE
