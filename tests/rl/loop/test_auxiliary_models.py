"""Validations that an engine of its own answers while the next steps train: when they are waited for, and what becomes
of the best model. The evaluator is a stand-in; a run with a real one is in tests/integration/test_evaluation.py."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_rl.evaluation.held_out_prompts import HeldOutPrompts


class StandIn:
    """An evaluator whose answers are there when a test says so."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.is_ended = False
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def begin(self, step, fleet):
        assert self.step is None
        self.step, self.is_ended = step, False
        self.calls.append(("begin", step))

    def wait(self):
        self.calls.append(("wait", self.step))
        if self.error is not None:
            raise self.error

    def wait_for(self, seconds):
        return self.is_ended

    def report(self):
        step, self.step = self.step, None
        self.calls.append(("report", step))
        return step, {"validation/reward": 0.5}

    def cancel(self):
        self.calls.append(("cancel", self.step))
        self.step = None


@pytest.fixture
def held_out() -> Any:
    """The held-out prompts of a run that validates every second step, and notes what becomes of models."""
    calls = (evaluator := StandIn()).calls
    run = SimpleNamespace(
        plan=SimpleNamespace(roles={"evaluation": None}, config=SimpleNamespace(train=SimpleNamespace(save_best=None))),
        validates=lambda step: step % 2 == 0,
        clock=SimpleNamespace(phase=lambda name: nullcontext()),
        roles=SimpleNamespace(prepare_evaluation=lambda: None),
        exports=SimpleNamespace(
            keep_candidate=lambda step: calls.append(("keep", step)),
            save_best=lambda step, metric, value: calls.append(("best", step)),
        ),
    )
    made: Any = HeldOutPrompts.__new__(HeldOutPrompts)
    made._run, made.evaluator = run, evaluator
    return made


def test_a_validation_is_reported_after_the_step_in_which_it_ends_and_waited_for_where_the_next_is_due(
    held_out, caplog
):
    held_out.after_step(2)
    held_out.after_step(3)
    assert held_out.evaluator.calls == [("begin", 2)]
    held_out.evaluator.is_ended = True
    held_out.after_step(3)
    assert held_out.evaluator.calls[1:] == [("wait", 2), ("report", 2)]
    held_out.after_step(4)
    held_out.after_step(5)
    assert not caplog.messages
    held_out.after_step(6)
    assert held_out.evaluator.calls[3:] == [("begin", 4), ("wait", 4), ("report", 4), ("begin", 6)]
    assert "the run waits for the validation at step 4 to end, because the validation at step 6 is due" in caplog.text


def test_a_state_is_saved_beside_a_validation_of_its_own_step_and_after_one_of_an_earlier(held_out):
    held_out.after_step(2)
    held_out.finish(before=2)  # whoever goes on from there validates again
    assert held_out.evaluator.step == 2
    held_out.finish(before=3)
    assert held_out.evaluator.calls == [("begin", 2), ("wait", 2), ("report", 2)]


def test_an_ending_run_takes_what_is_there_and_says_what_is_not(held_out, caplog):
    held_out.after_step(2)
    held_out.finish(before=3, seconds=1.0)
    assert held_out.evaluator.calls == [("begin", 2), ("cancel", 2)]
    assert "the validation at step 2 is not in validation.jsonl" in caplog.text
    held_out.after_step(4)
    held_out.evaluator.is_ended = True
    held_out.finish(before=5, seconds=1.0)
    assert held_out.evaluator.calls[-2:] == [("wait", 4), ("report", 4)]


def test_one_that_fails_ends_the_run_and_is_not_tried_again(held_out):
    held_out.after_step(2)
    held_out.evaluator.error, held_out.evaluator.is_ended = EnginehouseError("it broke"), True
    with pytest.raises(EnginehouseError, match="it broke"):
        held_out.after_step(3)
    held_out.finish(before=3, seconds=1.0)
    assert held_out.evaluator.calls == [("begin", 2), ("wait", 2), ("cancel", 2)]


def test_the_model_that_may_be_the_best_is_kept_as_it_was_validated(held_out):
    held_out._run.plan.config.train.save_best = "validation/reward"
    held_out.validate(0)
    held_out.finish()
    held_out.after_step(2)
    held_out.finish()
    assert [call for call in held_out.evaluator.calls if call[0] in ("keep", "best")] == [("keep", 2), ("best", 2)]
