"""What docs/trust.md says is trusted: where anything is unpickled, and that what strangers could send is not."""

import ast
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_rl.data.files import open_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
LOADS = {"load", "loads", "Unpickler", "_Unpickler", "open", "Shelf", "decode"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}
UNPICKLES = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "torch.export.load",
    "torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict",
    *(f"torch.distributed.{name}" for name in OBJECTS),
    *(f"torch.distributed.distributed_c10d.{name}" for name in OBJECTS),
    "megatron.core.dist_checkpointing.load", "megatron.core.dist_checkpointing.load_common_state_dict",
    "pandas.read_pickle", "pandas.read_hdf", "multiprocessing.reduction.ForkingPickler",
    *(f"yaml.{name}" for name in (
        "load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all",
        "Loader", "CLoader", "FullLoader", "CFullLoader", "UnsafeLoader", "CUnsafeLoader",
    )),
}  # fmt: skip
"""What makes any object of what it reads, by full name, beside the `LOADS` of `PICKLES`."""


def imported(tree: ast.AST) -> dict[str, set[str]]:
    """What each name that a module imports may stand for, in full."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.name if one.asname else one.name.partition(".")[0]
                found.setdefault(one.asname or name, set()).add(name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                found.setdefault(one.asname or one.name, set()).add(f"{node.module}.{one.name}")
    return found


def unpickles(name: str) -> bool:
    parts = name.split(".")
    if len(parts) > 1 and parts[-2] in PICKLES and parts[-1] in (*LOADS, "*"):
        return True
    return name in UNPICKLES or parts[-1] in ("read_pickle", "read_hdf")


def unpickling(source: str) -> Iterator[str]:
    """Where a source names what may make any object of what it reads, whatever it calls that."""
    tree = ast.parse(source)
    names = imported(tree)
    yield from (name for every in names.values() for name in every if unpickles(name) and name not in TOLD_TO_BE_SAFE)
    safe: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            said = {one.arg: ast.unparse(one.value) for one in node.keywords}
            if said.get("weights_only") == "True" or re.search(r"\bC?SafeLoader\b", ast.unparse(node)):
                safe.add(node.func)
            if said.get("allow_pickle", "False") != "False":
                yield "allow_pickle"
            called = full_names(node.func, names)
            if None in said and "numpy.load" in called:
                yield "numpy.load, told what nobody sees here"
            if isinstance(node.func, ast.Attribute) and node.func.attr == "recv" and not (node.args or node.keywords):
                yield "multiprocessing.connection.Connection.recv"
        elif isinstance(node, ast.Attribute | ast.Name):
            for name in full_names(node, names):
                if unpickles(name) and not (node in safe and name in TOLD_TO_BE_SAFE):
                    yield name


TOLD_TO_BE_SAFE = {"torch.load", "yaml.load", "yaml.load_all"}
"""What reads only data where the call says so."""


def full_names(node: ast.expr, names: dict[str, set[str]]) -> set[str]:
    """What a name with dots may stand for; none for any other expression."""
    if not re.fullmatch(r"[\w.]+", said := ast.unparse(node)):
        return set()
    first, dot, rest = said.partition(".")
    return {f"{name}{dot}{rest}" for name in names.get(first, {first})}


def test_all_that_is_unpickled_is_on_the_page():
    found = {str(path.relative_to(ROOT)) for path in SOURCES if list(unpickling(path.read_text(encoding="utf-8")))}
    said = set(re.findall(r"^\| `([^`]+\.py)` \|", PAGE, re.M))
    assert found == said


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`([\w/]+/test_\w+\.py)`", PAGE)
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "tests" / name).is_file()]


@pytest.mark.parametrize(
    "source",
    [
        "pickle.loads(b'')", "cloudpickle.load(file)", "torch.load(path)", "torch.load(path, weights_only=False)",
        "class Mine(pickle.Unpickler): ...", "from pickle import loads", "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)", "yaml.unsafe_load(text)", "pandas.read_pickle(path)",
        "import pickle as p; p.loads(b'')", "from ray import cloudpickle as cp; cp.loads(b'')", "from pickle import *",
        "import torch as t; t.load(path)", "from torch import load; load(path)", "load = pickle.loads",
        "load = torch.load", "torch.jit.load(path)", "class Mine(pickle._Unpickler): ...",
        "import torch.distributed.checkpoint as dcp; dcp.load(state)", "from yaml import load; load(text, Loader)",
        "import torch.distributed as dist; dist.all_gather_object(every, one)", "connection.recv()",
        "from megatron.core import dist_checkpointing; dist_checkpointing.load(state, path)",
        "yaml.load_all(text, Loader=yaml.FullLoader)", "import numpy as np; np.load(path, **k)", "pd.read_hdf(path)",
        "def one():\n from torch import load\n load(path)\ndef other():\n from json import load\n load(path)",
    ],
)  # fmt: skip
def test_each_way_to_unpickle_is_found(source: str):
    assert list(unpickling(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)", "json.loads(text)", "yaml.safe_load(text)", "pickle.dumps(1)",
        "from torch import load; load(path, weights_only=True)", "import numpy as np; np.load(path)", "socket.recv(4)",
        "from yaml import load, SafeLoader; load(text, SafeLoader)", "import json as pickle; pickle.loads(text)",
    ],
)  # fmt: skip
def test_what_reads_only_data_is_not(source: str):
    assert not list(unpickling(source))


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.pkl"])
def test_a_data_file_that_is_a_pickle_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(EnginehouseError, match=re.escape(name)):
        open_table(name, ["prompt"])
    assert not Path("ran").exists()
