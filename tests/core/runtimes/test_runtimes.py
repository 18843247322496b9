"""Runtimes: which interpreter a backend's workers get, and what is said of one that cannot be used."""

import dataclasses
import functools
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributions import installed
from made_up_runtimes import made_up_runtime

from enginehouse.plugin import RequirementSet, RolloutBackend
from enginehouse.plugin.requirements import find_missing
from enginehouse.runtimes import (
    MakingError,
    NoRuntime,
    RuntimeProblem,
    choose_runtime,
    find_state,
    list_runtimes,
    make_overlay,
    make_recipe,
    make_runtime,
    making,
    probe,
    remove_runtime,
)  # fmt: skip
from enginehouse.runtimes.ingredients import RuntimeRecipe, ray_version
from enginehouse.runtimes.maker import note_maker
from enginehouse.runtimes.probe import check_worker
from enginehouse.runtimes.store import lock_runtime, read_runtime

PATIENCE = 120.0
"""Longest anything may take, in seconds."""

HANG = "import os, time; print('hangs as', os.getpid(), flush=True); time.sleep(3600)"
"""A program that does not end."""

BACKEND = RolloutBackend(
    name="swift",
    engine="nowhere:Engine",
    options="nowhere:Options",
    requires=("swift-engine>=2 | swift-engine-cpu>=2",),
    runtimes={"cpu": RequirementSet(requirements=("swift-engine-cpu>=2",), module="swift")},
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runtimes."""
    folder = tmp_path / "runtimes"
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(folder))
    return folder


made_up = functools.partial(made_up_runtime, BACKEND)
"""A runtime of `swift` as `make_runtime` leaves it, without having installed anything."""


def small(**changed: Any) -> RuntimeRecipe:
    """A recipe that takes nothing from an index."""
    return dataclasses.replace(make_recipe(BACKEND, "cpu"), requirements=(), **{"module": "", "engine": "", **changed})


# Choosing


def test_an_engine_that_is_installed_here_runs_here(home: Path):
    here = dataclasses.replace(BACKEND, requires=("no-such-engine>=1 | pluggy>=1",))
    made_up(home)
    assert choose_runtime(here).python is None


def test_an_engine_that_is_not_installed_here_runs_in_its_runtime(home: Path):
    runtime = made_up(home)
    chosen = choose_runtime(BACKEND)
    assert (chosen.name, chosen.python) == (runtime.name, str(runtime.python))
    assert "needs swift-engine>=2 or swift-engine-cpu>=2, but it is not installed" in chosen.reason
    assert chosen == choose_runtime(BACKEND, runtime.name) == choose_runtime(BACKEND, "auto", "cpu")


def test_its_own_runtime_can_be_asked_for_where_the_engine_is_installed_here_too(home: Path):
    runtime = made_up(home)
    here = dataclasses.replace(BACKEND, requires=())
    assert choose_runtime(here).python is None
    assert choose_runtime(here, "own").python == str(runtime.python)


def test_its_own_runtime_has_to_be_there(home: Path):
    with pytest.raises(NoRuntime, match=r"engine.runtime=own.* Try: enginehouse runtime create swift"):
        choose_runtime(BACKEND, "own")
    with pytest.raises(NoRuntime, match=r"\(engine.runtime=own\), but declares no runtime. Try: engine.runtime=auto"):
        choose_runtime(dataclasses.replace(BACKEND, requires=(), runtimes={}), "own")


def test_without_a_runtime_the_command_that_makes_it_is_named():
    with pytest.raises(NoRuntime, match=r"Try: enginehouse runtime create swift( --variant cpu)?$"):
        choose_runtime(BACKEND)


def test_a_backend_named_for_its_runtime_is_told_the_runtimes_name(home: Path):
    runtime = made_up(home)
    with pytest.raises(RuntimeProblem, match=f"'swift' .* is an engine, whose runtimes are {runtime.name}. Use"):
        choose_runtime(BACKEND, "swift")


def test_a_device_that_the_backend_has_no_runtime_for_is_said():
    with pytest.raises(NoRuntime, match=r"runtimes only for cpu, not for cuda. Try: pip install \"swift-engine>=2\"$"):
        choose_runtime(BACKEND, "auto", "cuda")


def test_an_interpreter_by_path_is_the_environments_or_the_binary(home: Path):
    runtime = made_up(home, name="other", key="another")
    free = dataclasses.replace(BACKEND, requires=())
    by_folder, by_binary = (choose_runtime(free, str(path)) for path in (runtime.path, runtime.python))
    assert by_folder.python == by_binary.python == str(runtime.python)


def test_an_interpreter_by_path_without_the_engine_is_refused(tmp_path: Path):
    with pytest.raises(RuntimeProblem, match=r"cannot run in .*: needs swift-engine>=2 or swift-engine-cpu>=2"):
        choose_runtime(BACKEND, sys.executable)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"python": "cpython 3.7", "ray": ray_version()}, "its Python is cpython 3.7, but the driver's is"),
        ({"ray": "1.0"}, f"its Ray is 1.0, but the driver's is {ray_version()}"),
        ({"ray": "absent"}, "its Ray is absent"),
        ("what?", "does not answer as a Python interpreter"),
    ],
)
def test_an_interpreter_by_path_of_another_python_or_ray_is_refused(tmp_path: Path, answer: Any, said: str):
    from enginehouse.runtimes.ingredients import python_of_this_process

    full = {"python": python_of_this_process(), "path": [], **answer} if isinstance(answer, dict) else answer
    liar = tmp_path / "bin" / "python"
    liar.parent.mkdir()
    liar.write_text(f"#!/bin/sh\necho '{json.dumps(full)}'\n")
    liar.chmod(liar.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(RuntimeProblem, match="python") as caught:
        choose_runtime(BACKEND, str(liar))
    assert said in str(caught.value)


# States


def test_a_whole_runtime_is_ok(home: Path):
    assert find_state(made_up(home), BACKEND).word == "ok"


@pytest.mark.parametrize(
    ("changed", "word", "said"),
    [
        ({"key": "0123"}, "stale", "now requires other versions"),
        ({"python": "cpython 3.7"}, "broken", "its Python is cpython 3.7, but the driver's is"),
        ({"module": "swifter"}, "broken", "its engine's module 'swifter' is gone"),
        ({"variant": "tpu"}, "stale", "has no requirement set 'tpu' any more"),
    ],
)
def test_what_does_not_fit_any_more_is_named(home: Path, changed: dict[str, str], word: str, said: str):
    runtime = made_up(home, **changed)
    state = find_state(runtime, BACKEND)
    assert (state.word, said in state.problem) == (word, True), state
    with pytest.raises(RuntimeProblem, match=f"is {word}"):
        choose_runtime(BACKEND, runtime.name)


def test_another_version_of_ray_is_named(home: Path):
    runtime = made_up(home)
    (runtime.packages / f"ray-{ray_version()}.dist-info" / "METADATA").write_text("Name: ray\nVersion: 1.0\n")
    state = find_state(runtime, BACKEND)
    assert state.word == "broken"
    assert state.problem == f"its Ray is 1.0, but the driver's is {ray_version()}"
    remove, create = state.cure.split("; ")  # alone, `create` would make another beside it
    assert remove == f"enginehouse runtime remove {runtime.name}"
    assert create.startswith("enginehouse runtime create swift")


def test_a_runtime_whose_interpreter_is_gone_is_broken_and_not_used(home: Path):
    runtime = made_up(home)
    runtime.python.unlink()
    assert find_state(runtime, BACKEND).word == "broken"
    with pytest.raises(NoRuntime, match="is broken: its interpreter is gone"):
        choose_runtime(BACKEND)


def test_a_runtime_without_a_manifest_is_half_made_or_being_made(home: Path):
    runtime = made_up(home)
    (runtime.path / "manifest.json").unlink()
    runtime = read_runtime(runtime.path)
    assert find_state(runtime, BACKEND).word == "half-made"
    with lock_runtime(runtime.name):
        assert find_state(runtime, BACKEND).word == "being made"
        with pytest.raises(RuntimeProblem, match="is being made by another process"):
            remove_runtime(runtime)
    with pytest.raises(NoRuntime, match="is half-made"):
        choose_runtime(BACKEND)
    remove_runtime(runtime)
    assert list_runtimes() == []


# Recipes


def test_another_version_of_anything_is_another_recipe():
    first = make_recipe(BACKEND, "cpu")
    keys = {first.key}
    for changed in ({"ray": "1.0"}, {"python": "cpython 3.7"}, {"pins": ("a==1",)}, {"requirements": ()}):
        keys.add(dataclasses.replace(first, **changed).key)
    assert len(keys) == 5
    assert make_recipe(BACKEND, "cpu").key == first.key


def test_a_lock_is_taken_as_it_is_but_for_the_drivers_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "pinned"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "all.lock").write_text("# as tried\nsome-engine==3.1\nray==1.0  # replaced\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    locked = dataclasses.replace(BACKEND, runtimes={"cpu": RequirementSet(lock="pinned:all.lock")})
    assert make_recipe(locked, "cpu").pins == ("some-engine==3.1", f"ray=={ray_version()}")


def test_core_itself_is_no_part_of_a_recipe():
    wanted = make_recipe(BACKEND, "cpu")
    assert not any(line.startswith("enginehouse") for line in wanted.requirements)
    assert any(line.startswith("pydantic") for line in wanted.requirements)
    assert f"ray=={ray_version()}" in wanted.requirements
    assert not any(line.lower().startswith("tensorboard") for line in wanted.requirements)  # no worker tracks


# The overlay


def test_another_interpreter_sees_the_drivers_core_and_plugins_and_nothing_else_of_it(distributions, tmp_path):
    module = distributions.backend("swift")
    (distributions.site / "neighbour.py").touch()
    overlay = make_overlay()
    assert not (overlay.path / "neighbour.py").exists()
    code = (
        f"import enginehouse, {module}\n"
        "from importlib.metadata import entry_points, version\n"
        "assert 'swift' in {one.name for one in entry_points(group='enginehouse')}\n"
        "assert version('enginehouse')\n"
        "print(enginehouse.__file__)"
    )
    found = os.pathsep.join([str(overlay.path), *_pluggy()])
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True
    )
    assert ran.stdout.strip() == str(overlay.path / "enginehouse" / "__init__.py"), ran.stderr


def test_an_overlay_is_made_once_and_anew_when_a_plugin_came(distributions: Any):
    before = make_overlay()
    assert make_overlay().path == before.path
    distributions.backend("swift")
    after = make_overlay()
    assert after.path != before.path
    assert set(before.links) < set(after.links)


def test_an_overlay_that_leads_nowhere_and_is_not_new_goes_when_another_is_made(distributions: Any):
    module = distributions.backend("swift")
    dead = make_overlay()
    (distributions.site / f"{module}.py").unlink()
    distributions.backend("swallow")
    whole = make_overlay()
    assert dead.path.is_dir()  # a program that began a moment ago may use it
    for overlay in (dead, whole):
        os.utime(overlay.path, (0, 0))
    distributions.backend("swan")
    make_overlay()
    assert not dead.path.exists()
    assert whole.path.is_dir()


def test_the_drivers_installed_packages_are_not_handed_on(home: Path, monkeypatch: pytest.MonkeyPatch):
    made_up(home)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a/lib/python3.11/site-packages", "/mine"]))
    paths = choose_runtime(BACKEND).env["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(make_overlay().path), "/mine"]


def _pluggy() -> list[str]:
    """Where the few packages lie that importing a plugin takes."""
    import pluggy

    return [str(Path(pluggy.__file__).parents[1])]


# Making


def test_a_runtime_is_made_once_and_found_again():
    said: list[str] = []
    made = make_runtime(small(), progress=lambda step, line: said.append(step))
    assert made.manifest is not None
    assert made.manifest.key == small().key
    assert subprocess.run(
        [made.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    ).stdout == (f"{made.path}\n")
    assert said
    said.clear()
    assert make_runtime(small(), progress=lambda step, line: said.append(step)) == made
    assert not said


@pytest.mark.slow
def test_a_step_that_fails_is_named_with_its_last_lines_and_its_log_and_leaves_nothing(tmp_path: Path):
    lost = f"absent @ file://{tmp_path}/absent-1.0-py3-none-any.whl"
    with pytest.raises(MakingError) as caught:
        make_runtime(dataclasses.replace(small(), requirements=(lost,)))
    assert "the step 'install' failed" in str(caught.value)
    assert "absent-1.0-py3-none-any.whl" in str(caught.value)
    log = next(word.rstrip(".") for word in str(caught.value).split() if word.endswith(".log."))
    assert "absent-1.0" in Path(log).read_text()
    assert list_runtimes() == []


def test_an_engine_that_cannot_be_imported_fails_the_making():
    with pytest.raises(MakingError, match="the step 'import no_such_engine' failed"):
        make_runtime(dataclasses.replace(small(), module="no_such_engine"))
    assert list_runtimes() == []


def test_where_no_worker_starts_no_runtime_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "WORKER", "raise ImportError('pyarrow requires NumPy 2.0')")
    with pytest.raises(MakingError, match=r"the step 'test the imports of a worker' failed(.|\n)*requires NumPy 2\.0"):
        make_runtime(small(engine=BACKEND.engine))
    assert list_runtimes() == []


def test_what_a_worker_starts_starts_here(tmp_path: Path):
    check_worker(sys.executable, small(engine="enginehouse_torch.rollout:TorchRolloutEngine"))
    said = r"a worker cannot start in this runtime: AttributeError: .* no attribute 'NoEngine'"
    with pytest.raises(RuntimeProblem, match=said):
        check_worker(sys.executable, small(engine="enginehouse_torch.options:NoEngine"))


def test_an_engine_that_cannot_be_imported_by_itself_is_prepared_for_first(distributions: Any):
    source = """
        import sys, types
        def stand_in():
            sys.modules["no_such_engine"] = types.SimpleNamespace(__version__="2.1")
        """
    plugin = distributions.add("swift", source)
    (distributions.site / f"{plugin}.py").write_text(textwrap.dedent(source))  # core is not there to import from
    prepared = dataclasses.replace(small(), module="no_such_engine", prepare=f"{plugin}:stand_in")
    made = make_runtime(prepared)
    assert made.manifest is not None
    assert made.manifest.versions["engine"] == "2.1"


def test_how_an_engines_import_is_prepared_makes_no_other_runtime():
    assert dataclasses.replace(small(), prepare="swift:stand_in").key == small().key


def test_an_interruption_leaves_nothing_that_passes_for_whole():
    def interrupt(step: str, line: str) -> None:
        if step == "install":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_runtime(small(), progress=interrupt)
    assert list_runtimes() == []


@pytest.mark.slow
def test_a_driver_without_pip_makes_runtimes_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse.runtimes.making._has_pip_for_others", lambda: False)
    made = make_runtime(small())
    assert (made.packages / "pip").is_dir()


def test_what_was_half_made_under_the_name_is_replaced(home: Path):
    left = home / "mine" / "lib"
    left.mkdir(parents=True)
    (left / "leftover").touch()
    made = make_runtime(small(), name="mine")
    assert made.manifest is not None
    assert not (left / "leftover").exists()


@pytest.mark.slow
def test_who_makes_it_is_waited_for_by_name_and_what_it_made_is_taken():
    wanted = small()
    said: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        with lock_runtime(wanted.name):
            note_maker(wanted.name, since=0.0)
            told = threading.Event()
            made = threads.submit(make_runtime, wanted, progress=lambda step, line: (said.append(step), told.set()))
            assert told.wait(PATIENCE)
        assert made.result(PATIENCE).manifest is not None
    maker = rf"process {os.getpid()}, which has been making this runtime since \d\d:\d\d:\d\d"
    assert re.match(f"waiting for {maker}$", said[0])


def test_another_process_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(making, "WAIT_SECONDS", 0.0)
    with (
        lock_runtime(small().name),
        pytest.raises(MakingError, match=r"gave up waiting for another process .* after 0 s"),
    ):
        make_runtime(small())


@pytest.mark.slow
def test_a_step_that_hangs_ends_at_its_deadline_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(making, "_IMPORT", HANG)

    def begin(step: str, line: str) -> None:
        monkeypatch.setattr(making, "STEP_SECONDS", 0.5 if step == "import json" else PATIENCE)

    with pytest.raises(MakingError, match=r"the step 'import json' did not end within 0\.5 s"):
        make_runtime(dataclasses.replace(small(), module="json"), progress=begin)
    assert list_runtimes() == []


@pytest.mark.slow
def test_what_a_killed_maker_left_running_is_ended_by_the_next(home: Path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from core.runtimes import test_runtimes as tests\n"
        "tests.making._IMPORT = tests.HANG\n"
        "wanted = tests.dataclasses.replace(tests.small(), module='json')\n"
        "tests.make_runtime(wanted, progress=lambda step, line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        left = psutil.Process(int(next(line for line in maker.stdout if line.startswith("hangs as ")).split()[-1]))
        maker.kill()
    assert left.is_running()
    try:
        assert make_runtime(dataclasses.replace(small(), module="json")).manifest is not None
        psutil.wait_procs([left], PATIENCE)
        assert not left.is_running()
    finally:
        if left.is_running():
            left.kill()


# Requirements


def test_one_of_several_alternatives_is_enough(tmp_path: Path):
    installed(tmp_path, "swift-engine", version="1.9")
    installed(tmp_path, "swift-engine-cpu", version="2.1")
    assert not list(find_missing(BACKEND.requires, [str(tmp_path)]))


def test_an_alternative_of_an_older_version_is_not(tmp_path: Path):
    installed(tmp_path, "swift-engine-cpu", version="1.9")
    (missing,) = find_missing(BACKEND.requires, [str(tmp_path)])
    assert str(missing) == "needs swift-engine>=2 or swift-engine-cpu>=2, but 1.9 is installed"
