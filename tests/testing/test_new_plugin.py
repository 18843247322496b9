"""`enginehouse new-plugin`: what it makes is found, says what is yet to be written, and is in good style."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributions import installed

import enginehouse.plugin
import enginehouse_testing
from enginehouse.cli.main import main
from enginehouse.engines.declared import find_faults, protocols_of
from enginehouse.plugin import plugins, reload_plugins
from enginehouse.plugin.references import methods_of
from enginehouse_testing.doctor.imports import imports_of, off_contract
from enginehouse_testing.new_plugin.kinds import KINDS
from enginehouse_testing.unwritten import unwritten

RECORDS = {record.kind for record in enginehouse.plugin.KINDS}
KINDS_THERE = [kind for kind in KINDS if kind == "command" or kind in RECORDS]
STARTS = [(kind, start) for kind, one in KINDS.items() for start in one.starts]


@pytest.fixture
def new(tmp_path, monkeypatch):
    """Make a package, and have it found as if it were installed; returns its folder."""
    monkeypatch.chdir(tmp_path)
    packages = []

    def new(name, *arguments):
        done = CliRunner().invoke(main, ["new-plugin", name, *arguments])
        assert done.exit_code == 0, done.output
        folder = tmp_path / name
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        (points,) = project["entry-points"].values()
        monkeypatch.syspath_prepend(str(installed(tmp_path / "site", name, points).parent))
        monkeypatch.syspath_prepend(str(folder / "src"))
        packages.extend(points)
        importlib.invalidate_caches()
        reload_plugins()
        return folder

    yield new
    for name in [one for one in sys.modules if one.partition(".")[0] in packages]:
        del sys.modules[name]
    monkeypatch.undo()
    importlib.invalidate_caches()
    reload_plugins()


@pytest.mark.parametrize("kind", [kind for kind in KINDS_THERE if kind != "command"])
def test_a_package_is_found_and_all_that_its_author_writes_says_so(new, kind):
    folder = new(f"acme-{kind}", "--kind", kind)
    record = plugins().get(kind, f"acme_{kind}")
    assert list(find_faults(record)) == []
    found = unwritten(record)
    wanted = {name for protocol in protocols_of(record) for name in methods_of(protocol)} - {"sleep", "wake_up"}
    assert {one.name for one in found} >= wanted
    assert found
    for one in found:
        file, line, said = str(one).split(":", 2)
        assert (folder.parent / file if file.startswith("acme") else one.file) == one.file
        assert f"def {one.name}(" in one.file.read_text().splitlines()[int(line) - 1]
        assert said.startswith(f" {one.name} is yours to write: ")


def test_a_package_with_a_command_works_as_it_is(new, tmp_path):
    new("acme-say", "--kind", "command")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    done = CliRunner().invoke(main, ["acme-say", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, "step 3: reward/mean 0.5\n")


@pytest.mark.parametrize(("kind", "start"), STARTS)
def test_what_starts_with_code_that_works_leaves_nothing_to_be_written(new, kind, start):
    new("acme-engine", "--kind", kind, "--from", start)
    record = plugins().get(kind, "acme_engine")
    assert list(find_faults(record)) == []
    assert unwritten(record) == []
    assert record.capabilities


@pytest.mark.parametrize(("kind", "start"), [*((kind, "") for kind in KINDS_THERE), *STARTS])
def test_what_is_made_imports_the_addresses_of_the_contract_alone(new, kind, start):
    folder = new("acme-made", "--kind", kind, *(["--from", start] if start else []))
    found = list(imports_of((folder / "src").rglob("*.py")))
    assert found
    assert [said for one in found if (said := off_contract(one)[1])] == []
    surface = json.loads((Path(__file__).parents[1] / "contract" / "surface.json").read_text())["names"]
    since = [surface[name]["since"] for one in found if (name := f"{one.module}.{one.name}") in surface]
    assert since
    stated = re.search(r'^enginehouse_protocol = "(.+)"', (folder / "src/acme_made/plugin.py").read_text(), re.M)
    assert stated[1] >= max(since)


@pytest.mark.parametrize("file", ["batch.py", "served_weights.py"])
def test_the_example_has_what_its_template_makes(new, file):
    made = new("acme-rollout", "--kind", "rollout", "--from", "transformers") / "src" / "acme_rollout" / file
    example = Path(__file__).parents[2] / "examples/third_party/acme_rollout/src/acme_rollout" / file
    assert example.read_text() == made.read_text()


def test_a_suite_has_one_failing_test_for_each_method_until_all_are_written(new):
    folder = new("acme-loss", "--kind", "loss")

    class TestAcme(enginehouse_testing.LossSuite):
        loss = "acme_loss"

    assert not hasattr(TestAcme, "test_conforms")
    (cases,) = (mark.args[1] for mark in TestAcme.test_is_written.pytestmark)
    ((method,),) = (case.values for case in cases)
    with pytest.raises(pytest.fail.Exception, match=r"loss\.py:\d+: acme_loss is yours to write: ") as failed:
        TestAcme().test_is_written(method)
    assert not failed.value.pytrace

    source = folder / "src" / "acme_loss" / "loss.py"
    source.write_text(source.read_text().replace("raise NotImplementedError", "return str"))

    class TestWritten(enginehouse_testing.LossSuite):
        loss = "acme_loss"

    assert not hasattr(TestWritten, "test_is_written")
    assert hasattr(TestWritten, "test_conforms")


def test_a_check_that_is_asked_for_is_run_whatever_is_yet_to_be_written(new):
    new("acme-rollout", "--kind", "rollout")

    class TestAcme(enginehouse_testing.RolloutEngineSuite):
        backend = "acme_rollout"
        checks = ("greedy",)

    assert hasattr(TestAcme, "test_conforms")


def test_certify_checks_nothing_of_what_is_yet_to_be_written(new, tmp_path):
    new("acme-train", "--kind", "train")
    done = CliRunner().invoke(main, ["certify", "acme_train", "--out", str(tmp_path / "certificate")])
    assert done.exit_code == 1
    assert "train.py:" in done.output
    assert "nothing was checked, 9 methods are yet to be written" in done.output
    assert not (tmp_path / "certificate").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--kind", kind, "--from", start] for kind, start in STARTS),
        [word for kind in KINDS for word in ("--kind", kind)],
    ],
    ids=" ".join,
)
def test_what_is_made_is_in_good_style(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["new-plugin", "acme-things", "--author", 'Ada "A" Acme', *arguments])
    assert done.exit_code == 0, done.output
    for kind in arguments[1::2] if "--from" not in arguments else ():
        assert (f"certify acme_things --kind {kind} " in done.output) == bool(KINDS[kind].suite)
    assert "{{" not in (tmp_path / "acme-things" / "README.md").read_text()
    project = tomllib.loads((tmp_path / "acme-things" / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": 'Ada "A" Acme'}]
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--isolated", "--line-length", "120", "acme-things"]
    subprocess.run([*ruff, "check", "--select", "E,F,W,I,B,UP,SIM,C4,RUF", *settings], check=True)
    subprocess.run([*ruff, "format", "--check", *settings], check=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Acme_Loss", "--kind", "loss"], "write 'acme-loss'"),
        (["4ever", "--kind", "loss"], "write 'ever'"),
        (["json", "--kind", "loss"], "'json' is a word of Python itself; write 'acme-json'"),
        (["tests", "--kind", "loss"], "'tests' would stand in for a folder of every checkout; write 'acme-tests'"),
        (["torch", "--kind", "loss"], "torch, which is installed, has a module 'torch'; write 'acme-torch'"),
        (["grpo", "--kind", "advantage"], "enginehouse offers it, of kind advantage; write 'acme-grpo'"),
        (["train", "--kind", "command"], "`enginehouse train` is a command; write 'acme-train'"),
        (["enginehouse-vllm", "--kind", "loss"], "it is one of enginehouse's own packages"),
        (["acme", "--kind", "loss", "--from", "torch"], "--from torch is for --kind train, and not for loss"),
        (["acme", "--kind", "train", "--from", "torhc"], "Did you mean 'torch'?"),
        (["acme", "--kind", "los"], "'los' is not one of"),
        (["acme"], "Missing option '--kind'"),
        (["full", "--kind", "loss"], "'full' is there, and not an empty folder"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_a_mistake_is_said_in_one_line_and_nothing_is_made(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    done = CliRunner().invoke(main, ["new-plugin", *arguments])
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
