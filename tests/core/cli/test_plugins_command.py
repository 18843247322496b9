"""`enginehouse plugins`, and what every command shares: light start, errors as messages, plugins' commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributions import installed

from enginehouse.cli.main import main
from enginehouse.plugin import load_plugins, requirements
from enginehouse.runtimes.readiness import plugin_states

CONTRACT = 'from enginehouse.plugin import *\nenginehouse_protocol = "1.0"\n'
HEAVY = ("torch", "ray", "transformers")


class CommandLine:
    """Runs the command line in a process of its own, with fake distributions on its path."""

    def __init__(self, site: Path):
        self.site = site
        self.cache = {"XDG_CACHE_HOME": str(site / "cache")}

    def install(self, name: str, source: str, version: str = "0.1.0", entry: str | None = None) -> None:
        module = name.replace("-", "_")
        self.site.joinpath(f"{module}.py").write_text(CONTRACT + source)
        installed(self.site, name, {entry or name: module}, version=version)

    def run(self, *arguments: str, then: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        program = f"""
import sys
sys.argv = ["enginehouse", *{list(arguments)!r}]
from enginehouse.cli.main import main
try:
    main()
finally:
    {then or "pass"}
"""
        variables = {"PYTHONPATH": str(self.site), "ENGINEHOUSE_BLOCK_PLUGINS": "", **self.cache, **environment}
        inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def imported(self, *arguments: str, **environment: str) -> set[str]:
        """Top-level modules a command imports."""
        names = "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
        ended = self.run(*arguments, then=names, **environment)
        assert ended.returncode == 0, ended.stderr
        return set(ended.stderr.splitlines()[-1].split())


@pytest.fixture
def command_line(tmp_path):
    return CommandLine(tmp_path)


BACKEND = """
@hookimpl
def enginehouse_register_backends(register):
    register(TrainBackend(name={name!r}, engine="nowhere:Engine", options="enginehouse.engines.options:TrainOptions",
                          capabilities={{"offload"}}))
"""


def listed(command_line: CommandLine, *arguments: str, **environment: str) -> dict[str, dict]:
    ended = command_line.run("plugins", "list", "--json", *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return {plugin["name"]: plugin for plugin in json.loads(ended.stdout)["plugins"]}


OBSERVER = """
@hookimpl
def enginehouse_step_finished(step):
    pass
"""


@pytest.mark.slow
def test_observers_are_listed_with_what_they_observe(command_line):
    command_line.install("watcher", OBSERVER)
    assert listed(command_line)["watcher"]["observes"] == ["step_finished"]
    lines = command_line.run("plugins", "list", COLUMNS="140").stdout.splitlines()
    (observers,) = [" ".join(line.split()) for line in lines if line.startswith("observer")]
    assert "step_finished (watcher)" in observers


def test_what_a_plugin_prints_is_not_in_the_answer(command_line):
    command_line.install("noisy", "import subprocess\nprint('HELLO')\nsubprocess.run(['echo', 'THERE'])")
    assert listed(command_line)["noisy"]["state"] == "ok"


def test_a_plugin_that_exits_leaves_the_command_line_working(command_line):
    command_line.install("hostile", "import sys\nsys.exit(7)")
    ended = command_line.run("plugins", "list", COLUMNS="400")
    assert ended.returncode == 0
    assert "hostile (hostile): broken: SystemExit: 7" in ended.stdout


def test_a_plugin_whose_module_is_heavy_is_told(command_line):
    command_line.site.joinpath("transformers.py").write_text("")
    command_line.install("heavy", "import transformers")
    note = listed(command_line)["heavy"]["note"]
    assert "imports transformers" in note
    assert "every command waits for that" in note


CHILLED = '''
from typing import Annotated, Literal
from pydantic import Field

def chilled(view, *, cold: Annotated[float, Field(gt=0)] | None = None, how: Literal["a", "b"] = "a", deep: int,
            kl_coefficient: float = 0.0):
    """Weigh tokens by how cold they are.

    More on that.

    Args:
        view: what there is.
        cold: how cold; above that
            nothing freezes.
        deep: in metres.

    Returns:
        The loss.
    """
'''


def test_show_lists_the_arguments_of_a_loss(command_line):
    command_line.site.joinpath("parts.py").write_text(CHILLED)
    command_line.install(
        "cold",
        """
@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="chilled", function="parts:chilled"))
    register(Loss(name="lost", function="parts:lost"))
""",
    )
    ended = command_line.run("plugins", "show", "chilled", COLUMNS="200")
    assert ended.returncode == 0, ended.stderr
    assert "  Weigh tokens by how cold they are.\n" in ended.stdout
    lines = ended.stdout.splitlines()
    table = [" ".join(line.split()) for line in lines[-5:]]
    assert table == [
        "argument type default description",
        "cold number or null, > 0 unset how cold; above that nothing freezes.",
        "how a | b a",
        "deep integer (required) in metres.",
        "kl_coefficient number 0.0 Set by algorithm.kl.coefficient.",
    ]
    lost = command_line.run("plugins", "show", "lost", COLUMNS="200")
    assert lost.returncode == 0
    assert "arguments cannot be shown: " in lost.stdout


@pytest.mark.slow
def test_list_and_show_import_no_engine(command_line):
    command_line.install("sound-engines", BACKEND.format(name="sound"))
    for arguments in (
        ("plugins", "list"),
        ("plugins", "list", "--json"),
        ("plugins", "show", "sound"),
        ("plugins", "show", "torch"),
    ):
        assert not command_line.imported(*arguments) & set(HEAVY)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("plugins", "--help")])
def test_help_imports_neither_engine_nor_config(command_line, arguments):
    assert not command_line.imported(*arguments) & {*HEAVY, "pydantic", "datasets", "numpy"}


def test_the_table_shows_each_backend_with_where_it_is_from_and_what_it_can(command_line):
    command_line.install("sound-engines", BACKEND.format(name="sound"), version="2.3.4")
    lines = command_line.run("plugins", "list", COLUMNS="140").stdout.splitlines()
    assert lines[0].split() == ["engine", "kind", "distribution", "version", "contract", "state", "capabilities"]
    rows = [line.split() for line in lines]
    assert ["sound", "train", "sound-engines", "2.3.4", "1.0", "ok", "offload"] in rows
    assert any(row[:6] == ["torch", "rollout", "enginehouse-torch", "0.1.0", "1.1", "ok"] for row in rows)
    assert any(row[:2] == ["advantage", "distillation,"] for row in rows)


def test_a_narrow_terminal_still_shows_capabilities(command_line):
    said = command_line.run("plugins", "list", COLUMNS="80").stdout
    assert "reshard_checkpoint, value_head" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_each_state_is_listed_with_its_reason_under_the_table(command_line):
    command_line.install("fragile", "raise RuntimeError('no luck today')")
    command_line.install("dated", "enginehouse_protocol = '9.0'")
    command_line.install("shut", BACKEND.format(name="shut"))
    command_line.install(
        "needy", BACKEND.format(name="needy").replace("engine=", "requires=('absent-thing>=1',), engine=")
    )
    command_line.install("north", BACKEND.format(name="twin"))
    command_line.install("south", BACKEND.format(name="twin"))
    plugins = listed(command_line, ENGINEHOUSE_BLOCK_PLUGINS="shut")
    wanted = {
        "fragile": "broken",
        "dated": "incompatible",
        "shut": "blocked",
        "needy": "requirements missing",
        "north": "ok",
    }
    assert {name: plugins[name]["state"] for name in wanted} == wanted
    said = command_line.run("plugins", "list", ENGINEHOUSE_BLOCK_PLUGINS="shut", COLUMNS="200").stdout
    table, _, problems = said.partition("problems")
    for name, state in wanted.items():
        assert f"({name})" in table or state in ("ok", "requirements missing")
    assert "fragile (fragile): broken: RuntimeError: no luck today" in problems
    assert (
        "dated 0.1.0 is written for plugin contract 9.0, but enginehouse 0.1.0 offers 1.1; upgrade enginehouse"
        in problems
    )
    assert "needy (needy): requirements missing: needs absent-thing>=1, but it is not installed" in problems
    assert "write 'north:twin' or 'south:twin'" in problems
    assert "Traceback" not in said


def test_json_gives_every_field_and_kind_chooses(command_line):
    command_line.install("sound-engines", BACKEND.format(name="sound"))
    plugins = listed(command_line, "--kind", "train")
    (record,) = plugins["sound-engines"]["records"]
    assert record["kind"] == "train"
    assert record["state"] == "ok"
    assert record["capabilities"] == ["offload"]
    assert record["engine"] == "nowhere:Engine"
    assert record["layouts"] == [{"name": "single", "processes": 1, "options": {}, "without": [], "only": []}]
    assert plugins["enginehouse_rl"]["records"] == []
    assert plugins["torch"]["protocol"] == "1.1"


def test_show_gives_a_broken_plugins_traceback(command_line):
    command_line.install("fragile", "def inner():\n    raise RuntimeError('no luck today')\ninner()")
    said = command_line.run("plugins", "show", "fragile").stdout
    assert "broken" in said
    assert "in inner" in said
    assert "RuntimeError: no luck today" in said


def test_show_lists_options_with_defaults_bounds_and_descriptions(command_line):
    said = command_line.run("plugins", "show", "torch").stdout
    assert "training engine of enginehouse" in said
    assert "rollout engine of enginehouse" in said
    row = next(line for line in said.splitlines() if "max_grad_norm" in line)
    assert row.split()[1:5] == ["number,", ">", "0", "1.0"]
    assert "larger gradients are scaled" in row
    schedule = next(line for line in said.splitlines() if line.split()[:1] == ["schedule"])
    assert "constant | linear | cosine" in schedule


def test_show_says_which_options_it_cannot_import(command_line):
    source = BACKEND.format(name="hollow").replace("enginehouse.engines.options:TrainOptions", "nowhere:Options")
    command_line.install("hollow", source)
    ended = command_line.run("plugins", "show", "hollow")
    assert ended.returncode == 0
    assert "options cannot be shown: cannot import 'nowhere'" in ended.stdout


def test_show_says_what_a_runtime_is_made_of(command_line):
    source = """
@hookimpl
def enginehouse_register_backends(register):
    register(RolloutBackend(name="swift", engine="nowhere:Engine", options="nowhere:Options",
                            runtimes={"cpu": RequirementSet(lock="swift:cpu.lock"),
                                      "cuda": RequirementSet(requirements=("swift-engine>=2", "numpy"))}))
"""
    command_line.install("swift", source)
    said = command_line.run("plugins", "show", "swift").stdout
    assert "cpu: the pins of swift:cpu.lock" in said
    assert "cuda: swift-engine>=2, numpy" in said


def test_show_of_a_backend_that_is_not_installed_does_not_guess_its_kind(monkeypatch):
    monkeypatch.setattr("enginehouse.cli.plugins.loaded_plugins", lambda: load_plugins(entry_points=[]))
    shown = CliRunner().invoke(main, ["plugins", "show", "vllm"])
    assert shown.exit_code == 2
    assert "engine 'vllm' is not installed. Try: pip install " in shown.stderr
    assert "training" not in shown.stderr


def test_show_of_an_unknown_name_names_the_nearest_and_exits_with_2(command_line):
    ended = command_line.run("plugins", "show", "troch")
    assert ended.returncode == 2
    assert "Did you mean 'torch'?" in ended.stderr
    assert "Traceback" not in ended.stderr


FAILING_COMMANDS = """
import click
from enginehouse.errors import EnginehouseError, UserError

def fail(error):
    raise error

@hookimpl
def enginehouse_commands(cli):
    wrong = lambda: fail(UserError("the file is not there"))
    cli.add_command(click.Command("mistake", callback=wrong, short_help="Be wrong."))
    cli.add_command(click.Command("accident", callback=lambda: fail(EnginehouseError("a worker died"))))
"""


def test_a_plugin_adds_commands(command_line):
    command_line.install("extra-commands", FAILING_COMMANDS)
    said = command_line.run("--help").stdout
    assert "mistake" in said
    assert "Be wrong." in said


@pytest.mark.parametrize(
    ("command", "code", "message"), [("mistake", 2, "the file is not there"), ("accident", 1, "a worker died")]
)
def test_an_error_raised_on_purpose_is_its_message_alone(command_line, command, code, message):
    command_line.install("extra-commands", FAILING_COMMANDS)
    ended = command_line.run(command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", f"Error: {message}\n")


@pytest.mark.parametrize(("arguments", "environment"), [(("--debug",), {}), ((), {"ENGINEHOUSE_DEBUG": "1"})])
def test_debug_shows_the_traceback_too(command_line, arguments, environment):
    command_line.install("extra-commands", FAILING_COMMANDS)
    ended = command_line.run(*arguments, "mistake", **environment)
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr
    assert "in fail" in ended.stderr


@pytest.mark.parametrize("what", ["raise RuntimeError('not today')", "cli.add_command(click.Command('train'))"])
def test_a_plugin_whose_commands_fail_leaves_the_command_line_working(command_line, what):
    command_line.install("clumsy", f"import click\n@hookimpl\ndef enginehouse_commands(cli):\n    {what}\n")
    ended = command_line.run("--help")
    assert ended.returncode == 0
    assert "Train a model by reinforcement learning." in ended.stdout
    assert "clumsy" in ended.stderr


def test_an_unknown_command_is_a_usage_error(command_line):
    ended = command_line.run("trian")
    assert ended.returncode == 2
    assert "trian" in ended.stderr


def test_each_of_cores_own_commands_is_listed_and_explains_itself():
    from click.testing import CliRunner

    from enginehouse.cli.main import COMMANDS, main

    listed = CliRunner().invoke(main, ["--help"]).output
    for name in COMMANDS:
        (line,) = [line for line in listed.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.split()) > 2
        said = CliRunner().invoke(main, [name, "--help"])
        assert said.exit_code == 0
        assert said.output.startswith(f"Usage: main {name} "), said.output


def test_help_has_each_command_once_in_a_section_and_cuts_off_no_summary():
    from click.testing import CliRunner

    from enginehouse.cli.main import COMMANDS, SECTIONS, main
    from enginehouse.plugin.first_party import TOOLS

    commands = {name for names in (COMMANDS, *TOOLS.values()) for name in names if " " not in name}
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(commands)
    for group in ((), ("plugins",), ("runtime",), ("recipes",)):
        listed = CliRunner().invoke(main, [*group, "--help"], terminal_width=80).output
        assert "..." not in listed.partition("Options:")[2]
    assert "Other commands" not in listed


def test_a_command_of_another_package_is_listed_last_with_its_whole_first_sentence(command_line):
    summary = "Do what takes more words to describe than a line of eighty columns has room for beside a name."
    command = f"cli.add_command(click.Command('mistake', help={summary!r}))"
    command_line.install("wordy", f"import click\n@hookimpl\ndef enginehouse_commands(cli):\n    {command}\n")
    others = command_line.run("--help", COLUMNS="80").stdout.partition("Other commands:")[2]
    assert " ".join(others.split()) == f"mistake {summary}"


def test_show_lists_the_arguments_of_a_tracker_and_list_names_those_there_are():
    said = CliRunner().invoke(main, ["plugins", "show", "wandb"]).stdout
    assert "wandb>=" in said
    assert re.search(r"project +string +enginehouse +The project that lists the run\.", said)
    rows = [line.split() for line in CliRunner().invoke(main, ["plugins", "list"]).stdout.splitlines()]
    assert ["tracker", "tensorboard,", "wandb,", "mlflow,", "prometheus", "(enginehouse-report)"] in rows


def test_a_built_in_tracker_that_lacks_its_package_is_no_problem_of_the_installation(monkeypatch):
    manager = load_plugins(enabled=[])
    monkeypatch.setattr(requirements, "installed_version", lambda name, path=None: None)
    assert plugin_states(manager)["enginehouse_rl"] == "ok"
    monkeypatch.setattr("enginehouse.cli.plugins.loaded_plugins", lambda: manager)
    said = " ".join(CliRunner().invoke(main, ["plugins", "show", "wandb"]).stdout.split())
    assert "requirements missing: needs wandb>=0.31" in said
    assert 'pip install "enginehouse[wandb]"' in said
    assert "wandb>=" not in CliRunner().invoke(main, ["plugins", "list"]).stdout
