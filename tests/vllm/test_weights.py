"""A weight update of a vLLM replica is whole, or it has not happened. Oracle: plain transformers, in this process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai_client import complete
from torch_rollout_driver import plain_greedy, plain_logprobs
from vllm_weights_replica import close_to, updated_replica

from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

IDS = [5, 6, 7, 8, 9, 10, 11, 12] * 3
LONG_IDS = IDS * 20
"""Longer than several blocks of vLLM's prefix cache."""


def model(seed):
    return tiny_model(hidden=128, max_positions=16384, seed=seed)


@pytest.fixture(scope="module")
def act(ray_cluster, runtime):
    """Runs an act of `vllm_weight_acts` on one replica for the whole module; `model(0)` is its version 0."""
    with updated_replica(runtime, model(0), openai_endpoint="loopback") as act:
        yield act


@pytest.fixture(scope="module")
def versions():
    """Numbers for updates, each larger than any before."""
    return iter(range(1, 1000))


@pytest.fixture
def serves(act):
    """Whether the replica computes with the weights of `path`, all of them, and says that they are `version`."""

    def check(path, version):
        result = act("score", IDS)
        assert close_to(result.prompt_logprobs[1:], plain_logprobs(path, IDS))
        drawn = act("draw", IDS, 6).completions[0]
        assert list(drawn.token_ids) == plain_greedy(path, IDS, 6, [])
        assert (drawn.first_version, drawn.last_version) == (version, version)
        assert act("health").version == version

    return check


@pytest.mark.parametrize("fault", ["unknown at the end", "last one missing", "part of a layer missing"])
def test_version_0_comes_back_after_an_update_that_fails_in_the_midst(act, serves, fault):
    # The module's first tests: version 0 is served as long as no update was whole.
    kind, message, _ = act("fail", model(1), 1, fault)
    assert kind == "WeightSyncError"
    assert "version 0 is served again" in message
    serves(model(0), 0)


def test_updates_to_and_fro_serve_what_was_sent_each_time(act, serves, versions):
    for path, lend in ((1, False), (2, True), (1, True), (2, False), (0, True), (1, True)):
        version = next(versions)
        assert act("update", model(path), version, "float32", lend).version == version
        assert act("held") == [version] * lend, "what is served is held, and nothing else"
        serves(model(path), version)
    assert act("copies") == 0, "what can be held is not copied, and room for copies not kept"


def test_nothing_is_drawn_from_keys_and_values_of_older_weights(act, versions):
    for path in (model(1), model(2)):
        act("draw", LONG_IDS, 1)  # fills the prefix cache with the version before
        act("update", path, next(versions))
        drawn = act("draw", LONG_IDS, 8).completions[0]
        assert list(drawn.token_ids) == plain_greedy(path, LONG_IDS, 8, [])
        expected = plain_logprobs(path, [*LONG_IDS, *drawn.token_ids])[len(LONG_IDS) - 1 :]
        assert close_to(drawn.logprobs, expected)


def test_openai_clients_get_the_weights_that_are_served_and_wait_while_these_change(act, versions):
    act("update", model(1), next(versions))
    assert complete(act.url, IDS, 6) == plain_greedy(model(1), IDS, 6, [])
    act("pause")
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(complete, act.url, IDS, 6)  # not before the pause: the old weights must not answer it
        act("update", model(2), next(versions))
        assert asked.result() == plain_greedy(model(2), IDS, 6, [])


def test_a_frozen_request_goes_on_with_the_new_weights_as_if_they_had_read_it_from_the_start(act, versions):
    before, after = next(versions), next(versions)
    act("update", model(0), before)
    completion = act("update_while_frozen", model(1), after).completions[0]
    assert (completion.first_version, completion.last_version) == (before, after)
    ids = [5, 6, 7, *completion.token_ids]
    assert close_to(completion.logprobs[:2], plain_logprobs(model(0), ids)[2:4])
    assert close_to(completion.logprobs[-2:], plain_logprobs(model(1), ids)[-2:])


@pytest.mark.parametrize(
    ("fault", "lend"),
    [
        ("changed on the way", True),
        ("gone", False),
        ("unknown at the end", False),
        ("last one missing", True),
        ("part of a layer missing", True),
    ],
)
def test_the_version_before_comes_back_after_an_update_that_fails(act, serves, versions, fault, lend):
    served = next(versions)
    act("update", model(2), served, "float32", lend)
    kind, message, parameters = act("fail", model(1), next(versions), fault, False, lend)
    assert kind == "WeightSyncError"
    assert f"version {served} is served again" in message
    assert act("held") == [served] * lend
    serves(model(2), served)
    if fault == "part of a layer missing":
        assert any("layers.1.self_attn" in name for name in parameters)
    again = next(versions)
    act("update", model(1), again)
    serves(model(1), again)


def test_an_update_that_is_given_up_changes_nothing(act, serves, versions):
    served = next(versions)
    state = act("update", model(1), served, "float32", True)
    assert act("stage_and_give_up", model(2), next(versions), True) == state
    assert act("held") == [served]
    serves(model(1), served)


def test_an_update_that_cannot_be_is_refused_by_name_and_changes_nothing(act, serves, versions):
    served = next(versions)
    act("update", model(1), served)
    raised = act("refusals", model(2), next(versions))
    assert {kind for kind, _, _ in raised.values()} == {"WeightSyncError"}
    expected = {
        "unknown": "no parameter 'no.such.weight'",
        "tied": "'lm_head.weight' (it is tied to another",
        "shape": "as float32 (31, 128), but the model there has float32 (32, 128)",
        "dtype": "as float16 (32, 128), but the model there has float32 (32, 128)",
        "another shape than announced": "as float32 (31, 128)",
        "not announced": "which was not announced",
        "missing": "lacks ",
        "another version": "was started",
        "not newer": "version 0 is not newer",
        "chunk without a start": "no weight update was started",
        "finish without a start": "none was started",
    }
    assert set(raised) == set(expected)
    for name, said in expected.items():
        assert said in raised[name][1], name
    assert raised["unknown"][2] == ("no.such.weight",)
    assert len(raised["missing"][2]) > 5
    serves(model(1), served)


def test_staged_and_served_versions_have_no_name_that_could_stay_behind(act, versions):
    act("update", model(1), next(versions))
    assert act("shared_files") == []


def test_a_replica_that_lost_its_model_serves_nothing(act, versions):
    # The module's last test: the replica is no use after it.
    act("update", model(1), next(versions))
    kind, message, _ = act("fail", model(2), next(versions), "unknown at the end", True)
    assert kind == "WeightsLost"
    assert "start it again" in message
    assert act("ask_everything") == dict.fromkeys(("generate", "health", "resume"), "WeightsLost")
