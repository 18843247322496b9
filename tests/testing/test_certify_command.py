"""`enginehouse certify`: its files and how it exits."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_testing.certificate import Result
from enginehouse_testing.checks import checks_of
from enginehouse_testing.models import tiny_model
from enginehouse_testing.running import QUANTIZED_TOLERANCE, QUICK, Certifier


@pytest.fixture
def certify(tmp_path, monkeypatch):
    """Run the command with results made up: nothing is started."""

    def certify(outcome, *arguments, name="torch", cases=None):
        def run(self, case):
            if cases is not None:
                cases.append(case)
            if outcome == "interrupted":
                raise KeyboardInterrupt
            return Result(case.check.name, case.check.capability, case.layout, 1e-5, 1e-6, outcome, "made up")

        monkeypatch.setattr(Certifier, "__enter__", lambda self: self)
        monkeypatch.setattr(Certifier, "run", run)
        done = CliRunner().invoke(main, ["certify", name, "--out", str(tmp_path), *arguments])
        written = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob("certificate.json")}
        return done, written.pop(tmp_path.name, None) or written or None

    return certify


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcome", "arguments", "code", "passed"),
    [
        ("passed", [], 0, True),
        ("failed", [], 1, False),
        ("not run", [], 1, False),
        ("passed", ["--check", "logprobs", "--layout", "dp2"], 0, False),
    ],
    ids=str,
)
def test_its_exit_code_and_its_certificate_say_how_it_went(certify, outcome, arguments, code, passed):
    done, written = certify(outcome, "--kind", "train", *arguments)
    assert done.exit_code == code, done.output
    assert written["passed"] is passed
    assert "certificate.json" in done.output


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_a_certificate_says_of_which_model_and_dtype_it_is_and_what_was_not_asked_of_it(certify, tmp_path, kind):
    done, written = certify("passed", "--kind", kind, "--model", tiny_model(), "--dtype", "bfloat16", "--layers", "1")
    assert done.exit_code == 0, done.output
    said = f"{Path(tiny_model()).name}, first 1 of 2 layers, bfloat16"
    assert written["model"] == said
    assert f"model: {said}" in done.output
    assert f"Model: {said}" in (tmp_path / "certificate.md").read_text()
    assert written["passed"], "all that can be asked of the model"
    assert {layout for _, layout in ran(written)} == {"single"}
    others = {one["detail"] for one in written["checks"] if one["outcome"] == "not run"}
    assert others == {"this check runs only with the tiny models in float32"}


def test_options_reach_the_engine_and_its_certificate_which_is_not_that_of_the_engine_without_them(certify, tmp_path):
    arguments = ("--kind", "rollout", "--dtype", "bfloat16", "--options", "{quantization: fp8}")
    done, written = certify("passed", *arguments, name="vllm")
    assert done.exit_code == 0, done.output
    assert (written["options"], written["passed"]) == ({"quantization": "fp8"}, False)
    assert 'Options: {"quantization": "fp8"}' in (tmp_path / "certificate.md").read_text()


@pytest.mark.parametrize(
    ("options", "tolerance"), [("{quantization: fp8}", QUANTIZED_TOLERANCE), ("{max_running: 8}", 0.3)]
)
def test_an_engine_that_quantizes_may_differ_more_in_logprobs_alone(certify, options, tolerance):
    cases = []
    certify("passed", "--kind", "rollout", "--dtype", "bfloat16", "--options", options, name="vllm", cases=cases)
    assert {case.check.tolerance for case in cases} == {tolerance}
    assert all(case.layouts[0].options.items() >= yaml.safe_load(options).items() for case in cases)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--options", "{quantisation: fp8}"],
            "quantisation: Extra inputs are not permitted. Did you mean 'quantization'",
        ),
        (["--options", "{quantization: fp8}"], "vllm quantizes weights of bfloat16, not of float32"),
        (["--options", "fp8"], "--options must be a mapping such as {quantization: fp8}, not 'fp8'"),
    ],
)
def test_options_that_the_engine_does_not_take_are_the_users_mistake(certify, arguments, said):
    done, written = certify("passed", "--kind", "rollout", *arguments, name="vllm")
    assert (done.exit_code, written) == (2, None)
    assert said in " ".join(done.output.split())


def test_options_need_the_kind_of_a_name_that_has_several(certify):
    done, written = certify("passed", "--options", "{lr: 0.1}", name="torch")
    assert (done.exit_code, written) == (2, None)
    assert "'torch' is several: add --kind train or rollout" in " ".join(done.output.split())


def test_what_is_interrupted_leaves_a_certificate_that_says_so(certify):
    done, written = certify("interrupted", "--kind", "rollout")
    assert done.exit_code == 130
    assert (written["passed"], written["interrupted"]) == (False, True)


@pytest.mark.parametrize("arguments", [["--layout", "dp3"], ["--check", "logprob"]], ids=str)
def test_a_layout_or_check_that_is_not_there_is_the_users_mistake(certify, arguments):
    done, written = certify("passed", *arguments)
    assert done.exit_code == 2
    assert "Did you mean" in done.output
    assert written is None


def test_an_unknown_backend_is_answered_with_the_nearest(tmp_path):
    done = CliRunner().invoke(main, ["certify", "torhc", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "Did you mean 'torch'" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("json:JSONDecoder", "tracker", "does not implement Tracker: it lacks start, log, finish"),
        ("json:dumps", "environment", "must be a class, but is dumps, a function"),
        ("json:loads", "environment", "must be a class, but is loads, a function"),
        ("threading:Barrier.reset.__name__", "loss", "must be a function or a class, not str"),
        ("threading:active_count", "loss", "must take one argument, but takes ()"),
        ("grpoo", "loss", "(name your own code as module:attribute)"),
    ],
)
def test_what_is_not_of_the_kind_is_the_users_mistake(tmp_path, name, kind, said):
    done = CliRunner().invoke(main, ["certify", name, "--kind", kind, "--out", str(tmp_path / "out")])
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_of_a_name_of_two_kinds_both_are_checked_each_into_a_folder_of_its_own(certify):
    done, written = certify("passed")
    assert done.exit_code == 0, done.output
    assert {kind: (one["kind"], one["passed"]) for kind, one in written.items()} == {
        "train": ("train", True),
        "rollout": ("rollout", True),
    }


@pytest.mark.parametrize(
    ("arguments", "kind"), [(["--layout", "dp2"], "train"), (["--check", "greedy"], "rollout")], ids=str
)
def test_what_only_one_kind_has_chooses_it(certify, arguments, kind):
    done, written = certify("passed", *arguments)
    assert done.exit_code == 0, done.output
    assert written["kind"] == kind


def test_a_weight_transport_is_certified_by_its_name(certify):
    done, written = certify("passed", name="shared_memory")
    assert done.exit_code == 0, done.output
    assert (written["kind"], written["passed"]) == ("transport", True)


def ran(written):
    """Name and layout of each check that was run."""
    return [(one["name"], one["layout"]) for one in written["checks"] if one["outcome"] in ("passed", "failed")]


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_quick_runs_a_few_checks_at_the_first_layout_and_certifies_nothing(certify, kind):
    done, written = certify("passed", "--quick", "--kind", kind)
    assert done.exit_code == 0, done.output
    assert ran(written) == [(name, "single") for name in QUICK[kind]]
    assert written["passed"] is False


def test_quick_takes_another_layout_and_no_checks(certify):
    _, written = certify("passed", "--quick", "--layout", "dp2")
    assert {layout for _, layout in ran(written)} == {"dp2"}
    assert certify("passed", "--quick", "--check", "logprobs")[0].exit_code == 2


def test_fail_fast_ends_with_the_first_failure(certify):
    done, written = certify("failed", "--fail-fast", "--kind", "train")
    assert done.exit_code == 1
    assert len(ran(written)) == 1
    assert (written["whole"], written["interrupted"], written["passed"]) == (False, False, False)
    assert "made up" in done.output


def test_fail_fast_does_not_go_on_to_another_kind_of_the_name(certify):
    _, written = certify("failed", "--fail-fast")
    assert list(written) == ["train"]


def test_timeout_is_that_of_an_act(certify, monkeypatch):
    given = []
    monkeypatch.setattr("enginehouse_testing.running._site", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(Certifier, "__exit__", lambda self, *error: None)
    monkeypatch.setattr(Certifier, "versions", lambda self: {})
    certify("passed", "--timeout", "7", "--kind", "rollout", "--check", "greedy")
    assert given[0][3] == 7.0


def test_the_checks_of_a_quick_look_exist():
    for kind, names in QUICK.items():
        assert set(names) <= {check.name for check in checks_of(kind)}


def test_any_kind_is_certified_by_its_name_and_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from enginehouse_rl.losses.clipped_policy import clipped_policy\n\n"
        "def loss(view, *, clip: float):\n    return clipped_policy(view, clip_low=clip, clip_high=clip)\n"
    )
    monkeypatch.chdir(tmp_path)
    line = ["certify", "mine:loss", "--kind", "loss", "--out", "out"]
    done = CliRunner().invoke(main, [*line, "--arguments", "{clip: 0.3}"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert (written["backend"], written["kind"], written["passed"]) == ("mine:loss", "loss", True)
    for arguments, said in (
        ([], "it requires the argument 'clip'. Arguments:"),
        (["--arguments", "{clip: big}"], "clip"),
        (["--column", "x"], "NAME=row"),
    ):
        done = CliRunner().invoke(main, [*line, *arguments])
        assert done.exit_code == 2
        assert said in done.output
    assert CliRunner().invoke(main, ["certify", "mine:loss", "--out", "out"]).exit_code == 2


def test_rows_of_a_file_are_what_a_reward_is_tried_with(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"response": "4", "answer": "4", "reward": 1}\n{"response": "5", "answer": "4", "reward": 1}\n')
    line = ["certify", "exact_match", "--kind", "reward", "--out", str(tmp_path / "out"), "--check", "expected"]
    done = CliRunner().invoke(main, [*line, "--examples", str(rows)])
    assert done.exit_code == 1
    assert "the reward of response '5' is 0, not 1" in " ".join(done.output.split())
    rows.write_text("{\n")
    done = CliRunner().invoke(main, [*line, "--examples", str(rows)])
    assert (done.exit_code, "line 1" in done.output) == (2, True)


def test_its_checks_are_listed(tmp_path):
    done = CliRunner().invoke(main, ["certify", "--list", "--kind", "loss"])
    assert done.exit_code == 0
    assert [line.split(":")[0].strip() for line in done.output.splitlines()[1:]] == [
        check.name for check in checks_of("loss")
    ]
    assert "transport:" in CliRunner().invoke(main, ["certify", "--list"]).output


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certified")
    done = CliRunner().invoke(main, ["certify", "grpo", "--kind", "advantage", "--out", str(directory)])
    assert done.exit_code == 0, done.output
    return directory / "certificate.json"


def test_a_certificate_names_the_commit_of_the_code(certified):
    written = json.loads(certified.read_text())
    assert len(written["commit"]["hash"]) == 40
    assert written["commit"]["changed"] in (True, False)


def verified(path):
    done = CliRunner().invoke(main, ["certify", "--verify", str(path)])
    return done.exit_code, done.output


def test_verify_says_that_it_is_of_what_is_installed(certified):
    code, said = verified(certified)
    assert code == 0, said
    assert said.splitlines()[0].endswith(": passed")
    assert "advantage grpo, written" in said
    assert "It matches the installed software." in said


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("versions", "torch"), "0.0.1", "torch: certified 0.0.1, installed "),
        (("plugin", "digest"), "sha256:0", "plugin digest: certified sha256:0, installed sha256:"),
        (("plugin", "version"), "9", "plugin version: certified 9, installed "),
        (("backend",), "grop", "Did you mean 'grpo'"),
    ],
    ids=lambda one: ".".join(one) if isinstance(one, tuple) else "",
)
def test_verify_says_in_a_line_each_what_differs(certified, tmp_path, where, value, said):
    content = json.loads(certified.read_text())
    *above, last = where
    (content[above[0]] if above else content)[last] = value
    changed = tmp_path / "certificate.json"
    changed.write_text(json.dumps(content))
    code, output = verified(changed)
    assert code == 1
    assert said in output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"passed": False, "checks": [{"name": "column", "outcome": "failed"}]}, "failed"),
        ({"checks": [{"name": "column", "outcome": "failed"}]}, "failed"),
        ({"checks": [{"name": "column", "outcome": "not run"}]}, "not the whole suite"),
        ({"whole": False}, "not the whole suite"),
        ({"interrupted": True}, "interrupted"),
    ],
    ids=str,
)
def test_verify_says_no_to_what_did_not_pass(certified, tmp_path, changes, said):
    """Whatever the file says of `passed`: that is found from its checks."""
    changed = tmp_path / "certificate.json"
    changed.write_text(json.dumps({**json.loads(certified.read_text()), **changes}))
    code, output = verified(changed)
    assert (code, said in output.splitlines()[0]) == (1, True), output


OTHER = {
    "backend": "b", "kind": "loss", "passed": True, "interrupted": False, "whole": True, "checks": [1], "versions": {},
    "written": "",
}  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"passed": true}', json.dumps(OTHER), json.dumps(OTHER | {"checks": []})])
def test_verify_takes_nothing_else_for_a_certificate(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    code, output = verified(tmp_path / "other.json")
    assert code == 2
    assert "certificate" in output
