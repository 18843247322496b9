"""What a step is trained on, computed by hand: each column of its batch, where all roles have a part in it.

Tokens are drawn at another temperature than 1, a KL term is taken off the reward, a critic and a reward model score,
the ratio divides by the actor's own logprobs, an episode fails, and one ends by a word of its environment's. What is
the same on both sides of a comparison of runs, and wrong, shows here.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import Distributions, distributions  # noqa: F401 - a fixture
from inline_runs import run_inline
from plugin_pages import PagePackage

from enginehouse.data import Ragged
from enginehouse.data.columns import BY_NAME
from enginehouse.engines.environment import Scored
from enginehouse.engines.transcript import Transcript
from enginehouse_rl.loop.trainer import Trainer
from enginehouse_rl.losses.kl import adapt_coefficient
from enginehouse_testing.models import tiny_model

TEMPERATURE, GAMMA, LAMBDA, MODEL_WEIGHT = 0.7, 0.95, 0.9, 0.5
COEFFICIENT, TARGET = 0.3, 0.01
MISMATCH = 0.25
"""By so much the rollout's logprobs are wrong, so that they are not taken for the actor's."""
MOVES = {0: (0.5, -1.0), 1: (0.25, 0.75)}
"""The reward of each move of an episode, by its number."""
SCORES = {0: 0.125, 1: -0.5}
ENDS = {("3+4=", 0): "limit", ("3+4=", 1): "stop", ("1-2=", 0): "length"}
"""Why an episode ends. The one that is not here fails."""


class Game:
    """Two moves, each rewarded once the game has answered it."""

    rewards_moves = True

    async def run(self, task, policy, context):
        async def play(number, policy):
            said = Transcript(task.prompt_ids)
            for reward in MOVES[number]:
                said.add_drawn(await policy.generate(said.tokens))
                said.add_given([5, 6, 7])
                if self.rewards_moves:
                    said.add_reward(reward)
            if (task.prompt, number) not in ENDS:
                raise RuntimeError("the game broke")
            return said.episode(Scored(SCORES[number]), task.prompt, finish=ENDS[task.prompt, number])

        return await context.each(play)


class PlainGame(Game):
    """Its moves have no rewards."""

    rewards_moves = False


class Looking(Trainer):
    """Keeps what each step is trained on."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.trained_on: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []

        self.take, self.supply.take = self.supply.take, self.taken

    def taken(self, step, version):
        samples = self.take(step, version)
        self.samples.append({name: samples[name] for name in ("prompt", "finish_reason")})
        drawn = samples["rollout_logprobs"]
        return samples.with_columns(rollout_logprobs=drawn.like(drawn.values - MISMATCH))

    def updating(self, step, updates):
        here = updates["actor" if "actor" in updates else "critic"].batch.fetch()
        self.trained_on.append({name: here[name] for name in here.columns} | {"roles": set(updates)})
        return super().updating(step, updates)


def classifier(path: Path, seed: int) -> str:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model(seed=seed), num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Looking:
    """A run of three steps, the first of which trains the critic alone, at its end."""
    here = tmp_path_factory.mktemp("by-hand")
    rows = [{"prompt": prompt} for prompt, number in ENDS if number == 0]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = {"engine": {"options": {"lr": 1e-3}}}
    config = {
        "model": {"path": tiny_model()},
        "data": {"train": str(here / "train.jsonl"), "max_prompt_tokens": 8},
        "environment": {"name": f"{__name__}:Game"},
        "actor": engine,
        "critic": {"path": classifier(here / "critic", 2), "warmup_steps": 1},
        "reference": {"path": tiny_model(seed=1)},
        "reward_model": {"path": classifier(here / "judge", 3), "weight": MODEL_WEIGHT},
        "rollout": {
            "samples_per_prompt": 2,
            "on_failure": "mask",
            "sampling": {"max_tokens": 4, "temperature": TEMPERATURE},
        },
        "algorithm": {
            "advantage": {"name": "gae", "arguments": {"gamma": GAMMA, "lam": LAMBDA}},
            "kl": {"coefficient": COEFFICIENT, "estimator": "k1", "place": "reward", "target": TARGET},
            "old_logprobs": "actor",
            "mask_truncated": True,
        },
        "train": {"steps": 3, "prompts_per_step": 2, "samples_every": 0},
    }
    return run_inline(config, here, Looking)


def rows(column: Any) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


@torch.no_grad()
def logprobs(path: str, tokens: list[int], mask: list[bool]) -> list[float]:
    from transformers import AutoModelForCausalLM

    logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0, :-1]
    of_token = (logits / TEMPERATURE).log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()
    return [logprob if counts else 0.0 for logprob, counts in zip([0.0, *of_token], mask, strict=True)]


@torch.no_grad()
def states(path: str, tokens: list[int]) -> list[float]:
    """What a model with a value head makes of a row up to each of its tokens."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    return model.score(model.model(torch.tensor([tokens])).last_hidden_state)[0, :, 0].tolist()


def by_hand(looking: Looking) -> dict[str, list[Any]]:
    """The columns that the roles and the controller add to the tokens of the first step."""
    config = looking.config
    tokens, masks = (rows(looking.trained_on[0][name]) for name in ("input_ids", "loss_mask"))
    prompts, finish = (looking.samples[0][name] for name in ("prompt", "finish_reason"))
    made: dict[str, list[Any]] = {name: [] for name in ("old_logprobs", "reference_logprobs", "values", "rewards")}
    made |= {name: [] for name in ("reward", "token_rewards", "advantages", "returns")}
    for row, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
        number, failed = row % 2, finish[row] == "failed"
        assert failed == ((prompts[row], number) not in ENDS)
        old = logprobs(config.model.path, ids, mask)
        reference = logprobs(config.reference.path, ids, mask)
        before = [0.0, *states(config.critic.path, ids)[:-1]]
        values = [value if counts else 0.0 for value, counts in zip(before, mask, strict=True)]
        score = 0.0 if failed else states(config.reward_model.path, ids)[-1]
        reward = 0.0 if failed else SCORES[number] + MODEL_WEIGHT * score
        rewards = [-COEFFICIENT * (own - theirs) for own, theirs in zip(old, reference, strict=True)]
        chosen = [place for place, counts in enumerate(mask) if counts]
        moves = [place for place in chosen if not mask[place + 1]]  # the last token of each
        for place, of_move in zip(moves, () if failed else MOVES[number], strict=True):
            rewards[place] += of_move
        advantages, following, credit = [0.0] * len(ids), 0.0, 0.0
        for place in reversed(chosen):
            earned = rewards[place] + (reward if place == chosen[-1] else 0.0)
            credit = earned + GAMMA * following - values[place] + GAMMA * LAMBDA * credit
            advantages[place], following = credit, values[place]
        returns = [credit + value for credit, value in zip(advantages, values, strict=True)]
        found = (old, reference, values, [score], reward, rewards, advantages, returns)
        for name, column in zip(made, found, strict=True):
            made[name].append(column)
    counted = [
        credit for row, mask in zip(made["advantages"], masks, strict=True) for credit, yes in zip(row, mask) if yes
    ]
    deviation, mean = torch.std_mean(torch.tensor(counted, dtype=torch.float64))
    made["advantages"] = [
        [(credit - float(mean)) / float(deviation) if yes else 0.0 for credit, yes in zip(row, mask, strict=True)]
        for row, mask in zip(made["advantages"], masks, strict=True)
    ]
    return made


def test_each_column_of_a_step_is_what_it_is_by_hand(looking: Looking):
    batch = looking.trained_on[0]
    ends = list(looking.samples[0]["finish_reason"])
    assert sorted(ends) == ["failed", "length", "limit", "stop"]
    made = by_hand(looking)
    for name, wanted in made.items():
        found = batch[name].tolist() if name == "reward" else rows(batch[name])
        for row, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert ours == pytest.approx(theirs, abs=2e-4), (name, row, ends[row])
    assert batch["trained"].tolist() == [end != "length" for end in ends]
    drawn = [[one - MISMATCH for one in row] for row in made["old_logprobs"]]
    masks = rows(batch["loss_mask"])
    for ours, theirs, mask in zip(rows(batch["rollout_logprobs"]), drawn, masks, strict=True):
        chosen = [(one, other) for one, other, counts in zip(ours, theirs, mask, strict=True) if counts]
        assert [one for one, _ in chosen] == pytest.approx([other for _, other in chosen], abs=2e-4)
    assert [sum(mask) for mask in masks] == batch["response_tokens"].tolist()
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["episode"].tolist() == [0, 1, 2, 3]
    versions = [-1 if end == "failed" else 1 for end in ends]
    assert batch["first_version"].tolist() == batch["weight_version"].tolist() == versions
    others = {"input_ids", "loss_mask", "rollout_logprobs", "trained", "response_tokens", "group", "episode"}
    assert set(batch) - {"roles"} == made.keys() | others | {"first_version", "weight_version"}


def test_the_actor_is_trained_once_the_critic_has_warmed_up(looking: Looking):
    assert [one["roles"] for one in looking.trained_on] == [{"critic"}, {"actor", "critic"}, {"actor", "critic"}]


def test_the_coefficient_of_the_kl_term_is_adapted_step_by_step(looking: Looking):
    metrics = [json.loads(line) for line in (looking.run_directory.path / "metrics.jsonl").read_text().splitlines()]
    coefficient = COEFFICIENT
    for line, batch in zip(metrics, looking.trained_on, strict=True):
        assert line["kl_coefficient"] == pytest.approx(coefficient)
        mask = batch["loss_mask"].values
        apart = (batch["old_logprobs"].values - batch["reference_logprobs"].values)[mask]
        assert line["kl"] == pytest.approx(apart.mean().item(), abs=1e-5)
        coefficient = adapt_coefficient(coefficient, line["kl"], TARGET)
    assert coefficient > 1.05 * COEFFICIENT


def test_each_column_of_a_step_is_what_the_page_of_columns_says(looking: Looking):
    for name, values in looking.trained_on[0].items():
        if name != "roles":
            held, each = (values.values, "token") if isinstance(values, Ragged) else (values, "row")
            assert (each, str(held.dtype)) == (BY_NAME[name].each, f"torch.{BY_NAME[name].dtype}"), name


def test_the_page_of_the_run_directory_lists_its_files_and_the_keys_of_its_record(looking: Looking):
    directory = looking.run_directory.path
    page = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    files, record = page.split("## run.json")
    listed = set(re.findall(r"`([\w.]+)/?`", " ".join(re.findall(r"^\|([^|]+)\|", files, re.M))))
    assert {entry.name for entry in directory.iterdir()} <= listed
    assert all((directory / name).exists() for name in re.findall(r"^\| `([\w.]+)` \| always", files, re.M))
    assert looking.run_directory.record.content.keys() <= set(re.findall(r"`(\w+)`", record))


def test_a_package_adds_a_teacher_a_reward_model_and_a_column_by_a_file_and_a_line_each(
    distributions: Distributions,  # noqa: F811 - it is the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """That of docs/plugins/stage.md."""
    monkeypatch.setattr("enginehouse.plugin.process._current", None)  # what its config enables stays no longer than it
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("3+4=", "1-2=")))
    with PagePackage("stage").installed(distributions.site) as package:
        config = package.config()
        config["stages"]["my_teacher"]["path"] = teacher = tiny_model(seed=1)
        config["stages"]["my_judge"]["path"] = judge = classifier(tmp_path / "judge", 3)
        config |= {
            "model": {"path": tiny_model()},
            "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 8},
            "environment": {"name": f"{__name__}:PlainGame"},
            "rollout": {
                "samples_per_prompt": 2,
                "on_failure": "mask",
                "sampling": {"max_tokens": 4, "temperature": TEMPERATURE},
            },
            "plugins": {"enabled": ["torch", "my_stages"]},
            "train": {"steps": 1, "prompts_per_step": 2, "samples_every": 0},
        }
        run = run_inline(config, tmp_path, Looking)
    batch, (metrics,) = run.trained_on[0], map(json.loads, (run.run_directory.path / "metrics.jsonl").open())
    tokens, masks = rows(batch["input_ids"]), rows(batch["loss_mask"])
    finish = run.samples[0]["finish_reason"]
    of_teacher = [logprobs(teacher, ids, mask) for ids, mask in zip(tokens, masks, strict=True)]
    rewards = [
        0.0 if finish[row] == "failed" else SCORES[row % 2] + 0.5 * states(judge, ids)[-1]
        for row, ids in enumerate(tokens)
    ]
    for ours, theirs in zip(rows(batch["my_teacher_logprobs"]), of_teacher, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)
    assert batch["reward"].tolist() == pytest.approx(rewards, abs=2e-4)
    assert batch["brevity"].tolist() == pytest.approx([1 / (1 + sum(mask)) for mask in masks])
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 4, abs=2e-4)
    assert metrics["time/stages/my_teacher"] > 0
    credited = [
        [(own - drawn + reward / (1 + sum(mask))) if yes else 0.0 for own, drawn, yes in zip(*row, mask, strict=True)]
        for *row, mask, reward in zip(of_teacher, rows(batch["rollout_logprobs"]), masks, rewards, strict=True)
    ]
    for ours, theirs in zip(rows(batch["advantages"]), credited, strict=True):
        assert ours == pytest.approx(theirs, abs=4e-4)
