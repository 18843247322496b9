"""What is said about data files that cannot be used, and what is read from those that can."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from enginehouse.errors import DataError, UserError
from enginehouse_rl.data.files import check_file, open_table

KINDS = pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("use", [lambda p: check_file(p, ["prompt"]), lambda p: open_table(p, ["prompt"])])
def test_a_missing_column_is_answered_with_the_nearest(write: Any, kind: str, use: Any) -> None:
    path = write(kind, [{"promt": "a", "answer": 1}])
    with pytest.raises(
        DataError, match=r"no column 'prompt'. Did you mean 'promt'\? Available: answer, promt"
    ) as caught:
        use(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, UserError)


@KINDS
def test_a_good_file_gives_its_columns(write: Any, name: str) -> None:
    path = write(name, [{"prompt": "a", "response": "b", "answer": 1}])
    assert check_file(path, ["prompt"]) == ("prompt", "response", "answer")
    assert check_file(path, ["prompt", "response"]) == ("prompt", "response", "answer")
    with pytest.raises(DataError, match="no column 'reply'"):
        check_file(path, ["prompt", "reply"])


def test_a_missing_file_is_answered_with_the_nearest(write: Any, tmp_path: Path) -> None:
    write("train.jsonl", [{"prompt": "a"}])
    write("other.txt", ["x"])
    with pytest.raises(DataError, match=r"no data file .*trian\.jsonl; the nearest in .* is 'train\.jsonl'"):
        check_file(tmp_path / "trian.jsonl", ["prompt"])
    with pytest.raises(DataError, match=r"holds train\.jsonl"):
        check_file(tmp_path / "zzzzzz.parquet", ["prompt"])
    with pytest.raises(DataError, match=rf"folder {tmp_path}/no/such does not exist \({tmp_path} does\)"):
        check_file(tmp_path / "no" / "such" / "train.jsonl", ["prompt"])
    with pytest.raises(DataError, match=r"is a directory.*train\.jsonl"):
        check_file(tmp_path, ["prompt"])
    with pytest.raises(DataError, match=r"must be a data file, with a name that ends in \.jsonl"):
        check_file(tmp_path / "other.txt", ["prompt"])


@KINDS
def test_an_empty_file_has_no_rows(write: Any, name: str) -> None:
    with pytest.raises(DataError, match="has no rows"):
        check_file(write(name, []), ["prompt"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', "", '{"prompt": '], r"row 2 \(line 3\): not valid JSON: Expecting value"),
        (['{"prompt": "a"}', "[1, 2]"], r"row 2 \(line 2\): expected one JSON object per line, found a list"),
        (['{"prompt": "a"}', "", '{"promt": "b"}'], r"row 2 \(line 3\) has no column 'prompt'. Did you mean 'promt'"),
        (['{"prompt": "a"}', '{"prompt": "b", "x": {"y": 1, "y": 2}}'], r"row 2 \(line 2\): the key 'y' occurs twice"),
        (
            ['{"prompt": "a"}', '{"prompt": "\\ud800"}'],
            r"row 2 \(line 2\): column 'prompt' contains half of a character",
        ),
        (['{"prompt": "a"}', '{"prompt": "b", "x": ["\\uD83D!"]}'], r"row 2 \(line 2\): column 'x' contains half"),
        (
            ['{"prompt": "a"}', '{"prompt": "b", "x": ' + "[" * 65 + "]" * 65 + "}"],
            r"\(line 2\): lists .* more than 64",
        ),
        (['{"prompt": "a"}', '{"prompt": ' + "[" * 200_000], r"row 2 \(line 2\): lists .* more than 64"),
    ],
)
def test_a_bad_line_is_named(write: Any, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_table(write("a.jsonl", lines), ["prompt"])


def test_whole_characters_and_brackets_in_a_text_are_none_of_these(write: Any) -> None:
    rows = [{"prompt": "\\ud", "x": "\U0001f600" * 2, "y": "[{" * 200, "z": [[]] * 200}]
    table = open_table(write("a.jsonl", rows), ["prompt"])
    assert [{"prompt": table.needed["prompt"][0], **table.fetch_others([0])[0]}] == rows


def test_bad_rows_are_counted_and_the_first_few_named(write: Any) -> None:
    good = write("a.jsonl", [{"prompt": "a"}])
    bad = write("b.jsonl", [{"prompt": "a"}, *['{"prompt"'] * 4, *['{"prompt": "a", "prompt": "b"}'] * 3])
    with pytest.raises(DataError) as caught:
        open_table([good, bad], ["prompt"])
    first, *listed = str(caught.value).splitlines()
    assert first == "7 rows of the data cannot be used:"
    assert listed[0].startswith(f"  - {bad}, row 2 (line 2): not valid JSON")
    assert "row 6 (line 6): the key 'prompt' occurs twice" in listed[4]
    assert listed[5:] == ["  - and 2 more"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"}, {"prompt": "b"', "in row 2: not valid JSON"),
        ('[{"prompt": "a"},]', "in row 2: not valid JSON"),
        ('[{"prompt": "a"}] x', "not valid JSON: Extra data"),
        ('[{"prompt": "a"}, 3]', "row 2: expected one JSON object"),
        ('[{"prompt": "a"}, {"prompt": "b", "prompt": "c"}]', "row 2: the key 'prompt' occurs twice"),
    ],
)
def test_a_bad_value_of_a_json_array_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        open_table(path, ["prompt"])


def test_text_in_parquet_that_is_none_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    broken = pa.array([b"a", b"\xed\xa0\x80"]).view(pa.string())
    good = pa.array(["a", "b"])
    for name, columns in (("a", {"prompt": broken, "x": good}), ("b", {"prompt": good, "x": broken})):
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2: column 'prompt' is not valid UTF-8"):
        open_table(tmp_path / "a.parquet", ["prompt"])
    with pytest.raises(DataError, match=r"b.parquet cannot be read as Parquet: .*UTF8"):
        open_table(tmp_path / "b.parquet", ["prompt"])


def test_several_files_are_one_table(write: Any) -> None:
    files = [
        write("a.jsonl", [{"prompt": "a0", "x": 0}, {"prompt": "a1", "x": 1, "y": 1}]),
        write("b.parquet", [{"prompt": f"b{n}", "x": n} for n in (2, 3)]),
        write("c.json", ['[{"x": 4, "prompt": "c0"}]']),
    ]
    table = open_table(files, ["prompt"])
    assert table.needed["prompt"] == ["a0", "a1", "b2", "b3", "c0"]
    assert [row["x"] for row in table.fetch_others([4, 0, 3, 1, 2, 0])] == [4, 0, 3, 1, 2, 0]
    assert [table.where(row) for row in (1, 3, 4)] == [
        f"{files[0]}, row 2 (line 2)",
        f"{files[1]}, row 2",
        f"{files[2]}, row 1",
    ]
    assert [(set(shape.columns), shape.first, shape.rows) for shape in table.shapes()] == [
        ({"prompt", "x"}, 0, 4),
        ({"prompt", "x", "y"}, 1, 1),
    ]
    with pytest.raises(DataError, match="no data file is named"):
        open_table([], ["prompt"])


@KINDS
def test_reading_stops_after_a_time_and_counts_what_is_left(write: Any, name: str) -> None:
    path = write(name, [{"prompt": f"p{n}"} for n in range(3000)])
    table = open_table(path, ["prompt"], seconds=0)
    assert (len(table), table.unread) == (1024, 3000 - 1024)
    assert open_table(path, ["prompt"]).unread == 0


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2\): not valid JSON: .*utf-8"):
        open_table(path, ["prompt"])
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        check_file(broken, ["prompt"])


def test_values_in_jsonl_reach_the_reward_as_they_stand_in_the_file(write: Any) -> None:
    rows = [
        {"prompt": "2024-01-01", "date": "2024-01-01", "number": 1, "deep": {"a": 1}},
        {"number": 2.5, "prompt": "b", "deep": {"b": [1, "x", None]}, "late": 10**30},
    ]
    table = open_table(write("a.jsonl", rows), ["prompt"])
    assert table.needed["prompt"] == ["2024-01-01", "b"]
    others = table.fetch_others([1, 0])
    assert others == [{k: v for k, v in row.items() if k != "prompt"} for row in reversed(rows)]
    assert type(others[1]["number"]) is int


def test_a_json_array_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    array = tmp_path / "a.json"
    array.write_text('\n [{"prompt": "ä", "x": 1},\n {"prompt": "b"}]')
    table = open_table(array, ["prompt"])
    assert table.needed["prompt"] == ["ä", "b"]
    assert table.fetch_others([0, 1]) == [{"x": 1}, {}]
    marked = tmp_path / "b.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert open_table(marked, ["prompt"]).needed["prompt"] == ["a", "b"]


def test_parquet_rows_are_read(write: Any) -> None:
    rows = [{"prompt": f"p{i}", "answer": i, "deep": {"tags": ["x"] * i}} for i in range(4)]
    table = open_table(write("a.parquet", rows), ["prompt"])
    assert len(table) == 4
    assert table.needed["prompt"] == ["p0", "p1", "p2", "p3"]
    assert table.fetch_others([3, 1, 1]) == [{k: v for k, v in rows[i].items() if k != "prompt"} for i in (3, 1, 1)]
    assert table.fetch_others([]) == []
    alone = open_table(write("b.parquet", [{"prompt": "a"}]), ["prompt"])
    assert alone.fetch_others([0]) == [{}]


@pytest.mark.slow
def test_checking_a_file_imports_no_torch_and_reading_leaves_nothing_behind(write: Any, tmp_path: Path) -> None:
    write("a.jsonl", [{"prompt": "a"}])
    write("a.parquet", [{"prompt": "a"}])
    before = sorted(os.listdir(tmp_path))
    home = tmp_path.parent / f"{tmp_path.name}-home"
    home.mkdir()
    program = """
import socket, sys
def refuse(*a, **k): raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
from pathlib import Path
from enginehouse_rl.data.files import check_file, open_table
assert check_file(Path("a.jsonl"), ["prompt"]) == ("prompt",)
assert "pyarrow" not in sys.modules
assert check_file(Path("a.parquet"), ["prompt"]) == ("prompt",)
heavy = {"torch", "ray", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
assert len(open_table("a.parquet", ["prompt"])) == 1
assert len(open_table("a.jsonl", ["prompt"])) == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "TMPDIR": str(home),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sorted(os.listdir(tmp_path)) == before
    left = [path for path in home.rglob("*") if path.is_file()]
    assert not left, left


def test_a_column_that_nothing_here_decodes_is_handed_on_as_the_file_has_it(tmp_path, monkeypatch) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    stored = {"bytes": b"RIFF", "path": None}
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": [stored] * 2}, features).data.table
    mapped = pyarrow.array([[("k", 1)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(table.append_column("m", mapped).append_column("n", [[1, 2]]), path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr(datasets.config, "PIL_AVAILABLE", False)
    (row,) = open_table(path, ["prompt"]).fetch_others([1])
    assert row == {"image": stored, "m": [("k", 1)], "n": 2}
    assert list(row) == ["image", "m", "n"]
