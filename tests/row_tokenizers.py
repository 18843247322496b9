"""Tokenizers of the kinds that people have, trained here on a few lines: by how they begin, end and cut a text."""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "2+2=4 and 12+30=42, so 7*6=42.",
    "Say yes or no: is it so?  Yes, it is so.",
    "user: what is it?\nassistant: it is 42",
    "= 4\n= 42\n=4 =42 =no =yes",
    "Grüße aus Köln, 你好 😀",
] * 4
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = (
    "bytes", "bytes, blank first", "bytes, begin", "bytes, two begin", "bytes, end", "bytes, both",
    "pieces, blank", "pieces, blank, begin", "pieces, blank of the first", "pieces, no blank", "pieces by likelihood",
    "blank by a normalizer, begin and end",
)  # fmt: skip
AROUND = {
    "begin": "<s> $A",
    "two begin": "<|begin|> <s> $A",
    "end": "$A </s>",
    "both": "<s> $A </s>",
    "begin and end": "<s> $A </s>",
}


@functools.cache
def make_tokenizer(kind: str) -> Any:
    """A `transformers` tokenizer of a kind; its end of sequence is `</s>`, of a turn `<|im_end|>`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer, trainer = _cut(kind)
    tokenizer.train_from_iterator(CORPUS, trainer)
    around = next((form for name, form in AROUND.items() if kind.endswith(f", {name}")), None)
    if around:
        marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("<s>", "</s>", "<|begin|>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, pair=None, special_tokens=marks)
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[4:], chat_template=CHATML, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.enginehouse_kind = kind
    return made


def _cut(kind: str) -> tuple[Tokenizer, Any]:
    merging = functools.partial(trainers.BpeTrainer, vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    if kind.startswith("bytes"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="blank first" in kind, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, merging(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if kind.startswith("blank by a normalizer"):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        return tokenizer, merging()
    blank = {"pieces, no blank": "never", "pieces, blank of the first": "first"}.get(kind, "always")
    by_likelihood = kind == "pieces by likelihood"
    tokenizer = Tokenizer(models.Unigram() if by_likelihood else models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=blank, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=blank)
    if by_likelihood:
        return tokenizer, trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    return tokenizer, merging()
