"""Reading a run directory: whatever is missing, half written, damaged or of another kind of run."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run, sample, take_step

from enginehouse_report.page import write_report
from enginehouse_report.run_files import GrowingLines, RunFiles, read_run
from enginehouse_report.samples import SampleTable, read_samples, read_tokens, whole_row
from enginehouse_rl.runs import RunDirectory


def test_a_directory_with_a_record_alone_is_shown(tmp_path: Path):
    (tmp_path / "run.json").write_text("{")
    part = read_run(tmp_path).part()
    assert part["facts"]["status"] == "not begun"
    assert part["config_problem"] == "there is no config.yaml"
    assert part["metrics"]["rows"] == 0
    assert write_report([tmp_path], tmp_path / "page.html") > 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl", "timeline.json", "config.yaml", "alarms.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"[1, 2]\n{]\n", b'null\n"text"\n'])
def test_no_damage_of_a_file_keeps_a_run_from_being_shown(run: RunDirectory, tmp_path: Path, name: str, content: bytes):
    (run.path / name).write_bytes(content)
    assert write_report([run.path], tmp_path / "page.html") > 0


def test_a_last_line_that_is_half_written_is_read_once_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    assert not lines.refresh()
    path.write_text('{"step": 1}\n{"ste')
    assert not lines.refresh()
    assert lines.rows == [{"step": 1}]
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert not lines.refresh()
    assert lines.rows == [{"step": 1}, {"step": 2}]


def test_a_file_that_was_cut_back_is_read_anew(run: RunDirectory):
    files = RunFiles(run.path)
    assert not files.refresh()
    assert len(files.metrics.rows) == 3
    path = run.path / "metrics.jsonl"
    staged = path.with_name("new")
    row = json.dumps({"step": 3, "reward/mean": 0.9999, "note": "x" * 200})
    staged.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + row + "\n")
    staged.replace(path)  # longer than it was: told by the file's identity
    assert files.refresh()
    assert [row["step"] for row in files.metrics.rows] == [1, 2, 3]
    assert files.metrics.rows[-1]["reward/mean"] == 0.9999
    assert not files.refresh()


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "p", "response": "r"}, {"prompt": "p", "response": "r"}),
        ({"prompt": None, "response": ["a"], "reward": None}, {"prompt": "", "response": '["a"]', "reward": None}),
        ({"response": "r", "reward": "high", "tokens": True}, {"reward": None, "tokens": None}),
        ({"response": "x" * 999, "prompt": "a" * 99 + "b" * 99}, {"response": "x" * 160}),
        ({"response": "", "reward": 1, "turns": [{}, {}], "group": 3}, {"turns": 2, "group": 3, "reward": 1}),
    ],
)
def test_a_row_is_shown_as_far_as_it_says_something(tmp_path: Path, row: dict, shown: dict):
    path = tmp_path / "step-000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    table = SampleTable()
    table.add(path)
    assert {name: table.columns.get(name, [None])[0] for name in shown} == shown


def test_damaged_lines_are_counted_and_later_ones_found(tmp_path: Path):
    path = tmp_path / "step-000001.jsonl"
    rows = [json.dumps(sample(0)), '{"prompt": ', json.dumps(sample(2)), '{"cut": ']
    path.write_text("\n".join(rows))
    table = SampleTable()
    table.add(path)
    assert (table.damaged, table.columns["line"]) == (1, [1, 3])
    assert whole_row(table.places[1]) == sample(2)


TRICKY = ['"by_token": {', ', "by_token": {', "]}}", ']}, "', "]}, ", ', "', "\\", '\\"', "]"]


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("behind", [{}, {"group": 3}, {"a": {"b": [1]}}, {"by_token": "none"}, {"late": ']}, "x": 1'}])
def test_the_table_is_the_same_with_and_without_the_figures_of_tokens(tmp_path: Path, text: str, behind: dict):
    row = sample(1, prompt=text, response=f"{text} {text}", answer=text)
    row["by_token"]["text"] = [text, f"a{text}", text + text, "b", text]
    row |= behind
    tables = []
    for number, written in enumerate([row, {name: row[name] for name in row if name != "by_token"}], start=1):
        path = tmp_path / f"step-{number:06d}.jsonl"
        path.write_text(json.dumps(written) + "\n")
        table = SampleTable()
        table.add(path)
        tables.append({name: value for name, value in table.columns.items() if name != "step"})
    assert tables[0] == tables[1]


@pytest.mark.parametrize("found", [None, [], {}, {"text": "ab"}, {"text": [1]}, {"text": None, "mask": [1]}])
def test_figures_of_tokens_that_are_not_whole_are_not_shown(found):
    assert read_tokens(found) is None


def test_figures_of_tokens_that_do_not_fit_are_left_out():
    found = {"text": ["a", "b"], "mask": [1], "logprob": [-0.123456, float("nan")], "version": ["x", 2]}
    assert read_tokens(found) == {"text": ["a", "b"], "logprob": [-0.1235, None], "version": [None, 2]}


def test_files_of_samples_that_are_none_are_left_alone(run: RunDirectory):
    for name in ("notes.jsonl", "step-x.jsonl", ".step-000009.jsonl.partial"):
        (run.path / "samples" / name).write_text(json.dumps(sample(1)) + "\n")
    run.write_samples(3, [sample(7)], "validation")
    columns = read_samples(run.path).columns
    assert sorted(set(zip(columns["kind"], columns["step"]))) == [(0, 1), (0, 2), (0, 3), (1, 3)]


def test_a_run_of_preferences_or_demonstrations_has_no_samples(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run", "model: {path: m}\n", command=["enginehouse", "dpo", "dpo.yaml"])
    run.log(1, {"loss": 0.7, "validation/accuracy": 0.5, "rewards/chosen": 0.1})
    run.finish("interrupted")
    part = read_run(run.path).part()
    assert part["facts"]["kind"] == "dpo"
    assert part["facts"]["status"] == "interrupted"
    assert part["metrics"]["columns"]["validation/accuracy"] == [0.5]
    assert read_samples(run.path).part()["rows"] == 0


def test_alarms_and_the_error_are_shown(run: RunDirectory):
    alarm = {"step": 2, "alarm": "entropy_collapse", "said": "the entropy fell", "advice": "raise it"}
    (run.path / "alarms.jsonl").write_text(json.dumps(alarm) + '\n{"half')
    run.finish("failed", "it broke", "\n".join(["Traceback", *(f"line {number}" for number in range(50)), "Broken"]))
    part = read_run(run.path).part()
    assert part["alarms"] == [alarm]
    assert part["facts"]["error"] == "it broke"
    lines = part["error"].splitlines()
    assert lines[0] == "Traceback"
    assert lines[-1] == "Broken"
    assert len(lines) == 15


def test_a_run_that_was_killed_is_said_to_be(tmp_path: Path):
    program = (
        "import os, sys\nfrom enginehouse_rl.runs import RunDirectory\n"
        "RunDirectory.create(sys.argv[1], 'a: 1')\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False)
    assert read_run(tmp_path / "run").part()["facts"]["status"] == "killed"


def test_a_resumed_run_took_the_time_of_all_its_processes(tmp_path: Path):
    earlier = [{"status": "interrupted", "seconds": 100.0}, {"status": "failed", "seconds": 10.5, "resumed_after": 2}]
    record = {"status": "finished", "seconds": 30.0, "resumed_after": 4, "earlier": earlier}

    def said(**more: object) -> dict[str, Any]:
        (tmp_path / "run.json").write_text(json.dumps(record | more))
        return read_run(tmp_path).part()["facts"]

    assert (said()["seconds"], said()["at_least"], said()["resumed"]) == (140.5, False, 2)
    untold = said(earlier=[*earlier, {"status": "killed", "seconds": 2.0}, {"status": "killed"}])
    assert (untold["seconds"], untold["at_least"], untold["resumed"]) == (142.5, True, 4)


def test_a_killed_run_took_the_time_up_to_its_last_step(tmp_path: Path):
    record = {"status": "running", "host": socket.gethostname(), "started": "2020-01-01T00:00:00+00:00", "pid": 2**22}
    record |= {"resumed_after": 1, "earlier": [{"status": "interrupted", "seconds": 7.0}]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    rows = [{"step": 1, "elapsed_seconds": 5.0}, {"step": 2, "elapsed_seconds": 5.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = read_run(tmp_path).part()["facts"]
    assert (facts["status"], facts["seconds"], facts["at_least"]) == ("killed", 7.8, True)


def test_a_run_under_way_is_running(run: RunDirectory, tmp_path: Path):
    program = (
        "import sys, pathlib\nfrom enginehouse_report.run_files import read_run\n"
        "print(read_run(pathlib.Path(sys.argv[1])).part()['facts']['status'])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "running"


def test_a_resumed_run_shows_its_earlier_processes(run: RunDirectory):
    run.record.update(resumed_after=2, earlier=[{"status": "killed"}])
    facts = read_run(run.path).part()["facts"]
    assert (facts["resumed_after"], facts["resumed"]) == (2, 1)
    take_step(run, 4)
    assert make_run(run.path.parent / "two").last_step == 3
