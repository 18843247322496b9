"""From rows to tokens, with every kind of tokenizer.

The oracle is transformers: what a tokenizer makes of prompt and response together, and `apply_chat_template` of a whole
conversation.
"""

import json

import pytest
from row_tokenizers import CHATML, KINDS, make_tokenizer

from enginehouse.data.templates import find_begun_turn, text_ends
from enginehouse.engines.transcript import response_text
from enginehouse.errors import DataError
from enginehouse_rl.data.demonstrations import DemonstrationDataset
from enginehouse_rl.data.preference_files import PreferenceColumns
from enginehouse_rl.data.preferences import PreferenceDataset
from enginehouse_rl.data.prompts import PromptDataset
from enginehouse_rl.data.rendering import load_tokenizer

PAIRS = [("2+2=", "4"), ("Say yes or no:", " yes"), ("is it so?\n", "Yes, it is so."), ("12+30=", "42"), ("a", "\n\nb")]
ASKED = [{"role": "user", "content": "what is it?"}]
SAID = [{"role": "assistant", "content": "it is 42"}]


@pytest.fixture(params=KINDS)
def kind(request):
    return make_tokenizer(request.param)


def without_end(tokenizer, text):
    """What a tokenizer makes of a text, but for the end of sequence that it may put behind."""
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids


def up_to_its_end(tokenizer, ids):
    """Tokens of a chat without what its template writes after the end of the last turn."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return ids[: len(ids) - ids[::-1].index(end)]


def learned(row):
    return row["input_ids"][row["loss_mask"]].tolist()


def test_a_prompt_has_what_begins_a_text_once_and_nothing_that_ends_it(write, kind):
    begins = kind.decode(without_end(kind, "a")[: -len(kind("a", add_special_tokens=False)["input_ids"])])
    for text in ("2+2=", "Say yes or no:", "<|im_start|>user\nit<|im_end|>\n"):
        expected = without_end(kind, text)
        path = write("rows.jsonl", [{"prompt": text}, {"prompt": begins + text}])
        plain, rendered = PromptDataset.load(path, kind).all()["prompt_ids"]
        assert plain.tolist() == expected
        assert rendered.tolist().count(kind.bos_token_id) == expected.count(kind.bos_token_id)
        assert kind.eos_token_id not in rendered.tolist()


def test_prompt_and_response_are_one_text(write, kind):
    """Or, where one token has letters of both, what is learned is the response behind the prompt's own tokens."""
    path = write("rows.jsonl", [{"prompt": prompt, "response": response} for prompt, response in PAIRS])
    rows = DemonstrationDataset.load(path, kind)
    for number, (prompt, response) in enumerate(PAIRS):
        row = rows.rows([number]).row(0)
        ids, asked, whole = row["input_ids"].tolist(), without_end(kind, prompt), without_end(kind, prompt + response)
        assert ids[: len(asked)] == asked
        assert learned(row) == ids[len(asked) :]
        assert ids[-1] == kind.eos_token_id
        assert ids.count(kind.eos_token_id) == 1
        if whole[: len(asked)] == asked:
            assert ids[:-1] == whole
        assert kind.decode(ids, skip_special_tokens=True) == kind.decode(whole, skip_special_tokens=True)


def test_pairs_are_rendered_as_demonstrations_are(write, kind):
    path = write("rows.jsonl", [{"prompt": "2+2=", "response": "4", "chosen": "4", "rejected": "no"}])
    demonstration = DemonstrationDataset.load(path, kind).rows([0]).row(0)
    chosen = PreferenceDataset.load(path, kind, PreferenceColumns("prompt", ("chosen", "rejected"))).rows([0]).row(0)
    assert chosen["input_ids"].tolist() == demonstration["input_ids"].tolist()
    assert learned(chosen) == learned(demonstration)


def test_a_chat_is_what_transformers_makes_of_the_whole(write, kind):
    prompt = kind.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = kind.apply_chat_template([*ASKED, *SAID], return_dict=True)["input_ids"]
    path = write("rows.jsonl", [{"prompt": ASKED, "response": SAID}])
    row = DemonstrationDataset.load(path, kind).rows([0]).row(0)
    assert whole[: len(prompt)] == prompt, "else this asks nothing"
    assert row["input_ids"].tolist() == up_to_its_end(kind, whole)
    assert learned(row) == up_to_its_end(kind, whole)[len(prompt) :]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("form", ["messages", "JSON text", "parts", "parts of the template"])
def test_a_chat_is_the_same_in_whatever_form_it_comes(write, name, form):
    tokenizer = make_tokenizer("bytes")
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "it?"}]
    chat = [{"role": "user", "content": parts}] if form.startswith("parts") else ASKED
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    if form == "parts of the template":
        tokenizer = make_tokenizer.__wrapped__("bytes")
        each = "{% for p in m.content %}{{ p.text }}{% endfor %}"
        said = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{each}{{% endif %}}"
        tokenizer.chat_template = CHATML.replace("{{ m.content }}", said)
    batch = PromptDataset.load(
        write(name, [{"prompt": json.dumps(chat) if form == "JSON text" else chat}]), tokenizer
    ).all()
    assert batch["prompt"] == (expected,)
    assert batch["messages"] == (chat if form == "parts of the template" else ASKED,)


def test_keys_that_the_files_format_made_are_absent_at_every_depth(write):
    tokenizer = make_tokenizer.__wrapped__("bytes")
    tokenizer.chat_template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls | default([]) | tojson }}"
    )
    calls = [
        {"function": {"name": name, "arguments": arguments}} for name, arguments in (("w", {"x": "1"}), ("s", {"y": 2}))
    ]
    rows = [
        {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": "4"}]} for call in calls
    ]  # fmt: skip
    lines, table = (PromptDataset.load(write(f"a.{form}", rows), tokenizer).all() for form in ("jsonl", "parquet"))
    assert table["prompt"] == lines["prompt"]
    assert table["messages"] == lines["messages"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "a message with role 'user' has no 'content'"),
        (
            {"role": "user", "content": {"type": "text", "text": "4"}},
            "must be a text or a list of parts, not an object",
        ),
        ({"role": "user", "content": [{"type": "image", "image": "x.png"}]}, "only text parts are supported"),
    ],
)
def test_what_a_template_cannot_say_is_refused_by_row(write, message, said):
    with pytest.raises(DataError, match=rf"row 1 .*{said}"):
        PromptDataset.load(write("a.jsonl", [{"prompt": [message]}]), make_tokenizer("bytes"))


CALLED = [
    {"role": "assistant", "content": "yes", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "it is 42"},
]
TURNS = [*SAID, {"role": "user", "content": "is it so?"}, {"role": "assistant", "content": "no"}]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Its marks tell transformers which tokens are the assistant's."""


@pytest.mark.parametrize("said", [SAID, TURNS, CALLED], ids=["a turn", "turns", "calls"])
@pytest.mark.parametrize("system", [None, "= no"], ids=["", "system"])
def test_what_is_learned_is_transformers_mask_of_the_assistant(write, kind, said, system):
    """In a demonstration and in both sides of a pair."""
    tokenizer = make_tokenizer.__wrapped__(kind.enginehouse_kind)
    tokenizer.chat_template = MARKED
    begun = [{"role": "system", "content": system}] if system else []
    whole = tokenizer.apply_chat_template([*begun, *ASKED, *said], return_dict=True, return_assistant_tokens_mask=True)
    ids = up_to_its_end(tokenizer, whole["input_ids"])
    mask = [index for index, is_said in enumerate(whole["assistant_masks"]) if is_said]
    path = write("rows.jsonl", [{"prompt": ASKED, "response": said, "chosen": said, "rejected": said}])
    row = DemonstrationDataset.load(path, tokenizer, system=system).rows([0]).row(0)
    pair = PreferenceDataset.load(path, tokenizer, PreferenceColumns("prompt", ("chosen", "rejected")), system=system)
    for rendered in (row, pair.rows([0]).row(0), pair.rows([0]).row(1)):
        assert rendered["input_ids"].tolist() == ids
        assert rendered["loss_mask"].nonzero().flatten().tolist() == mask


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([*ASKED, *SAID], "begins with a turn of the user, but must begin and end with a turn of the assistant"),
        ([*SAID, *ASKED], "ends with a turn of the user"),
    ],
)
def test_nobodys_words_but_the_assistants_are_learned(write, turns, said):
    path = write("a.jsonl", [{"prompt": ASKED, "chosen": turns, "rejected": SAID}])
    with pytest.raises(DataError, match=said):
        PreferenceDataset.load(path, make_tokenizer("bytes"), PreferenceColumns("prompt", ("chosen", "rejected")))


def test_turns_that_a_template_writes_otherwise_once_others_follow_are_refused(write):
    tokenizer = make_tokenizer.__wrapped__("bytes")
    tokenizer.chat_template = CHATML.replace(
        "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
    )
    path = write("a.jsonl", [{"prompt": ASKED, "response": TURNS}])
    with pytest.raises(DataError, match=r"row 1 .*differently once others follow"):
        DemonstrationDataset.load(path, tokenizer)


@pytest.mark.parametrize("response", ["it is 42", SAID], ids=["text", "messages"])
def test_a_turn_ends_as_the_template_ends_it_and_a_text_as_the_tokenizer_does(write, kind, response):
    turn, text = (kind.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "</s>"))
    path = write("rows.jsonl", [{"prompt": ASKED, "response": response}])
    assert learned(DemonstrationDataset.load(path, kind).rows([0]).row(0))[-1] == turn
    path = write("plain.jsonl", [{"prompt": "2+2=", "response": "4"}])
    assert learned(DemonstrationDataset.load(path, kind).rows([0]).row(0))[-1] == text
    assert text_ends(kind) == (turn, text)


@pytest.mark.parametrize("written", ["4<|im_end|>", "4<|im_end|>\n", "4</s>"])
@pytest.mark.parametrize("prompt", [ASKED, "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"])
def test_a_response_that_ends_itself_has_one_end(write, kind, written, prompt):
    """As those that were rendered beforehand do."""
    path = write("rows.jsonl", [{"prompt": prompt, "response": written}])
    ids = learned(DemonstrationDataset.load(path, kind).rows([0]).row(0))
    assert kind.decode(ids).replace(" ", "") == written.strip()


def test_the_templates_arguments_reach_whoever_applies_it(write, tmp_path):
    tokenizer = make_tokenizer.__wrapped__("bytes")
    tokenizer.chat_template = "{% if deep is defined and not deep %}no{% endif %}" + CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    told = load_tokenizer(str(tmp_path / "tokenizer"), False, {"deep": False})
    path = write("rows.jsonl", [{"prompt": ASKED, "response": "4"}])
    plain, changed = (PromptDataset.load(path, one).all()["prompt"][0] for one in (tokenizer, told))
    assert changed == "no" + plain
    assert tokenizer.decode(DemonstrationDataset.load(path, told).rows([0]).row(0)["input_ids"]).startswith(changed)
    with pytest.raises(DataError, match=r"data\.template_arguments are set"):
        PromptDataset.load(write("plain.jsonl", [{"prompt": "a"}]), told)


@pytest.mark.parametrize(
    ("written", "finish", "text"),
    [
        ("<think>4</think>42</s>", "stop", "<think>4</think>42"),
        ("<think>42<|im_end|>", "stop", "<think>42"),
        ("<think>42<pad><pad>", "stop", "<think>42"),
        ("42<think>", "length", "42<think>"),
        ("</s>", "stop", ""),
    ],
)
def test_the_marks_of_a_response_stay_and_its_end_goes(kind, written, finish, text):
    ids = kind(written, add_special_tokens=False)["input_ids"]
    assert response_text(kind, ids, finish).replace(" ", "") == text


@pytest.mark.parametrize("begun", ["", "<think>\n"])
@pytest.mark.parametrize("earlier", ["", "<think></think>"])
def test_what_the_template_began_is_of_the_answer(begun, earlier):
    """Also where it writes an empty thought into turns of the past, and where the question has words of its own."""
    tokenizer = make_tokenizer.__wrapped__("bytes")
    tokenizer.chat_template = CHATML.replace(
        "<|im_start|>assistant\n{% endif", f"<|im_start|>assistant\n{begun}{{% endif"
    ).replace("{{ m.content }}", f"{{% if m.role == 'assistant' %}}{earlier}{{% endif %}}{{{{ m.content }}}}")
    chats = [ASKED, [*ASKED, *SAID, *ASKED], [{"role": "user", "content": "assistant"}]]
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert find_begun_turn(tokenizer, prompt, chat) == begun


def with_template(template):
    tokenizer = make_tokenizer.__wrapped__("bytes")
    tokenizer.chat_template = template
    return tokenizer


ENDED_WHOLE = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
"""As Phi-3's: it ends a chat that is asked nothing more."""
WITHOUT_END = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
"""As Solar's: no special token ends a turn."""


def test_what_a_template_writes_behind_the_end_of_a_turn_is_not_learned_and_parts_no_turns(write):
    """The end of a turn is what ends a rollout, so the model is never asked what follows."""
    tokenizer = with_template(ENDED_WHOLE)
    whole = tokenizer.apply_chat_template([*ASKED, *TURNS], tokenize=False)
    row = (
        DemonstrationDataset.load(write("a.jsonl", [{"prompt": ASKED, "response": TURNS}]), tokenizer).rows([0]).row(0)
    )
    assert whole.removesuffix("\n</s>") == tokenizer.decode(row["input_ids"])
    assert tokenizer.decode(learned(row)) == "it is 42<|im_end|>no<|im_end|>"


@pytest.mark.parametrize("response", [SAID, TURNS], ids=["turn", "turns"])
def test_a_chat_whose_template_ends_no_turn_ends_with_the_end_of_sequence(write, response):
    """As the same response in one text does: a model that learned no end would go on for ever."""
    tokenizer = with_template(WITHOUT_END)
    row = DemonstrationDataset.load(write("a.jsonl", [{"prompt": ASKED, "response": response}]), tokenizer)
    whole = tokenizer.apply_chat_template([*ASKED, *response], tokenize=False)
    assert tokenizer.decode(row.rows([0]).row(0)["input_ids"]) == whole + "</s>"
    assert learned(row.rows([0]).row(0))[-1] == tokenizer.eos_token_id


OF_CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
)


def calling(arguments):
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'], ids=["object", "text"])
@pytest.mark.parametrize(
    "template", [OF_CALLS, OF_CALLS.replace(" | tojson", " + ''")], ids=["of objects", "of text alone"]
)
def test_arguments_of_a_call_are_the_same_as_an_object_and_as_text(write, template, arguments):
    """Text is OpenAI's form: a template that writes JSON would else write JSON of JSON."""
    tokenizer = with_template(template)
    row = {"prompt": [*ASKED, *calling(arguments), *ASKED], "response": calling(arguments)}
    rendered = DemonstrationDataset.load(write("a.jsonl", [row]), tokenizer).rows([0]).row(0)
    assert tokenizer.decode(rendered["input_ids"]).count('<|im_start|>assistant\n{"a": 2}<|im_end|>') == 2
    assert tokenizer.decode(learned(rendered)) == '{"a": 2}<|im_end|>'


def test_calls_that_a_template_leaves_out_are_refused_by_row(write):
    path = write("a.jsonl", [{"prompt": ASKED, "response": calling({"a": 2})}])
    with pytest.raises(DataError, match=r"row 1 .*calls tools, but the chat template .* leaves tool calls out"):
        DemonstrationDataset.load(path, make_tokenizer("bytes"))


@pytest.mark.parametrize("form", ["text", "parts"])
def test_a_template_of_parts_alone_loses_no_text(write, form):
    """As those of models that see: of a text they would write nothing, or raise."""
    each = "{% for p in m.content %}{{ p['text'] if p['type'] == 'text' }}{% endfor %}"
    tokenizer = with_template(CHATML.replace("{{ m.content }}", each))
    row = {"prompt": ASKED, "response": SAID}
    if form == "parts":
        row = {name: [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in row[name]] for name in row}
    rendered = DemonstrationDataset.load(write("a.jsonl", [row]), tokenizer).rows([0]).row(0)
    expected = make_tokenizer("bytes").apply_chat_template([*ASKED, *SAID], tokenize=False)
    assert tokenizer.decode(rendered["input_ids"]) + "\n" == expected
    assert text_ends(tokenizer) == text_ends(make_tokenizer("bytes"))
    picture = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(DataError, match=r"row 1 .*only text parts are supported"):
        PromptDataset.load(write("c.jsonl", [{"prompt": picture}]), tokenizer)
    batch = PromptDataset.load(write("b.jsonl", [{"prompt": row["prompt"]}]), tokenizer).all()
    assert find_begun_turn(tokenizer, batch["prompt"][0] + "<think>", batch["messages"][0]) == "<think>"


def test_a_reply_that_does_not_follow_its_prompt_is_refused_with_what_to_give(write):
    """As DeepSeek-R1's: the prompt begins a thought, and of a turn of the past it writes none."""
    tokenizer = with_template(CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    path = write("a.jsonl", [{"prompt": ASKED, "response": SAID}])
    with pytest.raises(DataError, match=r"row 1 .*prompt ends with '.*<think>.*write the turn as a string"):
        DemonstrationDataset.load(path, tokenizer)
    path = write("a.jsonl", [{"prompt": ASKED, "response": "hm</think>it is 42"}])
    row = DemonstrationDataset.load(path, tokenizer).rows([0]).row(0)
    assert tokenizer.decode(row["input_ids"]).endswith("assistant\n<think>\nhm</think>it is 42<|im_end|>")
