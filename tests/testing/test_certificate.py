"""A certificate says passed only of what has run, whole, and without a failure."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from importlib import metadata

import pytest
from distributions import installed

from enginehouse.errors import UserError
from enginehouse.plugin import Layout, Loss, RolloutBackend, TrainBackend, capabilities, load_plugins, plugins, process
from enginehouse_testing.certificate import Certificate, Result, depends_on
from enginehouse_testing.check import PROTOCOL, Measured, Seen, wrong
from enginehouse_testing.checks import checks_of
from enginehouse_testing.comparison import larger
from enginehouse_testing.origin import commit_of, origin_of
from enginehouse_testing.running import HERE, Case, Certifier, cases, undeclared


def result(outcome, measured=1e-7):
    return Result("logprobs", "protocol", "single", 1e-5, measured, outcome, "what | where")


SINGLE = (Layout("single"),)


def backend(declared=(), layouts=SINGLE):
    return TrainBackend(
        name="mine", engine="mine:Engine", options="mine:Options", capabilities=declared, layouts=layouts
    )


@pytest.mark.parametrize(
    ("outcomes", "whole", "finished", "passed"),
    [
        (["passed"], True, True, True),
        (["passed", "not run", "not declared"], True, True, True),
        (["passed", "failed"], True, True, False),
        (["passed"], False, True, False),
        (["passed"], True, False, False),
        (["not run"], True, True, False),
        ([], True, True, False),
    ],
)
def test_it_passes_only_whole_finished_and_without_a_failure(tmp_path, outcomes, whole, finished, passed):
    certificate = Certificate("mine", whole, finished, [result(outcome) for outcome in outcomes])
    certificate.write(tmp_path)
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["passed"] is passed
    assert written["interrupted"] is not finished
    assert [check["outcome"] for check in written["checks"]] == outcomes
    assert {"backend", "versions", "machine"} <= written.keys()


def test_a_number_that_json_lacks_is_written_as_a_word(tmp_path):
    Certificate("mine", checks=[result("failed", float("inf"))]).write(tmp_path)
    assert json.loads((tmp_path / "certificate.json").read_text())["checks"][0]["measured"] == "inf"
    assert "what \\| where" in (tmp_path / "certificate.md").read_text()


def test_it_says_what_the_engine_stood_on_where_that_was_another_environment(tmp_path):
    Certificate("mine", kind="rollout", runtime={"torch": "9.9.9"}).write(tmp_path)
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert (written["kind"], written["runtime"]) == ("rollout", {"torch": "9.9.9"})
    assert written["versions"]["torch"] != "9.9.9"
    assert "torch 9.9.9" in (tmp_path / "certificate.md").read_text()


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """The record of a third party's backend, and the folder of its package."""
    package = tmp_path / "acme_hf"
    package.mkdir()
    installed(tmp_path, "acme-hf", {"acme": "acme_hf.plugin"}, version="0.3.1")
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text("class Engine: ...\n")
    (package / "plugin.py").write_text(
        "from enginehouse.plugin import RolloutBackend, hookimpl\n\nenginehouse_protocol = '1.0'\n\n@hookimpl\n"
        "def enginehouse_register_backends(register):\n"
        "    register(RolloutBackend(name='swift', engine='acme_hf.engine:Engine', options='acme_hf.engine:Options'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    manager = load_plugins(enabled=["acme"])
    monkeypatch.setattr("enginehouse_testing.origin.plugins", lambda: manager)
    yield manager.get("rollout", "swift"), package
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_hf"]:
        del sys.modules[name]


def test_it_says_which_distribution_and_which_code_of_it_was_certified(acme, tmp_path):
    record, package = acme
    origin = origin_of(record)
    Certificate("swift", kind="rollout", origin=origin).write(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert written["plugin"] == {"distribution": "acme-hf", "version": "0.3.1", "digest": origin.digest}
    assert written["versions"]["acme-hf"] == "0.3.1"
    assert "Plugin: acme-hf 0.3.1, sha256:" in (tmp_path / "out" / "certificate.md").read_text()
    (package / "engine.py").write_text("class Engine: 'edited'\n")
    assert origin_of(record).digest != origin.digest
    assert "acme_hf.engine" not in sys.modules


def test_the_code_of_a_plugin_that_it_stands_on_is_part_of_its_own(acme, tmp_path, monkeypatch):
    """As fsdp stands on what the torch plugin has for all engines in torch."""
    record, package = acme
    before = origin_of(record).digest
    assert "enginehouse-torch" not in depends_on(record)
    info = package.parent / "acme_hf-0.3.1.dist-info" / "METADATA"
    info.write_text(info.read_text() + "Requires-Dist: enginehouse_torch>=0.1\nRequires-Dist: absent; extra == 'all'\n")
    manager = load_plugins(enabled=["acme", "torch"])
    monkeypatch.setattr("enginehouse_testing.origin.plugins", lambda: manager)
    assert origin_of(manager.get("rollout", "swift")).digest != before
    assert "enginehouse-torch" in depends_on(record)


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_it_has_the_version_of_the_plugin_that_it_stands_on(name):
    record = plugins().get("train", name, elsewhere=True)
    written = Certificate(name, depends=depends_on(record)).as_json()
    assert written["versions"]["enginehouse-torch"] == metadata.version("enginehouse-torch")


def test_what_core_brings_weights_with_is_part_of_it(acme, tmp_path, monkeypatch):
    record, _ = acme
    loss = Loss(name="mine", function="acme_hf.engine:Engine")
    before, of_loss = origin_of(record).digest, origin_of(loss).digest
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "receiver.py").write_text("")
    core = importlib.util.find_spec("enginehouse")
    monkeypatch.setattr(core, "submodule_search_locations", [*core.submodule_search_locations, str(tmp_path)])
    assert origin_of(record).digest != before
    assert origin_of(loss).digest == of_loss, "no loss has to do with weights"


def test_what_is_registered_by_nobody_has_the_code_it_names(acme):
    record, _ = acme
    other = dataclasses.replace(record, name="other")
    assert origin_of(other) == origin_of(record)


def test_what_is_not_declared_is_said_and_not_run():
    record = backend({capabilities.VALUE_HEAD})
    run = {case.check.name for case in cases(record)}
    said = {one.name for one in undeclared(record)}
    assert "value_head" in run
    assert {"lora", "offload"} <= said
    assert run | said == {check.name for check in checks_of("train")}
    assert not run & said


def test_a_layout_may_lack_a_capability_the_backend_has():
    layouts = (Layout("whole"), Layout("split", 2, without=(capabilities.LORA,)))
    record = backend({capabilities.LORA}, layouts)
    assert [case.layout for case in cases(record, checks=["lora"])] == ["whole"]
    assert [(one.layout, one.outcome) for one in undeclared(record, checks=["lora"])] == [("split", "not declared")]


def test_a_layout_may_be_for_one_capability_alone():
    layouts = (Layout("whole"), Layout("experts2", 2, only=(capabilities.EXPERTS,)))
    found = cases(backend({capabilities.EXPERTS, capabilities.VALUE_HEAD}, layouts))
    here = {case.check.capability for case in found if case.layout == "experts2"}
    assert here == {capabilities.EXPERTS}
    assert "logprobs" in {case.check.name for case in found if case.layout == "whole"}


def test_checkpoints_of_experts_go_first_between_layouts_that_share_them_out():
    layouts = (Layout("one"), Layout("two", 2), Layout("experts2", 2, only=(capabilities.EXPERTS,)))
    both = {capabilities.EXPERTS, capabilities.RESHARD_CHECKPOINT}
    between = {case.layout for case in cases(backend(both, layouts), checks=["experts_reshard_checkpoint"])}
    assert {"experts2 -> one", "one -> experts2"} <= between
    assert not cases(backend({capabilities.EXPERTS}, layouts), checks=["experts_reshard_checkpoint"])


def test_checkpoints_go_between_layouts_of_different_sizes_alone():
    layouts = (Layout("a"), Layout("b", 2), Layout("c", 2, {"x": 1}), Layout("d", 4))
    between = [
        case.layouts
        for case in cases(backend({capabilities.RESHARD_CHECKPOINT}, layouts), checks=["reshard_checkpoint"])
    ]
    sizes = {(one.processes, other.processes) for one, other in between}
    assert sizes == {(4, 1), (4, 2), (2, 1), (1, 2), (2, 4), (1, 4)}


@pytest.mark.parametrize(("layouts", "checks"), [(["singel"], None), (None, ["logprob"])])
def test_a_name_that_is_not_there_is_answered_with_the_nearest(layouts, checks):
    with pytest.raises(UserError, match=r"Did you mean '(single|logprobs)'"):
        cases(backend(), layouts, checks)


def test_cases_of_a_rollout_engine_stand_together_by_layout_since_each_is_launched():
    record = RolloutBackend(name="mine", engine="m:E", options="m:O", layouts=(Layout("one"), Layout("two")))
    found = [case.layout for case in cases(record)]
    assert found == sorted(found)
    assert found.count("one") == found.count("two") > 10


@pytest.mark.parametrize("kind", ["train", "rollout", "transport"])
def test_every_capability_that_may_be_declared_has_a_check(kind):
    assert {check.capability for check in checks_of(kind)} == {PROTOCOL, *capabilities.BY_KIND[kind]}


def test_a_check_lists_all_that_it_found():
    (refused,) = (check for check in checks_of("rollout") if check.name == "refused")
    found = {"an empty prompt": "was served", "n 0": "raised ValueError: n"}
    judged = refused.judge([Seen(0, 1, True, (found, []))])
    assert "an empty prompt was served" in judged.detail
    assert "n 0 raised ValueError: n" in judged.detail
    several = larger(wrong("one thing"), Measured(3.0, "a size"), wrong("another"))
    assert several.detail == "one thing; another"


def test_the_first_check_of_a_rollout_engine_is_what_many_others_take():
    assert checks_of("rollout")[0].name == "overtaking"


def test_of_code_in_no_checkout_there_is_no_commit(acme, tmp_path):
    record, package = acme
    assert commit_of(record) is None

    def git(*words):
        own = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    assert commit_of(record) is None, "a checkout that does not have the code"
    git("add", "acme_hf")
    git("commit", "-qm", "Begin")
    commit = commit_of(record)
    assert (len(commit.hash), commit.changed) == (40, True), "other files of it are not committed"
    git("add", ".")
    git("commit", "-qm", "All")
    assert commit_of(record).changed is False
    (package / "engine.py").write_text("")
    assert commit_of(record).changed is True


def test_a_check_that_is_newer_than_its_plugin_warns_and_fails_nothing(distributions, monkeypatch):
    source = """
    def nothing(batch):
        return batch

    @hookimpl
    def enginehouse_register_advantages(register):
        register(Advantage(name="dated", function=__name__ + ":nothing"))
    """
    distributions.add("dated", source)
    monkeypatch.setattr(process, "_current", None)
    record = process.plugins().get("advantage", "dated")
    (check,) = [one for one in checks_of("advantage") if one.name == "column"]
    certificate = Certificate("dated", finished=True, kind="advantage", checks=[result("passed")])
    with Certifier(record) as certifier:
        for since, outcome in (("1.0", "failed"), ("1.1", "warning")):
            found = certifier.run(Case(dataclasses.replace(check, since=since), (HERE,)))
            certificate.checks[1:] = [found]
            assert (found.outcome, certificate.passed) == (outcome, outcome == "warning")
        assert found.detail.startswith("this check came with contract 1.1, but the plugin is written for 1.0: ")
        unregistered = dataclasses.replace(record, name="mine", function="builtins:dict")
        certifier.record = unregistered
        assert certifier.run(Case(dataclasses.replace(check, since="1.1"), (HERE,))).outcome == "failed"
    assert certificate.verdict() == "passed (1 passed, 1 warning)"
