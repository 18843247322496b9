"""What becomes of each bad plugin: how it is listed, what the doctor says of it, what an error says, and nobody else.

The keywords of a test's marker are what it looks for, and, without `cure`, a row of docs/plugins/bad-plugins.md:
`listed` is its state, `found` begins or is within a finding, `cure` is that finding's command, `asked` is within the
error of a config that names it, or `"works"`.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner, Result
from projects import Project, project  # noqa: F401 - a fixture

from enginehouse.cli.main import main
from enginehouse.plugin import CONTRACT, guard, process

PARTS = """
from enginehouse.engines.options import EngineOptions, TrainOptions

class Engine:
    mesh = None
    def setup(self, model, options, context): ...
    def forward(self, batch, outputs): ...
    def forward_backward(self, batch, loss): ...
    def optim_step(self): ...
    def weight_source(self): ...
    def save(self, path, what=()): ...
    def load(self, path, what=()): ...
    def export_hf(self, path): ...
    def shutdown(self): ...

class Half:
    def setup(self, model, options, context): ...

class Skewed(Engine):
    def forward(self, batch): ...

class NoModel:
    pass

class NoEngine(object):
    pass

def make_engine(): ...
"""


def backend(name: str = "acme", engine: str = "Engine", options: str = "TrainOptions", further: str = "") -> str:
    """The source of a plugin with one training backend; engine and options are in the module `acme_parts`."""
    engine, options = (one if ":" in one else f"acme_parts:{one}" for one in (engine, options))
    return f"""
@hookimpl
def enginehouse_register_backends(register):
    register(TrainBackend(name={name!r}, engine={engine!r}, options={options!r}{further}))
"""


@dataclass
class Bad:
    """Installs bad plugins, and looks at what becomes of them."""

    distributions: Any
    config: str
    row: dict[str, str]

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    def is_shown(self, source: str, *, asking: str = "actor.engine.backend=acme", metadata: str = "") -> dict[str, Any]:
        """Install the plugin `acme` and check all that the test's marker says; returns the finding."""
        module = self.distributions.add("acme", source, metadata=metadata)
        process._current = None
        finding = self.found()
        self.listed()
        self.asked(asking)
        if finding["where"]:
            assert finding["where"].partition(":")[0].endswith((f"{module}.py", "acme_parts.py"))
        return finding

    def ends_the_command(self, source: str) -> dict[str, Any]:
        """Install the plugin `acme`, which ends the process that loads it; returns the doctor's finding."""
        module = self.distributions.add("acme", source)
        finding = self.found()
        assert finding["where"].partition(":")[0].endswith(f"{module}.py")
        for arguments in (["plugins", "list"], ["plan", self.config]):
            ended = subprocess.run(
                [sys.executable, "-m", "enginehouse.cli.main", *arguments],
                env={**os.environ, "PYTHONPATH": str(self.distributions.site)}, capture_output=True, text=True,
                timeout=60,
            )  # fmt: skip
            assert ended.returncode != 0
            assert self.row["asked"] in ended.stderr
        return finding

    def found(self) -> dict[str, Any]:
        ended = self.run("plugins", "doctor", "acme", "--json")
        report = json.loads(ended.stdout)
        (plugin,) = report["plugins"]
        findings = plugin["findings"]
        matching = [one for one in findings if self.row["found"] in one["what"]]
        assert matching, findings
        assert ended.exit_code == (1 if report["wrong"] else 0)
        assert bool(report["wrong"]) == any(one["severity"] == "wrong" for one in findings)
        assert matching[0]["cure"] == self.row["cure"]
        return matching[0]

    def listed(self) -> None:
        ended = self.run("plugins", "list", "--json")
        assert ended.exit_code == 0
        states = {plugin["name"]: plugin["state"] for plugin in json.loads(ended.stdout)["plugins"]}
        assert states["acme"] == self.row["listed"]
        assert states["torch"] == "ok"

    def asked(self, override: str) -> None:
        ended = self.run("plan", self.config, override)
        if self.row["asked"] == "works":
            assert ended.exit_code == 0, ended.output
        else:
            assert ended.exit_code == 2
            assert self.row["asked"] in ended.stderr
        assert self.run("plan", self.config).exit_code == 0


@pytest.fixture
def bad(distributions, project: Project, monkeypatch, request) -> Bad:  # noqa: F811
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", "torch,acme,apex")
    monkeypatch.setattr(process, "_current", None)
    (distributions.site / "acme_parts.py").write_text(PARTS)
    distributions.modules.append("acme_parts")  # to be forgotten
    project.write_tokenizer()
    return Bad(distributions, str(project.save()), request.node.get_closest_marker("bad_plugin").kwargs)


@pytest.mark.bad_plugin(
    what="calls `os._exit(7)` at import",
    listed="nothing: the command ends",
    found="it ends the process that loads it, with exit code 7",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="The process ended while it loaded plugin acme (acme 0.1.0). ENGINEHOUSE_BLOCK_PLUGINS=acme keeps it out",
)
def test_a_hostile_import(bad: Bad):
    bad.ends_the_command("import os; os._exit(7)")


@pytest.mark.bad_plugin(
    what="crashes at import",
    listed="nothing: the command ends",
    found="it ends the process that loads it, by signal 11",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="The process ended while it loaded plugin acme (acme 0.1.0). ENGINEHOUSE_BLOCK_PLUGINS=acme keeps it out",
)
def test_a_crash_at_import(bad: Bad):
    found = bad.ends_the_command("import os\nos.kill(os.getpid(), 11)")
    assert found["where"].endswith(".py:4")


@pytest.mark.bad_plugin(
    what="never ends its import",
    listed="broken",
    found="it was not loaded within ",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="plugin 'acme' (acme 0.1.0) is installed but broken: it was not loaded within ",
)
def test_an_endless_import(bad: Bad, monkeypatch):
    monkeypatch.setattr(guard, "SECONDS", 1.0)
    found = bad.is_shown("import time\nwhile True:\n    time.sleep(1)")
    assert found["where"].endswith(".py:5")


@pytest.mark.bad_plugin(
    what="calls `sys.exit(7)` at import",
    listed="broken",
    found="SystemExit: 7",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="plugin 'acme' (acme 0.1.0) is installed but broken: SystemExit: 7",
)
def test_an_exit_at_import(bad: Bad):
    assert bad.is_shown("import sys\nsys.exit(7)")["where"].endswith(".py:4")


@pytest.mark.bad_plugin(
    what="declares a name of enginehouse",
    listed="broken",
    found="loss 'clipped_policy' is a name of enginehouse itself; choose another",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="is installed but broken: loss 'clipped_policy' is a name of enginehouse itself",
)
def test_a_name_of_enginehouse(bad: Bad):
    found = bad.is_shown(
        """
@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="clipped_policy", function="acme_parts:Half"))
"""
    )
    assert found["where"].endswith(".py:6")


@pytest.mark.bad_plugin(
    what="declares a name of another distribution",
    listed="ok",
    found="training engine 'swift' is provided by acme and apex; write 'acme:swift' or 'apex:swift'",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="training engine 'swift' is provided by acme and apex; write 'acme:swift' or 'apex:swift'",
)
def test_a_name_of_two_distributions(bad: Bad):
    bad.distributions.add("apex", backend("swift"))
    bad.is_shown(backend("swift"), asking="actor.engine.backend=swift")
    assert bad.run("plan", bad.config, "actor.engine.backend=apex:swift").exit_code == 0


@pytest.mark.bad_plugin(
    what="lacks a package that its engine needs",
    listed="requirements missing",
    found="train 'acme' needs absent-thing>=1, but it is not installed",
    cure='pip install "absent-thing>=1"',
    asked='needs absent-thing>=1, but it is not installed. Try: pip install "absent-thing>=1"',
)
def test_a_missing_requirement(bad: Bad):
    bad.is_shown(backend(further=", requires=('absent-thing>=1',)"))


@pytest.mark.bad_plugin(
    what="lacks a package that its loss needs",
    listed="requirements missing",
    found="loss 'acme' needs absent-thing>=1, but it is not installed",
    cure='pip install "absent-thing>=1"',
    asked='needs absent-thing>=1, but it is not installed. Try: pip install "absent-thing>=1"',
)
def test_a_missing_requirement_of_a_function(bad: Bad):
    source = """
@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="acme", function="absent_thing:loss", requires=("absent-thing>=1",)))
"""
    bad.is_shown(source, asking="algorithm.loss.name=acme")


@pytest.mark.bad_plugin(
    what="imports a name that has moved",
    listed="ok",
    found="it imports enginehouse.engines.weights.checksum, which is now enginehouse.weights.checksum",
    cure="pip install --upgrade acme",
    asked="works",
)
def test_a_name_that_has_moved(bad: Bad):
    found = bad.is_shown(backend() + "\ndef later():\n    from enginehouse.engines.weights import checksum\n")
    assert found["severity"] == "note"


@pytest.mark.bad_plugin(
    what="lacks a package that it imports",
    listed="broken",
    found="acme 0.1.0 needs absent-thing>=1, but it is not installed",
    cure='pip install "absent-thing>=1"',
    asked="is installed but broken: ModuleNotFoundError: No module named 'absent_thing'",
)
def test_a_missing_dependency(bad: Bad):
    bad.is_shown("import absent_thing", metadata="Requires-Dist: absent-thing>=1\n")


@pytest.mark.bad_plugin(
    what="states the next major contract version",
    listed="incompatible",
    found="acme 0.1.0 is written for plugin contract 2.0",
    cure="pip install --upgrade enginehouse",
    asked="is installed but incompatible: acme 0.1.0 is written for plugin contract 2.0",
)
def test_a_newer_contract(bad: Bad):
    bad.is_shown("enginehouse_protocol = '2.0'")


@pytest.mark.bad_plugin(
    what="states the next minor contract version",
    listed="incompatible",
    found="upgrade enginehouse to a version that offers ",
    cure="pip install --upgrade enginehouse",
    asked="is installed but incompatible: acme 0.1.0 is written for plugin contract ",
)
def test_a_newer_minor_contract(bad: Bad):
    found = bad.is_shown(f"enginehouse_protocol = '{CONTRACT[0]}.{CONTRACT[1] + 1}'")
    assert f"plugin contract {CONTRACT[0]}.{CONTRACT[1] + 1}" in found["what"]


@pytest.mark.bad_plugin(
    what="states an older contract version",
    listed="incompatible",
    found="acme 0.1.0 is written for plugin contract 0.9",
    cure="pip install --upgrade acme",
    asked="is installed but incompatible: acme 0.1.0 is written for plugin contract 0.9",
)
def test_an_older_contract(bad: Bad):
    bad.is_shown("enginehouse_protocol = '0.9'")


@pytest.mark.bad_plugin(
    what="has an engine that lacks methods",
    listed="ok",
    found="train 'acme': engine 'acme_parts:Half' does not implement TrainEngine: it lacks forward, forward_backward, "
    "optim_step",
    cure="pip install --upgrade acme",
    asked="the engine of 'acme', acme_parts:Half, does not implement TrainEngine: it lacks forward, forward_backward, "
    "optim_step",
)
def test_missing_methods(bad: Bad):
    found = bad.is_shown(backend(engine="Half"))
    assert found["where"].endswith(f"acme_parts.py:{PARTS.splitlines().index('class Half:') + 1}")


@pytest.mark.bad_plugin(
    what="has an engine whose method takes other arguments",
    listed="ok",
    found="train 'acme': engine 'acme_parts:Skewed' does not implement TrainEngine: forward: it takes (self, batch)",
    cure="pip install --upgrade acme",
    asked="works",
)
def test_a_method_of_another_signature(bad: Bad):
    bad.is_shown(backend(engine="Skewed"))


@pytest.mark.bad_plugin(
    what="declares a capability that its engine lacks",
    listed="ok",
    found="does not implement OffloadsState: it lacks offload, onload, which its capability 'offload' promises",
    cure="pip install --upgrade acme",
    asked="the engine of 'acme', acme_parts:Engine, does not implement OffloadsState: it lacks offload, onload",
)
def test_a_capability_that_is_absent(bad: Bad):
    bad.is_shown(backend(further=", capabilities={'offload'}"))


@pytest.mark.bad_plugin(
    what="declares an unknown capability",
    listed="broken",
    found="train 'acme': unknown capability 'offlod'. Did you mean 'offload'?",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="is installed but broken: train 'acme': unknown capability 'offlod'. Did you mean 'offload'?",
)
def test_a_capability_that_there_is_not(bad: Bad):
    bad.is_shown(backend(further=", capabilities={'offlod'}"))


@pytest.mark.bad_plugin(
    what="has options that are no pydantic model",
    listed="ok",
    found="options 'acme_parts:NoModel' is not derived from enginehouse.engines.options:TrainOptions",
    cure="pip install --upgrade acme",
    asked="the options of 'acme': acme_parts:NoModel is no pydantic model",
)
def test_options_of_a_wrong_type(bad: Bad):
    bad.is_shown(backend(options="NoModel"))


@pytest.mark.bad_plugin(
    what="has options of the wrong base class",
    listed="ok",
    found="options 'acme_parts:EngineOptions' is not derived from enginehouse.engines.options:TrainOptions",
    cure="pip install --upgrade acme",
    asked="works",
)
def test_options_of_another_base(bad: Bad):
    bad.is_shown(backend(options="EngineOptions"))


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.bad_plugin(
    what="has options that import torch",
    listed="ok",
    found="train 'acme': its options import torch, which makes every `plan` slow",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="works",
)
def test_options_that_import_torch(bad: Bad):
    (bad.distributions.site / "acme_parts.py").write_text(f"import torch\n{PARTS}")
    assert bad.is_shown(backend())["severity"] == "note"


@pytest.mark.bad_plugin(
    what="names a class that is no engine",
    listed="ok",
    found="train 'acme': engine 'acme_parts:NoEngine' does not implement TrainEngine: it lacks setup, forward",
    cure="pip install --upgrade acme",
    asked="the engine of 'acme', acme_parts:NoEngine, does not implement TrainEngine: it lacks setup, forward",
)
def test_a_class_that_is_no_engine(bad: Bad):
    bad.is_shown(backend(engine="NoEngine"))


@pytest.mark.bad_plugin(
    what="names a function as its engine",
    listed="ok",
    found="train 'acme': engine 'acme_parts:make_engine' must be a class, but is make_engine, a function",
    cure="pip install --upgrade acme",
    asked="the engine of 'acme', acme_parts:make_engine, is no class",
)
def test_a_function_that_is_no_engine(bad: Bad):
    bad.is_shown(backend(engine="make_engine"))


@pytest.mark.bad_plugin(
    what="has an engine whose import ends the process",
    listed="ok",
    found="importing what train 'acme' names: it ends the process that loads it, with exit code 7",
    cure="pip install --upgrade acme",
    asked="works",
)
def test_an_engine_that_ends_the_process(bad: Bad):
    (bad.distributions.site / "acme_hostile.py").write_text(f"{PARTS}\nimport os\nos._exit(7)")
    bad.is_shown(backend(engine="acme_hostile:Engine"))


@pytest.mark.bad_plugin(
    what="prints at import",
    listed="ok",
    found="it prints while it is loaded: 'HELLO'",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="works",
)
def test_prints_at_import(bad: Bad):
    assert bad.is_shown("print('HELLO')\n" + backend())["severity"] == "note"


@pytest.mark.bad_plugin(
    what="has a hook with an unknown argument",
    listed="broken",
    found="Argument(s) {'extra'} are declared in the hookimpl but can not be found in the hookspec",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="is installed but broken: PluginValidationError: Plugin 'acme:acme' for hook 'enginehouse_register_losses'",
)
def test_a_hook_of_another_signature(bad: Bad):
    bad.is_shown("@hookimpl\ndef enginehouse_register_losses(register, extra): ...")


@pytest.mark.bad_plugin(
    what="has an unknown hook",
    listed="broken",
    found="unknown hook 'enginehouse_register_loses'. Did you mean 'enginehouse_register_losses'?",
    cure="export ENGINEHOUSE_BLOCK_PLUGINS=acme",
    asked="is installed but broken: unknown hook 'enginehouse_register_loses'",
)
def test_a_hook_that_there_is_not(bad: Bad):
    bad.is_shown("@hookimpl\ndef enginehouse_register_loses(register): ...")
