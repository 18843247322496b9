"""A tokenizer made on the spot: one token a character, with and without a chat template. Nothing is downloaded."""

from typing import Any

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =:,.\n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(chat_template: str | None = None, begin: bool = False, end: bool = True) -> Any:
    """A real `transformers` tokenizer over characters; `begin` adds `<s>` to plain text, `end` gives it an EOS."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>" if end else None)
    made.chat_template = chat_template
    return made


def ids_of(text: str) -> list[int]:
    """The oracle: what the tokenizer must give, by hand."""
    return [3 + CHARACTERS.index(character) if character in CHARACTERS else 0 for character in text]
