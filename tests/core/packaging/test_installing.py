"""Both documented ways to install from a checkout, with the machine's own pip.

The Python environments are new, but third-party packages are lent to them by the running one, so that nothing
large is downloaded; hatchling is installed once instead of for each build.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
FIND = "from importlib.util import find_spec; print(find_spec({!r}))"
OURS = ("enginehouse", "_enginehouse", "__editable__", "__pycache__", "distutils-precedence")


class CleanEnvironment:
    """A Python environment without enginehouse, which sees the running one's third-party packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        site = next(folder.glob("lib/python*/site-packages"))
        lent = folder / "lent"
        lent.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(OURS) and not path.name.endswith(".pth"):
                lent.joinpath(path.name).symlink_to(path)
        site.joinpath("lent.pth").write_text(f"{lent}\n")
        self.pip("install", "--quiet", "hatchling>=1.25")

    def run(self, *command: str, cwd: Path) -> str:
        # constraints-local.txt speaks of $PWD, which a shell keeps and subprocess does not
        environment = {**os.environ, "PWD": str(cwd), "COLUMNS": "500"}
        for name in ("ENGINEHOUSE_PLUGINS", "ENGINEHOUSE_BLOCK_PLUGINS", "PYTHONPATH"):
            environment.pop(name, None)
        ended = subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def pip(self, *arguments: str) -> str:
        return self.run("python", "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT)

    def origin(self, distribution: str) -> str:
        """The URL a distribution was installed from."""
        program = (
            f"from importlib.metadata import distribution as d; print(d({distribution!r}).read_text('direct_url.json'))"
        )
        return json.loads(self.run("python", "-c", program, cwd=self.folder))["url"]

    def plugins(self) -> dict[str, dict]:
        """What `enginehouse plugins list` says there, by plugin."""
        said = self.run("enginehouse", "plugins", "list", "--json", cwd=self.folder)
        return {plugin["name"]: plugin for plugin in json.loads(said)["plugins"]}


@pytest.fixture
def clean(tmp_path):
    return CleanEnvironment(tmp_path / "environment")


@pytest.mark.sources("pyproject.toml", "core/pyproject.toml", "plugins/fsdp/pyproject.toml", "constraints.txt")
@pytest.mark.parametrize(
    ("name", "needs", "arguments"),
    [
        ("torch", (), (".[torch]",)),
        ("fsdp", ("torch",), (".[fsdp]",)),
        ("megatron", ("torch",), ("-c", "constraints-local.txt", "./core[megatron]")),
    ],
    ids=[".[torch]", ".[fsdp]", "./core[megatron]"],
)
def test_installing_from_a_checkout_takes_the_plugin_from_it_and_its_engine_where_that_fits(
    clean, name, needs, arguments
):
    said = clean.pip("install", "--no-build-isolation", *arguments)
    assert clean.origin("enginehouse") == f"file://{ROOT}/core"
    for one in (name, *needs):
        assert clean.origin(f"enginehouse-{one}") == f"file://{ROOT}/plugins/{one}"
    assert name != "megatron" or "Requirement already satisfied: megatron-core" in said  # lent; else it were fetched
    found = clean.plugins()
    assert found[name]["distribution"] == f"enginehouse-{name}"
    assert found[name]["state"] == "ok"
    assert [record["name"] for record in found[name]["records"] if record["kind"] == "train"] == [name]
    assert set(PLUGINS) & set(found) == {name, *needs}


def test_core_alone_has_no_engine_and_says_the_line_that_brings_one(clean):
    clean.pip("install", "--no-build-isolation", "./core")
    assert not [record for plugin in clean.plugins().values() for record in plugin["records"] if is_engine(record)]
    listed = clean.run("enginehouse", "plugins", "list", cwd=clean.folder)
    (line,) = re.findall(r"No engine is installed\. Try: pip (install .*)", listed)
    clean.pip(*shlex.split(line), "--no-build-isolation")
    assert [record["kind"] for record in clean.plugins()["torch"]["records"] if is_engine(record)] == [
        "train",
        "rollout",
    ]
    assert "No engine" not in clean.run("enginehouse", "plugins", "list", cwd=clean.folder)


@pytest.mark.essential
def test_the_loop_learns_from_the_wheels_of_core_and_torch_alone(clean, tmp_path):
    """Neither a trainer nor the checkout is there: the two need no other distribution of ours."""
    wheels = tmp_path / "wheels"
    clean.pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "./core", "./plugins/torch")
    clean.pip("install", *map(str, wheels.glob("*.whl")))
    ours = "from importlib.metadata import distributions as d; print(*{x.name for x in d() if 'enginehouse' in x.name})"
    assert set(clean.run("python", "-c", ours, cwd=tmp_path).split()) == {"enginehouse", "enginehouse-torch"}
    for module in ("enginehouse_rl", "enginehouse_rewards", "enginehouse_recipes"):
        assert clean.run("python", "-c", FIND.format(module), cwd=tmp_path) == "None\n"
    shutil.copytree(ROOT / "examples" / "loop", tmp_path / "loop", ignore=shutil.ignore_patterns("__pycache__"))
    clean.run("python", "loop/warm_up.py", cwd=tmp_path)
    said = clean.run("python", "loop/grpo.py", "200", cwd=tmp_path)
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", said)]
    assert len(rewards) == 200
    assert sum(rewards[:5]) / 5 <= 0.15
    assert sum(rewards[-5:]) / 5 >= 0.9, rewards


def is_engine(record: dict) -> bool:
    return record["kind"] in ("train", "rollout")
