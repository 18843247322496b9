"""The benchmarks by which a model can be evaluated, with the lm-eval task of each.

lm-eval writes the prompts and scores the responses. The other modules of this package import lm-eval. They are imported
only if a run has a benchmark.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from typing import NamedTuple

from enginehouse.errors import ConfigError, nearest

INSTALL = "pip install 'enginehouse-rl[benchmarks]'"
"""The command that installs lm-eval with everything that its tasks need."""

FILES = ("README.md", "*.parquet", "*.jsonl", "*.json", "*.csv")
"""Patterns of the files of a data set. All matching files are fetched, because benchmark data sets are small."""


class Benchmark(NamedTuple):
    """A benchmark.

    Attributes:
        task: the lm-eval task, or group of tasks.
        folder: folder of the task, below lm-eval's folder of tasks.
        repository: the name of the data set on the hub.
        metric: the lm-eval metric that is the reward of a response.
        filter: the lm-eval filter that extracts the answer for this metric.
    """

    task: str
    folder: str
    repository: str
    metric: str
    filter: str


BENCHMARKS = {
    "gsm8k": Benchmark("gsm8k", "gsm8k", "openai/gsm8k", "exact_match", "flexible-extract"),
    "math500": Benchmark("minerva_math500", "minerva_math", "HuggingFaceH4/MATH-500", "math_verify", "none"),
    "aime24": Benchmark("aime24", "aime", "Maxwell-Jia/AIME_2024", "exact_match", "none"),
    "aime25": Benchmark("aime25", "aime", "math-ai/aime25", "exact_match", "none"),
    "gpqa": Benchmark(
        "gpqa_diamond_cot_zeroshot", "gpqa/cot_zeroshot", "Idavidrein/gpqa", "exact_match", "flexible-extract"
    ),
    "mmlu_pro": Benchmark("mmlu_pro", "mmlu_pro", "TIGER-Lab/MMLU-Pro", "exact_match", "custom-extract"),
    "ifeval": Benchmark("ifeval", "ifeval", "google/IFEval", "prompt_level_strict_acc", "none"),
}
SEVERAL = {"aime": ("aime24", "aime25")}
"""Names that stand for several benchmarks."""


NEEDED = {"math500": ("math_verify", "sympy", "antlr4"), "ifeval": ("langdetect", "immutabledict", "nltk")}
"""The packages that a benchmark needs besides lm-eval, by the names with which they are imported."""
SENTENCES = "punkt_tab"
"""The data with which NLTK splits text into sentences."""


class BenchmarkName(NamedTuple):
    """A benchmark as a config names it: `gsm8k`, or with a revision of its data set `gsm8k@main`.

    Attributes:
        revision: branch, tag or commit of the data set; None if the config names none.
    """

    name: str
    revision: str | None = None

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.name]

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def list_benchmarks(texts: Iterable[str]) -> list[BenchmarkName]:
    """Return the benchmarks that `texts` name, each once.

    Raises:
        ValueError: a text names no benchmark, or two texts name different revisions of a benchmark.
    """
    benchmarks: dict[str, BenchmarkName] = {}
    for text in texts:
        name, at, revision = text.strip().partition("@")
        if name in SEVERAL and at:
            parts = ", ".join(f"{part}@REVISION" for part in SEVERAL[name])
            raise ValueError(
                f"{text!r}: {name} has several data sets, but a revision belongs to a single data set: write {parts}"
            )
        if (name not in BENCHMARKS and name not in SEVERAL) or (at and not revision):
            raise ValueError(f"unknown benchmark {text!r}. {nearest(name, [*BENCHMARKS, *SEVERAL])}")
        for part in SEVERAL.get(name, (name,)):
            benchmark = BenchmarkName(part, revision or None)
            if benchmarks.setdefault(part, benchmark) != benchmark:
                raise ValueError(f"{part} must not have two revisions: {benchmarks[part]} and {benchmark}")
    return list(benchmarks.values())


def check_installed(names: Iterable[BenchmarkName]) -> None:
    """Check that lm-eval and the other packages that the benchmarks need are installed.

    Raises:
        ConfigError: a package, or the data for splitting texts into sentences, is missing.
    """
    for name, _ in names:
        packages = ("lm_eval", *NEEDED.get(name, ()))
        if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
            raise ConfigError(f"the benchmark {name} needs {' and '.join(missing)}: {INSTALL}")
        if "nltk" in packages:
            _check_sentences(name)


def _check_sentences(name: str) -> None:
    """Check that NLTK can split texts into sentences, with data that it downloads if there is a network.

    Raises:
        ConfigError: the data is missing and cannot be downloaded.
    """
    import nltk

    try:
        nltk.data.find(f"tokenizers/{SENTENCES}")
    except LookupError:
        output = io.StringIO()
        if not nltk.download(SENTENCES, quiet=True, print_error_to=output):
            raise ConfigError(
                f"the benchmark {name} counts sentences with NLTK's data {SENTENCES}, which is not installed and "
                f"cannot be downloaded ({' '.join(output.getvalue().split()) or 'no reason given'}): run `python "
                f"-m nltk.downloader -d FOLDER {SENTENCES}` on a machine with a network, and set NLTK_DATA to the "
                "folder"
            ) from None
