"""Make a release of all distributions, check it, and, in a separate step, upload it.

    python -m tools.release set 0.2.0       # writes the version and the ranges of first-party dependencies
    python -m tools.release build 0.2.0     # dist/0.2.0: wheels, sdists, notes, hashes, bill of materials
    python -m tools.release upload 0.2.0 --confirm 0.2.0

Packages `build`, `twine` and `check-wheel-contents` build, check and upload.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_string
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HASHES = "SHA256SUMS"
NOTES = "RELEASE-NOTES.md"
MATERIALS = "sbom.cdx.json"
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)((?:a|b|rc)\d+)?")
OURS = re.compile(r"\b(enginehouse(?:-[a-z]+)?)((?:>=|<|==|~=)[^\"'\];]*)")
LONGEST = 900.0
"""Time limit of a tool, in seconds."""
LINK_BESIDE = re.compile(r"\]\((?!https?:|#)")


class ReleaseError(Exception):
    """A release cannot be made; the message says why."""


def projects(root: Path = ROOT) -> dict[str, Path]:
    """Return the folder of each distribution of the checkout by name, core first."""
    files = [root / "core" / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))]
    return {tomllib.loads(file.read_text())["project"]["name"]: file.parent for file in files}


def range_of(version: str) -> str:
    """Return the range in which first-party distributions require each other: releases of one minor version.

    The range of a release candidate begins with the candidate, because `>=0.2` does not contain 0.2.0rc1.
    """
    major, minor, is_candidate = _parsed(version)
    return f">={version if is_candidate else f'{major}.{minor}'},<{major}.{minor + 1}"


def out_of_step(version: str, root: Path = ROOT) -> list[str]:
    """Return a line for each place in the checkout without this version; empty if all have it."""
    wanted = range_of(version)
    found = []
    if (said := _init(root).read_text()) and f'__version__ = "{version}"' not in said:
        found.append(f"{_init(root).relative_to(root)} has another __version__")
    for name, folder in projects(root).items():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        if project["version"] != version:
            found.append(f"{name} is {project['version']}")
        extras = project.get("optional-dependencies", {})
        for needed in [*project["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]:
            if (ours := OURS.match(needed)) and ours[2].strip() != wanted:
                found.append(f"{name} needs {needed}, not {ours[1]}{wanted}")
        if not _section(folder / "CHANGELOG.md", version):
            found.append(f"{(folder / 'CHANGELOG.md').relative_to(root)} has no section of {version}")
    return found


def set_version(version: str, root: Path = ROOT) -> None:
    """Write the version and the ranges into every distribution, and record that the contract is published with it.

    It does not edit the changelogs.
    """
    wanted = range_of(version)
    for folder in projects(root).values():
        file = folder / "pyproject.toml"
        text = re.sub(r'^version = ".*"$', f'version = "{version}"', file.read_text(), count=1, flags=re.M)
        file.write_text(OURS.sub(rf"\g<1>{wanted}", text))
    text = re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', _init(root).read_text(), flags=re.M)
    _init(root).write_text(text)
    surface = root / "tests" / "contract" / "surface.json"
    surface.write_text(re.sub(r'^("contract": "(.*)",\n"published": )".*"', r'\1"\2"', surface.read_text(), flags=re.M))


def notes(version: str, root: Path = ROOT) -> str:
    """Return the release's notes: the version's section of each changelog."""
    parts = [f"# enginehouse {version}"]
    parts += [f"## {name}\n\n{_section(folder / 'CHANGELOG.md', version)}" for name, folder in projects(root).items()]
    return "\n\n".join(parts) + "\n"


def build(version: str, out: Path, root: Path = ROOT, uncommitted: bool = False) -> None:
    """Build and check all distributions into an empty folder, with notes, hashes and a bill of materials.

    Args:
        version: version that every distribution must have.
        out: the folder, which is created.
        root: the checkout.
        uncommitted: True if sources may differ from the last commit.

    Raises:
        ReleaseError: versions differ, changes are uncommitted, git fails, or an archive fails a check.
    """
    if wrong := out_of_step(version, root):
        raise ReleaseError(_lines(f"not all is {version}; `make version VERSION={version}` writes it:", wrong))
    if not uncommitted and (changed := _git(root, "status", "--porcelain", "--", "core", "plugins")):
        raise ReleaseError(_lines("sources differ from the last commit:", changed.splitlines()))
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty: remove it to build {version} anew")
    out.mkdir(parents=True, exist_ok=True)
    # The archives contain the commit's time, so that a second build of it has the same hashes.
    try:
        seconds = _git(root, "log", "-1", "--format=%ct")
    except ReleaseError:
        if not uncommitted:
            raise
        seconds = "315532800"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    for folder in projects(root).values():
        _run("build", "--no-isolation", "--outdir", str(out), str(folder), environment=environment)
    check(out, root)
    (out / NOTES).write_text(notes(version, root))
    (out / MATERIALS).write_text(json.dumps(materials(version, projects(root)), indent=1) + "\n")
    (out / HASHES).write_text("".join(f"{_digest(file)}  {file.name}\n" for file in sorted(out.iterdir())))


def check(out: Path, root: Path = ROOT) -> None:
    """Check wheels and sdists as a package index does, and for faults that only this project knows.

    Raises:
        ReleaseError: the message has everything that the project's own checks found.
    """
    wheels, sources = _archives(out)
    names = set(projects(root))
    for kind, files in (("wheel", wheels), ("sdist", sources)):
        if {file.name.partition("-")[0].replace("_", "-") for file in files} != names or len(files) != len(names):
            raise ReleaseError(f"{out} has not one {kind} of each of {', '.join(sorted(names))}")
    _run("twine", "check", "--strict", *map(str, [*wheels, *sources]))
    for wheel in wheels:
        # W002, the same file twice: templates of new packages share a licence and options with us and one another.
        _run("check_wheel_contents", "--ignore=W002", "--toplevel", wheel.name.partition("-")[0], str(wheel))
    licence = (root / "LICENSE").read_bytes()
    found = [fault for wheel in wheels for fault in faults_of_wheel(wheel, licence)]
    found += [fault for source in sources for fault in faults_of_source(source, licence)]
    if found:
        raise ReleaseError(_lines("not fit for a package index:", found))


def faults_of_wheel(path: Path, licence: bytes) -> list[str]:
    """Return a wheel's faults: paths of the machine, links that lead nowhere, no licence, no `py.typed`."""
    found = []
    package = path.name.partition("-")[0]
    with zipfile.ZipFile(path) as wheel:
        files = wheel.namelist()
        (said,) = [wheel.read(file).decode() for file in files if file.endswith(".dist-info/METADATA")]
        licences = [wheel.read(file) for file in files if file.endswith(".dist-info/licenses/LICENSE")]
    if re.search(r"\bfile:/", said) or str(ROOT) in said:
        found.append("its metadata name a place of this machine")
    if any(" @ " in needed for needed in message_from_string(said).get_all("Requires-Dist", [])):
        found.append("it needs a distribution from a URL, which a package index refuses")
    if LINK_BESIDE.search(said):
        found.append("its README has a link that leads nowhere on a package index")
    if licences != [licence]:
        found.append("it does not have the project's LICENSE")
    if f"{package}/py.typed" not in files:
        found.append(f"it has no {package}/py.typed")
    return [f"{path.name}: {fault}" for fault in found]


def faults_of_source(path: Path, licence: bytes) -> list[str]:
    """Return an sdist's faults."""
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as source:
        files = set(source.getnames())
        member = source.extractfile(f"{top}/LICENSE") if f"{top}/LICENSE" in files else None
        held = member.read() if member else None
    found = [f"it has no {name}" for name in ("README.md", "CHANGELOG.md") if f"{top}/{name}" not in files]
    if held != licence:
        found.append("it does not have the project's LICENSE")
    return [f"{path.name}: {fault}" for fault in found]


def materials(version: str, folders: dict[str, Path]) -> dict[str, Any]:
    """Return the bill of materials (CycloneDX): what these distributions require, in this environment's versions.

    It does not list what engines require in their own runtimes.
    """
    said = _run("cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON", sys.executable)
    bill: dict[str, Any] = json.loads(said)
    needed = needed_by(folders)
    bill["components"] = [part for part in bill["components"] if canonicalize_name(part["name"]) in needed]
    for component in bill["components"]:  # an editable installation names its folder
        places = [place for place in component.get("externalReferences", []) if not place["url"].startswith("file:")]
        component["externalReferences"] = places
        if component["name"] in folders:
            component["version"] = version
    kept = {component["bom-ref"] for component in bill["components"]}
    bill["dependencies"] = [
        {**entry, "dependsOn": sorted(kept.intersection(entry.get("dependsOn", ())))}
        for entry in bill["dependencies"]
        if entry["ref"] in kept
    ]
    return bill


def needed_by(names: Iterable[str]) -> set[str]:
    """Return the installed ones of these distributions and of all that they require, directly or indirectly."""
    found: set[str] = set()
    left = [(canonicalize_name(name), "") for name in names]
    seen = set(left)
    while left:
        name, extra = left.pop()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform, or an extra that is not installed
            continue
        found.add(name)
        for needed in map(Requirement, requirements):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                further = {(canonicalize_name(needed.name), added) for added in ("", *needed.extras)} - seen
                seen |= further
                left += further
    return found


def upload(version: str, out: Path, confirmed: str | None, root: Path = ROOT, arguments: Sequence[str] = ()) -> None:
    """Upload unchanged what `build` made, to the index in twine's own settings.

    Raises:
        ReleaseError: the confirmation is not the version, files differ from their hashes, or a changelog says that the
            version is unreleased.
    """
    if confirmed != version:
        raise ReleaseError(f"an upload cannot be taken back; to do it, say CONFIRM={version}")
    if not (out / HASHES).exists():
        raise ReleaseError(f"there is no {out / HASHES}: `make release VERSION={version}` first")
    lines = (out / HASHES).read_text().splitlines()
    hashes = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    now = {file.name: _digest(file) for file in out.iterdir() if file.name != HASHES}
    if changed := sorted(name for name in hashes.keys() | now.keys() if hashes.get(name) != now.get(name)):
        raise ReleaseError(f"not as they were built: {', '.join(changed)}")
    heads = [(folder / "CHANGELOG.md", _head(folder / "CHANGELOG.md", version)) for folder in projects(root).values()]
    if open_ := [str(file.relative_to(root)) for file, head in heads if head is None or "unreleased" in head]:
        raise ReleaseError(_lines(f"no date beside {version} in:", open_))
    check(out, root)
    wheels, sources = _archives(out)
    _run("twine", "upload", "--non-interactive", *arguments, *map(str, [*wheels, *sources]))


def _archives(out: Path) -> tuple[list[Path], list[Path]]:
    return sorted(out.glob("*.whl")), sorted(out.glob("*.tar.gz"))


def _init(root: Path) -> Path:
    return root / "core" / "src" / "enginehouse" / "__init__.py"


def _parsed(version: str) -> tuple[int, int, bool]:
    """Return major and minor version, and True for a release candidate."""
    if not (found := VERSION.fullmatch(version)):
        raise ReleaseError(f"{version!r} is no version of ours, such as 0.2.0 or 0.2.0rc1")
    return int(found[1]), int(found[2]), found[4] is not None


def _head(changelog: Path, version: str) -> str | None:
    found = re.search(rf"^## {re.escape(version)}(?: .*)?$", changelog.read_text(), re.M)
    return found and found[0]


def _section(changelog: Path, version: str) -> str:
    head = _head(changelog, version)
    return changelog.read_text().partition(f"{head}\n")[2].partition("\n## ")[0].strip() if head else ""


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    """Return git's output.

    Raises:
        ReleaseError: git fails, for example outside of a git checkout.
    """
    try:
        ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError as error:
        raise ReleaseError(f"git {arguments[0]} failed: {error}") from error
    if ended.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {ended.stderr.strip()}")
    return ended.stdout.strip()


def _run(module: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"{module} {arguments[0]} took more than {LONGEST:g} s") from error
    if ended.returncode:
        raise ReleaseError(f"{module} {arguments[0]} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def _lines(head: str, lines: Iterable[str]) -> str:
    return "\n  ".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("set", "build", "upload"):
        command = commands.add_parser(name)
        command.add_argument("version", nargs="?")
        if name != "set":
            command.add_argument("--out", type=Path, help="the folder; dist/VERSION unless given")
    commands.choices["build"].add_argument("--uncommitted", action="store_true", help="a rehearsal: with changed files")
    commands.choices["upload"].add_argument("--confirm", help="the version once more")
    commands.choices["upload"].add_argument("--repository-url", help="the package index, if twine knows no other")
    said = parser.parse_args(arguments)
    try:
        if said.version is None:
            target = {"set": "version", "build": "release", "upload": "publish"}[said.command]
            raise ReleaseError(f"say VERSION=, as in `make {target} VERSION=0.2.0`")
        if said.command == "set":
            set_version(said.version)
            return 0
        out = said.out or ROOT / "dist" / said.version
        if said.command == "build":
            build(said.version, out, uncommitted=said.uncommitted)
        else:
            index = ["--repository-url", said.repository_url] if said.repository_url else []
            upload(said.version, out, said.confirm, arguments=index)
    except ReleaseError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"{file.stat().st_size:>9}  {file.name}" for file in sorted(out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
