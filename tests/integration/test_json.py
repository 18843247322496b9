"""`--json`: a real run as events on standard output, to its end or until it is interrupted."""

import json

import pytest

from .conftest import Start

pytestmark = pytest.mark.slow

INLINE = ("reward.function=rewards:unrepeated", "cluster.launcher=inline")


def test_a_run_is_its_events(train: Start):
    run = train(*INLINE, "train.steps=12", "rollout.sampling={max_tokens: 1, top_k: 1}", "--json")
    ended = run.finished()
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert [row["event"] for row in rows if row["event"] not in ("step", "note")] == [
        "plan", "start", "alarm", "alarm", "saved", "end",
    ]  # fmt: skip
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 13))
    written = [{name: value for name, value in row.items() if name not in ("elapsed_seconds",)} for row in run.metrics]
    assert [{"step": row["step"], **row["metrics"]} for row in rows if row["event"] == "step"] == written
    alarms = [json.loads(line) for line in (run.directory / "alarms.jsonl").read_text().splitlines()]
    assert [row for row in rows if row["event"] == "alarm"] == [{"event": "alarm", **alarm} for alarm in alarms]
    assert rows[-1]["alarms"] == 2


def test_an_interrupted_run_ends_its_events(train: Start):
    run = train(*INLINE, "train.steps=1000000", "--json")
    run.until_step(2)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130, ended.err
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert rows[-1]["event"] == "end"
    assert (rows[-1]["status"], rows[-1]["steps"]) == ("interrupted", run.record["steps"])
    assert {row["what"] for row in rows if row["event"] == "saved"} == {"model", "state"}
