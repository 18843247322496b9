"""`make trace`: what a call of a step enters of ours, and what of ours waits when it first calls a model."""

import sys
from functools import partial

import torch
from tools.trace import Trace, class_of

from enginehouse.data import Ragged
from enginehouse.errors import listed, nearest
from enginehouse.fleet.fleet import run_at_once


def run_step(step: int) -> None:
    if step == 1:
        listed(["a"])
        return
    nearest("a", ["b"])
    Ragged.from_list([[1]])
    run_at_once([partial(torch.nn.Identity(), torch.ones(1))])


def test_a_trace_has_what_one_call_entered_and_the_way_to_the_model():
    profile = sys.getprofile()
    with Trace("run_step", ("step", 2)) as trace:
        for step in (1, 2):
            run_step(step)
        listed(["a"])
    assert sys.getprofile() == profile
    names = {code.co_name for code in trace.entered}
    assert {"nearest", "from_list", "run_at_once"} <= names
    assert not names & {"listed", "run_step"}  # of another step, and of no package of ours
    assert {class_of(code) for code in trace.entered} >= {"", "Ragged"}
    assert [code.co_name for code in trace.frames] == ["run_at_once"]
    files = {code.co_filename for code in trace.entered}
    assert trace.table().splitlines()[-1].split()[:2] == ["all", str(len(files))]
