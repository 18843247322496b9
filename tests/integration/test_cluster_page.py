"""The commands of docs/operators.md work."""

import contextlib
import importlib.util
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .marked import Marked

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "operators.md"
PATIENCE_SECONDS = 540.0

HAS_RAY_EXTRAS = all(importlib.util.find_spec(name) for name in ("grpc", "aiohttp", "opencensus"))
"""Whether `ray[default]` is installed: blocks marked as needing it run only then."""


class Block(NamedTuple):
    """A fenced block of the page."""

    info: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    fences = re.findall(r"^```(\S[^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(*found) for found in fences]


def to_run() -> list[Block]:
    """The blocks that this machine can run, in the page's order."""
    wanted = {"bash run", "bash run ray[default]"} if HAS_RAY_EXTRAS else {"bash run"}
    return [block for block in blocks_of(PAGE) if block.info in wanted]


class Session(NamedTuple):
    """One shell in which the page's commands were run, one block after the other."""

    code: int
    text: str
    said: dict[str, str]
    """What each block printed, by its text."""

    def after(self, command: str) -> str:
        """What the block with this command printed."""
        (found,) = [said for text, said in self.said.items() if command in text]
        return found


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Runs the page's commands as they stand, but for the head's port: another Ray on this machine may have it.

    Home and Ray's directory are the test's own, so that neither token nor current cluster of this user change.
    """
    directory = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))  # short: Ray's sockets lie deep below it
    blocks = to_run()
    port = str(_free_port())
    script = ["set -eu", f"cd {REPOSITORY}"]
    for number, block in enumerate(blocks):
        script += [f"echo '=== block {number}'", block.text.replace("6379", port)]
    (directory / "page.sh").write_text("\n".join([*script, "echo '=== end'"]))
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    commands = Marked(directory, {"HOME": str(directory), "RAY_TMPDIR": str(directory), "PATH": path})
    try:
        code = commands.run(["bash", directory / "page.sh"], directory / "said.txt", PATIENCE_SECONDS)
        text = (directory / "said.txt").read_text()
        parts = re.split(r"^=== .*\n", text, flags=re.MULTILINE)[1:]
        yield Session(code, text, {block.text: part for block, part in zip(blocks, parts)})
    finally:
        commands.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_runs_from_top_to_bottom(session: Session):
    assert session.code == 0, session.text
    assert session.text.endswith("=== end\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_takes_both_nodes_of_the_cluster(session: Session):
    greetings = re.findall(r"hello from rank (\d) of 4 on node (\w+)", session.after("python examples"))
    assert [rank for rank, _ in greetings] == ["0", "1", "2", "3"]
    assert len({node for _, node in greetings}) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_cluster_says_what_it_has_and_what_it_did(session: Session):
    status = session.after("ray status")
    assert "/4.0 CPU" in status, status
    assert "Trace file written" in session.after("ray timeline")


if HAS_RAY_EXTRAS:

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_submitted_job_joins_the_cluster_it_runs_on(session: Session):
        said = session.after("ray job submit")
        assert len(re.findall(r"hello from rank \d of 4", said)) == 4
        assert "succeeded" in said


def test_of_what_ray_does_only_what_would_end_the_clusters_of_others_is_not_run():
    assert len(to_run()) >= 6
    left = [block.text for block in blocks_of(PAGE) if block.info == 'bash not-run="ends every Ray on the machine"']
    assert left == ["ray stop\n"]
    skipped = [block for block in blocks_of(PAGE) if block.info.startswith("bash not-run")]
    assert [block.text for block in skipped if "ray " in block.text] == left
