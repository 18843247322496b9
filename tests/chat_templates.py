"""Chat templates that have, in short, what those of families of models have; and a tokenizer of bytes.

QWEN puts what tools say into one turn of the user's, and takes thoughts out of its history. CHATML wants the name of
the tool. LLAMA has a header of its own for tools, trims what is said and takes one call at a time. MISTRAL closes by
its eos, wants ids of nine letters, and lists tools at the last question alone. GEMMA knows no tools, and wants turns to
alternate. DEEPSEEK refuses what a tool says where nothing was called, and takes arguments as JSON text.
"""

from typing import Any

_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else 'Be brief.' %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}"

QWEN = (
    _SYSTEM
    + "{{ '<|im_start|>system\n' + system }}"
    + _TOOLS
    + """{{ '<|im_end|>\n' }}
{%- set ns = namespace(question=-1) %}
{%- for m in rest if m.role == 'user' %}{% set ns.question = rest.index(m) %}{% endfor %}
{%- for m in rest %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{%- set said = m.content if loop.index0 > ns.question else m.content.split('</think>')[-1] %}
{{- '<|im_start|>' + m.role + '\n' + said }}
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)

QWEN_CODER = QWEN.replace(
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}""",
    """{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}""",
)

CHATML = (
    _SYSTEM
    + "{{ '<|im_start|>system\n' + system }}"
    + _TOOLS
    + """{{ '<|im_end|>\n' }}
{%- for m in rest %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'tool' %}
{%- if not m.name %}{{ raise_exception('a name, please') }}{% endif %}
{{- '{"name": "' + m.name + '", "content": ' + m.content | tojson + '}' }}
{%- else %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n{"arguments": ' + call.function.arguments | tojson + ', "name": "' + call.function.name + '"}\n' }}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

LLAMA = (
    "{{ bos_token }}"
    + _SYSTEM
    + "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}"
    + """{%- for m in rest %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson }}
{%- elif m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.role == 'user' and loop.first %}"""
    + _TOOLS
    + """{% endif %}
{{- m.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
)

MISTRAL = (
    "{{ bos_token }}"
    + _SYSTEM
    + """{%- set ns = namespace(last=none) %}
{%- for m in rest if m.role == 'user' %}{% set ns.last = m %}{% endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if m == ns.last and tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- else %}
{{- m.content + eos_token }}
{%- endif %}
{%- endfor %}"""
)

GEMMA = """{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{% set ns = namespace(called=false) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('nothing was called') }}{% endif %}
{{- '<|tool_output|>' + m.content }}
{%- elif m.tool_calls is defined %}
{%- set ns.called = true %}
{%- for call in m.tool_calls %}
{{- '<|tool_call|>' + call.function.name + '\n' + call.function.arguments }}
{%- endfor %}
{{- eos_token }}
{%- else %}
{{- '<|' + m.role + '|>' + m.content + (eos_token if m.role == 'assistant' else '') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

ENDS = {
    QWEN: "<|im_end|>",
    QWEN_CODER: "<|im_end|>",
    CHATML: "<|im_end|>",
    LLAMA: "<|eot_id|>",
    MISTRAL: "</s>",
    GEMMA: "<end_of_turn>",
    DEEPSEEK: "</s>",
}
"""What closes an answer of each."""

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|python_tag|>"),
)


def make_tokenizer(template: str | None = QWEN, eos: str | None = None) -> Any:
    """A real `transformers` tokenizer: a token a byte, one for each special token, and for some pairs of letters.

    Args:
        template: its chat template.
        eos: its end of sequence; None: what closes an answer of the template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("Ċ", "Ċ"), ("{", '"')]
    names = [*letters, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos or ENDS.get(template or "", "</s>")
    )
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL], special_tokens=True)
    made.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>", "</think>")])
    made.chat_template = template
    return made
