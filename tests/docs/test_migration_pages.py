"""The pages docs/from-*.md: names and keys on our side exist; the examples are configs and rewards."""

import ast
import importlib
import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from plugin_pages import blocks

from enginehouse.plugin import Advantage, Loss, RolloutBackend, TrainBackend, plugins, resolve
from enginehouse_rl.config.load import keys, load_config
from enginehouse_rl.config.migration import answer_key
from enginehouse_rl.config.schema import Config, DPOConfig

DOCS = Path(__file__).parents[2] / "docs"
FROM_VERL = (DOCS / "from-verl.md").read_text(encoding="utf-8")
FROM_TRL = (DOCS / "from-trl.md").read_text(encoding="utf-8")
NAMES = (DOCS / "from-verl-workers.md").read_text(encoding="utf-8")
ERRORS = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("troubleshooting.md", "watching.md"))
OUR_CONFIGS = {"from-verl.md": blocks(FROM_VERL, "yaml")[1], "from-trl.md": blocks(FROM_TRL, "yaml")[0]}

MODULES = ("enginehouse.controller", "enginehouse.data", "enginehouse.plugin", "enginehouse.plugin.hookspecs")
MODULES += (
    "enginehouse.engines",
    "enginehouse.engines.mesh",
    "enginehouse.engines.model",
    "enginehouse_megatron.dispatch",
)
PLACEHOLDERS = {"a", "b", "A", "f", "g", "pool", "spec", "batch"}
"""Names in a call that stand for the reader's own."""
NO_NAMES = ("def ", "self.")
WORDS = {"f", "None", "dp"}


def our_spans() -> list[str]:
    """Return the code spans that name something of ours, in right-hand columns and in the last paragraph."""
    cells = [line.strip("|").rsplit("|", 1)[-1] for line in NAMES.splitlines() if line.startswith("| ")]
    cells = [cell for cell in cells if cell.strip() != "here"]
    spans = re.findall(r"`([^`]+)`", "\n".join(cells) + NAMES.split("no counterpart", 1)[1])
    return [span for span in spans if span[0].isalpha() and not span.startswith(NO_NAMES) and span not in WORDS]


def names_in_answers() -> list[str]:
    """Return the code spans of the pages on errors and slow runs that name a class of ours."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", ERRORS, flags=re.DOTALL))
    names = {" ".join(span.split()) for span in spans if re.match(r"[A-Z][a-z]+[A-Z]\w*$|Balanced", span)}
    return sorted(names - {"InvalidAuthToken"})


@pytest.mark.parametrize("span", [*our_spans(), *names_in_answers()])
def test_a_name_that_the_page_gives_exists(span: str):
    for node in ast.walk(ast.parse(span, mode="eval")):
        if isinstance(node, ast.Name) and node.id not in PLACEHOLDERS:
            find(node.id)
        elif isinstance(node, ast.Attribute):
            owner = find(ast.unparse(node.value))
            assert has(owner, node.attr), f"{ast.unparse(node.value)} has no {node.attr}"
        elif isinstance(node, ast.Call):
            parameters = inspect.signature(find(ast.unparse(node.func))).parameters
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                assert {keyword.arg for keyword in node.keywords} <= set(parameters)


def our_keys() -> list[tuple[str, tuple[str, ...]]]:
    """Return each config key of the tables, and the engines that its cell names: `torch` where it names none."""
    found = []
    for line in (FROM_VERL + FROM_TRL).splitlines():
        if line.startswith("| "):
            cell = line.strip("|").rsplit("|", 1)[-1]
            for part in re.split(r"(?<=\)),", cell):  # each with its own brackets
                spans = re.findall(r"`([^`]+)`", part)
                engines = [span for span in spans if span in ENGINES]
                found += [(span, tuple(engines) or ("torch",)) for span in spans if re.fullmatch(KEY, span)]
    return found


ENGINES = {"fsdp", "megatron", "vllm", "sglang"}
KEY = r"[a-z]+\.[a-z_.]+"


@pytest.mark.parametrize(("key", "engines"), our_keys())
def test_a_config_key_that_a_page_gives_exists(key: str, engines: tuple[str, ...]):
    section, _, option = key.partition(".options.")
    known = [names for schema in (Config, DPOConfig) for names in keys(schema)]
    if option:
        kind = RolloutBackend if section == "rollout.engine" else TrainBackend
        for engine in engines:
            record = plugins().get(kind, engine, elsewhere=True)
            assert option in {".".join(names) for names in keys(resolve(record.options))}, engine
    elif ".arguments." in key:
        section, _, argument = key.partition(".arguments.")
        record_type = {"loss": Loss, "advantage": Advantage}[section.rpartition(".")[2]]
        functions = [resolve(provided.record.function) for provided in plugins().providers(record_type)]
        assert any(argument in inspect.signature(function).parameters for function in functions)
    else:
        path = tuple(key.split("."))
        assert any(names[: len(path)] == path for names in known)


def find(name: str) -> Any:
    """Return the public thing of that name, whichever module has it."""
    first, *rest = name.split(".")
    for module in map(importlib.import_module, MODULES):
        if hasattr(module, first):
            return reduce(getattr, rest, getattr(module, first))
    raise AssertionError(f"nothing of enginehouse is named {name}")


def has(owner: Any, attribute: str) -> bool:
    """Return whether a class has an attribute, on itself or only on its objects."""
    annotated = (vars(kind).get("__annotations__", {}) for kind in owner.__mro__)
    return hasattr(owner, attribute) or any(attribute in names for names in annotated)


@pytest.mark.parametrize("page", OUR_CONFIGS)
def test_the_config_on_a_page_loads(tmp_path: Path, page: str):
    (tmp_path / "run.yaml").write_text(OUR_CONFIGS[page])
    config = load_config(tmp_path / "run.yaml", [])
    options = resolve(plugins().get(TrainBackend, "fsdp", elsewhere=True).options)
    assert options(**config.actor.engine.options).lr == 1e-6


def test_each_key_of_the_example_of_verl_is_in_the_table():
    flat = flatten(yaml.safe_load(blocks(FROM_VERL, "yaml")[0]))
    assert len(flat) > 15
    assert [key for key in flat if not answer_key(key)] == []


def flatten(tree: dict[str, Any], above: str = "") -> list[str]:
    return [
        key
        for name, value in tree.items()
        for key in (flatten(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"])
    ]


def test_each_argument_of_the_example_of_trl_is_in_the_table_or_loads_the_data():
    calls = [node for node in ast.walk(ast.parse(blocks(FROM_TRL, "python")[0])) if isinstance(node, ast.Call)]
    (config,) = [call for call in calls if ast.unparse(call.func) == "GRPOConfig"]
    names = [keyword.arg for keyword in config.keywords]
    assert len(names) > 10
    assert [name for name in names if not answer_key(name or "")] == []


def test_the_two_rewards_of_the_page_of_trl_agree():
    theirs, ours = blocks(FROM_TRL, "python")
    tree = ast.parse(theirs)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    of_trl: dict[str, Any] = {}
    of_ours: dict[str, Any] = {}
    exec(compile(tree, "train.py", "exec"), of_trl)
    exec(ours, of_ours)
    texts, answers = [" 4\n", "5"], ["4", "4"]
    assert of_trl["score"](texts, answer=answers) == list(map(of_ours["score"], texts, answers)) == [1.0, 0.0]


def test_the_pages_are_read_whole():
    assert {"Balanced", "DataLost", "RemoteError", "WorkerDied", "WorkerTimeout"} <= set(names_in_answers())
    assert len(our_spans()) > 50
    assert "ResourcePool([4, 2])" in our_spans()
    assert len(our_keys()) > 90
    assert ("actor.engine.options.recompute", ("megatron",)) in our_keys()
    assert ("train.save_best", ("torch",)) in our_keys()
