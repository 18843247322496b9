"""Gather the wheels that a machine with a card, Python 3.12 and torch lacks: `python -m tools.gpu.wheels .gpu`.

It builds this checkout's wheels and downloads those of other packages, so it needs a network. It removes half of Ray,
which no run here uses. At most `MOST_MB` may remain, because they have to be carried in.
"""

import argparse
import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

PLUGINS = ("rewards", "rl", "recipes", "torch", "fsdp", "megatron", "testing", "report", "transports")
OWN = ("core", *(f"plugins/{name}" for name in PLUGINS))
OTHERS = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "anybadge", "copier", "jsonschema",
    "referencing", "rpds-py", "jsonschema-specifications", "msgpack", "pluggy", "megatron-core==0.16.1", "ray==2.60.0",
)  # fmt: skip
FOR = ("--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64")
UNUSED = ("ray/jars/", "ray/rllib/", "ray/serve/", "ray/llm/", "ray/tune/", "ray/dashboard/client/")
"""Parts of Ray for other uses. The raylet and the job server start without them."""
MOST_MB = 60.0
RECORD = ".dist-info/RECORD"
"""End of the path of a wheel's own record, at the top level: Ray's wheel contains other packages with theirs."""


def strip(wheel: Path, unused: tuple[str, ...] = UNUSED) -> None:
    """Remove folders from a wheel, in place, and from its `RECORD`."""
    stripped = wheel.with_suffix(".stripped")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stripped, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if entry.filename.startswith(unused):
                continue
            content = old.read(entry)
            if entry.filename.endswith(RECORD) and entry.filename.count("/") == 1:
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.startswith(unused)).encode()
            new.writestr(entry, content)
    stripped.replace(wheel)


def check(wheel: Path) -> None:
    """Raise ValueError unless a wheel's `RECORD` names each of its files with its digest."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith(RECORD) and name.count("/") == 1)
        rows = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        if {name for name, _, _ in rows} != {name for name in names if not name.endswith("/")}:
            raise ValueError(f"{wheel.name}: its RECORD names other files than it has")
        for name, digest, _ in rows:
            kind, _, expected = digest.partition("=")
            found = hashlib.new(kind, archive.read(name)).digest() if kind else b""
            if base64.urlsafe_b64encode(found).rstrip(b"=") != expected.encode():
                raise ValueError(f"{wheel.name}: {name} is not what its RECORD says")


def main() -> int:
    """Return the exit code: 1 if the wheels are too large to carry."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder the wheels go to")
    out = parser.parse_args().out
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "-w", out, "--no-deps", *(f"./{name}" for name in OWN)], check=True)
    loading = [*pip, "download", "-q", "-d", out, "--no-deps", "--only-binary=:all:", *FOR, *OTHERS]
    subprocess.run(loading, check=True)
    for wheel in out.glob("ray-*.whl"):
        strip(wheel)
        check(wheel)
    sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in sorted(out.glob("*.whl"))}
    print("\n".join(f"{size:6.1f} MB  {name}" for name, size in sizes.items()))
    total = sum(sizes.values())
    print(f"{total:6.1f} MB in all, of {MOST_MB:g} that can be carried")
    return 0 if total <= MOST_MB else 1


if __name__ == "__main__":
    sys.exit(main())
