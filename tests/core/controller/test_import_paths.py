"""Which of the driver's import paths its workers get."""

import site
import sysconfig

import pytest

from enginehouse.controller.launchers.import_paths import own_import_paths


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A virtual environment at `work/venv`, on a base at `usr`."""
    library, packages = tmp_path / "usr/lib/python3.11", tmp_path / "work/venv/lib/python3.11/site-packages"
    paths = {"stdlib": library, "platstdlib": library, "purelib": packages, "platlib": packages}
    paths |= {"scripts": tmp_path / "work/venv/bin", "data": tmp_path / "work/venv"}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {name: str(path) for name, path in paths.items()})
    monkeypatch.setattr(site, "getsitepackages", lambda prefixes=(): [str(tmp_path / "usr/lib/python3/dist-packages")])
    return tmp_path


@pytest.mark.parametrize("own", ["work/venv-project", "work/venv/src", "usr/src/app", "usr/lib/python3.11-project"])
def test_a_project_beside_or_below_the_environment_is_passed_on(environment, own):
    project = environment / own
    project.mkdir(parents=True)
    assert own_import_paths([str(project)]) == [str(project)]


@pytest.mark.parametrize(
    "owned",
    [
        "usr/lib/python3.11/lib-dynload",
        "usr/lib/python3/dist-packages",
        "work/venv/lib/python3.11/site-packages",
        "work/venv/bin",
    ],
)
def test_what_the_environment_owns_is_not(environment, owned):
    directory = environment / owned
    directory.mkdir(parents=True)
    link = environment / "link"
    link.symlink_to(directory)
    assert own_import_paths([str(directory), str(link), str(environment / "absent.zip")]) == []


def test_the_working_directory_is_passed_on_by_its_full_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed = sysconfig.get_paths()
    assert own_import_paths(["", installed["stdlib"], installed["purelib"]]) == [str(tmp_path)]
