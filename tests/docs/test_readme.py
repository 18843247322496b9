"""README.md: its task is a reward and a config that load, its form holds, and core/README.md is made from it."""

from pathlib import Path

import yaml
from plugin_pages import blocks
from tools.index_page import PAGE, index_page

from enginehouse_rl.config.schema import Config

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_its_task_is_a_reward_and_a_config():
    (reward,), (config,) = blocks(README, "python"), blocks(README, "yaml")
    module: dict = {}
    exec(reward, module)
    assert [module["score"](response, "42") for response in ("It is 42", "142", "")] == [1.0, 0.0, 0.0]
    assert Config.model_validate(yaml.safe_load(config)).reward.function == "my_rewards:score"


def test_it_is_short_and_no_line_of_its_blocks_is_cut_off():
    assert len(README.splitlines()) <= 120
    shown = [line for language in ("bash [^\n]*", "python", "yaml", "text") for block in blocks(README, language)
             for line in block.splitlines()]  # fmt: skip
    assert len(shown) > 20
    assert [line for line in shown if len(line) > 80] == []


def test_the_page_of_the_package_index_is_made_from_it():
    assert PAGE.read_text(encoding="utf-8") == index_page(README), "make readme"


def test_the_page_of_the_package_index_has_no_clone_no_picture_and_no_link_into_it():
    picture = "<picture>\n<img>\n</picture>"
    readme = f"# A\n\n[it](b.md), [out](https://c)\n\n{picture}\n\n## Clone\n\nIn a clone:\n\n- a\n\n## B\n\nb\n"
    assert index_page(readme) == "# A\n\nit, [out](https://c)\n\n## B\n\nb\n"
