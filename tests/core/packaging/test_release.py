"""`make release` and `make publish`: one version in all, archives fit for a package index, and no upload by mistake."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tools import release
from tools.release import ROOT, ReleaseError

from enginehouse import __version__

NAMES = list(release.projects())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a release reads of the checkout, without the code."""
    for folder in release.projects().values():
        there = tmp_path / folder.relative_to(ROOT)
        there.mkdir(parents=True)
        for name in ("pyproject.toml", "CHANGELOG.md"):
            shutil.copy(folder / name, there)
    init = tmp_path / "core" / "src" / "enginehouse" / "__init__.py"
    init.parent.mkdir(parents=True)
    init.write_text('__version__ = "0.0.0"\n')
    shutil.copy(ROOT / "LICENSE", tmp_path)
    contract = tmp_path / "tests" / "contract"
    contract.mkdir(parents=True)
    (contract / "surface.json").write_text('{\n"contract": "1.4",\n"published": "1.2",\n"names": {}}\n')
    return tmp_path


def test_one_command_writes_the_version_everywhere_but_in_the_changelogs(checkout: Path):
    assert "enginehouse-vllm needs enginehouse" in " ".join(release.out_of_step("7.3.1", checkout))
    release.set_version("7.3.1", checkout)
    assert release.out_of_step("7.3.1", checkout) == [
        f"{folder.relative_to(checkout)}/CHANGELOG.md has no section of 7.3.1"
        for folder in release.projects(checkout).values()
    ]
    for folder in release.projects(checkout).values():
        text = (folder / "pyproject.toml").read_text()
        assert not re.search(r"enginehouse[a-z-]*>=(?!7\.3,<7\.4)", text)
        assert 'enginehouse = "enginehouse.cli.main:main"' in text or folder.name != "core"
    assert json.loads((checkout / "tests/contract/surface.json").read_text())["published"] == "1.4"


@pytest.mark.parametrize("version", ["7.3.0", "7.3.1", "7.3.0rc1", "7.3.1b2"])
def test_a_release_takes_its_own_other_distributions_and_not_those_of_the_next_minor_version(version: str):
    taken = SpecifierSet(release.range_of(version))
    assert version in taken
    assert "7.3.5" in taken
    assert not taken.contains("7.4.0", prereleases=True)


def test_what_is_out_of_step_is_not_built(checkout: Path, tmp_path: Path):
    with pytest.raises(ReleaseError, match=r"not all is 7\.3\.1; `make version VERSION=7\.3\.1` writes it"):
        release.build("7.3.1", tmp_path / "out", checkout)
    with pytest.raises(ReleaseError, match="'seven' is no version"):
        release.build("seven", tmp_path / "out", checkout)


def test_what_is_not_committed_is_not_built(checkout: Path, tmp_path: Path):
    release.set_version(__version__, checkout)
    with pytest.raises(ReleaseError, match=r"git status failed: .*not a git repository"):
        release.build(__version__, tmp_path / "out", checkout)
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    with pytest.raises(ReleaseError, match="differ from the last commit"):
        release.build(__version__, tmp_path / "out", checkout)


def test_the_notes_have_the_section_of_every_changelog():
    written = release.notes(__version__)
    assert re.findall(r"^## (.*)$", written, re.M) == NAMES
    assert "- The engine protocols." in written


def wheel(path: Path, **changes: str | bytes) -> Path:
    """A wheel without a fault, but for the changes: metadata, licence, typed."""
    metadata = "Metadata-Version: 2.4\nName: mine\nVersion: 1\nRequires-Dist: torch>=2\n\n[us](https://example.org)\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("mine-1.dist-info/METADATA", changes.get("metadata", metadata))
        file.writestr("mine-1.dist-info/licenses/LICENSE", changes.get("licence", b"free"))
        file.writestr(str(changes.get("typed", "mine/py.typed")), "")
    return path


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"metadata": "Requires-Dist: a @ https://example.org/a.whl\n\n"}, "from a URL"),
        ({"metadata": "Requires-Dist: a @ file:///a\n\n"}, "place of this machine"),
        ({"metadata": "Name: mine\n\nOf the Dockerfile: nothing\n"}, None),
        ({"metadata": f"Summary: {ROOT}\n\n"}, "place of this machine"),
        ({"metadata": "Name: mine\n\n[README](../README.md)\n"}, "leads nowhere"),
        ({"licence": b"another"}, "LICENSE"),
        ({"typed": "mine/__init__.py"}, "py.typed"),
    ],
)
def test_a_wheel_that_is_not_fit_is_told(tmp_path: Path, changes: dict[str, str | bytes], fault: str | None):
    found = release.faults_of_wheel(wheel(tmp_path / "mine-1-py3-none-any.whl", **changes), b"free")
    assert bool(found) == (fault is not None)
    assert fault is None or fault in " ".join(found)


def test_a_source_archive_without_licence_is_told(tmp_path: Path):
    path = tmp_path / "mine-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("README.md", "CHANGELOG.md"):
            archive.addfile(tarfile.TarInfo(f"mine-1/{name}"), io.BytesIO())
    assert release.faults_of_source(path, b"free") == ["mine-1.tar.gz: it does not have the project's LICENSE"]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    out = tmp_path / "built"
    out.mkdir()
    (out / "mine.whl").write_bytes(b"wheel")
    (out / release.HASHES).write_text(f"{hashlib.sha256(b'wheel').hexdigest()}  mine.whl\n")
    return out


def test_nothing_is_uploaded_unasked_changed_or_undated(built: Path, checkout: Path):
    with pytest.raises(ReleaseError, match=f"say CONFIRM={__version__}"):
        release.upload(__version__, built, "", checkout)
    with pytest.raises(ReleaseError, match=rf"no date beside {__version__} in:\n  core/CHANGELOG\.md"):
        release.upload(__version__, built, __version__, checkout)
    (built / "mine.whl").write_bytes(b"another")
    (built / "more.whl").write_bytes(b"")
    with pytest.raises(ReleaseError, match=r"not as they were built: mine\.whl, more\.whl"):
        release.upload(__version__, built, __version__, checkout)


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert release.main(["upload", __version__, "--confirm", __version__, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: there is no ")
    assert f"`make release VERSION={__version__}` first" in said
    assert release.main(["build", "--uncommitted"]) == 2
    assert capsys.readouterr().err == "Error: say VERSION=, as in `make release VERSION=0.2.0`\n"


def test_a_tool_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "LONGEST", 0.2)
    with pytest.raises(ReleaseError, match=r"http\.server 0 took more than 0\.2 s"):
        release._run("http.server", "0", "--bind", "127.0.0.1")


@pytest.fixture
def index() -> Iterator[tuple[str, dict[str, str]]]:
    """A package index on this machine: its address, and the digest of each file it was sent."""
    received: dict[str, str] = {}

    class Index(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            boundary = self.headers["Content-Type"].partition("boundary=")[2].encode()
            for part in body.split(b"--" + boundary):
                head, _, content = part.partition(b"\r\n\r\n")
                if name := re.search(rb'filename="(.+?)"', head):
                    received[name[1].decode()] = hashlib.sha256(content[:-2]).hexdigest()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", received
        server.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_has_no_link_that_leads_nowhere_on_a_package_index(name: str):
    text = (release.projects()[name] / "README.md").read_text(encoding="utf-8")
    assert not (found := release.LINK_BESIDE.search(text)), text[found.start() - 40 : found.end() + 40]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_is_built_checked_and_uploaded_as_it_was_built(tmp_path, index, monkeypatch):
    out = tmp_path / "out"
    release.build(__version__, out, uncommitted=True)
    hashes = dict(line.split("  ")[::-1] for line in (out / release.HASHES).read_text().splitlines())
    archives = {name for name in hashes if name.endswith((".whl", ".tar.gz"))}
    assert len(archives) == 2 * len(NAMES)
    assert set(hashes) == archives | {release.NOTES, release.MATERIALS}
    with zipfile.ZipFile(next(out.glob("enginehouse-*.whl"))) as core:
        assert {name.partition("/")[0] for name in core.namelist()} == {
            "enginehouse",
            f"enginehouse-{__version__}.dist-info",
        }

    bill = json.loads((out / release.MATERIALS).read_text())
    parts = {one["name"]: one["version"] for one in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert {name: parts[name] for name in NAMES} == dict.fromkeys(NAMES, __version__)
    assert {"torch", "ray", "pluggy"} < set(parts)
    assert not {"ruff", "mypy", "twine"} & set(parts), "tools of developers are no part of what is released"
    assert "file:" not in json.dumps(bill)
    assert str(ROOT) not in json.dumps(bill)

    monkeypatch.setattr(release, "_head", lambda changelog, version: f"## {version} (2000-01-01)")
    monkeypatch.setenv("TWINE_USERNAME", "nobody")
    monkeypatch.setenv("TWINE_PASSWORD", "nothing")
    release.upload(__version__, out, __version__, arguments=["--repository-url", index[0], "--disable-progress-bar"])
    assert index[1] == {name: hashes[name] for name in archives}
