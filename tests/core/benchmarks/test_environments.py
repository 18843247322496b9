"""Python environments made for a benchmark."""

import subprocess

import pytest
from benchmarks import environments


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ROOT", tmp_path)


@pytest.mark.slow
def test_an_environment_is_made_once_and_anew_when_a_file_it_is_keyed_by_changes(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("")
    first = environments.environment("probe", keyed_by=[requirements])
    made = first.stat(follow_symlinks=False).st_ctime_ns
    assert environments.versions(first, "pip")["pip"]
    assert environments.environment("probe", keyed_by=[requirements]) == first
    assert first.stat(follow_symlinks=False).st_ctime_ns == made
    requirements.write_text("# changed")
    assert environments.environment("probe", keyed_by=[requirements]) != first


@pytest.mark.slow
def test_an_environment_whose_install_failed_is_not_taken_for_whole(tmp_path):
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            environments.environment("probe", ["--no-index", "no-such-distribution"])
