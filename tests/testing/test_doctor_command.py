"""`enginehouse plugins doctor`: what it says of plugins, where they would run, and its exit code.

What it says of each kind of bad plugin: `tests/testing/test_bad_plugins.py`.
"""

import json
import site
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from made_up_runtimes import made_up_runtime

from enginehouse.cli.main import main
from enginehouse.plugin import guard, load_plugins, process
from enginehouse.runtimes import Runtime
from enginehouse_testing.doctor import trial
from enginehouse_testing.doctor.examination import examine_plugins

BACKEND = """
@hookimpl
def enginehouse_register_backends(register):
    register({kind}Backend(name={name!r}, engine={engine!r}, options={options!r}{further}))
"""
OPTIONS = "enginehouse.engines.options:{kind}Options"


def backend(
    name: str, kind: str = "Rollout", engine: str = "nowhere:Engine", options: str = OPTIONS, further: str = ""
) -> str:
    """The source of a plugin with one backend; `further` are fields of its record, as source."""
    return BACKEND.format(
        name=name,
        kind=kind,
        engine=engine,
        options=options.format(kind=kind),
        further=f", {further}" if further else "",
    )


@pytest.fixture
def doctor(distributions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `enginehouse plugins doctor` where no plugin is enabled but those called `acme` and `apex`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", "acme,apex")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(process, "_current", None)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["plugins", "doctor", *arguments])

    return run


def report(doctor, *arguments: str) -> dict[str, Any]:
    return json.loads(doctor(*arguments, "--json").stdout)


def plugin(doctor, name: str = "acme") -> dict[str, Any]:
    (found,) = report(doctor, name)["plugins"]
    return found


def test_a_finding_has_its_place_and_its_cure_and_the_exit_code_is_1(doctor, distributions):
    module = distributions.add("acme", "\nraise RuntimeError('no luck today')")
    ended = doctor("acme")
    assert ended.exit_code == 1
    lines = [line.strip() for line in ended.stdout.splitlines()]
    at = lines.index("wrong: RuntimeError: no luck today")
    assert lines[at + 1] == f"at {distributions.site / module}.py:4"
    assert lines[at + 2] == "try: export ENGINEHOUSE_BLOCK_PLUGINS=acme"
    assert lines[-1] == "1 plugin examined: 1 wrong"


def test_the_last_line_counts_plugins_however_many_findings_each_has(doctor, distributions):
    distributions.add("acme", backend("acme") + FURTHER)
    distributions.add("apex", "")
    assert doctor().stdout.splitlines()[-1].endswith(" plugins examined: 1 wrong (2 findings)")


FURTHER = """
@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="acme", function="nowhere:loss"))
"""
IMPORTS = {
    "from enginehouse.plugin import *": "",
    "from enginehouse.plugin import capabilities, batched_reward": "",
    "import enginehouse.engines": "",
    "from enginehouse.engines import model": "note: .engines.model, which is not part of the contract and may",
    "from enginehouse.engines.weights import checksum": "note: .engines.weights.checksum, which is now .weights",
    "from enginehouse.engines.train import TokenView":
        "note: .engines.train.TokenView, which is not part of the contract; the contract has it as .engines.TokenView",
    "from enginehouse.engines.rollout import LossSpec":
        "wrong: .engines.rollout.LossSpec, which does not exist: use .engines.LossSpec",
    "from enginehouse.data import PaddedBatch": "wrong: .data.PaddedBatch, which does not exist",
    "import enginehouse.trackers": "wrong: .trackers, which does not exist",
    "import enginehouse_torch.modeling.loading": "note: enginehouse_torch.modeling.loading, which acme does not",
    "import packaging.version": "",
    "import pluggy": "",
}  # fmt: skip
"""What `plugins doctor` says of an import, in the main."""


def test_imports_are_held_against_the_contract_and_against_what_is_required(doctor, distributions):
    lines = [f"    {line}" if "*" not in line else line for line in IMPORTS]
    source = "\n".join(["", lines[0], "def later():", *lines[1:]])
    required = "Requires-Dist: enginehouse\nRequires-Dist: packaging; extra == 'more'\n"
    module = distributions.add("acme", source, metadata=required)
    found = plugin(doctor)["findings"]
    for number, (line, said) in enumerate(IMPORTS.items(), start=4):
        where = f"{distributions.site / module}.py:{number + (number > 4)}"
        told = [f"{one['severity']}: {one['what']}" for one in found if one["where"] == where]
        assert len(told) == bool(said), (line, told)
        if said:
            expected = said.replace(": ", ": it imports ", 1).replace(" .", " enginehouse.")
            assert told[0].startswith(expected), line
    assert found[-1]["cure"] == 'dependencies = ["enginehouse-torch"] in its pyproject.toml'


def test_where_nothing_is_wrong_the_exit_code_is_0(doctor, distributions):
    distributions.add("acme", "")
    ended = doctor("acme")
    assert ended.exit_code == 0
    assert ended.stdout.endswith("1 plugin examined: nothing wrong\n")


def test_a_plugin_is_named_by_what_it_declares_too_and_nobody_else_is_examined(doctor, distributions):
    distributions.add("acme", backend("swift"))
    distributions.add("apex", "raise RuntimeError('no luck today')")
    (found,) = report(doctor, "swift")["plugins"]
    assert found["name"] == "acme"
    assert {one["name"] for one in report(doctor)["plugins"] if one["state"] != "blocked"} == {"acme", "apex"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acne", "unknown name 'acne'. Did you mean 'acme'?"),
        ("numeric", "'numeric' is part of enginehouse itself, which is not examined. Available: acme"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(doctor, distributions, name: str, said: str):
    distributions.add("acme", "")
    ended = doctor(name)
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert "cispo" not in ended.stderr  # it would be refused
    assert not ended.stdout


def test_a_plugin_that_is_blocked_is_not_examined(doctor, distributions, monkeypatch):
    distributions.add("acme", "import os; os._exit(7)", metadata="Requires-Dist: absent-thing\n")
    monkeypatch.setenv("ENGINEHOUSE_BLOCK_PLUGINS", "acme")
    found = plugin(doctor)
    assert (found["state"], found["findings"], found["loading"]) == ("blocked", [], None)


def test_the_doctor_does_not_end_with_the_plugins_that_it_examines(doctor, distributions):
    distributions.add("acme", "import os; os._exit(7)")
    distributions.add("apex", "")
    states = {found["name"]: found["state"] for found in report(doctor)["plugins"]}
    assert (states["acme"], states["apex"]) == ("broken", "ok")


def test_the_doctor_comes_with_the_package_that_tests_plugins(doctor, monkeypatch):
    assert "doctor" in CliRunner().invoke(main, ["plugins", "--help"]).stdout
    monkeypatch.setenv("ENGINEHOUSE_BLOCK_PLUGINS", "testing")
    ended = doctor("acme")
    assert ended.exit_code == 2
    assert "`plugins doctor` comes with enginehouse-testing, which is installed, but blocked" in ended.stderr
    assert CliRunner().invoke(main, ["plugins", "--help"]).exit_code == 0


def test_where_no_process_can_be_started_that_is_said(doctor, distributions, monkeypatch):
    distributions.add("acme", "")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (finding,) = plugin(doctor)["findings"]
    assert (finding["severity"], finding["what"]) == ("note", "no process could be started to examine the plugin")


def test_how_far_it_is_is_told(doctor, distributions):
    distributions.add("acme", "")
    distributions.add("apex", "")
    told: list[tuple[str, int]] = []
    examine_plugins(None, lambda what, number, of: told.append((what, of - number)))
    names = [one.name for one in load_plugins(enabled=[]).plugins if not one.internal]
    assert told == [(name, len(names) - number) for number, name in enumerate(names, 1)]


def test_what_loading_does_beside_is_noted(doctor, distributions):
    distributions.add(
        "acme",
        """
        import os, threading
        os.environ["ACME_HOME"] = "here"
        threading.Thread(target=threading.Event().wait, name="acme's own", daemon=True).start()
        """,
    )
    found = plugin(doctor)
    assert found["loading"]["variables"] == ["ACME_HOME"]
    assert [(one["severity"], one["what"]) for one in found["findings"]] == [
        ("note", "it starts threads while it is loaded: acme's own"),
        ("note", "it changes environment variables while it is loaded: ACME_HOME"),
    ]


def test_commands_that_cannot_be_added_are_found(doctor, distributions):
    distributions.add("acme", "@hookimpl\ndef enginehouse_commands(cli):\n    raise RuntimeError('no luck today')")
    (finding,) = plugin(doctor)["findings"]
    assert finding["severity"] == "wrong"
    assert "could not add its commands: no luck today" in finding["what"]


FUNCTIONS = """
def loss(): ...

def advantage(batch): ...

not_a_function = 3
"""


def test_functions_are_looked_for_and_have_to_take_what_they_are_given(doctor, distributions):
    (distributions.site / "acme_parts.py").write_text(FUNCTIONS)
    distributions.add(
        "acme",
        """
        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="idle", function="acme_parts:loss"))
            register(Loss(name="gone", function="acme_parts:losses"))

        @hookimpl
        def enginehouse_register_advantages(register):
            register(Advantage(name="sound", function="acme_parts:advantage"))
            register(Advantage(name="three", function="acme_parts:not_a_function"))
        """,
    )
    found = {one["what"]: one["where"].rpartition("/")[2] for one in plugin(doctor)["findings"]}
    module = distributions.modules[-1]
    assert found == {
        "loss 'idle': function 'acme_parts:loss' must take one argument, but takes ()": "acme_parts.py:2",
        "loss 'gone': function: module 'acme_parts' has no 'losses' (asked for by 'acme_parts:losses'). Did you mean "
        "'loss'? Available: advantage, loss, not_a_function": f"{module}.py:4",
        "advantage 'three': function 'acme_parts:not_a_function' is 3, which cannot be called": f"{module}.py:9",
    }


def test_an_engine_that_hangs_where_it_is_imported_is_left_at_a_deadline_with_its_place(
    doctor, distributions, monkeypatch
):
    (distributions.site / "acme_parts.py").write_text("import time\nwhile True:\n    time.sleep(1)")
    distributions.add("acme", backend("swift", engine="acme_parts:Engine"))
    monkeypatch.setattr(trial, "RECORD_SECONDS", 1.0)
    found = plugin(doctor)
    assert found["state"] == "ok"
    (finding,) = found["findings"]
    assert finding["what"] == "importing what rollout 'swift' names: it was not loaded within 1 s"
    assert finding["where"] == f"{distributions.site}/acme_parts.py:3"


def test_a_plugin_that_hangs_where_no_signal_reaches_it_ends_its_own_process(doctor, distributions, monkeypatch):
    """As native code does that holds the interpreter; whoever waits may be gone."""
    hangs = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\nwhile True: time.sleep(9)"
    module = distributions.add("acme", hangs)
    monkeypatch.setattr(guard, "SECONDS", 0.5)
    found = plugin(doctor)
    (finding,) = found["findings"]
    assert (found["state"], finding["what"]) == ("broken", "it was not loaded within 0.5 s; so it is not loaded")
    assert finding["where"] == f"{distributions.site / module}.py:5"


def test_a_device_that_is_not_here_is_noted(doctor, distributions):
    distributions.add(
        "acme", backend("swift", engine="pathlib:Path", further="devices=('cuda',), requires=('absent',)")
    )
    found = plugin(doctor)
    assert found["records"][0]["runtime"] == {
        "name": "",
        "why": "it runs on cuda, but a run here would be on cpu",
    }
    assert [one["severity"] for one in found["findings"]] == ["note"]


RUNTIMES = "requires=('swift-engine-cpu>=2',), runtimes={'cpu': RequirementSet(requirements=('swift-engine-cpu>=2',))}"
ENGINE = """
import swift

class Engine:
    async def launch(self, model, options, context): ...
"""


def make_runtime(site_of_plugins: Path, runtimes: Path) -> Runtime:
    """A runtime of the backend `swift`, with the module `swift` and all that core needs."""
    record = load_plugins(enabled=["acme"]).get("rollout", "swift", elsewhere=True)
    made = made_up_runtime(record, runtimes)
    (made.packages / "swift" / "__init__.py").write_text("")
    (made.packages / "core_needs.pth").write_text("\n".join([*site.getsitepackages(), str(site_of_plugins)]))
    return made


def test_a_plugin_that_cannot_be_loaded_in_a_runtime_is_found(doctor, distributions, tmp_path: Path):
    source = "import importlib.util\nif importlib.util.find_spec('swift'): raise RuntimeError('no luck there')\n"
    distributions.add("acme", source + backend("swift", further=RUNTIMES))
    made = make_runtime(distributions.site, tmp_path / "runtimes")
    (finding,) = plugin(doctor)["findings"]
    assert finding["what"] == (f"in runtime {made.name}: the plugin cannot be loaded: RuntimeError: no luck there")


def test_an_engine_is_examined_in_the_runtime_that_it_would_run_in(doctor, distributions, tmp_path: Path):
    (distributions.site / "acme_parts.py").write_text(ENGINE)
    distributions.add("acme", backend("swift", engine="acme_parts:Engine", further=RUNTIMES))
    (finding,) = plugin(doctor)["findings"]
    assert finding["what"] == "rollout 'swift' needs swift-engine-cpu>=2, but it is not installed"
    assert finding["cure"] == "enginehouse runtime create swift"

    made = make_runtime(distributions.site, tmp_path / "runtimes")
    found = plugin(doctor)
    (swift,) = found["records"]
    assert swift["runtime"]["name"] == made.name
    assert [(one["name"], one["state"]) for one in swift["environments"]] == [
        ("current", "requirements missing"),
        (made.name, "ok"),
    ]
    (finding,) = found["findings"]
    assert finding["what"].startswith(
        f"in runtime {made.name}: rollout 'swift': engine 'acme_parts:Engine' does not implement RolloutEngine: it "
        "lacks generate, "
    )

    manifest = json.loads((made.path / "manifest.json").read_text())
    (made.path / "manifest.json").write_text(json.dumps(manifest | {"key": "another"}))
    stale = plugin(doctor)["findings"][-1]
    assert stale["what"].startswith(f"runtime {made.name} of rollout 'swift' is stale")
    assert "enginehouse runtime create swift" in stale["cure"]


SOUND = """
from enginehouse.engines.rollout import RolloutEngine
from enginehouse.engines.train import TrainEngine

class Trains(TrainEngine): ...

class Serves(RolloutEngine): ...
"""
PICKS = """
@hookimpl
def enginehouse_register_backends(register):
    register(TrainBackend(name="swift", engine="acme_parts:Trains", options="enginehouse.engines.options:TrainOptions"))
    register(RolloutBackend(name="swift", engine="acme_parts:Serves", capabilities={"colocates"},
                            options="enginehouse.engines.options:RolloutOptions"))
"""


def test_the_transport_that_would_be_picked_is_said_by_where_the_two_are(doctor, distributions):
    (distributions.site / "acme_parts.py").write_text(SOUND)
    distributions.add("acme", PICKS)
    found = report(doctor, "acme")
    assert found["wrong"] == 0, found
    picked = {one["where"]: one["transport"]["name"] for one in found["transports"]}
    assert picked == {
        "in one process": "inproc",
        "in processes of one host": "shared_memory" if sys.platform == "linux" else "collective",
        "on several hosts": "collective",
        "on several hosts, with several training processes": "point_to_point",
    }


def test_a_hook_that_fails_to_pick_a_transport_is_found(doctor, distributions):
    (distributions.site / "acme_parts.py").write_text(SOUND)
    distributions.add(
        "acme", f"{PICKS}\n@hookimpl\ndef enginehouse_pick_transport(cluster):\n    print('!')\n    1 / 0"
    )
    ended = doctor("acme", "--json")
    assert ended.exit_code == 1
    (first, *_) = json.loads(ended.stdout)["findings"]
    assert first["what"] == (
        "no weight transport can be picked for swift and swift in one process: ZeroDivisionError: division by zero"
    )


def test_json_is_alone_on_stdout_whatever_an_engine_prints(doctor, distributions):
    (distributions.site / "acme_parts.py").write_text("print('NOISE')\nimport os\nos.system('echo NOISE')\n" + SOUND)
    distributions.add("acme", "print('NOISE')\n" + PICKS)
    ended = doctor("acme", "--json")
    assert "NOISE" not in json.dumps(json.loads(ended.stdout)["plugins"][0]["records"])
    assert json.loads(ended.stdout)["plugins"][0]["loading"]["printed"] == "NOISE\n"


@pytest.mark.slow
def test_there_is_nothing_wrong_with_our_own_plugins(doctor, monkeypatch):
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", "torch,fsdp,megatron,testing")
    found = report(doctor)
    assert {one["name"] for one in found["plugins"] if one["loading"]} == {"torch", "fsdp", "megatron", "testing"}
    assert (found["wrong"], found["notes"]) == (0, 0)
