"""A chat, a part at a time: what closes an answer, and what follows it."""

import asyncio

import pytest
from chat_templates import CHATML, DEEPSEEK, ENDS, GEMMA, LLAMA, MISTRAL, QWEN, make_tokenizer

from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import UserError
from enginehouse_environments.dialogue import ChatTemplate, Dialogue

ASK = [{"role": "user", "content": "And?"}]


def result(text, **more):
    return {"role": "tool", "name": "add", "tool_call_id": "abcdef012", "content": text, **more}


def follows(template, messages, answer, stopped=False, eos=None):
    tokenizer = make_tokenizer(template, eos)
    chat = ChatTemplate(tokenizer)
    return tokenizer.decode(chat.continuation(messages, tokenizer.encode(answer, add_special_tokens=False), stopped))


AFTER = {
    QWEN: "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
    CHATML: "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
    LLAMA: "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    MISTRAL: "[INST]And?[/INST]",
    GEMMA: "\n<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
    DEEPSEEK: "<|user|>And?<|assistant|>",
}


@pytest.mark.parametrize("template", AFTER)
def test_an_answer_is_closed_once_whatever_ended_it(template):
    end, after = ENDS[template], AFTER[template]
    assert follows(template, ASK, "So.") == end + after  # it was cut
    assert follows(template, ASK, f"So.{end}", True) == after
    assert follows(template, ASK, f"So.{end}") == after
    assert follows(template, ASK, "So.<|endoftext|>", True) == after  # by another of the model's ends
    assert follows(template, ASK, "So.<|endoftext|>", True, eos="<|endoftext|>") == after
    assert follows(template, ASK, "So.<|python_tag|>") == end + after  # it was cut there


@pytest.mark.parametrize(("finish", "text"), [("length", "So.<|python_tag|>"), ("stop", "So.")])
def test_an_answer_that_was_cut_has_not_closed_itself_whatever_its_last_token(finish, text):
    tokenizer = make_tokenizer(QWEN)
    answer = tokenizer.encode("So.<|python_tag|>", add_special_tokens=False)

    class Says:
        sampling = SamplingParams()

        async def generate(self, tokens, sampling):
            return Completion(answer, [0.0] * len(answer), finish, 0, 0)

    dialogue = Dialogue(ChatTemplate(tokenizer), ASK)
    asyncio.run(dialogue.answer(Says()))
    assert dialogue.last == text
    before = len(dialogue.transcript.tokens)
    dialogue.say(ASK)
    assert tokenizer.decode(dialogue.transcript.tokens[before:]) == ("<|im_end|>" * (finish == "length")) + AFTER[QWEN]


@pytest.mark.parametrize("template", AFTER)
def test_the_text_of_an_answer_is_without_what_closed_it(template):
    tokenizer = make_tokenizer(template)
    chat = ChatTemplate(tokenizer)
    for said, stopped, text in [
        (f"So.{ENDS[template]}", False, "So."),
        ("So.<|eom_id|>", True, "So."),
        ("So.<|python_tag|>", False, "So.<|python_tag|>"),
        ("[TOOL_CALLS] a .", True, "[TOOL_CALLS] a ."),
        ("", True, ""),
    ]:
        assert chat.text(tokenizer.encode(said, add_special_tokens=False), stopped) == text


@pytest.mark.parametrize(
    ("template", "after"),
    [
        (QWEN, "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
         "<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, '\n<|im_start|>tool\n{"name": "add", "content": "2"}<|im_end|>\n<|im_start|>tool\n'
         '{"name": "add", "content": "3"}<|im_end|>\n<|im_start|>assistant\n'),
        (LLAMA, '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
         '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
        (MISTRAL, '[TOOL_RESULTS]{"content": 2, "call_id": "abcdef012"}[/TOOL_RESULTS][TOOL_RESULTS]{"content": 3, '
         '"call_id": "abcdef012"}[/TOOL_RESULTS]'),
        (DEEPSEEK, "<|tool_output|>2<|tool_output|>3<|assistant|>"),
    ],
)  # fmt: skip
def test_what_tools_say_is_written_as_after_an_answer_that_calls(template, after):
    """Also where the template wants that there was a call, one call, or its arguments as text."""
    results = [result("2"), result("3")]
    assert follows(template, results, f"x{ENDS[template]}", True) == after
    assert follows(template, results, "x") == ENDS[template] + after


def test_a_template_that_refuses_a_role_is_named():
    with pytest.raises(UserError, match="refuses messages of user, assistant, tool: roles must alternate"):
        follows(GEMMA, [result("2")], "x")


def test_where_a_template_closes_nothing_nothing_is_left_out():
    bare = "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content }}{% endfor %}"
    assert follows(bare, ASK, "So.</s>", True) == "<s>user:And?"
    assert follows(bare, ASK, "So.<s>", True) == "user:And?"  # the answer has begun it


def test_an_end_that_is_plain_text_is_not_lost_in_a_longer_token():
    """Two line ends are a token of this tokenizer."""
    lines = "{% for m in messages %}{{ m.role[0] + m.content + '\n' }}{% endfor %}"
    assert follows(lines, [{"role": "\nu", "content": "x"}], "So.") == "\n\nx\n"
    assert follows(lines, [{"role": "\nu", "content": "x"}], "So.\n", True) == "\nx\n"


def test_a_template_that_leaves_out_answers_is_refused():
    with pytest.raises(UserError, match="leaves out what an assistant says"):
        ChatTemplate(make_tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))


def test_a_template_that_takes_parts_alone_is_given_parts():
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = "{% for m in messages %}<|im_start|>" + parts + "<|im_end|>{% endfor %}"
    assert follows(template, ASK, "So.<|im_end|>") == "<|im_start|>And?<|im_end|>"
