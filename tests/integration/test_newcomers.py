"""The commands of docs/newcomers.md work, and the names and config keys in docs/from-verl.md exist."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .marked import Marked

REPOSITORY = Path(__file__).parents[2]
NEWCOMERS = REPOSITORY / "docs" / "newcomers.md"
FROM_VERL = REPOSITORY / "docs" / "from-verl.md"
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
    return [block for block in blocks_of(NEWCOMERS) if block.info in wanted]


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
    directory = Path(tempfile.mkdtemp(prefix="newcomer-", dir="/tmp"))  # short: Ray's sockets lie deep below it
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


def test_every_block_says_whether_it_is_run():
    left = 'bash not-run="ends every Ray on the machine"'
    asks = 'bash not-run="the model and the data are yours"'
    assert {block.info for block in blocks_of(NEWCOMERS)} == {left, asks, "bash run", "bash run ray[default]"}
    assert [block.text for block in blocks_of(NEWCOMERS) if block.info == left] == ["ray stop\n"], (
        "of what Ray does, only what would end other people's clusters is left out"
    )


def test_links_of_the_pages_lead_somewhere():
    for page in (NEWCOMERS, FROM_VERL, REPOSITORY / "examples" / "tutorial" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


# docs/from-verl.md

ROOMS = ("enginehouse.controller", "enginehouse.data", "enginehouse.plugin", "enginehouse.plugin.hookspecs")
ROOMS += (
    "enginehouse.engines",
    "enginehouse.engines.mesh",
    "enginehouse.engines.model",
    "enginehouse_megatron.dispatch",
)
PLACEHOLDERS = {"a", "b", "A", "f", "g", "pool", "spec", "batch"}
"""Names in a call that stand for the reader's own."""


def names_in_answers() -> list[str]:
    """The code spans of the newcomers' page that name a class of ours."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", NEWCOMERS.read_text(), flags=re.DOTALL))
    return sorted({" ".join(span.split()) for span in spans if re.match(r"[A-Z][a-z]+[A-Z]|Balanced", span)} - WORDS)


NAMES_BEGIN = "\n## Pools and groups\n"
"""Above it the page is about config keys."""


def our_spans() -> list[str]:
    """The code spans that name something of ours: of the tables' right-hand columns, and of the last paragraph."""
    text = FROM_VERL.read_text().split(NAMES_BEGIN, 1)[1]
    cells = [line.strip("|").rsplit("|", 1)[-1] for line in text.splitlines() if line.startswith("| ")]
    cells = [cell for cell in cells if cell.strip() != "here"]
    spans = re.findall(r"`([^`]+)`", "\n".join(cells) + text.split("no counterpart", 1)[1])
    return [span for span in spans if span[0].isalpha() and not span.startswith(NO_NAMES) and span not in WORDS]


NO_NAMES = ("def ", "self.")
WORDS = {"f", "None", "dp", "InvalidAuthToken"}


@pytest.mark.parametrize("span", [*our_spans(), *names_in_answers()])
def test_a_name_that_the_pages_give_exists(span: str):
    tree = ast.parse(span, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in PLACEHOLDERS:
            find(node.id)
        elif isinstance(node, ast.Attribute):
            owner = find(ast.unparse(node.value))
            assert has(owner, node.attr), f"{ast.unparse(node.value)} has no {node.attr}"
        elif isinstance(node, ast.Call):
            parameters = inspect.signature(find(ast.unparse(node.func))).parameters
            if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
                assert {keyword.arg for keyword in node.keywords} <= set(parameters)


def our_keys() -> list[tuple[str, tuple[str, ...]]]:
    """Each config key of the table of keys, and the backends that its cell names: `torch` where it names none."""
    table = FROM_VERL.read_text().split(NAMES_BEGIN, 1)[0]
    found = []
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith("| verl"):
            cell = line.strip("|").rsplit("|", 1)[-1]
            for part in re.split(r"(?<=\)),", cell):  # each with its own brackets
                spans = re.findall(r"`([^`]+)`", part)
                backends = [span for span in spans if span in BACKENDS]
                found += [(span, tuple(backends) or ("torch",)) for span in spans if re.fullmatch(KEY, span)]
    return found


BACKENDS = {"fsdp", "megatron", "vllm", "sglang"}
KEY = r"[a-z]+\.[a-z_.]+"


@pytest.mark.parametrize(("key", "backends"), our_keys())
def test_a_config_key_that_the_page_gives_exists(key: str, backends: tuple[str, ...]):
    from enginehouse.plugin import Advantage, Loss, RolloutBackend, TrainBackend, plugins, resolve
    from enginehouse_rl.config.load import keys
    from enginehouse_rl.config.schema import Config, DPOConfig

    section, _, option = key.partition(".options.")
    known = [one for schema in (Config, DPOConfig) for one in keys(schema)]
    if option:
        kind = RolloutBackend if section == "rollout.engine" else TrainBackend
        for backend in backends:
            record = plugins().get(kind, backend, elsewhere=True)
            assert option in {".".join(one) for one in keys(resolve(record.options))}, backend
    elif ".arguments." in key:
        section, _, argument = key.partition(".arguments.")
        kind = {"loss": Loss, "advantage": Advantage}[section.rpartition(".")[2]]
        functions = [resolve(one.record.function) for one in plugins().providers(kind)]
        assert any(argument in inspect.signature(function).parameters for function in functions)
    else:
        said = tuple(key.split("."))
        assert any(one[: len(said)] == said for one in known)


def find(name: str) -> Any:
    """The public thing of that name, wherever it lives."""
    first, *rest = name.split(".")
    for room in ROOMS:
        module = importlib.import_module(room)
        if hasattr(module, first):
            return reduce(getattr, rest, getattr(module, first))
    raise AssertionError(f"nothing of enginehouse is named {name}")


def has(owner: Any, attribute: str) -> bool:
    """Whether a class has an attribute, on itself or only on its objects."""
    annotated = (vars(kind).get("__annotations__", {}) for kind in owner.__mro__)
    return hasattr(owner, attribute) or any(attribute in names for names in annotated)


def test_the_pages_are_read_whole():
    assert {"Balanced", "DataLost", "RemoteError", "WorkerDied", "WorkerTimeout"} <= set(names_in_answers())
    assert len(our_spans()) > 50
    assert "ResourcePool([4, 2])" in our_spans()
    assert len(our_keys()) > 50
    assert ("actor.engine.options.recompute", ("megatron",)) in our_keys()
