"""Workers of another Python environment: what they have in common with the driver is checked before they are used."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from controller_workers import Trouble

import enginehouse
from enginehouse.controller import ControllerError, ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.controller.launchers.handshake import check_identity, read_identity
from enginehouse.controller.launchers.import_paths import own_import_paths
from enginehouse.controller.launchers.node_paths import look_for_missing, model_paths, needed_paths
from enginehouse.runtimes import RuntimeProblem

HERE = Path(enginehouse.__file__).parent


@pytest.fixture
def pool(ray_cluster) -> Iterator[ResourcePool]:
    """Room for one process."""
    pool = ResourcePool([1], cpus_per_process=0.25)
    yield pool
    pool.shutdown()


def launch(pool: ResourcePool, spec: WorkerSpec) -> WorkerGroup:
    return WorkerGroup(pool, spec.options(distributed=False), name="liar")


@pytest.mark.slow
def test_a_worker_with_another_wire_format_is_refused_with_what_both_sides_have(pool: ResourcePool, tmp_path: Path):
    shutil.copytree(HERE, tmp_path / "enginehouse", ignore=shutil.ignore_patterns("__pycache__"))
    for file, version in (("data/wire_version.py", "WIRE_VERSION = "), ("plugin/hookspecs.py", "CONTRACT = ")):
        path = tmp_path / "enginehouse" / file
        lines = path.read_text().splitlines()
        changed = [version + ("99" if "WIRE" in version else "(98, 0)") if version in one else one for one in lines]
        assert changed != lines
        path.write_text("\n".join(changed))
    spec = WorkerSpec(Trouble).options(python=sys.executable, env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ControllerError) as caught:
        launch(pool, spec)
    said = str(caught.value)
    assert said.startswith("liar rank 0 cannot work with this driver: ")
    assert f"wire format is 99 in the worker, but {read_identity().wire} in the driver" in said
    assert f"plugin contract is 98.0 in the worker, but {read_identity().contract} in the driver" in said


@pytest.mark.slow
def test_an_interpreter_with_another_ray_is_refused_before_a_process_starts(pool: ResourcePool, tmp_path: Path):
    liar = tmp_path / "python"
    answer = '{"python": "' + read_identity().python + '", "ray": "1.0", "path": []}'
    liar.write_text(f"#!/bin/sh\necho '{answer}'\n")
    liar.chmod(0o755)
    with pytest.raises(RuntimeProblem, match=r"its Ray is 1\.0, but the driver's is"):
        launch(pool, WorkerSpec(Trouble).options(python=str(liar)))


@pytest.mark.slow
def test_roles_of_one_process_under_two_interpreters_are_refused(pool: ResourcePool):
    from enginehouse.controller import colocate

    other = WorkerSpec(Trouble).options(python=sys.executable)
    with pytest.raises(ControllerError) as caught:
        colocate(pool, {"a": WorkerSpec(Trouble), "b": other}, name="both")
    assert "colocated roles cannot use different interpreters" in str(caught.value)


def test_a_process_can_work_with_its_like():
    check_identity("group", 0, read_identity())


def test_a_worker_that_says_nothing_of_itself_is_refused():
    with pytest.raises(ControllerError, match="too old to run in a runtime"):
        check_identity("group", 0, None)


def test_a_worker_elsewhere_gets_no_folder_of_installed_packages(tmp_path: Path):
    foreign = tmp_path / "lib" / "site-packages"
    foreign.mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    paths = [str(foreign), str(mine), os.path.dirname(os.__file__)]
    assert own_import_paths(paths, elsewhere=True) == [str(mine)]
    assert own_import_paths(paths) == [str(foreign), str(mine)]


def test_what_workers_elsewhere_are_started_from_are_the_interpreter_and_what_links_lead_to(tmp_path: Path):
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "enginehouse").symlink_to(HERE)
    (overlay / "gone").symlink_to(tmp_path / "no-such-package")
    paths = needed_paths(sys.executable, {"PYTHONPATH": f"{overlay}{os.pathsep}{tmp_path / 'mine'}"})
    assert look_for_missing()(paths) == [
        (str(tmp_path / "mine"), ""),
        (str(overlay / "gone"), str(tmp_path / "no-such-package")),
    ]


def test_of_a_model_the_directory_and_its_weights_are_looked_for_where_the_driver_has_them(tmp_path: Path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).touch()
    paths = model_paths([str(tmp_path), "/nowhere/model", str(tmp_path)])
    assert paths == (str(tmp_path), str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    assert look_for_missing()(paths) == [(str(tmp_path / "model.safetensors"), "")]
