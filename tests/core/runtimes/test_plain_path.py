"""A model's directory of any name is told to runtimes by a name that none of them reads otherwise."""

import os
from pathlib import Path

import pytest

from enginehouse.engines.plain_path import PlainPath


@pytest.mark.parametrize(
    "name", ["a [y] b", "50%", "a*b", "q?", "x:y", "ümläut 模型", "it's", 'a"b', "{a}", "a;b", "a\\b"]
)
def test_other_characters_are_told_by_a_link_that_goes_with_the_engine(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    told = PlainPath(str(directory))
    assert told.path.isascii()
    assert not set(told.path) & set("[]*?:%'\"{};\\")
    assert Path(told.path, "config.json").read_text() == "{}"
    told.close()
    assert not os.path.lexists(told.path)
    assert directory.is_dir()
    told.close()


def test_a_plain_path_is_told_as_it_is(tmp_path):
    told = PlainPath(str(tmp_path))
    assert told.path == str(tmp_path)
    told.close()
    assert tmp_path.is_dir()


def test_a_relative_path_leads_to_the_same_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("[m]").mkdir()
    told = PlainPath("[m]")
    assert Path(told.path).samefile(tmp_path / "[m]")
    told.close()
