from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from enginehouse.engines.model import served_positions
from enginehouse.plugin.capabilities import STOP_STRINGS
from enginehouse_rl.benchmarks.names import BENCHMARKS
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.benchmarks import BenchmarkPlan
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.hub import HubPart
from enginehouse_rl.plan.parts.model import ModelPart


class BenchmarksPart(Part[Config]):
    """The benchmarks on which a model is evaluated, beside the files of held-out prompts.

    Attributes:
        longest: the maximum number of tokens of a prompt with its response; 0 without benchmarks.
    """

    benchmarks: tuple[BenchmarkPlan, ...] = ()
    longest = 0

    def settle(self) -> None:
        for name, folder in self.run[HubPart].benchmarks.items():
            if name in self.config.data.validation_files():
                self.refuse(
                    f"data.validation names a file {name!r}, which is a benchmark too: name the file differently"
                )
                continue
            self.findings.doing(f"Reading the benchmark {name}")
            with self.findings.collecting():
                self._add(name, folder)

    def count_answers(self) -> int:
        """Return the number of responses to all items."""
        return self.config.evaluation.samples_per_prompt * sum(plan.items for plan in self.benchmarks)

    def facts(self) -> Iterable[Fact]:
        for plan in self.benchmarks:
            how = "by the model's chat template" if plan.is_chat else "as plain text"
            yield (
                f"{plan.name}",
                f"{plan.items:,} items of {BENCHMARKS[plan.name].repository}, by {plan.description}, {how}; responses "
                f"of at most {count(plan.max_tokens, 'token')}",
            )

    def _add(self, name: str, folder: Path) -> None:
        """Add the plan of a benchmark.

        Raises:
            DataError: the files do not belong to the benchmark, or the chat template rejects its messages.
        """
        from enginehouse_rl.benchmarks.lm_eval_tasks import read_items
        from enginehouse_rl.benchmarks.prompts import load_prompts

        config, tokenizer = self.config, self.run[ModelPart].tokenizer
        if tokenizer is None or (loaded := tokenizer()) is None:
            return
        is_chat = config.data.chat_template
        if is_chat is None:
            is_chat = bool(getattr(loaded, "chat_template", None))
        source = read_items(name, folder, config.evaluation.max_prompts, is_chat)
        prompts = load_prompts(name, source, loaded, config.data.system if is_chat else None)
        longest = int(prompts.ragged("prompt_ids").lengths.max())
        wanted_tokens = config.evaluation.sampling.max_tokens or source.max_tokens
        room = self._find_room()
        tokens = wanted_tokens if room is None else min(wanted_tokens, room - longest)
        if tokens <= 0:
            self.refuse(
                f"evaluation.benchmarks: a prompt of {name} has {longest:,} tokens, but the model reads at most "
                f"{room:,}"
            )
            return
        if tokens < wanted_tokens:
            self.note(
                f"{name}: a response may have only {tokens:,} tokens instead of {wanted_tokens:,}, because the longest "
                f"prompt has {longest:,} tokens and the model reads at most {room:,}"
            )
        self.longest = max(self.longest, longest + tokens)
        engine = self.run.engines["evaluation" if "evaluation" in self.run.roles else "rollout"]
        plan = BenchmarkPlan(
            name=name,
            folder=folder,
            is_chat=is_chat,
            items=len(source.items),
            max_tokens=tokens,
            stop=() if engine.lacks(STOP_STRINGS) else source.until,
            description=source.description,
        )
        self.benchmarks = (*self.benchmarks, plan)

    def _find_room(self) -> int | None:
        """Return the maximum number of tokens of a row that the answering engine can read; None if unknown."""
        role = self.run.roles["evaluation" if "evaluation" in self.run.roles else "rollout"]
        limits = (served_positions(self.run[ModelPart].json), role.options.get("max_model_tokens"))
        return min((limit for limit in limits if isinstance(limit, int)), default=None)
