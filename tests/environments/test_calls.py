"""Tool calls told from an answer's text."""

import json
import re

import pytest
from chat_templates import CHATML, DEEPSEEK, GEMMA, LLAMA, MISTRAL, QWEN, QWEN_CODER, make_tokenizer

from enginehouse.errors import UserError
from enginehouse_environments.calls import FORMATS, ToolCall, find_call_format
from enginehouse_environments.dialogue import ChatTemplate

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "one"},
                "said": {"type": "string", "description": "other"},
                "list": {"type": "array", "description": "others"},
            },
        },
    },
}


def form(template=QWEN, name="auto"):
    return find_call_format(ChatTemplate(make_tokenizer(template), [ADD]), name)


def named(parsed):
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


TEMPLATES = {QWEN: "hermes", CHATML: "hermes", QWEN_CODER: "qwen3_coder", LLAMA: "llama", MISTRAL: "mistral"}
TRICKY = {"a": -3, "said": 'a "q" \\ </think> </tool_call> <parameter=x> [TOOL_CALLS]\n{};', "list": [1, {"k": None}]}


@pytest.mark.parametrize("template", TEMPLATES, ids=TEMPLATES.values())
@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"said": "1"}, {"said": "null"}, TRICKY])
def test_a_call_is_read_as_the_models_own_template_writes_it(template, arguments):
    chat = ChatTemplate(make_tokenizer(template), [ADD])
    made = find_call_format(chat)
    assert made.name == TEMPLATES[template]
    assert named(made.parse(chat.call("add", arguments))) == [("add", arguments)]


@pytest.mark.parametrize("template", [GEMMA, DEEPSEEK, "{{ messages[0].content }}{{ messages[-1].content }}"])
def test_a_template_that_writes_calls_in_no_known_form_is_refused_and_a_form_may_be_said(template):
    with pytest.raises(UserError, match=r"writes them in an unknown format.*hermes, qwen3_coder"):
        form(template)
    assert form(template, "hermes").name == "hermes"


def test_a_form_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown format of tool calls 'herms'\. Did you mean 'hermes'"):
        form(name="herms")


def test_what_the_tokenizer_declares_of_its_answers_is_believed():
    tokenizer = make_tokenizer(DEEPSEEK)
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {"close": "<CALL>"},
            "tool_calls": {
                "open": "<CALL>",
                "close": "</CALL>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    made = find_call_format(ChatTemplate(tokenizer, [ADD]))
    parsed = made.parse('so<CALL>{"name": "add", "arguments": {"a": 1}}</CALL>')
    assert named(parsed) == [("add", {"a": 1})]
    assert parsed.content == "so"
    assert made.parse("so<CALL>{</CALL>").problems
    del tokenizer.response_template["start_anchor"]
    with pytest.raises(UserError, match=r"response_template of the model's tokenizer cannot be used: .*start_anchor"):
        find_call_format(ChatTemplate(tokenizer, [ADD]))


SAID = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": %d}}]',
}


@pytest.mark.parametrize("name", SAID)
def test_several_calls_and_what_stands_around_them(name):
    parsed = form(name=name).parse(f"One. {SAID[name] % 1}\n{SAID[name] % 2} ")
    assert named(parsed) == [("add", {"a": 1}), ("add", {"a": 2})]
    assert parsed.content == "One."
    assert not parsed.problems


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 2}'),
        ("llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'),
        ("llama", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}\n{"name": "add", '
        '"arguments": {"a": 2}}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "add", '
        '"parameters": {"a": 2}}'),
        ("qwen3_coder", "<function=add>\n<parameter=a>1</parameter>\n</function><tool_call><function=add>"
        "<parameter=a>\n2\n</parameter></function>"),
    ],
)  # fmt: skip
def test_forms_that_models_also_write(name, text):
    assert named(form(name=name).parse(text)) == [("add", {"a": 1}), ("add", {"a": 2})]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", " No call. ", '{"a": 1}', '{"name": "Ann"}', "2 < 3", "<think>so</think> 3\n"])
def test_an_answer_without_a_call_is_content_as_it_is(name, text):
    assert form(name=name).parse(text) == (text, [], [])


@pytest.mark.parametrize("name", SAID)
def test_what_is_thought_is_no_call(name):
    call = SAID[name] % 1
    assert named(form(name=name).parse(f"<think>{call}</think>{SAID[name] % 2}")) == [("add", {"a": 2})]
    begins = QWEN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    assert named(form(begins, name).parse(f"{call}</think>{SAID[name] % 2}")) == [("add", {"a": 2})]
    assert not form(begins, name).parse(call).calls
    assert form(name=name).parse(f"<think>{call}") == (f"<think>{call}", [], [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", "<tool_call>%</tool_call>", r"it is no JSON: Expecting value at '%</tool_call>'"),
        ("hermes", '<tool_call>{"name": "add"', "it is no JSON: .* at its end"),
        (
            "hermes",
            '<tool_call>{"name": "add"} x</tool_call>',
            "</tool_call> must follow the JSON, not 'x<",
        ),
        ("hermes", '<tool_call>{"nam": 1}</tool_call>', 'it must be an object with "name" and "arguments"'),
        ("hermes", "<tool_call>[]</tool_call>", 'it must be an object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add are no object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999 is no number"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}</tool_call>', "no JSON that can be read"),
        ("llama", '{"name": "add", "parameters": {', "it is no JSON"),
        ("llama", "<|python_tag|>add.call(a=1)", "it is no JSON: Expecting value at 'add.call"),
        ("mistral", '[TOOL_CALLS][{"name": "add", ', "it is no JSON"),
        ("mistral", "[TOOL_CALLS]", "it is no JSON: Expecting value at its end"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "<function=NAME> must follow <tool_call>"),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>1</function>",
            "<parameter=NAME>...</parameter> or <",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name, text, said):
    parsed = form(name=name).parse(text)
    assert not parsed.calls
    (problem,) = parsed.problems
    assert problem.startswith("tool call 1 is not well-formed: ")
    assert re.search(said, problem)


def test_a_malformed_call_does_not_hide_others():
    parsed = form().parse(f"{SAID['hermes'] % 1}<tool_call>{{</tool_call>{SAID['hermes'] % 3}")
    assert named(parsed) == [("add", {"a": 1}), ("add", {"a": 3})]
    assert [one[:11] for one in parsed.problems] == ["tool call 2"]


def test_ids_are_nine_letters_that_are_the_same_again_and_differ_by_turn_and_place():
    text = SAID["hermes"] % 1 * 2
    first, again, later = (form().parse(text, turn).calls for turn in (0, 0, 1))
    assert first == again
    ids = [call.id for call in [*first, *later]]
    assert len(set(ids)) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_call_is_an_entry_of_openais():
    call = ToolCall("abc", "add", {"said": "ä\n", "list": [1, None]})
    entry = call.entry()
    assert json.loads(entry["function"]["arguments"]) == call.arguments
    assert (entry["id"], entry["type"], entry["function"]["name"]) == ("abc", "function", "add")


def test_text_that_cannot_be_encoded_goes_into_an_entry():
    (call,) = form().parse('<tool_call>{"name": "add", "arguments": {"said": "\\ud800"}}</tool_call>').calls
    json.dumps(call.entry()).encode()
    call.entry()["function"]["arguments"].encode()
