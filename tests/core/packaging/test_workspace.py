"""The distributions of this checkout fit together: names, versions, extras, and what a plugin package must be."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project
from tools.release import out_of_step, range_of

from enginehouse import __version__
from enginehouse.cli.main import main
from enginehouse.plugin import Backend, PluginLookupError, PluginManager, load_plugins
from enginehouse.plugin.first_party import pip_line
from enginehouse.runtimes.readiness import plugin_states

ROOT = Path(__file__).parents[3]
RANGE = range_of(__version__)
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def project(*folder: str) -> dict:
    return tomllib.loads(ROOT.joinpath(*folder, "pyproject.toml").read_text())["project"]


def test_every_first_party_plugin_is_in_the_checkout():
    assert [
        *(
            "environments",
            "fsdp",
            "megatron",
            "recipes",
            "report",
            "rewards",
            "rl",
            "sglang",
            "testing",
            "torch",
            "transports",
            "vllm",
        )
    ] == PLUGINS


def test_versions_and_the_ranges_of_first_party_dependencies_are_in_step():
    assert out_of_step(__version__) == []


ENGINES = ("fsdp", "megatron", "sglang", "torch", "vllm")
"""Plugins that bring a backend. Their extras bring the trainer, its recipes and its rewards."""

NEEDS = {
    **dict.fromkeys(("fsdp", "megatron"), ("torch",)),
    **dict.fromkeys(("environments", "testing"), ("rewards", "rl")),
    **dict.fromkeys(("recipes", "report"), ("rl",)),
    "rl": ("rewards",),
}
"""Plugins that stand on others."""

WITHOUT_ENGINE = ("environments", "recipes", "report", "rewards", "rl", "testing", "torch", "transports")
"""Plugins with no engine beyond what core needs itself."""

BESIDE = ("megatron",)
"""Plugins whose engine is installed beside core by their extra; the others' engines get runtimes of their own."""


def test_each_extra_of_core_is_one_plugin_with_bounds_and_there_is_no_extra_for_all():
    extras = project("core")["optional-dependencies"]
    engines = {name: project("plugins", name)["optional-dependencies"]["engine"] for name in BESIDE}
    assert {name: extras[name] for name in PLUGINS} == {
        name: [
            *([f"enginehouse-recipes{RANGE}"] if name in ENGINES else []),
            f"enginehouse-{name}{RANGE}",
            *engines.get(name, []),
            *([f"enginehouse-transports{RANGE}"] if name in ENGINES else []),
        ]
        for name in PLUGINS
    }
    assert "all" not in extras


def test_the_workspace_and_the_constraints_take_every_plugin_from_the_checkout():
    extras = project()["optional-dependencies"]
    constraints = ROOT.joinpath("constraints-local.txt").read_text().splitlines()
    for name in PLUGINS:
        engine = "[engine]" if name in BESIDE else ""
        there = f"enginehouse-{name}{engine} @ {{root:uri}}/plugins/{name}"
        assert there in extras[name]
        assert taken(extras, name) >= {f"enginehouse-{one}" for one in (name, *NEEDS.get(name, ()))}
        assert name not in ENGINES or {f"enginehouse-workspace[{one}]" for one in ("recipes", "transports")} <= {
            *extras[name]
        }
        assert f"enginehouse-{name} @ file://${{PWD}}/plugins/{name}" in constraints


def taken(extras: dict, name: str) -> set[str]:
    """The distributions that an extra of the workspace takes from the checkout."""
    found = set()
    for line in extras[name]:
        inner = re.fullmatch(r"enginehouse-workspace\[(.*)\]", line)
        found |= taken(extras, inner[1]) if inner else {re.split(r"[ \[]", line)[0]}
    return found


LIGHT = {
    "environments": ["bm25s>=0.2", "fastapi>=0.115", "gymnasium>=1.0", "uvicorn>=0.30"],
    "fsdp": ["accelerate>=1.10", "peft>=0.18"],
    "megatron": ["peft>=0.18"],
    "recipes": ["datasets>=3.0"],
    "report": ["prometheus-client>=0.20"],
    "rl": ["datasets>=3.0", "huggingface_hub>=0.34", "pyyaml>=6.0", "tensorboardX>=2.6.2"],
    "testing": ["anybadge>=1.16", "copier>=9", "pytest>=8.2"],
    "torch": ["transformers>=5.17"],
}
"""What a plugin may bring along: pure Python that is content with any torch a vendor's container has."""


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_depends_on_core_and_what_is_light_and_its_engine_is_an_extra(name):
    declared = project("plugins", name)
    assert declared["name"] == f"enginehouse-{name}"
    needed = [f"enginehouse-{one}{RANGE}" for one in NEEDS.get(name, ())]
    assert declared["dependencies"] == [f"enginehouse{RANGE}", *needed, *LIGHT.get(name, [])]
    assert ("engine" in declared.get("optional-dependencies", {})) == (name not in WITHOUT_ENGINE)
    assert declared["entry-points"]["enginehouse"] == {name: f"enginehouse_{name}.plugin"}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugins_modules_are_light(name):
    source = ROOT / "plugins" / name / "src"
    options = f"import enginehouse_{name}.options; " if name in ENGINES else ""
    assert options == "" or source.joinpath(f"enginehouse_{name}", "__init__.py").read_text() == ""
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); import enginehouse_{name}.plugin; "
        "assert 'pydantic' not in sys.modules; "
        f"{options}"
        "assert not {'torch', 'ray', 'transformers', 'vllm', 'sglang', 'megatron'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


PLANNING = """
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import PLANS
from enginehouse_rl.config.schema import SCHEMAS
PLANS[{command!r}](load_config({file!r}, {overrides!r}, SCHEMAS[{command!r}]), config_path={file!r})
"""
LIGHT_PROGRAMS = {
    "the controller": "import enginehouse.controller",
    "balancing": "from enginehouse.data import balance; balance([1, 2], 2)",
    "listing recipes": "import enginehouse_recipes.cli.recipes as recipes; recipes.all_recipes()",
    "reading runs": "import enginehouse_report.page, enginehouse_report.server, enginehouse_report.cli",
    "planning GRPO": PLANNING.format(
        command="train", file="grpo.yaml", overrides=["algorithm.loss.arguments={clip_low: 0.2, clip_high: 0.28}"]
    ),
    "planning DPO": PLANNING.format(command="dpo", file="preferences.yaml", overrides=[]),
    "planning a reward model": PLANNING.format(command="rm", file="preferences.yaml", overrides=[]),
}


@pytest.mark.parametrize("what", LIGHT_PROGRAMS)
def test_what_computes_nothing_imports_neither_torch_nor_ray(tmp_path, what):
    made = Project(tmp_path)
    made.save()
    made.save_preferences()
    heavy = "import sys; sys.exit(', '.join({'torch', 'ray', 'transformers', 'datasets'} & {*sys.modules}) or None)"
    subprocess.run([sys.executable, "-c", f"{LIGHT_PROGRAMS[what]}\n{heavy}"], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", ENGINES)
def test_a_plugins_backends_are_called_after_it(monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / name / "src"))
    manager = load_plugins(entry_points=[EntryPoint(name, f"enginehouse_{name}.plugin", "enginehouse")])
    assert plugin_states(manager)[name] in ("ok", "requirements missing")  # the engine's, until its runtime is made
    declared = next(plugin for plugin in manager.plugins if plugin.name == name).records
    assert {one.name for one in declared if isinstance(one, Backend)} == {name}


def test_the_extra_of_suites_is_taken_for_no_backend():
    with pytest.raises(PluginLookupError) as caught:
        load_plugins(entry_points=[]).get("train", "nothing")
    assert "testing" not in str(caught.value)


def test_no_process_of_ray_builds_a_grammar_for_iris():
    """Ray imports jsonschema, and that builds the grammar where this is installed."""
    assert importlib.util.find_spec("rfc3987_syntax") is None, "`make lint` or `make test` bring .venv up to date"


@pytest.fixture
def alone(monkeypatch) -> PluginManager:
    """Core's plugins, as where no other is installed."""
    monkeypatch.setattr("enginehouse.plugin.discovery.find_entry_points", lambda: ())
    manager = load_plugins()
    monkeypatch.setattr("enginehouse.plugin.process._current", manager)
    return manager


def test_without_an_engine_each_command_says_what_brings_one(alone):
    """The default engine is a plugin as any other."""
    for kind in ("train", "rollout"):
        with pytest.raises(PluginLookupError, match=r"'torch' is not installed\. Try: pip install .*torch"):
            alone.get(kind, "torch")
    listed = CliRunner().invoke(main, ["plugins", "list"]).output
    assert re.search(r"No engine is installed\. Try: pip install .*torch", listed.replace("\n", " "))


@pytest.mark.parametrize("command", ["certify mine --out there", "new-plugin acme --kind loss", "plugins doctor"])
def test_without_the_suites_their_commands_say_what_brings_them(alone, command):
    refused = CliRunner().invoke(main, command.split())
    assert refused.exit_code == 2
    name = command if command.startswith("plugins") else command.split()[0]
    assert re.search(rf"`{name}` comes with enginehouse-testing\. Try: pip install .*testing", refused.output)


@pytest.mark.parametrize(
    ("command", "brings"), [("train grpo.yaml", "rl"), ("plan grpo.yaml", "rl"), ("init", "recipes")]
)
def test_core_alone_has_no_trainer_and_says_what_brings_it(monkeypatch, command, brings):
    monkeypatch.setattr("enginehouse.plugin.manager.find_storeys", list)
    monkeypatch.setattr("enginehouse.plugin.process._current", load_plugins(entry_points=[]))
    refused = CliRunner().invoke(main, command.split())
    assert refused.exit_code == 2
    assert re.search(rf"comes with enginehouse-{brings}\. Try: pip install .*{brings}", refused.output)
    listed = CliRunner().invoke(main, ["--help"]).output
    assert "runtime" in listed
    assert "train " not in listed


def test_what_is_installed_and_blocked_is_not_said_to_be_missing(monkeypatch):
    manager = load_plugins(enabled=["none-of-them"])
    monkeypatch.setattr("enginehouse.plugin.process._current", manager)
    assert "No engine is installed" not in CliRunner().invoke(main, ["plugins", "list"]).output
    refused = CliRunner().invoke(main, ["certify", "mine", "--out", "there"])
    assert "enginehouse-testing, which is installed, but blocked" in refused.output


def test_a_plugin_from_a_checkout_comes_with_those_it_stands_on_and_that_are_not_there(monkeypatch):
    monkeypatch.setattr("enginehouse.plugin.first_party._checkout", lambda: ROOT)
    assert pip_line("fsdp") == f"pip install {ROOT}/plugins/fsdp"
    monkeypatch.setattr("enginehouse.plugin.first_party.installed_version", lambda distribution: None)
    assert pip_line("fsdp") == f"pip install {ROOT}/plugins/torch {ROOT}/plugins/fsdp"
    assert pip_line("vllm") == f"pip install {ROOT}/plugins/vllm"
