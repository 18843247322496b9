"""Programs that nobody has read: what hostile ones come to, by docs/trust.md, and that nothing of them is left."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from enginehouse.errors import ConfigError
from enginehouse_rewards import sandbox, sandboxed
from enginehouse_rewards.builtin.code import code
from enginehouse_rewards.pool import RewardPool
from enginehouse_rewards.program import MARK
from enginehouse_rewards.sandbox import Sandbox, SandboxError

PAGE = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
HOSTILE_TABLE = PAGE.partition("### Hostile programs")[2].partition("\n## ")[0]
ENDINGS = {
    program: ending
    for ending, programs in re.findall(r"^\| `([^`]+)` \| (.+) \|$", HOSTILE_TABLE, re.M)
    for program in programs.split(", ")
}

HOSTILE = {
    "forks without end": "while True: os.fork()",
    "allocates 10 GB": "held = bytearray(10 << 30)",
    "prints without end": "while True: print('x' * 1000)",
    "sleeps": "time.sleep(60)",
    "loops": "while True: pass",
    "loops in threads": "for _ in range(8): threading.Thread(target=sum, args=(iter(int, 1),)).start()\n"
    "threading.Event().wait()",
    "starts threads without end": "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "starts small threads without end": "threading.stack_size(32768); hold = threading.Event().wait\n"
    "while True: threading.Thread(target=hold).start()",
    "connects to a host": "socket.create_connection(('127.0.0.1', {port}))",
    "connects to a socket of this host": "socket.socket(socket.AF_UNIX).connect('/dev/log')",
    "asks for a name": "print(socket.getaddrinfo('example.com', 80))",
    "writes outside its directory": "open('{outside}/new', 'w')",
    "empties a file outside": "os.open('{secret}', os.O_RDONLY | os.O_TRUNC)",
    "moves a file in from outside": "os.rename('{secret}', 'mine')",
    "changes a mode outside": "os.chmod('{secret}', 0o777)",
    "reads a secret of the user's": "print(open('{secret}').read())",
    "reads its parent's environment": "print(open(f'/proc/{{os.getppid()}}/environ').read())",
    "writes to what its parent holds open": "os.open(f'/proc/{{os.getppid()}}/fd/1', os.O_WRONLY)",
    "reads the tests": "print(open('{tests}').read())",
    "links to a file outside": "os.symlink('{secret}', 'link'), print(open('link').read())",
    "leaves a daemon": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(60)",
    "runs another program": "subprocess.run(['/bin/sh', '-c', 'echo'])",
    "fills the disk": "[open(str(n), 'wb').write(bytes(2**24)) for n in range(10**6)]",
    "fills the disk with one file": "open('large', 'wb').write(bytes(2**25))",
    "makes many files": "[open(str(n), 'w').close() for n in range(10**7)]",
    "removes its directory": "os.rmdir(os.getcwd())",
    "locks its directory": "os.chmod('.', 0)",
    "recurses": "sys.setrecursionlimit(10**9); f = lambda _: sorted([0], key=f); f(0)",
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "kills everything": "os.kill(-1, 9)",
    "has another process signalled": "fcntl.fcntl(socket.socketpair()[0], fcntl.F_SETOWN, os.getppid())",
    "traces its parent": "if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise OSError",
    "outlives its parent's death": "if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "leaves shared memory": "if ctypes.CDLL(None).shmget(0, 4096, 0o1666) < 0: raise OSError",
    "crashes": "ctypes.string_at(0)",
    "exits at once": "os._exit(0)",
    "closes its output": "os.close(1); time.sleep(0.1)",
    "raises in atexit": "atexit.register(lambda: 1 / 0); raise SystemExit",
    "prints what is no text": "os.write(1, bytes(range(128, 256))); os._exit(0)",
}
IMPORTS = "import atexit, ctypes, fcntl, os, resource, signal, socket, subprocess, sys, threading, time\n"


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """Of all that a test's sandboxes start; their directories are in `tmp_path`."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return mark


def left(mark):
    """Processes with the mark, but for this one, whose own was set after its start."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(mark):
                found.append(process)
        except psutil.Error:
            pass
    return found


def test_the_page_of_rewards_has_every_hostile_program():
    assert ENDINGS.keys() == HOSTILE.keys()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_as_documented_and_leaves_nothing(name, mark, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("did it")
    (outside / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"port": server.getsockname()[1], "outside": outside, "secret": outside / "secret", "tests": __file__}
        source = IMPORTS + HOSTILE[name].format(**given) + "\nprint('did it')"
        with Sandbox(seconds=0.7 if ENDINGS[name] == "time" else 20, memory_mb=256) as process:
            ended = process.run(source)
    assert ended.how == ENDINGS[name]
    assert "did it" not in ended.output
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "did it"
    assert (outside / "secret").stat().st_mode & 0o777 == 0o600
    assert not left(mark)


def fenced(program):
    return f"Sure:\n```python\nprint('not this')\n```\nor rather\n```python\n{program}\n```\nDone."


ADD = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = {"inputs": ["1 2\n", "20 22\n"], "outputs": ["3", "42  \n\n"]}
OF_PAIRS = {"inputs_column": "inputs", "outputs_column": "outputs"}


@pytest.mark.parametrize(
    ("program", "share", "all_of_them"),
    [
        (ADD, 1.0, 1.0),
        ("if __name__ == '__main__':\n    " + ADD.replace("\n", "\n    "), 1.0, 1.0),
        (ADD.replace("+", "*"), 0.0, 0.0),
        ("print(3)", 0.5, 0.0),
        (ADD + "\nraise ValueError", 0.0, 0.0),
        ("syntax error", 0.0, 0.0),
        ("import time\ntime.sleep(60)", 0.0, 0.0),
    ],
)
def test_a_program_is_credited_for_the_outputs_that_are_right(program, share, all_of_them):
    scores = [
        code(fenced(program), **OF_PAIRS, **PAIRS, credit=credit, seconds=0.5, prompt="p", finish_reason="stop")
        for credit in ("share", "all")
    ]
    assert scores == [share, all_of_them]


def test_a_response_without_a_program_passes_nothing_and_a_row_without_tests_has_no_score():
    assert code("print(3)", **OF_PAIRS, **PAIRS) == 0.0
    with pytest.raises(ValueError, match="0 inputs, 0 outputs"):
        code(fenced("print(3)"), **OF_PAIRS, inputs=[], outputs=[])


ASSERTS = [
    "assert twice(2) == 4",
    "assert twice('ab') == 'abab', 'of texts'",
    "assert (1, 1) == tuple(twice([1]))",
    "from math import isclose",
    "assert isclose(twice(0.1), 0.2)",
]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def twice(x): return x * 2", 1.0),
        ("def twice(x): return x + x if x != 2 else 5", 0.75),
        ("import collections\nclass twice(str): __eq__ = lambda *_: True\n", 0.0),
        ("class twice:\n def __init__(self, x): pass\n def __eq__(self, o): return True\n", 0.0),
        ("def twice(x): return None", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("def twice(x): import os; os._exit(0)", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("def twice(x): raise SystemExit(0)", 0.0),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef twice(x): return x", 0.0),
        ("import os\nfor fd in range(20):\n  try: os.write(fd, b'{\"ready\": true}\\n{\"value\": \"4\"}\\n' * 9)\n"
         "  except OSError: pass\nimport time\ntime.sleep(60)", 0.0),
        ("import gc\ndef twice(x):\n  return next((o for o in gc.get_objects() if o == 'abab'), None)", 0.0),
        ("import sys\ndef twice(x):\n  f, found = sys._getframe(), ''\n  while f:\n    found += repr(f.f_locals)\n"
         "    f = f.f_back\n  return 4 if 'twice(2)' + ' == 4' in found else None", 0.0),
        ("def twice(x): return [[]] * 10**7", 0.0),
    ],
)  # fmt: skip
def test_asserts_are_passed_by_values_and_by_no_way_of_leaving_before_them(program, expected):
    assert code(fenced(program), asserts_column="tests", tests=ASSERTS, seconds=1.0) == expected


def test_values_that_equal_a_literal_pass_for_it_though_they_are_of_another_type():
    program = """
import collections, decimal, fractions
Pair = collections.namedtuple("Pair", "a b")
values = [collections.Counter("aab"), {1: 2}.keys(), Pair(1, (2,)), decimal.Decimal(3), fractions.Fraction(1, 4), set()]
"""
    wanted = ["{'a': 2, 'b': 1}", "{1}", "(1, (2,))", "3", "0.25", "set()"]
    tests = [f"assert values[{number}] == {literal}" for number, literal in enumerate(wanted)]
    assert code(fenced(program), asserts_column="tests", tests=tests) == 1.0
    assert code(fenced(program), asserts_column="tests", tests=[f"{tests[-1]} | {{1}}", "assert values[4] == 0"]) == 0.0


def test_a_function_that_checks_is_a_test():
    tests = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n\ncheck(twice)\n"
    given = {"asserts_column": "test", "test": tests}
    assert code(fenced("def twice(x): return x * 2"), **given) == 1.0
    assert code(fenced("def twice(x): return 2"), **given) == 0.0


def test_tests_share_the_time_of_their_response():
    inputs = ["1 2\n"] * 50
    begun = time.monotonic()
    pairs = {"inputs": inputs, "outputs": ["3"] * 50}
    assert code(fenced("import time\ntime.sleep(60)"), **OF_PAIRS, **pairs, seconds=0.3, total_seconds=0.5) == 0.0
    assert time.monotonic() - begun < 5


def test_a_program_ends_with_the_process_that_runs_it_and_its_directory_is_deleted_later(mark, tmp_path, monkeypatch):
    runs = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n" + (
        "from enginehouse_rewards.sandbox import Sandbox\n"
        "with Sandbox(60) as process: process.load('print(1)'); print('begun', flush=True); "
        "process.do('import time; time.sleep(60)')"
    )
    owner = subprocess.Popen([sys.executable, "-c", runs], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"begun\n"
    assert len(left(mark)) == 2
    owner.kill()
    owner.communicate()
    until = time.monotonic() + 10
    while left(mark):
        assert time.monotonic() < until
    (stale,) = tmp_path.iterdir()
    monkeypatch.setattr(sandbox, "STALE_SECONDS", 0)
    with Sandbox(1) as process:
        assert [*tmp_path.iterdir()] == [Path(process.directory)] != [stale]
    assert not [*tmp_path.iterdir()]


def test_a_sandbox_that_somebody_deleted_leaves_the_folder_it_was_in_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with Sandbox(seconds=5) as sandbox:
        shutil.rmtree(sandbox.directory)
    assert (tmp_path / "temporary").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.slow
def test_a_program_ends_with_the_row_that_is_late(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    arguments = {**OF_PAIRS, "seconds": 60, "total_seconds": 60}
    pool = RewardPool(f"{code.__module__}:code", arguments, timeout_seconds=3, on_error="zero", max_failures=1)
    try:
        rows = [{"response": fenced(program), **PAIRS} for program in (ADD, "while True: pass")]
        right, late = pool.score(rows)
    finally:
        pool.close()
    assert (right.reward, late.reward) == (1.0, 0.0)
    assert "did not return within 3 s" in late.failure

    def still_there():
        for process in psutil.process_iter():
            try:
                if process.cwd().startswith(str(tmp_path)):
                    return True
            except psutil.Error:
                pass
        return False

    until = time.monotonic() + 10
    while still_there():
        assert time.monotonic() < until


DAEMON = "import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n    time.sleep(60)\n  os._exit(0)"


@pytest.mark.parametrize(
    ("there", "lost", "lacks"),
    [
        ("LANDLOCK_RESTRICT_SELF = 444,", "LANDLOCK_RESTRICT_SELF = 9999,", "files"),
        ('"x86_64": 0xC000003E, "aarch64"', '"other": 0, "aarch64"', "system calls"),
    ],
)
def test_a_machine_that_cannot_isolate_is_refused_unless_less_is_accepted(
    mark, tmp_path, monkeypatch, there, lost, lacks
):
    source = Path(sandboxed.__file__).read_text()
    assert there in source
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sandboxed.py").write_text(source.replace(there, lost))
    monkeypatch.setattr(sandboxed, "__file__", str(elsewhere / "sandboxed.py"))
    assert sandbox.missing() == (lacks,)
    with pytest.raises(SandboxError, match=f"cannot restrict {lacks} of a program"):
        code(fenced(ADD), **OF_PAIRS, **PAIRS)
    with pytest.raises(ConfigError, match=f"cannot restrict {lacks} of a program.*isolation=best accepts less"):
        code.check(OF_PAIRS, ("inputs", "outputs"))
    code.check({**OF_PAIRS, "isolation": "best"}, ("inputs", "outputs"))
    assert code(fenced(ADD), **OF_PAIRS, **PAIRS, isolation="best") == 1.0
    assert code(fenced(DAEMON), **OF_PAIRS, **PAIRS, isolation="best", seconds=0.5) == 0.0
    assert not left(mark)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
