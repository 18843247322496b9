"""How the training benchmark judges its sides, and that the loop it compares with computes what it says."""

import pytest
import torch
from benchmarks.train_engine import agree, paired, wait
from benchmarks.train_engine_bare import BareLoop, Settings
from benchmarks.train_engine_rank import PER_GROUP, draw_rows
from torch_train_cases import make_engine

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec
from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model


def test_a_ratio_is_the_median_over_rounds_of_a_rounds_own_ratio():
    found = {"seconds": {"bare": [1.0, 10.0, 2.0], "fsdp": [2.0, 10.0, 1.0]}}
    assert paired(found, "fsdp", "bare") == 1.0
    found["seconds"]["fsdp"] = [0.5, 5.0, 8.0]
    assert paired(found, "fsdp", "bare") == 2.0, "how many times as fast ours is"


@pytest.mark.parametrize("other", [[1.0, 2.01], [1.0001, 2.0], [1.0, float("nan")]])
def test_sides_that_do_not_compute_the_same_are_not_compared(other):
    agree({"bare": [[1.0, 2.0]], "ours": [[1.000001, 2.000001]]})
    with pytest.raises(RuntimeError, match="step 0: ours has"):
        agree({"bare": [[1.0, 2.0]], "ours": [other]})


def test_rows_come_in_groups_with_one_prompt_and_the_longest_is_there():
    rows = draw_rows(8, 32, VOCABULARY_SIZE, seed=0)
    prompts = [tuple(ids[:prompt]) for ids, prompt in rows]
    assert [prompts.count(prompt) for prompt in prompts] == [PER_GROUP] * 8
    assert max(len(ids) for ids, _ in rows) == 32
    assert min(len(ids) - prompt for ids, prompt in rows) > 0
    assert draw_rows(8, 32, VOCABULARY_SIZE, seed=1) != rows


@pytest.mark.parametrize("whole_logits", [False, True])
def test_the_hand_written_loop_trains_as_the_torch_engine_does(whole_logits):
    rows, settings = draw_rows(6, 20, VOCABULARY_SIZE, seed=0), Settings(lr=1e-3, budget=50)
    bare = BareLoop(tiny_model(), settings, torch.device("cpu"), sharded=False, whole_logits=whole_logits)
    engine = make_engine(
        tiny_model(), lr=settings.lr, eps=settings.eps, weight_decay=settings.weight_decay, tokens_per_microbatch=50
    )
    ids = Ragged.from_list([tokens for tokens, _ in rows], dtype=torch.int64)
    mask = torch.tensor([place >= prompt for tokens, prompt in rows for place in range(len(tokens))])
    batch = Batch({"input_ids": ids, "loss_mask": Ragged(mask, ids.offsets)})
    for _ in range(3):
        loss = engine.forward_backward(batch, LossSpec("supervised"))["loss"]
        norm = engine.optim_step()["grad_norm"]
        total, counted, bare_norm = bare.step(rows)
        assert (counted, total, bare_norm) == (loss.weight, pytest.approx(loss.total, 1e-5), pytest.approx(norm, 1e-5))
    engine.shutdown()


def test_a_rank_that_fails_ends_the_run_with_what_it_said(tmp_path):
    import subprocess

    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(["sh", "-c", "echo the reason; exit 3"], stdout=output)
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 ended with code 3(.|\n)*the reason"):
        wait([process], [log])
