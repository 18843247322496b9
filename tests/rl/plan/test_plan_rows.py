"""Planning reads the data files as the run does: no bad row is left to end a run in its midst."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from character_tokenizer import TEMPLATE
from click.testing import CliRunner
from projects import Project, refusal

from enginehouse.cli.main import main
from enginehouse.engines.model import positions, served_positions
from enginehouse.errors import UserError
from enginehouse.plugin import load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SFTConfig
from enginehouse_rl.plan import row_lengths, rows
from enginehouse_rl.plan.plan import Plan, SFTPlan, plan_sft

GOOD = {"prompt": "1+1=", "answer": "2"}
CHAT = [{"role": "user", "content": "hi"}]


BAD_ROWS = {
    "a broken line": ('{"prompt": "1+', "row 10 (line 10): not valid JSON"),
    "half a character": ('{"prompt": "\\ud800", "answer": "2"}', "row 10 (line 10): column 'prompt' contains half"),
    "a key twice": ('{"prompt": "a", "answer": "", "answer": ""}', "row 10 (line 10): the key 'answer' occurs twice"),
    "a value nested deeply": ('{"prompt": "a", "answer": ' + "[" * 90_000 + "]" * 90_000 + "}", "nested more than 64"),
    "no prompt": ('{"answer": "2"}', "row 10 (line 10) has no column 'prompt'"),
    "no answer": ('{"prompt": "1+1="}', "requires the argument 'answer', not among prompt, messages, response, "
                  "response_tokens, finish_reason, the columns of train.jsonl, row 10 (line 10)"),
    "a column that the run gives": ('{"prompt": "1+1=", "answer": "2", "response": ""}',
                                    "train.jsonl, row 10 (line 10): a reward gets 'response' from the run"),
    "a prompt of another type": ('{"prompt": 7, "answer": "2"}', "row 10 (line 10): the prompt is 7 (a number)"),
    "a turn of the assistant at the end": (
        '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "2"}', "row 10 (line 10): the prompt ends with"),
    "a prompt longer than data.max_prompt_tokens": (
        '{"prompt": "11111111111111111", "answer": "2"}', "row 10 (line 10): the prompt has 17 tokens, more than"),
}  # fmt: skip


@pytest.mark.fault(
    area="data",
    what=(
        "a row cannot be used: broken JSON, half a character, a duplicate key, deep nesting, a column that is "
        "missing or has a reserved name, a prompt of a wrong type, too long, or ending with the assistant's turn"
    ),
    happens="`plan`, `train` and `sft` name file, line and remedy. They list the first few such rows and count all",
    exit_code="2",
    kept="nothing is started or written",
    noticed="before any worker starts",
)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_refused_by_plan_and_train_alike(project: Project, bad: str):
    line, said = BAD_ROWS[bad]
    project.write_tokenizer(chat_template=TEMPLATE)
    path = project.write_rows("train.jsonl", [GOOD] * 9)
    path.write_text(f"{path.read_text()}{line}\n" + path.read_text())
    project.save()
    for command in ("plan", "train"):
        done = CliRunner().invoke(main, [command, "grpo.yaml"])
        assert done.exit_code == 2, done.output
        assert "train.jsonl" in done.output
        assert said in done.output
    assert not (project.root / "runs").exists()


def test_a_run_looks_at_every_row_where_the_plan_had_no_time(project: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "READ_SECONDS", 0.0)
    project.write_tokenizer()
    project.write_rows("train.jsonl", [{**GOOD, "answer": str(n)} for n in range(2000)] + [{"prompt": "1+1="}])
    project.save()
    done = CliRunner().invoke(main, ["plan", "grpo.yaml"])
    assert done.exit_code == 0, done.output
    assert "1,024 of 2,001 rows of train.jsonl were read; the run reads all" in done.output
    assert "2,001 prompts in train.jsonl" in done.output
    done = CliRunner().invoke(main, ["train", "grpo.yaml"])
    assert done.exit_code == 2, done.output
    assert "requires the argument 'answer'" in done.output
    assert "train.jsonl, row 2001 (line 2001)" in done.output
    assert not (project.root / "runs").exists()


def test_the_longest_texts_are_looked_at_first(make, project, monkeypatch):
    monkeypatch.setattr(row_lengths, "LENGTHS_SECONDS", 0.0)
    project.write_tokenizer()
    project.write_rows("train.jsonl", [{**GOOD, "prompt": f"{n:09}"} for n in range(2000)])
    said = "\n".join(make().notes)
    assert "lengths of 512 of 2,000 prompts of train.jsonl were checked, beginning with the longest texts" in said
    project.write_rows(
        "train.jsonl", [{**GOOD, "prompt": f"{n:09}"} for n in range(2000)] + [{**GOOD, "prompt": "1" * 17}]
    )
    assert "row 2001 (line 2001): the prompt has 17 tokens, more than data.max_prompt_tokens=16" in refusal(make)


def test_a_prompt_has_to_leave_room_for_a_response(make: Callable[..., Plan], project: Project):
    project.write_tokenizer()
    longer = ["data.max_prompt_tokens=200"]
    project.write_rows("train.jsonl", [GOOD] * 9 + [{**GOOD, "prompt": "1" * 120}])
    make(*longer)
    project.write_rows("train.jsonl", [GOOD] * 9 + [{**GOOD, "prompt": "1" * 121}])
    said = refusal(make, *longer)
    assert "row 10 (line 10): the prompt has 121 tokens, more than the 120 that leave room for 8 new tokens" in said
    assert "within the model's positions (max_position_embeddings), 128" in said
    assert "(9 rows" not in said
    make(*longer, "rollout.sampling.max_tokens=7")
    assert make(*longer, "data.overlong_prompts=drop").prompt_limit.tokens == 120


def test_room_for_validation_answers_is_that_of_the_engine_that_gives_them(make: Callable[..., Plan], project: Project):
    long = ["data.validation=train.jsonl", "data.max_prompt_tokens=40", "rollout.engine.options.max_model_tokens=50"]
    own = ["evaluation.engine.backend=torch", "evaluation.engine.options.max_model_tokens=100"]
    assert make(*long, *own, "evaluation.sampling.max_tokens=60").prompt_limit.tokens == 40
    assert make(*long, *own, "evaluation.sampling.max_tokens=61").prompt_limit.tokens == 39
    said = refusal(make, *long, "evaluation.sampling.max_tokens=60")  # the rollout answers
    assert "evaluation.sampling.max_tokens is 60, but a prompt" in said
    assert "at most 50 tokens together: rollout.engine.options.max_model_tokens" in said
    said = refusal(make, *long, *own, "evaluation.engine.options.max_model_tokens=8")
    assert "rollout.sampling.max_tokens is 8, but a prompt" in said
    assert "at most 8 tokens together: evaluation.engine.options.max_model_tokens" in said


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ({"max_position_embeddings": 32}, 32),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({"max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 2}}, 64),
        (  # the factor is in it already
            {
                "max_position_embeddings": 128,
                "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
            },
            128,
        ),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128),
        ({"rope_scaling": None}, None),
    ],
)
def test_positions_of_a_model(model: dict[str, Any], number: int | None):
    assert positions(model) == number


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ({"max_position_embeddings": 128, "rope_parameters": LONGROPE}, 32),
        ({"max_position_embeddings": 128, "original_max_position_embeddings": 48, "rope_scaling": {"type": "su"}}, 48),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 32),
        ({"text_config": {"max_position_embeddings": 64, "rope_parameters": {"full_attention": LONGROPE}}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128),
        ({}, None),
    ],
)
def test_positions_that_all_engines_serve_alike(model: dict[str, Any], number: int | None):
    assert served_positions(model) == number


def test_rows_whose_rope_engines_choose_in_different_ways_are_refused(make: Callable[..., Plan], project: Project):
    project.write_tokenizer()
    file = project.root / "model/config.json"
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_scaling": rope}))
    project.write_rows("train.jsonl", [{**GOOD, "prompt": "1" * 125}] * 9)
    said = refusal(make, "data.max_prompt_tokens=200")
    assert "more than the 120 that leave room for 8 new tokens" in said
    assert "the model's RoPE" in said
    said = refusal(make, "rollout.engine.options.max_model_tokens=256")
    assert "rollout.engine.options.max_model_tokens must be at most 128, not 256" in said


def test_prompts_that_are_left_out_are_counted(make: Callable[..., Plan], project: Project):
    project.write_tokenizer()
    project.write_rows("train.jsonl", [{**GOOD, "prompt": "1" * (12 + n % 5)} for n in range(40)])
    drop = ["data.max_prompt_tokens=14", "data.overlong_prompts=drop"]
    assert "24 prompts in train.jsonl, each used 3.3 times; 16 more are too long and left out" in make(*drop).render()
    assert "holds only 24 prompts of at most 14 tokens" in refusal(make, *drop, "train.prompts_per_step=25")
    assert "leaves none of 40 prompts" in refusal(make, "data.max_prompt_tokens=3", drop[1])


def test_rows_that_were_not_read_may_be_short(make, project, monkeypatch):
    monkeypatch.setattr(rows, "READ_SECONDS", 0.0)
    project.write_tokenizer()
    project.write_rows("train.jsonl", [{**GOOD, "prompt": "1" * 20}] * 1024 + [GOOD] * 100)
    assert "at least 1,024 more are too long and left out" in make("data.overlong_prompts=drop").render()


def test_validation_files_are_looked_at_too(make: Callable[..., Plan], project: Project):
    project.write_rows("held_out.jsonl", [GOOD, {"prompt": "1+1="}])
    said = refusal(make, "data.validation=held_out.jsonl")
    assert "requires the argument 'answer'" in said
    assert "held_out.jsonl, row 2 (line 2)" in said


def test_rows_may_differ_where_the_reward_takes_any(make: Callable[..., Plan], project: Project):
    project.write_rows("train.jsonl", [GOOD, {**GOOD, "more": 1}] * 10)
    make()
    (project.root / "strict.py").write_text("def right(answer, more): ...\n")
    assert "requires the argument 'more', not among" in refusal(make, "reward.function=strict:right")
    project.write_rows("train.jsonl", [{**GOOD, "more": 1}, GOOD] * 10)
    assert "train.jsonl, row 2 (line 2) and 9 more rows" in refusal(make, "reward.function=strict:right")


@pytest.mark.parametrize("prompt", ["hi", CHAT])
def test_messages_are_rendered_as_the_run_renders_them(make: Callable[..., Plan], project: Project, prompt: Any):
    project.write_rows("train.jsonl", [{**GOOD, "prompt": prompt}] * 9)
    template = [] if isinstance(prompt, list) else ["data.chat_template=true"]
    project.write_tokenizer(chat_template=TEMPLATE)
    assert "the prompt has 18 tokens, more than data.max_prompt_tokens=16" in refusal(make, *template)
    make(*template, "data.max_prompt_tokens=18")
    if isinstance(prompt, list):
        assert "but data.chat_template is false" in refusal(make, "data.chat_template=false")
    (project.root / "model/chat_template.jinja").write_text("{{ raise_exception('not so') }}")
    assert "9 rows of the data cannot be used" in (said := refusal(make, *template))
    assert "row 1 (line 1): the chat template rejects the messages: not so" in said


def test_several_files_are_planned_and_their_order_kept(make: Callable[..., Plan], project: Project):
    project.write_rows("more.jsonl", [{**GOOD, "prompt": f"{n}+2="} for n in range(30)])
    assert "70 prompts in train.jsonl, more.jsonl, each" in make("data.train=[train.jsonl, more.jsonl]").render()
    assert "no data file mroe.jsonl" in refusal(make, "data.train=[train.jsonl, mroe.jsonl]")
    for wrong in ("[]", "7", "[train.jsonl, 7]"):
        assert "data.train (in the override 'data.train=" in (said := refusal(make, f"data.train={wrong}"))
        assert "expected a path or a list of paths" in said


def test_prompts_that_repeat_and_validation_on_what_is_trained_are_noted(make: Callable[..., Plan], project: Project):
    resumable = "train.checkpoint_every=5"  # else that is noted
    assert not make(resumable).notes
    project.write_rows("same.jsonl", [GOOD] * 2000)
    notes = make(resumable, "data.train=same.jsonl", "data.validation=train.jsonl").notes
    assert "only 1 of the 2,000 prompts of same.jsonl differ" in notes[0]
    assert "1 of 40 validation prompts of train.jsonl are in same.jsonl too" in notes[1]
    (note,) = make(resumable, "data.validation=train.jsonl").notes
    assert note.startswith("all validation prompts of train.jsonl are in train.jsonl too")


def test_chats_that_repeat_are_noted_and_those_that_differ_in_a_word_are_not(make, project):
    project.write_tokenizer(chat_template=TEMPLATE)
    other = [{"role": "user", "content": "ho"}]
    options = ["train.checkpoint_every=5", "data.max_prompt_tokens=18", "train.prompts_per_step=2"]
    project.write_rows("train.jsonl", [{**GOOD, "prompt": CHAT}, {**GOOD, "prompt": other}])
    assert not make(*options).notes
    project.write_rows("train.jsonl", [{**GOOD, "prompt": CHAT}, {**GOOD, "prompt": CHAT}, {**GOOD, "prompt": other}])
    assert "only 2 of the 3 prompts of train.jsonl differ" in make(*options).notes[0]


def test_demonstrations_are_looked_at_too(make_sft: Callable[..., SFTPlan], project: Project):
    project.write_tokenizer()
    good = {"prompt": "1+1=", "response": "2"}
    project.write_rows("more.jsonl", [good])
    assert "41 demonstrations in" in make_sft("data.train=[demonstrations.jsonl, more.jsonl]").render()
    project.write_rows("more.jsonl", [good, {**good, "response": 2}])
    assert "row 2 (line 2): the response in column 'response' is a number" in refusal(make_sft, "data.train=more.jsonl")
    project.write_rows("more.jsonl", [good, {**good, "response": "1" * 28}])
    said = refusal(make_sft, "data.train=more.jsonl")
    assert "row 2 (line 2): prompt and response together has 33 tokens, more than data.max_tokens=32" in said
    project.write_rows("more.jsonl", [good, {**good, "response": "1" * 128}])
    said = refusal(make_sft, "data.train=more.jsonl", "data.max_tokens=500")
    assert "has 133 tokens, more than the model's positions (max_position_embeddings), 128" in said


WEIGHTED = "data.train={train.jsonl: 3, more.jsonl: 1}"


def test_a_plan_says_the_share_and_the_epochs_of_each_file(make: Callable[..., Plan], project: Project):
    project.write_rows("more.jsonl", [{**GOOD, "level": n} for n in range(5)])
    project.write_rows("train.jsonl", [{**GOOD, "prompt": f"{n}+1=", "level": n} for n in range(40)])
    said = make(WEIGHTED, "data.order_by=level").render()
    assert (
        "0.75 of train.jsonl (40 prompts, 1.5 epochs), 0.25 of more.jsonl (5 prompts, 4 epochs); by level, the lowest"
        in said
    )


ORDERS = {
    "no such column": ({}, "train.jsonl has no column 'level'", "data.order_by=level"),
    "a column of one file alone": ({"level": 1}, "more.jsonl, row 2 (line 2) has no column 'level'", WEIGHTED),
    "text": (
        {"level": "hard"},
        "train.jsonl, row 4 (line 4): 'level' is 'hard' (a string)",
        "data.order_by=level",
    ),
    "true": ({"level": True}, "train.jsonl, row 4 (line 4): 'level' is True (a boolean)", "data.order_by=level"),
    "no number": ({"level": float("nan")}, "row 4 (line 4): 'level' is nan (a number)", "data.order_by=level"),
}


@pytest.mark.parametrize("wrong", ORDERS)
def test_a_column_that_cannot_order_rows_is_refused_by_name_row_and_file(project: Project, wrong: str):
    column, said, override = ORDERS[wrong]
    project.write_tokenizer()
    there = {"level": 0} if column else {}
    project.write_rows("train.jsonl", [GOOD | there] * 3 + [GOOD | column] + [GOOD | there] * 40)
    project.write_rows("more.jsonl", [GOOD | {"level": 1}, GOOD, *[GOOD | {"level": 1}] * 5])
    project.save()
    for command in ("plan", "train"):
        done = CliRunner().invoke(main, [command, "grpo.yaml", override, "data.order_by=level"])
        assert done.exit_code == 2, done.output
        assert said in done.output


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("{train.jsonl: 0}", "expected a number above 0 as the weight of train.jsonl, not 0"),
        ("{train.jsonl: -1}", "the weight of train.jsonl, not -1"),
        ("{train.jsonl: .inf}", "the weight of train.jsonl, not inf"),
        ("{train.jsonl: much}", "the weight of train.jsonl, not 'much'"),
        ("{train.jsonl: true}", "the weight of train.jsonl, not True"),
        ("{a: train.jsonl}", "expected a number above 0 as the weight of a, not 'train.jsonl'"),
        ("{}", "expected a path or a list of paths"),
        ("{trian.jsonl: 1}", "there is no data file trian.jsonl; the nearest in"),
        (
            "{train.jsonl: 1, few.jsonl: 3}",
            "train.prompts_per_step is 8, and 0.75 of them come from few.jsonl, but that file has only 5 prompts",
        ),
        ("{train.jsonl: 1, long.jsonl: 1}", "long.jsonl has a weight in data.train, but none of its rows is left"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(project: Project, weights: str, said: str):
    project.write_tokenizer()
    project.write_rows("few.jsonl", [GOOD] * 5)
    project.write_rows("long.jsonl", [{**GOOD, "prompt": "1" * 40}] * 20)
    project.save()
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", f"data.train={weights}", "data.overlong_prompts=drop"])
    assert done.exit_code == 2, done.output
    assert said in done.output


HELD_OUT = "data.validation=train.jsonl"
DRAWN = ("evaluation.samples_per_prompt=3", "evaluation.sampling.temperature=1")
BEST = {
    "no file": ("validation/reward", "there is no file to validate on (data.validation)", ()),
    "no validation's": (
        "reward",
        "no validation measures 'reward'. Available: validation/reward",
        (HELD_OUT,),
    ),
    "a name mistyped": ("validation/rewrd", "Did you mean 'validation/reward'", (HELD_OUT,)),
    "another k": ("validation/pass@3", "Did you mean 'validation/pass@", (HELD_OUT, "evaluation.samples_per_prompt=4")),
    "what is best when it is least": ("validation/truncated", "Available: validation/reward", (HELD_OUT,)),
    "a file without its name": (
        "validation/reward",
        "Did you mean 'validation/b/reward'?",
        ("data.validation={b: train.jsonl}",),
    ),
}


@pytest.mark.parametrize("wrong", BEST)
def test_a_metric_that_no_validation_measures_is_refused(make: Callable[..., Plan], wrong: str):
    metric, said, overrides = BEST[wrong]
    message = refusal(make, f"train.save_best={metric}", *overrides)
    assert "train.save_best" in message
    assert said in message


@pytest.mark.parametrize(
    ("metric", "overrides"),
    [
        ("validation/reward", (HELD_OUT,)),
        ("validation/majority@3", (HELD_OUT, *DRAWN)),
        ("validation/pass@2", (HELD_OUT, *DRAWN)),
        ("validation/b/format", ("data.validation={b: train.jsonl}",)),  # maybe a figure of the reward
        ("validation/2/reward", (HELD_OUT, "evaluation.by=answer")),
    ],
)
def test_what_a_validation_measures_can_choose_the_best_model(make, metric, overrides):
    notes = make(f"train.save_best={metric}", *overrides).notes
    assert "train.save_best is set, but train.validate_every is 0: the model of the last step is the best" in notes
    assert not any(
        "save_best" in note for note in make(f"train.save_best={metric}", "train.validate_every=2", *overrides).notes
    )


@pytest.mark.parametrize("override", ["data.system=be brief", "data.tools=tools"])
def test_a_plan_refuses_what_no_chat_template_would_write(project: Project, override: str):
    project.write_tokenizer(chat_template=TEMPLATE)
    project.write_rows("train.jsonl", [{**GOOD, "tools": [{"name": "look"}]}] * 40)
    project.save()
    said = "train.jsonl, row 1 (line 1) and 39 more rows: the prompt is a string, to which no chat template is applied"
    for command in ("plan", "train"):
        done = CliRunner().invoke(main, [command, "grpo.yaml", override])
        assert done.exit_code == 2, done.output
        assert said in done.output
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", "data.system=''"])
    assert done.exit_code == 2, done.output
    assert "data.system" in done.output


def test_a_system_message_counts_for_the_length_of_a_prompt(make: Callable[..., Plan], project: Project):
    project.write_tokenizer(chat_template=TEMPLATE)
    long = ("data.chat_template=true", "data.max_prompt_tokens=24")
    make(*long)
    assert "the prompt has 36 tokens, more than data.max_prompt_tokens=24" in refusal(
        make, *long, "data.system=be brief"
    )


def test_a_supervised_plan_says_shares_too(project: Project):
    project.write_rows("more.jsonl", [{"prompt": "1=", "response": "1"}] * 5)
    path = project.save_sft()
    weights = ["data.train={demonstrations.jsonl: 3, more.jsonl: 1}"]
    said = plan_sft(load_config(path, weights, SFTConfig), load_plugins(enabled=("torch",)), path).render()
    assert "0.75 of demonstrations.jsonl (40 demonstrations, 0.75 epochs), 0.25 of more.jsonl (5 demonst" in said


CHATML = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}" + TEMPLATE.partition("endfor %}")[2]
)
SAID = [{"role": "assistant", "content": "yes"}]


def plan_of_demonstrations(project: Project, *overrides: str, **how: Any) -> Any:
    path = project.save_sft()
    return plan_sft(load_config(path, overrides, SFTConfig), load_plugins(enabled=("torch",)), path, **how)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_token_that_the_model_has_no_embedding_for_is_refused_by_row(make, project: Project, command: str):
    project.write_tokenizer()
    config = project.root / "model/config.json"
    config.write_text(config.read_text().replace('"vocab_size": 64', '"vocab_size": 40'))
    project.write_rows("train.jsonl", [{"prompt": "1", "answer": "2"}] * 39 + [{"prompt": "a=", "answer": ""}])
    rows = [{"prompt": "1", "response": "2"}] * 39 + [{"prompt": "1", "response": "="}]
    project.write_rows("demonstrations.jsonl", rows)
    with pytest.raises(UserError, match=r"\(line 40\): the model has no embedding for a token, such as 40, '=': it"):
        make() if command == "train" else plan_of_demonstrations(project)


def test_a_plan_shows_the_first_row_with_what_is_learned(project: Project):
    project.write_tokenizer(chat_template=CHATML)
    turns = [*SAID, {"role": "user", "content": "so"}, *SAID]
    rows = [{"prompt": CHAT, "response": turns}] + [{"prompt": CHAT, "response": "no"}] * 39
    project.write_rows("demonstrations.jsonl", rows)
    facts = dict(plan_of_demonstrations(project, "data.max_tokens=99").facts)
    assert facts["lengths"] == (
        "of 40 demonstrations of demonstrations.jsonl: median 21 tokens, 95 % up to 21, longest 44"
    )
    seen = facts["first row"]
    said = seen.replace("|", "")
    assert "row 1 (line 1)" in seen
    assert said.endswith("the 8 in [[ ]] are learned: user:hi</s>assistant:[[yes</s>]]user:so</s>assistant:[[yes</s>]]")


def test_what_is_shown_is_of_each_file_and_of_rows_that_a_run_need_not_look_at(make, project: Project, monkeypatch):
    monkeypatch.setattr(row_lengths, "_SAMPLED", 3)
    project.write_tokenizer()
    project.write_rows("one.jsonl", [{"prompt": "1", "answer": "2"}] * 7)
    project.write_rows("two.jsonl", [{"prompt": "22=", "answer": "2"}] * 2)
    facts = make("data.train=[one.jsonl, two.jsonl]", starts=False).facts
    assert [text for name, text in facts if name == "first row"] == [
        "one.jsonl, row 1 (line 1), 1 tokens: 1", "two.jsonl, row 1 (line 1), 3 tokens: 2|2|=",
    ]  # fmt: skip
    assert ("lengths", "of 4 of 9 prompts of one.jsonl, two.jsonl: median 1 tokens, 95 % up to 3, longest 3") in facts
    assert not {"first row", "lengths"} & {name for name, _ in make("data.train=[one.jsonl, two.jsonl]").facts}


def test_responses_that_are_empty_are_counted(project: Project):
    empty: list[Any] = ["", [{"role": "assistant", "content": ""}]]
    rows = [{"prompt": CHAT, "response": SAID}] * 38 + [{"prompt": CHAT, "response": one} for one in empty]
    project.write_tokenizer(chat_template=CHATML)
    project.write_rows("demonstrations.jsonl", rows)
    (note,) = [note for note in plan_of_demonstrations(project, "data.max_tokens=99").notes if "empty" in note]
    assert "in 2 of the 40 rows that were read, the response is empty" in note
    assert "row 39 (line 39)" in note


def test_supervised_rows_are_given_a_system_message_and_template_arguments(project: Project):
    project.write_tokenizer(chat_template="{{ style | default('none') }} " + CHATML)
    project.write_rows("demonstrations.jsonl", [{"prompt": CHAT, "response": SAID}] * 40)
    asked = ("data.max_tokens=99", "data.system=be brief", "data.template_arguments={style: terse}")
    (seen,) = [text for name, text in plan_of_demonstrations(project, *asked).facts if name == "first row"]
    assert "terse system:be brief</s>user:hi</s>assistant:[[yes</s>]]" in seen.replace("|", "")


def test_arguments_that_the_run_gives_a_template_itself_are_refused(project: Project):
    with pytest.raises(UserError, match=r"must not contain 'tools', because the run itself sets it"):
        plan_of_demonstrations(project, "data.template_arguments={tools: []}")
