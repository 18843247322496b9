"""The page of a run: it has what the run's files have, as data and never as markup, within its size."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from report_runs import CONFIG, make_run, page_of, sample, take_step

from enginehouse.cli.main import main
from enginehouse_report.page import ASSETS, write_report
from enginehouse_rl.runs import RunDirectory
from enginehouse_rl.runs.jsonlines import read_whole_lines

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "\"'`${x}",
    "line\u2028end\u2029",
    "half \ud83d of a pair",
    "\x00\x1b[31m",
    "{{data}} {{title}}",
    "名前 😀",
)


def report(*runs: RunDirectory, out: Path, **options):
    write_report([run.path for run in runs], out, **options)
    return page_of(out)


def test_the_page_has_the_figures_of_the_files(run: RunDirectory, tmp_path: Path):
    run.finish("finished")
    page = report(run, out=tmp_path / "page.html")
    (part,) = page.blocks["main"]["runs"]
    written = read_whole_lines(run.path / "metrics.jsonl")
    columns = part["metrics"]["columns"]
    assert columns["step"] == [row["step"] for row in written]
    for name in ("reward/mean", "entropy"):
        assert columns[name] == pytest.approx([row[name] for row in written], rel=1e-4)
    assert columns["critic/loss"][0] == 0.12346  # five digits
    assert part["validations"]["columns"]["validation/reward"] == [0.05, 0.1, 0.15]
    assert part["facts"]["status"] == "finished"
    assert (part["facts"]["steps"], part["facts"]["of_steps"]) == (3, 10)
    assert part["facts"]["model"] == "models/tiny"
    assert part["facts"]["algorithm"] == "advantage grpo, loss clipped_policy, staleness 1"
    (engine,) = part["facts"]["engines"]
    assert (engine["role"], engine["backend"], engine["version"], engine["ranks"]) == ("actor", "torch", "2.13.0", 1)


def test_the_headline_has_what_the_last_lines_of_a_run_say(run: RunDirectory, tmp_path: Path):
    (part,) = report(run, out=tmp_path / "page.html").blocks["main"]["runs"]
    headline = part["headline"]
    assert headline["learned"] == {"name": "reward/mean", "first": 0.1, "last": 0.3, "over": 1}
    validated = headline["validated"]
    assert (validated["first"], validated["best"], validated["last"]) == ([1, 0.05], [3, 0.15], [3, 0.15])
    assert headline["speed"]["steps"] == 3


def test_the_headline_says_how_a_validation_is_worse(run: RunDirectory, tmp_path: Path):
    for step, reward in ((4, 0.9), (5, 0.01)):
        run.log_validation(step, {"validation/reward": reward, "validation/reward_stderr": 0.01})
    run.finish("finished")
    (part,) = report(run, out=tmp_path / "page.html").blocks["main"]["runs"]
    validated = part["headline"]["validated"]
    assert (validated["best"], validated["last"]) == ([4, 0.9], [5, 0.01])
    assert validated["worse"] == "worse than at step 1"


def test_the_host_and_the_absolute_path_are_shown_on_request_only(run: RunDirectory, tmp_path: Path):
    run.record.update(host="a-host-of-ours")
    assert "a-host-of-ours" not in json.dumps(report(run, out=tmp_path / "page.html").blocks)
    page = report(run, out=tmp_path / "page.html")
    assert str(run.path) not in json.dumps(page.blocks)
    (part,) = report(run, out=tmp_path / "page.html", show_host=True).blocks["main"]["runs"]
    assert (part["path"], part["host"]) == (str(run.path), "a-host-of-ours")


def test_keys_that_differ_from_their_defaults_are_named(tmp_path: Path):
    config = "model: {path: m}\ndata: {train: t.jsonl}\ntrain: {steps: 9, staleness: 0}\nrun: {directory: r}\n"
    (part,) = report(make_run(tmp_path / "run", config=config), out=tmp_path / "page.html").blocks["main"]["runs"]
    assert "train.staleness" in part["config"]
    assert set(part["changed"]) == {"model.path", "data.train", "train.steps", "run.directory"}


def test_all_keys_of_a_config_of_another_version_are_named(run: RunDirectory, tmp_path: Path):
    (part,) = report(run, out=tmp_path / "page.html").blocks["main"]["runs"]
    assert set(part["changed"]) == set(part["config"])  # `data` is missing


def test_the_table_has_the_reference_answer(run: RunDirectory, tmp_path: Path):
    run.write_samples(4, [sample(0, reference="12"), sample(1, reference=[1, 2]), sample(2, answer="13")])
    columns = report(run, out=tmp_path / "page.html").blocks["samples-0"]["columns"]
    rows = zip(*(columns[name] for name in ("step", "line", "reference", "answer")), strict=True)
    assert [row[1:] for row in rows if row[0] == 4] == [(1, "12", None), (2, "[1, 2]", None), (3, None, "13")]


def test_the_page_has_the_samples_and_every_token(run: RunDirectory, tmp_path: Path):
    page = report(run, out=tmp_path / "page.html")
    columns = page.blocks["samples-0"]["columns"]
    found = {(columns["step"][at], columns["line"][at]): page.whole_row(at) for at in range(12)}
    assert found == {(step, number + 1): sample(number) for step in (1, 2, 3) for number in range(4)}
    assert sorted(columns["reward"]) == sorted([0.0, 0.1, 0.2, 0.3] * 3)
    assert set(columns["response"]) == {"ab\n"}


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_a_model_says_is_data(run: RunDirectory, tmp_path: Path, text: str):
    hostile = sample(0, response=text, prompt=text, reward_failure=text)
    hostile["by_token"]["text"] = [text] * 5
    run.write_samples(4, [hostile])
    run.log(4, {text: 1.0, "__proto__": 2.0})
    run.finish("failed", text, f"Traceback\n{text}")
    page = report(run, out=tmp_path / "page.html")
    row = page.whole_row(page.blocks["samples-0"]["columns"]["step"].index(4))
    assert (row["response"], row["by_token"]["text"]) == (text, [text] * 5)
    (part,) = page.blocks["main"]["runs"]
    assert text in part["metrics"]["columns"]
    assert part["facts"]["error"] == text
    scripts = [attributes for tag, attributes in page.tags if tag == "script" and "type" not in attributes]
    assert len(scripts) == 1


def test_a_title_is_text(tmp_path: Path):
    run = make_run(tmp_path / "<b>&run", steps=0)
    write_report([run.path], tmp_path / "page.html")
    assert "<title>&lt;b&gt;&amp;run</title>" in (tmp_path / "page.html").read_text()


def test_the_page_runs_its_own_script_and_nothing_else(run: RunDirectory, tmp_path: Path):
    report(run, out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    script, style = (
        re.search(pattern, text, re.S)[1] for pattern in (r"<script>(.*?)</script>", r"<style>(.*?)</style>")
    )
    for rule, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src" not in policy
    assert not re.search(r"(src|href)=\"(?!#|data:,)", text.partition("<script>")[0])


def test_what_is_not_finite_is_a_gap_and_counted(run: RunDirectory, tmp_path: Path):
    run.log(4, {"entropy": float("nan"), "grad_norm": float("inf")})
    (run.path / "metrics.jsonl").open("a").write('{"step": 5, "entropy": NaN, "reward/mean": 1e400}\n')
    (part,) = report(run, out=tmp_path / "page.html").blocks["main"]["runs"]
    metrics = part["metrics"]
    assert metrics["columns"]["entropy"] == [1.0, 0.5, 0.33333, None, None]
    assert metrics["not_finite"] == {"entropy": [3, 4], "grad_norm": [3], "reward/mean": [4]}


def test_long_runs_keep_the_lowest_and_the_highest_of_equal_parts(tmp_path: Path):
    from enginehouse_report.columns import make_columns

    rows = [{"step": step, "loss": float(step % 10)} for step in range(1, 9001)]
    rows[4321]["loss"], rows[4322]["loss"] = 100.0, -100.0
    found = make_columns(rows, most=1000)
    assert found["rows"] <= 1000
    assert found["binned"] == 18
    assert {100.0, -100.0} <= set(found["columns"]["loss"])
    assert found["columns"]["step"][0] == 1
    assert found["columns"]["step"][-1] == 9000


def test_a_budget_keeps_the_best_and_the_worst_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_report.page.CHUNK_BYTES", 2000)
    run = make_run(tmp_path / "run", steps=0)
    for step in (1, 2):
        run.write_samples(step, [sample(number) for number in range(100)])
    page = report(run, out=tmp_path / "page.html", rows_bytes=3000)
    columns = page.blocks["samples-0"]["columns"]
    kept = {(columns["step"][at], columns["line"][at]) for at in range(200) if columns["block"][at] is not None}
    ends = {1, 2, 3, 4, 97, 98, 99, 100}
    assert {(step, line) for step in (1, 2) for line in ends} <= kept
    assert {(2, 5), (2, 6)} <= kept
    assert not {(1, line) for line in range(5, 97)} & kept
    assert len(columns["reward"]) == 200  # all rows have their figures
    whole = report(run, out=tmp_path / "page.html", rows_bytes=10_000_000).blocks["samples-0"]["columns"]
    assert None not in whole["block"]


def test_the_room_for_rows_is_kept_to_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_report.page.CHUNK_BYTES", 2000)
    run = make_run(tmp_path / "run", steps=0)
    run.write_samples(1, [sample(number) for number in range(300)])
    page = report(run, out=tmp_path / "page.html", rows_bytes=4000)
    blocks = page.blocks["samples-0"]["columns"]["block"]
    assert 10 < sum(block is not None for block in blocks) < 200
    for at, block in enumerate(blocks):
        if block is not None:
            assert page.whole_row(at) == sample(page.blocks["samples-0"]["columns"]["line"][at] - 1)


def test_where_there_is_no_time_the_newest_samples_are_read_and_the_others_named(run: RunDirectory, tmp_path: Path):
    samples = report(run, out=tmp_path / "page.html", seconds=0.0).blocks["samples-0"]
    assert set(samples["columns"]["step"]) == {3}
    assert samples["unread"] == ["step-000001.jsonl", "step-000002.jsonl"]


def test_variables_of_an_engine_are_not_shown(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=0)
    run.record.update(command=["enginehouse", "train", "actor.engine.env.TOKEN=hush", "train.steps=3"])
    page = report(run, out=tmp_path / "page.html")
    (part,) = page.blocks["main"]["runs"]
    assert "hush" not in json.dumps(page.blocks)
    assert part["config"]["actor.engine.env.TOKEN"] == "(not shown)"
    assert part["facts"]["command"].endswith("TOKEN=(not shown) train.steps=3")


def test_two_runs_say_what_differs(run: RunDirectory, tmp_path: Path):
    other = make_run(tmp_path / "runs" / "two", steps=5, config=CONFIG.replace("0.001", "0.01"))
    other.record.update(versions={**other.record.content["versions"], "torch": "9.9"})
    page = report(run, other, out=tmp_path / "page.html")
    differing = page.blocks["main"]["differing"]
    assert differing["config"] == {"actor.engine.options.lr": [0.001, 0.01]}
    assert differing["versions"]["torch"][1] == "9.9"
    assert [part["name"] for part in page.blocks["main"]["runs"]] == ["one", "two"]
    assert len(page.blocks["samples-1"]["columns"]["step"]) == 20


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    runs = [make_run(tmp_path / where / "run", steps=0) for where in ("a", "b")]
    page = report(*runs, out=tmp_path / "page.html")
    assert [part["name"] for part in page.blocks["main"]["runs"]] == ["a/run", "b/run"]


def test_the_timeline_is_of_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run", steps=30)
    monkeypatch.setattr("enginehouse_report.spans.MOST_SPANS", 20)
    from enginehouse_report.spans import read_timeline

    timeline = read_timeline(run.path / "timeline.json", most=20)
    kept = [step for step, _, _ in timeline["steps"]]
    assert {0, 1, 27, 28, 29, 30} <= set(kept)
    assert (timeline["of_steps"], timeline["of_spans"]) == (31, 60)
    assert len(timeline["columns"]["begin"]) <= 20
    whole = read_timeline(run.path / "timeline.json")
    assert len(whole["columns"]["begin"]) == 60
    assert whole["tracks"] == ["controller"]


def test_work_of_a_role_that_overlaps_is_one_track(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=1)
    for track in ("rollout", "episodes"):
        for begin in (1.0, 1.1):
            run.timeline.lane(track, "draw", begin, begin + 5.0)
    run.flush()
    timeline = report(run, out=tmp_path / "page.html").blocks["timeline-0"]
    assert sorted(timeline["tracks"]) == ["controller", "episodes", "episodes (2)", "rollout"]


def command(*arguments: object):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_command_writes_into_the_run(run: RunDirectory):
    result = command(run.path)
    assert result.exit_code == 0, result.output
    assert f"written: {run.path / 'report.html'}" in result.output
    assert page_of(run.path / "report.html").blocks["main"]["runs"][0]["name"] == "one"


def test_several_runs_are_written_here(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = make_run(tmp_path / "runs" / "two")
    monkeypatch.chdir(tmp_path)
    assert command(run.path, other.path).exit_code == 0
    assert (tmp_path / "report.html").is_file()


def test_what_is_no_run_is_one_error_with_the_nearest(run: RunDirectory, tmp_path: Path):
    result = command(run.path.parent / "onee")
    assert result.exit_code == 2
    assert "there is no such directory. Did you mean" in result.output
    assert str(run.path) in result.output
    result = command(run.path.parent)
    assert result.exit_code == 2
    assert "no run.json is in it" in result.output


def test_a_page_that_cannot_be_written_is_one_error(run: RunDirectory, tmp_path: Path):
    result = command(run.path, "--out", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 2
    assert "Name another file: --out FILE" in result.output


def test_the_page_follows_a_run_that_goes_on(run: RunDirectory, tmp_path: Path):
    report(run, out=tmp_path / "page.html")
    take_step(run, 4)
    (part,) = report(run, out=tmp_path / "page.html").blocks["main"]["runs"]
    assert part["metrics"]["columns"]["step"] == [1, 2, 3, 4]


def test_the_library_in_the_page_is_the_one_that_is_named():
    named = re.findall(r"^\| `(.+)` \| `(.+)` \|$", (ASSETS / "uPlot.md").read_text(), re.M)
    assert len(named) == 3
    for name, digest in named:
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest, name


def _luminance(color: str) -> float:
    """The relative luminance of a colour, as WCAG defines it."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(first: str, second: str) -> float:
    dark, light = sorted(map(_luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_a_reader_who_sees_no_colours_tells_the_first_lines_apart(theme: int):
    css = (ASSETS / "page.css").read_text()
    panel = re.findall(r"--panel: (#[0-9a-f]{6})", css)[theme]
    colors = [re.findall(rf"--c{place}: (#[0-9a-f]{{6}})", css)[theme] for place in range(4)]
    assert min(_contrast(color, panel) for color in colors) >= 3
    assert _contrast(colors[0], colors[1]) >= 1.5
    assert _contrast(colors[1], colors[2]) >= 1.4
