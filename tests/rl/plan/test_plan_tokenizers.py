"""Planning models beside the actor's: which tokens they read is judged by what the tokenizers map."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from projects import Project, refusal

from enginehouse.errors import UserError
from enginehouse_rl.plan.plan import Plan
from enginehouse_rl.plan.tokenizers import read_tokens

STRINGS = [f"token{number}" for number in range(24)] + ["<pad>", "<end>"]
ROLES = {
    "reference": ["algorithm.kl.coefficient=0.1"],
    "critic": ["algorithm.advantage.name=gae"],
    "reward_model": [],
    "teacher": ["algorithm.advantage.name=distillation", "algorithm.loss.name=policy_gradient"],
}


@pytest.fixture
def beside(make: Callable[..., Plan], project: Project) -> Callable[..., Plan]:
    """Plans a run with a model for a role, whose tokenizer has certain strings, beside an actor with `STRINGS`."""

    def write(name: str, strings: list[str], kind: str) -> None:
        vocabulary = [[string, 0.0] for string in strings] if kind == "Unigram" else dict(zip(strings, range(99)))
        added = [{"id": number, "content": string} for number, string in enumerate(strings) if string[0] == "<"]
        content = {"model": {"type": kind, "vocab": vocabulary}, "added_tokens": added}
        (project.root / name / "tokenizer.json").write_text(json.dumps(content))

    def plan(role: str, strings: list[str], rows: int = 31, kind: str = "BPE") -> Plan:
        project.make_model("other", vocab_size=rows)
        write("other", strings, kind)
        write("model", STRINGS, "BPE")
        return make(*ROLES[role], f"{'reference' if role == 'teacher' else role}.path=other")

    return plan


@pytest.mark.parametrize("role", ROLES)
def test_other_strings_of_the_same_number_are_refused(beside: Callable[..., Plan], role: str):
    with pytest.raises(UserError, match="must have the same tokenizer") as caught:
        beside(role, [*STRINGS[23::-1], *STRINGS[24:]])
    assert "other has 'token23' as token 0, but model.path has 'token0' as token 0; 24 of 26 tokens" in str(
        caught.value
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rows", [26, 64])
def test_an_embedding_padded_to_another_size_passes(beside: Callable[..., Plan], role: str, rows: int):
    planned = beside(role, STRINGS, rows=rows)
    assert not [note for note in planned.notes if "token" in note]
    assert planned.vocabulary == min(rows, 31), "no model is asked for a row that it lacks"


def test_two_forms_of_one_tokenizer_are_equal(beside: Callable[..., Plan]):
    beside("reference", STRINGS, kind="Unigram")


@pytest.mark.parametrize(
    ("strings", "rows", "said"),
    [
        (STRINGS, 25, "other has embeddings for 25 tokens, but model.path has a token 25"),
        ([*STRINGS[:24], "<end>", "<pad>"], 31, "has '<end>' as token 24, but model.path has '<pad>' as token 24"),
        (STRINGS[:20], 31, "has no token 20, but model.path has 'token20' as token 20; 4 of 26 tokens"),
    ],
)  # fmt: skip
def test_a_model_that_reads_some_tokens_otherwise_is_refused(beside, strings, rows, said):
    assert said in refusal(beside, "reference", strings, rows)


@pytest.mark.parametrize(("added", "said"), [(["<pad>", "<eot>"], "'<eot>' as token 25"), (["<pad>"], "no token 25")])
def test_an_added_token_by_another_name_is_noted(beside: Callable[..., Plan], added: list[str], said: str):
    (note,) = [note for note in beside("reference", [*STRINGS[:24], *added]).notes if "added tokens" in note]
    assert f"lacks 1 of the actor's added tokens (it has {said}, but model.path has '<end>'" in note


def test_a_tokenizer_in_another_form_is_read_by_transformers(tmp_path: Path):
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokens = read_tokens(str(tmp_path), trust_remote_code=False)
    assert tokens is not None
    assert {string: number for number, string in tokens.strings.items()} == vocabulary
    assert tokens.added == {2}
