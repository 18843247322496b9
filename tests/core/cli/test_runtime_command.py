"""`enginehouse runtime`: making, listing, checking and removing the Python environments of engines."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from distributions import installed
from made_up_runtimes import made_up_runtime
from wheelhouse import Wheelhouse

from enginehouse.cli.main import main
from enginehouse.plugin import Backend, load_plugins, process
from enginehouse.runtimes import RuntimeProblem, choose_runtime, list_runtimes, make_recipe, probe
from enginehouse.runtimes.ingredients import python_of_this_process, ray_version
from enginehouse.runtimes.plugin_install import install_plugin
from enginehouse.runtimes.readiness import plugin_states
from enginehouse.runtimes.store import read_runtime

PLUGIN = """
from enginehouse.plugin import RequirementSet, RolloutBackend, hookimpl

enginehouse_protocol = "1.0"

@hookimpl
def enginehouse_register_backends(register):
    register(RolloutBackend(name="swift", engine="swift_plugin:Engine", options="swift_plugin:Options",
                            requires=("swift-engine>=2 | swift-engine-cpu>=2",),
                            runtimes={"cpu": RequirementSet(requirements=("swift-engine-cpu",), module="swift")}))
    register(RolloutBackend(name="plain", engine="swift_plugin:Engine", options="swift_plugin:Options"))
"""


def swift() -> Backend:
    """The backend `swift` as it is declared."""
    return load_plugins().get("rollout", "swift", elsewhere=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheelhouse: Wheelhouse):
    """Run `enginehouse runtime ...` where a plugin `swift` is installed whose runtime takes nothing from an index."""
    site = tmp_path / "site"
    installed(site, "swift", {"swift": "swift_plugin"}, version="0.1")
    (site / "swift_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("enginehouse.plugin.process._current", None)
    monkeypatch.setattr(probe, "WORKER", "import swift")  # in its place: of Ray a runtime of these has the name alone
    wheelhouse.add_all(make_recipe(swift(), "cpu").requirements)
    wheelhouse.add("swift-engine-cpu", "2.1", module="swift")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["runtime", *arguments])

    return run


@pytest.mark.slow
def test_where_the_engine_is_installed_here_too_creating_says_how_the_runtime_is_asked_for(run, wheelhouse, tmp_path):
    installed(tmp_path / "site", "swift-engine", version="2.0")
    made = run("create", "swift", "--variant", "cpu")
    assert "This Python environment also meets the requirements of 'swift'" in made.stdout
    assert made.stdout.rstrip().endswith("set engine.runtime=own in the config")
    assert choose_runtime(swift(), "own").name == make_recipe(swift(), "cpu").name


@pytest.mark.slow
def test_a_runtime_is_made_listed_checked_and_removed(run):
    made = run("create", "swift", "--variant", "cpu")
    assert made.exit_code == 0, made.output
    name = make_recipe(swift(), "cpu").name
    assert f"made runtime {name}: swift 2.1, ray " in made.stdout
    assert made.stdout.rstrip().endswith("It is used wherever a config asks for 'swift'")
    assert "make a virtual environment" in made.stderr

    again = run("create", "swift", "--variant", "cpu")
    assert f"runtime {name} exists already: swift 2.1" in again.stdout
    assert "virtual environment" not in again.stderr

    (line,) = [line for line in run("list").stdout.splitlines() if name in line]
    assert line.split()[1:4] == ["swift", "cpu", "2.1"]
    assert line.rstrip().endswith("ok")

    doctor = run("doctor")
    assert (doctor.exit_code, "ok" in doctor.stdout) == (0, True), doctor.output

    assert choose_runtime(swift()).name == name
    assert plugin_states(load_plugins())["swift"] == "ok"
    assert f"in runtime {name}" in CliRunner().invoke(main, ["plugins", "show", "swift"]).stdout

    assert run("remove", name).stdout == f"removed runtime {name}\n"
    assert "there is no runtime in" in run("list").stdout


def test_a_runtime_that_starts_no_worker_is_broken(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = made_up_runtime(swift(), tmp_path / "runtimes")
    monkeypatch.setattr(probe, "check_interpreter", lambda python: None)
    monkeypatch.setattr(probe, "WORKER", "raise ImportError('NumPy is too old')")
    doctor = run("doctor", made.name)
    assert doctor.exit_code == 1
    said = " ".join(doctor.stdout.split())
    assert "broken" in said
    assert "a worker cannot start in this runtime: ImportError: NumPy is too old" in said


def test_doctor_names_what_is_wrong_and_its_cure_and_fails(run, tmp_path: Path):
    (tmp_path / "runtimes" / "cut-short").mkdir(parents=True)
    stale = tmp_path / "runtimes" / "old"
    stale.mkdir()
    (stale / "manifest.json").write_text(
        json.dumps({"backend": "swift", "variant": "cpu", "key": "1", "module": "json", "python": "cpython 3.7"})
    )
    doctor = run("doctor")
    assert doctor.exit_code == 1
    lines = {line.split()[0]: line for line in doctor.stdout.splitlines()}
    assert "half-made" in lines["cut-short"]
    assert "enginehouse runtime remove cut-short" in lines["cut-short"]
    assert "broken" in lines["old"]
    assert "enginehouse runtime remove old; enginehouse runtime create swift --variant cpu" in lines["old"]
    assert run("doctor", "cut-short").exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "name"),
    [({"key": "0" * 16}, None), ({"python": "cpython 3.7"}, "mine"), ({"variant": "none"}, None)],
)
def test_the_cure_that_doctor_names_works(run, tmp_path: Path, changed: dict[str, str], name: str | None):
    """A runtime of another recipe, or of another Python, is none that `create` would make."""
    folder = tmp_path / "runtimes" / (name or f"swift-cpu-{changed.get('key', '1' * 16)[:8]}")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    packages = read_runtime(folder).packages
    (packages / f"ray-{ray_version()}.dist-info").mkdir(parents=True)
    (packages / f"ray-{ray_version()}.dist-info" / "METADATA").write_text(f"Name: ray\nVersion: {ray_version()}\n")
    told = {"backend": "swift", "variant": "cpu", "key": "1" * 16, "module": "", "python": python_of_this_process()}
    (folder / "manifest.json").write_text(json.dumps(told | changed))
    doctor = run("doctor")
    assert doctor.exit_code == 1
    cure = doctor.stdout.splitlines()[1].partition("enginehouse runtime ")[2]
    for command in cure.split("; enginehouse runtime "):
        assert run(*command.split()).exit_code == 0, command
    assert run("doctor").exit_code == 0
    if "variant" not in changed:
        assert [one.name for one in list_runtimes()] == [name or make_recipe(swift(), "cpu").name]


def test_without_a_home_there_are_no_runtimes_and_making_one_names_the_variable(run, monkeypatch: pytest.MonkeyPatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("ENGINEHOUSE_RUNTIMES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    listed = CliRunner().invoke(main, ["plugins", "list"])
    assert listed.exit_code == 0, listed.output
    assert "requirements missing" in listed.output
    for arguments in (("create", "swift", "--variant", "cpu"), ("list",), ("doctor",), ("remove", "swift")):
        refused = run(*arguments)
        assert refused.exit_code == 2, refused.output
        assert "Error: there is no home directory to keep runtimes in; set the environment " in refused.stderr
        assert "variable ENGINEHOUSE_RUNTIMES to a folder" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "plain"), "engine 'plain' needs no runtime: it runs in this Python environment"),
        (("create", "swift", "--variant", "tpu"), "no requirement set 'tpu' for a runtime; available: cpu"),
        (("create", "swift", "--variant", "cpu", "--name", "../up"), "cannot be the name of a runtime"),
        (
            ("create", "swift", "--variant", "cpu", "--name", "own"),
            "in a config, engine.runtime=own has another meaning",
        ),
        (("create", "swfit"), "unknown rollout engine 'swfit'"),
        (("remove", "nothing"), "no runtime 'nothing' in"),
        (("doctor", "nothing"), "no runtime 'nothing' in"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments: tuple[str, ...], said: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_backend_without_its_runtime_says_how_to_make_it(run):
    assert plugin_states(load_plugins())["swift"] == "requirements missing"
    assert "try `enginehouse runtime create swift`" in CliRunner().invoke(main, ["plugins", "list"]).stdout


def test_a_plugin_that_is_not_installed_comes_from_where_core_came_from(tmp_path, monkeypatch):
    """pip is asked for the plugin of the same checkout, or, where core came from an index, for core's extra."""
    asked: list[list[str]] = []

    def pip(command, **options):
        asked.append(command[4:])
        return type("Ran", (), {"returncode": 0, "stdout": ""})

    monkeypatch.setattr("subprocess.run", pip)
    checkout = tmp_path / "checkout"
    (checkout / "plugins" / "swift").mkdir(parents=True)
    (checkout / "plugins" / "swift" / "pyproject.toml").touch()
    noted = {"text": json.dumps({"url": f"file://{checkout}/core", "dir_info": {}})}
    found = SimpleNamespace(read_text=lambda name: noted["text"])  # whichever finder of metadata is in the process
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    assert "from " + str(checkout / "plugins" / "swift") in install_plugin("swift")
    noted["text"] = None
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.0")
    assert "from the package index" in install_plugin("swift")
    assert asked == [[str(checkout / "plugins" / "swift")], ["enginehouse[swift]==0.1.0"]]


def test_an_environment_that_cannot_be_written_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(RuntimeProblem, match=r"cannot be written\. Run: pip install .*vllm"):
        install_plugin("vllm")


def test_a_mistake_of_a_plugins_author_is_told_without_its_traceback(run, tmp_path: Path):
    (tmp_path / "site" / "swift_plugin.py").write_text(
        PLUGIN.replace('("swift-engine>=2 | swift-engine-cpu>=2",)', '"x"')
    )
    sys.modules.pop("swift_plugin", None)
    process._current = None
    done = run("create", "swift")
    assert done.exit_code == 2
    assert "RolloutBackend.requires must be a tuple of strings, not the string 'x'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith("See enginehouse plugins doctor")
