"""The compatibility matrix: which runs are planned, what is read from them, when it stands, and what the page says."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributions import installed

from enginehouse.cli.main import main
from enginehouse.errors import DataError, UserError
from enginehouse.plugin import load_plugins
from enginehouse_rl.runs.jsonlines import write_json_lines
from enginehouse_testing.certificate import Certificate, Result
from enginehouse_testing.cli.matrix import matrix
from enginehouse_testing.matrix.badge import badge_of
from enginehouse_testing.matrix.certified import certified, findings
from enginehouse_testing.matrix.combination import Combination, Setting, combinations, parts_of_plugin, planned
from enginehouse_testing.matrix.findings import MatrixFindings, earlier_findings
from enginehouse_testing.matrix.making import MatrixMaker
from enginehouse_testing.matrix.page import render
from enginehouse_testing.matrix.row import Figures, MatrixRow, error_of, figures, ran
from enginehouse_testing.matrix.standing import standing
from enginehouse_testing.matrix.task import digits, make_task
from enginehouse_testing.model_under_test import ModelUnderTest
from enginehouse_testing.models import tiny_model
from enginehouse_testing.origin import origin_of

REPOSITORY = Path(__file__).parents[2]

SETTING = Setting(steps=3, processes=2)
TORCH = Combination("torch", "torch", "shared_memory")
FOUND = Figures(
    mean_difference=2.34e-7,
    max_difference=5.67e-6,
    update_seconds=0.1234,
    tokens_per_second=4321.4,
    update_mib=1.5,
    steps=3,
)
ROW = MatrixRow(
    train="torch",
    rollout="torch",
    transport="shared_memory",
    outcome="ran",
    figures=FOUND,
    setting={"steps": 3, "processes": 2},
    layouts={"actor": "dp2 (2 processes)", "rollout": "single x2"},
    placement="separate",
    standing={"train": {"enginehouse": "0.1.0"}, "rollout": {"enginehouse": "0.1.0"}},
    busy_cores=0.3,
    begun="2026-01-01T00:00:00+00:00",
)


@pytest.fixture(scope="module")
def own():
    """The `torch` backends and core's transports, whatever is installed."""
    return load_plugins(enabled=["torch"])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A plugin manager that also has a rollout backend `swift`, whose requirement nobody meets."""
    site = installed(tmp_path / "site", "swift-engine", {"swift": "swift_engine_of_a_test"}).parent
    (site / "swift_engine_of_a_test.py").write_text(
        "from enginehouse.plugin import RolloutBackend, hookimpl\n\nenginehouse_protocol = '1.0'\n\n@hookimpl\n"
        "def enginehouse_register_backends(register):\n"
        "    register(RolloutBackend(name='swift', engine='nowhere:E', requires=('swift-itself>=1',),\n"
        "                            options='enginehouse_torch.options:TorchRolloutOptions'))\n"
    )
    monkeypatch.syspath_prepend(str(site))
    return load_plugins(enabled=["torch", "swift"])


def metrics(**steps):
    """Lines of a run's `metrics.jsonl`, from the values of each figure step by step."""
    lines = [dict(zip(steps, values)) for values in zip(*steps.values())]
    return [
        {
            "mismatch/absolute_mean": line["mean"],
            "mismatch/absolute_max": line["max"],
            "mismatch/kl": line["mean"] ** 2,
            "time/sync": line["sync"],
            "time/generate": line["generate"],
            "response/tokens_mean": 32.0,
            "weights/mib": 1.5,
        }
        for line in lines
    ]


METRICS = metrics(mean=[3e-7, 1e-7, 2e-7], max=[1e-6, 9e-6, 2e-6], sync=[9.0, 0.1, 0.3], generate=[8.0, 1.0, 2.0])


def test_every_backend_is_combined_with_every_other_by_every_transport(own):
    assert combinations(own, {}) == [
        Combination("torch", "torch", "inproc"),
        TORCH,
        Combination("torch", "torch", "collective"),
        Combination("torch", "torch", "point_to_point"),
        Combination("torch", "torch", "differences"),
    ]
    assert combinations(own, {"transport": ["shared_memory"]}) == [TORCH]


def test_a_name_that_is_not_there_is_answered_with_the_nearest(own):
    with pytest.raises(UserError, match=r"--transport: unknown weight transport 'sharedmemory'\. Did you mean"):
        combinations(own, {"transport": ["sharedmemory"]})


def test_the_parts_of_a_plugin_are_what_it_declares(foreign):
    assert parts_of_plugin(foreign, "swift") == parts_of_plugin(foreign, "swift-engine") == [("rollout", "swift")]
    with pytest.raises(UserError, match=r"unknown plugin 'swfit'\. Did you mean 'swift'"):
        parts_of_plugin(foreign, "swfit")


def test_a_plugin_has_a_page_of_its_own_and_a_badge(foreign, tmp_path, monkeypatch):
    monkeypatch.setattr("enginehouse.plugin.plugins", lambda: foreign)
    monkeypatch.setattr(MatrixMaker, "certify", made_up_certificates)
    monkeypatch.setattr(MatrixMaker, "run", lambda self, chosen, again: self._write() is None)
    page = tmp_path / "swift.md"
    done = CliRunner().invoke(matrix, ["--plugin", "swift", "--train", "torch", "--output", str(page)])
    assert done.exit_code == 0, done.output
    text, svg = page.read_text(), page.with_suffix(".svg").read_text()
    assert "# Compatibility of swift" in text
    assert "--plugin swift" in text
    assert "![certified or not](swift.svg)" in text
    assert {row for row in made_up_certificates.seen if "torch" in row} == {("train", "torch")}, "no other rollout"
    assert "certified (7 checks)" in svg
    endpoint = json.loads((tmp_path / "swift.badge.json").read_text())
    assert endpoint["schemaVersion"] == 1
    assert endpoint["label"].startswith("enginehouse ")
    assert endpoint["message"] == "certified (7 checks)"


PASSED = {"passed": True, "counts": {"passed": 26}}


def made_up_certificates(self, chosen, *, make, again=False):
    parts = {(kind, getattr(one, kind)) for one in chosen for kind in ("train", "rollout", "transport")}
    made_up_certificates.seen = parts
    for kind, name in parts:
        one = findings(Certificate(name, True, True, [Result("c", "protocol", "l", 0.0, 0.0, "passed")] * 7).as_json())
        self.findings.add({**one, "kind": kind})
    return True


@pytest.mark.parametrize(
    ("certificates", "said"),
    [
        ([], "not certified"),
        ([{"passed": False, "problem": "none"}], "not certified"),
        (
            [{"passed": True, "counts": {"passed": 26}}, {"passed": True, "counts": {"passed": 22}}],
            "certified (48 checks)",
        ),
        ([{"passed": True, "counts": {"passed": 26}}, {"passed": False, "failed": ["x"]}], "failed (1 check)"),
    ],
    ids=str,
)
def test_a_badge_says_certified_only_where_every_part_is(certificates, said):
    assert badge_of(certificates)[0] == said


def test_a_bad_name_ends_the_command_with_2_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["matrix", "--rollout", "torhc"])
    assert done.exit_code == 2
    assert "Did you mean 'torch'" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("transport", "colocated"),
    [
        ("inproc", True),
        ("shared_memory", False),
        ("collective", False),
        ("point_to_point", False),
        ("differences", False),
    ],
)
def test_roles_share_processes_where_the_transport_reaches_no_further(own, config, tmp_path, transport, colocated):
    found = planned(own, Combination("torch", "torch", transport), SETTING, config, tmp_path / "run")
    rollout = found.plan.roles["rollout"]
    assert (rollout.transport, rollout.shares == "actor") == (transport, colocated)
    assert (found.plan.config.actor.processes, found.plan.config.rollout.replicas) == (2, 2)
    assert found.plan.config.train.steps == 3


@pytest.mark.parametrize(("processes", "layout"), [(1, "single"), (3, "dp2"), (4, "dp4")])
def test_training_is_laid_out_as_the_suite_does_in_as_many_processes_as_may_be(
    own, config, tmp_path, processes, layout
):
    found = planned(own, TORCH, Setting(steps=1, processes=processes), config, tmp_path / "run")
    assert found.train.name == layout
    assert found.plan.config.actor.processes == found.train.processes


@pytest.fixture
def maker(foreign, tmp_path):
    return MatrixMaker(
        plugins=foreign,
        setting=SETTING,
        directory=tmp_path / "runs",
        certificates=tmp_path / "certificates",
        findings=MatrixFindings(),
        page=tmp_path / "page.md",
        onlooker=Silent(),
    )


def test_what_the_plan_refuses_is_a_row_with_its_reason_and_no_failure(maker, foreign, tmp_path):
    chosen = combinations(foreign, {"rollout": ["swift"]})
    assert maker.certify(chosen, make=False)
    assert maker.run(chosen, again=False)
    rows = json.loads((tmp_path / "page.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["refused"] * len(chosen)
    assert all("swift-itself" in row["reason"] for row in rows)
    page = (tmp_path / "page.md").read_text()
    assert "torch x swift by inproc" in page
    assert "swift-itself" in page


def test_figures_that_cannot_be_found_again_here_are_kept_and_that_is_a_failure(maker, foreign, tmp_path):
    chosen = combinations(foreign, {"train": ["torch"], "rollout": ["swift"], "transport": ["inproc"]})
    before = replace(ROW, **asdict(chosen[0]))
    maker.findings.add(before)
    passed = {**findings(certificate(tmp_path).as_json()), "backend": "swift", "kind": "rollout"}
    maker.findings.add(passed)
    assert not maker.certify(chosen, make=False)
    assert not maker.run(chosen, again=True)
    assert maker.findings.rows[chosen[0]] == before
    assert maker.findings.certificates["rollout", "swift", ""] == passed


class Silent:
    """An onlooker."""

    def begins(self, what):
        """Nothing is said."""

    def part(self, number, of, what):
        """Nothing is said."""

    def ended(self, said, failed):
        """Nothing is said."""


def test_times_are_medians_without_the_first_step_and_differences_are_of_all():
    found = figures(METRICS)
    assert found.mean_difference == pytest.approx(2e-7)
    assert found.max_difference == 9e-6
    assert found.update_seconds == pytest.approx(0.2)
    assert found.tokens_per_second == pytest.approx((64 * 32 / 1.0 + 64 * 32 / 2.0) / 2)
    assert found.steps == 3
    assert found.kl == pytest.approx((9 + 1 + 4) / 3 * 1e-14)


def test_a_single_step_is_all_there_is():
    assert figures(METRICS[:1]).update_seconds == 9.0


@pytest.mark.parametrize("wrong", [None, math.inf], ids=["null", "inf"])
def test_a_figure_that_is_no_number_is_no_figure(wrong):
    assert figures([*METRICS[:2], {**METRICS[2], "mismatch/absolute_max": wrong}]) is None


@pytest.mark.parametrize("missing", METRICS[0])
def test_a_figure_that_is_missing_makes_none_up(missing):
    assert figures([{name: value for name, value in line.items() if name != missing} for line in METRICS]) is None


@pytest.mark.parametrize(
    ("lines", "outcome", "reason"),
    [
        (METRICS, "ran", ""),
        (METRICS[:0], "failed", "lack a figure"),
        (metrics(mean=[3e-4], max=[1e-3], sync=[1.0], generate=[1.0]), "failed", "0.0003 nats apart"),
    ],
)
def test_engines_that_are_too_far_apart_have_failed(own, config, tmp_path, lines, outcome, reason):
    write_json_lines(tmp_path / "metrics.jsonl", lines)
    row = ran(TORCH, SETTING, planned(own, TORCH, SETTING, config, tmp_path / "run"), tmp_path)
    assert row.outcome == outcome
    assert reason in row.reason
    assert row.layouts == {"actor": "dp2 (2 processes)", "rollout": "single x2"}


def test_a_failed_run_says_what_its_record_says_else_the_end_of_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\nError: it broke\nin two lines\n")
    assert error_of(tmp_path, log) == "Error: it broke\nin two lines"
    (tmp_path / "run.json").write_text(json.dumps({"error": "a worker died"}))
    assert error_of(tmp_path, log) == "a worker died"
    after = (tmp_path / "run.json").stat().st_mtime + 1
    assert error_of(tmp_path, log, after) == "Error: it broke\nin two lines", "the record is that of an earlier run"


@pytest.mark.parametrize(
    ("row", "setting", "versions", "stands"),
    [
        (ROW, SETTING, ROW.standing, True),
        (ROW, replace(SETTING, steps=4), ROW.standing, False),
        (ROW, SETTING, {"train": {"enginehouse": "0.2.0"}, "rollout": {"enginehouse": "0.1.0"}}, False),
        (replace(ROW, outcome="failed"), SETTING, ROW.standing, False),
    ],
    ids=["same", "other setting", "other versions", "failed"],
)
def test_a_row_stands_while_nothing_it_was_found_with_has_changed(row, setting, versions, stands):
    read_back = MatrixRow.from_json(json.loads(json.dumps(row.as_json())))
    assert read_back.still_stands(setting, versions) is stands


def certificate(tmp_path, outcome="passed", whole=True):
    result = Result("logprobs", "protocol", "dp2", 1e-5, 4e-6, outcome, "rank 1 differs")
    (torch,) = (one.record for one in load_plugins(enabled=["torch"]).providers("train", "torch"))
    made = Certificate("torch", checks=[result], whole=whole, finished=True, origin=origin_of(torch))
    made.write(tmp_path / "train" / "torch")
    return made


def test_a_certificate_of_the_same_versions_is_read_and_not_made_anew(own, tmp_path):
    certificate(tmp_path)
    found = certified(own.providers("train", "torch")[0], tmp_path, "cpu", make=False)
    assert found["passed"]
    assert found["layouts"] == ["dp2"]
    assert found["counts"] == {"passed": 1}
    assert found["nearest"] == {"name": "logprobs", "layout": "dp2", "measured": 4e-6, "tolerance": 1e-5}


@pytest.mark.parametrize("change", ["versions", "code", "interrupted", "whole", "absent"])
def test_any_other_certificate_is_none(own, tmp_path, change):
    certificate(tmp_path, whole=change != "whole")
    path = tmp_path / "train" / "torch" / "certificate.json"
    content = json.loads(path.read_text())
    content |= {"versions": {**content["versions"], "torch": "0.0"}} if change == "versions" else {}
    content |= {"plugin": {**content["plugin"], "digest": "sha256:0"}} if change == "code" else {}
    content |= {"interrupted": True} if change == "interrupted" else {}
    path.write_text(json.dumps(content))
    if change == "absent":
        path.unlink()
    found = certified(own.providers("train", "torch")[0], tmp_path, "cpu", make=False)
    assert "no certificate" in found["problem"]
    assert not found["passed"]


@pytest.mark.slow
def test_a_certificate_that_is_missing_is_made_by_the_suite_and_stands_afterwards(own, tmp_path):
    inproc, begun = own.providers("transport", "inproc")[0], []
    made = certified(inproc, tmp_path, "cpu", make=True, begins=lambda case, number, of: begun.append(number))
    assert made["passed"]
    assert begun == list(range(1, made["counts"]["passed"] + 1))
    assert certified(inproc, tmp_path, "cpu", make=False) == made


def test_a_certificate_says_which_check_failed_and_why(tmp_path):
    found = findings(certificate(tmp_path, "failed").as_json())
    assert not found["passed"]
    assert found["failed"] == ["logprobs at dp2: rank 1 differs"]


def test_versions_are_those_of_core_plugin_and_requirements(own):
    found = standing(own.providers("train", "torch")[0], "cpu")
    assert {"enginehouse", "torch", "transformers", "ray"} <= found.keys()


def test_the_page_has_the_figures_of_every_run_and_the_reason_of_every_other():
    found = MatrixFindings(command="enginehouse matrix")
    found.add(ROW)
    found.add(replace(ROW, transport="collective", outcome="failed", reason="a|b\nc", figures=None))
    for transport in ("inproc", "pigeon"):
        found.add(MatrixRow(train="torch", rollout="swift", transport=transport, outcome="refused", reason="not here"))
    page = render(found, "page.json")
    assert "| torch | torch | 2.3e-07 | **failed** |" in page
    (line,) = [line for line in page.splitlines() if "dp2 (2 processes)" in line]
    assert "| 2.3e-07 | 5.7e-06 | 0.123 | 4,321 | 0.3 |" in line
    assert "| torch x torch by collective | a\\|b<br>c |" in page
    assert "| torch x swift by inproc<br>torch x swift by pigeon | not here |" in page
    assert "train: enginehouse 0.1.0" in page.replace(" | torch | ", ": ").replace("| ", "")


def test_what_was_found_is_read_back_as_it_was(tmp_path):
    found = MatrixFindings(command="enginehouse matrix")
    found.add(ROW)
    found.write(tmp_path / "page.md")
    read_back = earlier_findings(tmp_path / "page.md")
    assert read_back.rows == {TORCH: replace(ROW, overrides=[])}
    assert render(read_back, "page.json") == (tmp_path / "page.md").read_text()


OTHER = ModelUnderTest("/where/it/is", "bfloat16", "small, first 4 of 30 layers", "a wheel: 4 bits")


def test_rows_and_certificates_of_another_model_have_tables_of_their_own_and_say_the_model_and_the_dtype(tmp_path):
    combination = replace(TORCH, model=OTHER.label)
    found = MatrixFindings(command="enginehouse matrix")
    figures = replace(FOUND, mean_difference=0.0123, kl=0.0021)
    found.add(replace(ROW, **asdict(combination), figures=figures))
    found.add(ROW)
    checked = certificate(tmp_path).as_json()
    for model in ("", OTHER.label):
        found.add(findings({**checked, "model": model}))
    assert len(found.rows) == len(found.certificates) == 2
    found.sort([TORCH])
    found.write(tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    tiny, _, models = page.partition("## Other models and dtypes")
    models = models.partition("## Certificates")[0]
    assert OTHER.title not in tiny
    assert "### small, first 4 of 30 layers (a wheel: 4 bits), bfloat16" in models
    assert (
        "| torch | torch | shared_memory | dp2 (2 processes) | 3 | 1.2e-02 | 5.7e-06 | 2.1e-03 | 0.123 | 4,321 |"
        in models
    )
    assert "| train | torch | logprobs at dp2 | 4.0e-06 | 1e-05 |" in models
    assert "0.0015 to 0.003 nats" in models
    assert render(earlier_findings(tmp_path / "page.md"), "page.json") == page


def test_the_files_of_another_model_are_not_those_of_the_tiny_one():
    assert TORCH.folder == "torch-torch-shared_memory"
    folder = replace(TORCH, model=OTHER.label).folder
    assert folder == "torch-torch-shared_memory-small-first-4-of-30-layers-bfloat16"


@pytest.mark.parametrize(("dtype", "outcome"), [("float32", "failed"), ("bfloat16", "ran")])
def test_engines_are_judged_by_the_dtype_that_they_compute_in(own, tmp_path, dtype, outcome):
    model = ModelUnderTest(tiny_model(), dtype, "small")
    config = make_task(tmp_path / "task", model)
    assert not (tmp_path / "task" / "model").exists()
    lines = metrics(mean=[3e-2], max=[1e-1], sync=[1.0], generate=[1.0])
    write_json_lines(tmp_path / "metrics.jsonl", lines)
    combination = replace(TORCH, model=model.label)
    allowed = planned(own, combination, SETTING, config, tmp_path / "run")
    assert allowed.plan.roles["actor"].model.dtype == dtype
    assert '"lr": 2e-05' in " ".join(allowed.overrides)
    row = ran(combination, SETTING, allowed, tmp_path)
    assert (row.outcome, row.model) == (outcome, "small, " + dtype)


def test_figures_of_another_machine_are_not_put_beside_those_of_this_one(tmp_path):
    found = MatrixFindings()
    found.machine = {**found.machine, "cpus": 4096}
    found.add(ROW)
    found.write(tmp_path / "page.md")
    assert earlier_findings(tmp_path / "page.md").rows == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"form": 1}'])
def test_a_file_of_something_else_is_not_written_over(tmp_path, content):
    (tmp_path / "page.json").write_text(content)
    with pytest.raises(DataError, match="choose another --output"):
        earlier_findings(tmp_path / "page.md")
    assert (tmp_path / "page.json").read_text() == content


def test_rewards_differ_between_responses():
    assert digits("x", "1" * 32) == 1.0
    assert digits("x", "1a" * 8) == 0.25


def test_the_page_in_the_repository_is_what_its_figures_make():
    page = REPOSITORY / "docs" / "compatibility.md"
    content = json.loads(page.with_suffix(".json").read_text())
    assert page.read_text() == render(MatrixFindings.from_json(content), "compatibility.json")
