"""What vLLM splits and rounds is served as it was sent. Oracle: plain transformers, in this process.

What it packs and fuses, an untied head and experts, is sent to and fro by the suite's own checks (test_conformance.py).
"""

from contextlib import ExitStack

import pytest
import torch
from torch_rollout_driver import plain_logprobs
from torch_train_cases import POLICY, make_batch, make_engine
from vllm_weights_replica import close_to, updated_replica

from enginehouse.controller import RemoteError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

IDS = [5, 6, 7, 8, 9, 10, 11, 12] * 3


def tied_qwen(seed):
    return tiny_model(hidden=128, seed=seed)


def to_and_fro(act, make, *args):
    """Update to another model, back, and again; the logprobs after each update, and the model."""
    for version, seed in enumerate((1, 0, 1, 0), start=1):
        act("update", make(seed), version, *args)
        yield make(seed), act("score", IDS).prompt_logprobs[1:]


@pytest.mark.exhaustive
def test_a_model_split_over_two_processes_is_updated_on_both_and_comes_back_on_both(ray_cluster, runtime):
    # vLLM can bind processes of one replica to cores of their own only; any two will do.
    with updated_replica(runtime, tied_qwen(0), env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, tensor_parallel=2) as act:
        for path, logprobs in to_and_fro(act, tied_qwen, "float32", True):  # both map the memory it is lent
            assert close_to(logprobs, plain_logprobs(path, IDS))
        for fault in ("unknown at the end", "gone"):
            kind, message, _ = act("fail", tied_qwen(1), 9, fault, False, True)
            assert (kind, "rank 0" in message) == ("WeightSyncError", True)
            assert close_to(act("score", IDS).prompt_logprobs[1:], plain_logprobs(tied_qwen(0), IDS))


def test_weights_in_half_precision_are_served_as_sent_or_a_cpu_that_cannot_is_named(ray_cluster, runtime):
    with ExitStack() as stack:
        try:
            act = stack.enter_context(updated_replica(runtime, tied_qwen(0), "bfloat16"))
        except RemoteError as error:  # some CPUs lack what vLLM's build for CPUs takes for granted
            if "bfloat16 with instructions that this CPU does not support" not in str(error):
                raise
            return
        fresh = act("score", IDS).prompt_logprobs[1:]
        after = list(to_and_fro(act, tied_qwen, "bfloat16"))
    # Rounding to half precision moves logprobs of this model by some hundredths; other weights, by nats.
    for path, logprobs in after:
        error = (torch.tensor(logprobs) - plain_logprobs(path, IDS)).abs().mean()
        assert error < 0.25
    # Once back at the first weights, it is to the last bit what it was when it had loaded them itself.
    assert after[1][1] == after[3][1] == fresh
    assert after[0][1] == after[2][1]


def test_an_export_is_served_from_a_path_of_any_characters(ray_cluster, runtime, tmp_path):
    path = tmp_path / "a [y] 100% b*"
    engine = make_engine(tied_qwen(0), lr=1e-2)
    engine.forward_backward(make_batch(2, 2), POLICY)
    engine.optim_step()
    engine.export_hf(str(path))
    engine.shutdown()
    with updated_replica(runtime, str(path)) as act:
        assert close_to(act("score", IDS).prompt_logprobs[1:], plain_logprobs(str(path), IDS))
