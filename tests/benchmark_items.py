"""Made items of each benchmark, in the form in which its data set is published, and answers of many kinds to them."""

import csv
import io
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow
from pyarrow import parquet

ITEMS = 200
SUBJECTS = (
    *("biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history"),
    *("law", "math", "other", "philosophy", "physics", "psychology"),
)
"""The categories of MMLU-Pro."""
LATEX = (
    *(
        r"\frac{3}{4}",
        r"2\sqrt{3}",
        r"\left(3, \frac{\pi}{2}\right)",
        "x^2+2x+1",
        r"\text{Evelyn}",
        "10,000",
        r"90^\circ",
    ),
    *("[2,5)", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "-7", "0.5", r"\frac{1}{2}", r"5\text{ cm}", "1,2"),
)
"""Answers of MATH's kinds."""


def make_data_set(benchmark: str) -> dict[str, bytes]:
    """Return the files of a benchmark's data set, by their paths on the hub."""
    return MAKERS[benchmark](random.Random(f"items of {benchmark}"))


def make_answers(benchmark: str, items: list[Mapping[str, Any]]) -> list[str]:
    """Return an answer to each item: right, wrong, in another form, empty, or cut."""
    draw = random.Random(f"answers to {benchmark}")
    return [ANSWERERS[benchmark](draw, item) for item in items]


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def make_card(*configs: str) -> bytes:
    """Return a card that lists configurations, each as a flow mapping of YAML."""
    return ("---\nconfigs:\n" + "".join(f"- {config}\n" for config in configs) + "---\n").encode()


def make_gsm8k(draw: random.Random) -> dict[str, bytes]:
    def row() -> dict[str, str]:
        bags, each = draw.randint(2, 90), draw.randint(2, 60)
        total = f"{bags * each:,}" if draw.random() < 0.3 else str(bags * each)
        return {
            "question": f"A shop sells {bags} bags of {each} apples each. How many apples is that?",
            "answer": f"It sells {bags} x {each} = <<{bags}*{each}={bags * each}>>{bags * each} apples.\n#### {total}",
        }

    return {
        "README.md": make_card(
            "{config_name: main, data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]}",
            "{config_name: socratic, data_files: [{split: train, path: socratic/train-*}]}",
        ),
        "main/train-00000-of-00001.parquet": as_parquet([row() for _ in range(40)]),
        "main/test-00000-of-00001.parquet": as_parquet([row() for _ in range(ITEMS)]),
        "socratic/train-00000-of-00001.parquet": as_parquet([row() for _ in range(5)]),
    }


def answer_gsm8k(draw: random.Random, item: Mapping[str, Any]) -> str:
    gold = item["answer"].rpartition("#### ")[2]
    value = gold if draw.random() < 0.6 else str(draw.randint(1, 5000))
    plain = value.replace(",", "")
    return draw.choice(
        [
            f" They are {plain}.\n#### {value}",
            f" #### {plain}",
            f" #### {int(plain):,}.\nQuestion: How many pears?\n#### 12",
            f" The answer is ${plain}.",
            f" The answer is {plain}.00",
            f" First 7 bags, then {plain} apples, which leaves -{plain}",
            f" {plain} apples, that is **{value}**!",
            f" It sells {plain} = <<1*{plain}={plain}>>",
            "",
            " I cannot tell.",
            " ####",
            f" #### {plain[:-1]}",
            f" #### {plain}<|im_end|>#### 1",
            f" #### {plain} apples, #### 3",
        ]
    )


def make_math500(draw: random.Random) -> dict[str, bytes]:
    def row(number: int) -> dict[str, Any]:
        answer = draw.choice([*LATEX, str(draw.randint(-50, 2000)), rf"\frac{{{draw.randint(1, 9)}}}{{11}}"])
        return {
            "problem": f"What is the value of $f({number})$?",
            "solution": f"We see that $f({number})$ is what is wanted, $\\boxed{{{answer}}}.$",
            "answer": answer,
            "subject": "Algebra",
            "level": draw.randint(1, 5),
            "unique_id": f"test/algebra/{number}.json",
        }

    return {"test.jsonl": as_jsonl([row(number) for number in range(ITEMS)])}


def answer_math500(draw: random.Random, item: Mapping[str, Any]) -> str:
    gold = item["solution"].partition("boxed{")[2].rpartition("}")[0]
    value = gold if draw.random() < 0.6 else draw.choice([*LATEX, str(draw.randint(-50, 2000))])
    return draw.choice(
        [
            f" Thus it is $\\boxed{{{value}}}$.\nFinal Answer: The final answer is ${value}$. I hope it is correct.",
            f"\nFinal Answer: The final answer is {value}. I hope it is correct.\n\nProblem:\nWhat is $2$?",
            f" $\\boxed{{{value}}}$",
            f" \\boxed{{{value}}}",
            f" It is ${value}$.",
            f" It is {value}",
            f" \\fbox{{{value}}}, or \\boxed {value}",
            f" $x = {value}$",
            f" Final Answer: The final answer is $\\dfrac{{1}}{{2}}$ or ${value}$. I hope it is correct.",
            "",
            " No idea.",
            f" $\\boxed{{{value}",
        ]
    )


def make_aime24(draw: random.Random) -> dict[str, bytes]:
    rows = [
        {
            "ID": f"2024-{'I' * (number % 2 + 1)}-{number}",
            "Problem": f"Find the remainder when ${number}^{{2024}}$ is divided by $1000$.",
            "Solution": "It is found by squaring.",
            "Answer": draw.randint(0, 999),
        }
        for number in range(ITEMS)
    ]
    return {"aime_2024_problems.parquet": as_parquet(rows)}


def make_aime25(draw: random.Random) -> dict[str, bytes]:
    rows = [
        {"problem": f"Find the sum of all bases $b>{number}$.", "answer": str(draw.randint(0, 999)), "id": str(number)}
        for number in range(ITEMS)
    ]
    return {"test.jsonl": as_jsonl(rows)}


def answer_aime(draw: random.Random, item: Mapping[str, Any]) -> str:
    gold = str(item.get("Answer", item.get("answer")))
    value = gold if draw.random() < 0.6 else str(draw.randint(0, 999))
    return draw.choice(
        [
            f" Thus the answer is $\\boxed{{{value}}}$.",
            f" \\boxed{{{value}}}",
            f" \\boxed{{0{value}}}",
            f" \\boxed {value}",
            f" ${value}$",
            f" $x = {value}$ as $y$ is",
            f" {value}",
            value,
            f" {value}.",
            f" $\\fbox{{{value}}}$\nQuestion: and $\\boxed{{1}}$",
            f" $\\boxed{{{value}}}$, no: $\\boxed{{{draw.randint(0, 999)}}}$",
            f" $\\boxed{{\\frac{value}1}}$",
            "",
            " So $\\boxed{",
            " None.",
        ]
    )


def make_gpqa(draw: random.Random) -> dict[str, bytes]:
    def row(number: int) -> dict[str, Any]:
        right, *wrong = draw.sample(
            ["10^-4 eV", "10^-11 eV", "a [title] b", "3.5  mol", "Guilty", "Guilty of it", "(CH3)2"], 4
        )
        return {
            "Pre-Revision Question": "As it was.",
            "Question": f"Two states have lifetimes of {number} s. Which energy tells them apart?",
            "Correct Answer": f" {right} ",
            "Incorrect Answer 1": wrong[0],
            "Incorrect Answer 2": wrong[1] + "\n",
            "Incorrect Answer 3": wrong[2],
            "Explanation": "By the uncertainty, which is, in short, a rule.",
            "Subdomain": "Physics (general)",
            "Writer's Difficulty Estimate": "",
            "Record ID": f"rec{number}",
            "High-level domain": "Physics",
        }

    subsets = ("gpqa_extended", "gpqa_main", "gpqa_diamond")
    card = make_card(*(f"{{config_name: {subset}, data_files: {subset}.csv}}" for subset in subsets))
    others = {f"{subset}.csv": as_csv([row(number) for number in range(3)]) for subset in subsets[:2]}
    return {"README.md": card, **others, "gpqa_diamond.csv": as_csv([row(number) for number in range(ITEMS)])}


def answer_gpqa(draw: random.Random, item: Mapping[str, Any]) -> str:
    letter = item["answer"][1] if draw.random() < 0.6 else draw.choice("ABCDE")
    text = item[f"choice{'ABCD'.index(letter) + 1}"] if letter in "ABCD" else "all"
    return draw.choice(
        [
            f"The answer is ({letter}).",
            f"We think of (A), then of (B). The answer is ({letter}).\nNext (C).",
            f"The answer is {letter}.",
            f"({letter})",
            f"Answer: {letter}",
            f"It is {text}",
            f"The answer is {text}.",
            f"The answer is ({letter}) {text}.</s>The answer is (A).",
            f"the answer is ({letter.lower()})",
            "",
            "The answer is ",
            "I do not know.",
        ]
    )


def make_mmlu_pro(draw: random.Random) -> dict[str, bytes]:
    def row(number: int, subject: str, shown: bool) -> dict[str, Any]:
        options = [f" {draw.randint(1, 99)} units" for _ in range(draw.choice([4, 9, 10]))]
        right = draw.randrange(len(options))
        thoughts = f"A: Let's think step by step. It is halved. The answer is ({'ABCDEFGHIJ'[right]})."
        return {
            "question_id": number,
            "question": f"In {subject}, how large is quantity {number}?",
            "options": options,
            "answer": "ABCDEFGHIJ"[right],
            "answer_index": right,
            "cot_content": thoughts if shown else "",
            "category": subject,
            "src": "made",
        }

    shown = [row(number, SUBJECTS[number // 5], True) for number in range(5 * len(SUBJECTS))]
    asked = [row(100 + number, SUBJECTS[number % len(SUBJECTS)], False) for number in range(ITEMS)]
    splits = "[{split: test, path: data/test-*}, {split: validation, path: data/validation-*}]"
    return {
        "README.md": make_card(f"{{config_name: default, data_files: {splits}}}"),
        "data/test-00000-of-00001.parquet": as_parquet(asked),
        "data/validation-00000-of-00001.parquet": as_parquet(shown),
    }


def answer_mmlu_pro(draw: random.Random, item: Mapping[str, Any]) -> str:
    letter = item["answer"] if draw.random() < 0.6 else draw.choice("ABCDEFGHIJ")
    return draw.choice(
        [
            f" It is halved. The answer is ({letter}).",
            f" the answer is {letter}",
            f" The answer is ({letter}), no: the answer is (B).",
            f" The answer is ({letter}).\n\nQuestion:\nAnother? The answer is (A).",
            f" Answer: {letter}",
            f" ({letter})",
            f" The answer is ({letter.lower()})",
            f" The answer is **({letter})**",
            f" So the answer is ({letter}",
            "",
            " The answer is",
            " It cannot be known.",
        ]
    )


INSTRUCTIONS: Mapping[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "keywords:existence": lambda draw, _: {"keywords": draw.sample(WORDS, 2)},
    "keywords:frequency": lambda draw, _: {
        "keyword": draw.choice(WORDS), "frequency": draw.randint(1, 3), "relation": draw.choice(RELATIONS)
    },
    "keywords:forbidden_words": lambda draw, _: {"forbidden_words": draw.sample(WORDS, 2)},
    "keywords:letter_frequency": lambda draw, _: {
        "letter": draw.choice("aeq"), "let_frequency": draw.randint(1, 30), "let_relation": draw.choice(RELATIONS)
    },
    "language:response_language": lambda draw, _: {"language": draw.choice(["fr", "en", "de"])},
    "length_constraints:number_sentences": lambda draw, _: {
        "num_sentences": draw.randint(1, 8), "relation": draw.choice(RELATIONS)
    },
    "length_constraints:number_paragraphs": lambda draw, _: {"num_paragraphs": draw.randint(1, 3)},
    "length_constraints:number_words": lambda draw, _: {
        "num_words": draw.randint(5, 60), "relation": draw.choice(RELATIONS)
    },
    "length_constraints:nth_paragraph_first_word": lambda draw, _: {
        "num_paragraphs": 2, "nth_paragraph": draw.randint(1, 2), "first_word": draw.choice(["the", "every"])
    },
    "detectable_content:number_placeholders": lambda draw, _: {"num_placeholders": draw.randint(1, 3)},
    "detectable_content:postscript": lambda draw, _: {"postscript_marker": draw.choice(["P.S.", "P.P.S"])},
    "detectable_format:number_bullet_lists": lambda draw, _: {"num_bullets": draw.randint(1, 3)},
    "detectable_format:constrained_response": lambda draw, _: {},
    "detectable_format:number_highlighted_sections": lambda draw, _: {"num_highlights": draw.randint(1, 2)},
    "detectable_format:multiple_sections": lambda draw, _: {"section_spliter": "SECTION", "num_sections": 2},
    "detectable_format:json_format": lambda draw, _: {},
    "detectable_format:title": lambda draw, _: {},
    "combination:two_responses": lambda draw, _: {},
    "combination:repeat_prompt": lambda draw, prompt: {"prompt_to_repeat": prompt},
    "startend:end_checker": lambda draw, _: {"end_phrase": "That is all you need!"},
    "change_case:capital_word_frequency": lambda draw, _: {
        "capital_frequency": draw.randint(1, 4), "capital_relation": draw.choice(RELATIONS)
    },
    "change_case:english_capital": lambda draw, _: {},
    "change_case:english_lowercase": lambda draw, _: {},
    "punctuation:no_comma": lambda draw, _: {},
    "startend:quotation": lambda draw, _: {},
}  # fmt: skip
"""Instructions of IFEval, with what makes their arguments."""
WORDS = ("river", "garden", "window", "letter", "winter")
RELATIONS = ("less than", "at least")
ENGLISH = (
    "The old garden lies between the river and the tall trees on the other side of the road.",
    "Every winter my brother writes a long letter to the people who live in the small house.",
    "She opened the window, looked at the quiet street, and thought about what she had read.",
)
FRENCH = (
    "Le jardin se trouve derrière la maison, près de la petite rivière où nous avons pique-niqué.",
    "Chaque hiver, mon frère écrit une longue lettre à ses amis qui habitent dans le village.",
)


def make_ifeval(draw: random.Random) -> dict[str, bytes]:
    def row(number: int) -> dict[str, Any]:
        names = draw.sample(sorted(INSTRUCTIONS), draw.choice([1, 1, 1, 2, 3]))
        prompt = f"Write about {WORDS[number % len(WORDS)]} number {number}."
        arguments = [INSTRUCTIONS[name](draw, prompt) for name in names]
        return {"key": 1000 + number, "prompt": prompt, "instruction_id_list": names, "kwargs": arguments}

    return {"ifeval_input_data.jsonl": as_jsonl([row(number) for number in range(ITEMS)])}


def answer_ifeval(draw: random.Random, item: Mapping[str, Any]) -> str:
    sentences = FRENCH if draw.random() < 0.25 else ENGLISH
    paragraphs = [" ".join(draw.choices(sentences, k=draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
    text = draw.choice(["\n\n", "\n\n***\n\n"]).join(paragraphs)
    return draw.choice(
        [
            text,
            text.upper(),
            text.lower(),
            text.replace(",", ""),
            f'"{text}"',
            f"{item['prompt']}\n\n{text}",
            f"<<A title>>\n{text}\n\nP.S. [name] and [address]",
            f"* one\n* two\n*{text}*\n{text}",
            f"SECTION 1\n{text}\nSECTION 2\n{text}",
            f"{text}\n\n******\n\n{text} Once more.",
            f"Sure, here it is:\n{text} That is all you need!",
            f"**{text} That is all you need!**\nAnything else?",
            json.dumps({"text": text}),
            f"```json\n{json.dumps([text])}\n```",
            "My answer is maybe.",
            "",
            " \n",
        ]
    )


MAKERS: Mapping[str, Callable[[random.Random], dict[str, bytes]]] = {
    "gsm8k": make_gsm8k,
    "math500": make_math500,
    "aime24": make_aime24,
    "aime25": make_aime25,
    "gpqa": make_gpqa,
    "mmlu_pro": make_mmlu_pro,
    "ifeval": make_ifeval,
}
ANSWERERS: Mapping[str, Callable[[random.Random, Mapping[str, Any]], str]] = {
    "gsm8k": answer_gsm8k,
    "math500": answer_math500,
    "aime24": answer_aime,
    "aime25": answer_aime,
    "gpqa": answer_gpqa,
    "mmlu_pro": answer_mmlu_pro,
    "ifeval": answer_ifeval,
}
