"""What docs/trust.md says is trusted: where anything is unpickled, and that what strangers could send is not."""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse.data.files import open_table
from enginehouse.errors import EnginehouseError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
SOURCES = sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "_pickle", "jsonpickle"}


def unpickling(source: str) -> Iterator[str]:
    """The calls and classes in a source that may make any object of what they read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(base) for base in node.bases if ast.unparse(base).endswith("Unpickler"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            yield f"from {node.module} import"  # what is called by its bare name is not found below
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        said = {one.arg: ast.unparse(one.value) for one in node.keywords}
        if owner in PICKLES and name in ("load", "loads", "Unpickler", "open"):
            yield f"{owner}.{name}"
        elif (owner, name) == ("torch", "load") and said.get("weights_only") != "True":
            yield "torch.load"
        elif name in ("read_pickle", "unsafe_load", "full_load", "UnsafeLoader"):
            yield name
        elif (owner, name) == ("yaml", "load") and "SafeLoader" not in ast.unparse(node):
            yield "yaml.load"
        elif said.get("allow_pickle", "False") != "False":
            yield "allow_pickle"


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
    ],
)  # fmt: skip
def test_each_way_to_unpickle_is_found(source: str):
    assert list(unpickling(source))


@pytest.mark.parametrize("source", ["torch.load(path, weights_only=True)", "json.loads(text)", "yaml.safe_load(text)"])
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
