"""A replica whose server the worker has started: updates that fail, what is refused, and what is left behind."""

import os
import signal

import psutil
import pytest
import torch
from torch_rollout_driver import plain_logprobs

from enginehouse.controller import RemoteError, WorkerDied
from enginehouse.errors import ConfigError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

SECONDS = 120  # longest a process may take to end
PROMPT = [5, 6, 7]
MODEL = {"hidden": 128, "max_positions": 2048}


@pytest.fixture(scope="module")
def path():
    return tiny_model(**MODEL)


@pytest.fixture(scope="module")
def group(replica, path):
    """A launched replica for the module; the last test ends it."""
    with replica() as group:
        group.call("launch", path, {})
        yield group


def act(group, name, *arguments):
    return group.call("act", name, *arguments)[0]


def served(completion, model, version):
    expected = plain_logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-4, rtol=0)
    assert (completion.first_version, completion.last_version) == (version, version)


@pytest.mark.parametrize("fault", ["changed on the way", "gone", "of another shape", "not known by its name"])
def test_an_update_that_fails_in_sglangs_process_leaves_the_old_version_serving(group, path, fault):
    before = act(group, "state")
    raised = act(group, "update", tiny_model(**MODEL, seed=1), before + 1, fault)
    assert raised[0] == "WeightSyncError", raised
    assert f"version {before} is served again" in raised[1]
    assert act(group, "state") == before
    served(act(group, "draw"), path, before)


def test_the_server_tells_nobody_its_keys(group):
    told = act(group, "told")
    assert {"version", "tp_size", "dtype"} <= told
    assert not told & {"api_key", "admin_api_key", "launch_command"}, told
    assert "--model-path" in (words := act(group, "command_lines"))
    assert "key" not in words


def test_after_failed_updates_one_succeeds(group, path):
    new = tiny_model(**MODEL, seed=1)
    for model, version in ((new, 1), (path, 2)):
        assert act(group, "update", model, version) == ("", "")
        served(act(group, "draw"), model, version)


def test_a_stop_token_ends_a_completion_that_ignores_the_models_end(group, path):
    """SGLang itself has no such mode: where it stops at an end that is to be ignored, it is asked to go on."""
    sampling = {"tokens": 200, "temperature": 1.6, "stop_token_ids": (17,), "seed": 4}
    completion = act(group, "draw_with", sampling)
    assert (completion.token_ids[-1], completion.finish_reason) == (17, "stop")
    assert completion == act(group, "draw_with", sampling)


def test_what_sglang_refuses_is_an_error_of_that_request_alone(group):
    odd = {"sampling_params": {"max_new_tokens": 3, "temperature": -1.0}}
    said, beside = act(group, "refused_beside_served", odd)
    assert said.startswith("EnginehouseError: request '9'")
    assert "temperature" in said
    assert beside == 3


def test_the_processes_of_a_killed_worker_end(group):
    """The last test of this replica."""
    pid = group.call("pid")[0]
    started = psutil.Process(pid).children(recursive=True)
    assert len(started) >= 3  # the server, and processes of its own
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.call("pid")
    assert psutil.wait_procs(started, timeout=SECONDS)[1] == []


def test_an_argument_that_sglang_does_not_know_is_an_error_at_launch(replica, path):
    with replica() as group:
        with pytest.raises(RemoteError, match=r"rejects an argument of `native`.*--no-such-thing") as refused:
            group.call("launch", path, {"native": {"no_such_thing": 1}})
        assert isinstance(refused.value.cause, ConfigError)
