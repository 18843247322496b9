"""Files of a run on a full disk, and damaged ones: what is written is whole, and a bad line costs only itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse import atomic
from enginehouse.atomic import clear_partial, find_set_aside, move_into_place, write_whole
from enginehouse_rl.runs.jsonlines import JsonLines, read_whole_lines, write_json_lines

FULL = """
# Writes lines until the file may not grow any more, as on a full disk: the last write is cut off within a line.
import resource, sys
from pathlib import Path
from enginehouse_rl.runs.jsonlines import JsonLines

lines = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(100):
    try:
        lines.append({"step": step, "text": "x" * 50})
    except OSError:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        lines.append({"step": "after"})
        print(step)
        break
"""


def test_a_line_the_disk_has_no_room_for_is_not_begun(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True)
    failed = int(done.stdout)
    assert 0 < failed < 100
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(failed), "after"]


def test_appending_goes_on_after_what_is_there(tmp_path: Path):
    for step in (1, 2):
        lines = JsonLines(tmp_path / "a.jsonl")
        lines.append({"step": step, "text": "ä\u2028"})
        lines.to_disk()
        lines.close()
    assert read_whole_lines(tmp_path / "a.jsonl") == [{"step": 1, "text": "ä\u2028"}, {"step": 2, "text": "ä\u2028"}]


def test_lines_that_are_damaged_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, \n\xff\xfe\n[3]\n%b\n{"step": 4}\n{"step": 5' % (b"[" * 100_000))
    assert [row["step"] for row in read_whole_lines(path)] == [1, 4]
    assert [record.message.split(" is damaged")[0] for record in caplog.records] == [
        f"{path}, line {number}" for number in (2, 3, 4, 5)
    ]


def test_a_file_that_cannot_be_replaced_is_as_it_was_and_leaves_nothing(tmp_path: Path, monkeypatch):
    path = tmp_path / "run.json"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_two_that_write_a_file_at_once_do_not_take_away_what_each_other_moves_there(tmp_path: Path):
    path = tmp_path / "run.json"

    def text_beside_another() -> Iterator[str]:  # as the thread of a second signal writes
        yield "first"
        write_whole(path, "second")

    write_whole(path, text_beside_another())
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_of_rows_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "step-000001.jsonl"
    write_json_lines(path, [{"reward": 1.0}])

    def cut_off():
        yield {"reward": 2.0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_json_lines(path, cut_off())
    (staging := tmp_path / ".partial").symlink_to("/dev/full")
    monkeypatch.setattr(atomic, "_staging", lambda path: staging)
    with pytest.raises(OSError, match="No space"):
        write_json_lines(path, [{"reward": 2.0}])
    assert path.read_text() == '{"reward": 1.0}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_is_moved_into_place_is_on_disk_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "new" / "actor").mkdir(parents=True)
    (tmp_path / "new" / "actor" / "weights").write_text("w")
    happened: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(*names: Path) -> None:
        happened.append("renamed")
        rename(*names)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    move_into_place(tmp_path / "new", tmp_path / "place")
    assert set(happened[:3]) == {"new", "actor", "weights"}
    assert happened[3:] == ["renamed", tmp_path.name]


@pytest.mark.parametrize("killed", [False, True], ids=["there", "set aside by a save that was killed"])
def test_what_a_directory_held_is_back_when_the_new_one_cannot_be_moved_there(tmp_path: Path, killed: bool):
    held = tmp_path / (".place.replaced" if killed else "place")
    held.mkdir()
    (held / "old").touch()
    with pytest.raises(FileNotFoundError):
        move_into_place(tmp_path / "new", tmp_path / "place", to_disk=False)
    assert os.listdir(tmp_path) == ["place"]
    assert os.listdir(tmp_path / "place") == ["old"]


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path):
    for content in ("old", "new"):
        (tmp_path / "partial").mkdir()
        (tmp_path / "partial" / content).touch()
        move_into_place(tmp_path / "partial", tmp_path / "place")
    assert os.listdir(tmp_path) == ["place"]
    assert os.listdir(tmp_path / "place") == ["new"]


class Killed(BaseException):
    """In place of the end of a process: nothing after it is done."""


@pytest.fixture
def killed_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place whose new directory was to be renamed to it when the process ended."""
    for name, content in (("place", "old"), (".place.partial", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).touch()
    rename, renamed = os.rename, []

    def dying(*names: Path) -> None:
        if renamed:
            raise Killed
        renamed.append(names)
        rename(*names)

    monkeypatch.setattr(os, "rename", dying)
    with pytest.raises(Killed):
        move_into_place(tmp_path / ".place.partial", tmp_path / "place", to_disk=False)
    monkeypatch.setattr(os, "rename", rename)
    assert sorted(os.listdir(tmp_path)) == [".place.partial", ".place.replaced"]
    return tmp_path / "place"


def test_what_a_killed_replacement_set_aside_is_put_back(killed_between_the_renames: Path):
    place = killed_between_the_renames
    assert find_set_aside(place) == place.with_name(".place.replaced")
    for _ in range(2):
        clear_partial(place.parent)
        assert os.listdir(place.parent) == ["place"]
        assert os.listdir(place) == ["old"]
    assert find_set_aside(place) is None


def test_what_was_set_aside_goes_where_the_new_one_is_there(tmp_path: Path):
    for name, content in (("place", "new"), (".place.replaced", "old"), (".other.partial", "half")):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).touch()
    assert find_set_aside(tmp_path / "place") is None
    clear_partial(tmp_path)
    assert os.listdir(tmp_path) == ["place"]
    assert os.listdir(tmp_path / "place") == ["new"]


def test_what_was_set_aside_and_cannot_be_put_back_stays(killed_between_the_renames, monkeypatch, caplog):
    def refused(*names: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "rename", refused)
    clear_partial(killed_between_the_renames.parent)
    assert os.listdir(killed_between_the_renames.parent) == [".place.replaced"]
    assert "read-only" in caplog.text
