"""Single wrong lines of code, each of which a quick test has to find.

    python -m tools.mutants                # all of them: a few minutes
    python -m tools.mutants a12 cosine     # only these

Each mutant gives a wrong result that nobody would see in a run. Reviewers wrote them, to test the tests. A line is
replaced in a copy of its distribution's sources, which comes first on the path; the checkout stays unchanged. The exit
code is 1 if a mutant survives, or if its line or its test no longer exists.

The tests run in forks of a process that has imported other packages, because importing them takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
RL = "plugins/rl/src/enginehouse_rl"
TORCH = "plugins/torch/src/enginehouse_torch"
IMPORTED_BEFORE = (
    "torch",
    "transformers",
    "transformers.models.auto",
    "hypothesis",
    "pytest",
    "pydantic",
    "yaml",
    "ray",
)
LONGEST_SECONDS = 600.0
"""Time limit of a mutant's tests; a mutant that hangs counts as killed."""

DATA = "core/src/enginehouse/data"
ROWS = f"{RL}/data"
RENDERING = "tests/rl/data/test_rendering.py"
ORACLES = "tests/rl/test_oracles.py"
BY_HAND = "tests/rl/test_step_by_hand.py"
SGLANG = "plugins/sglang/src/enginehouse_sglang"
SGLANG_LOADS = "tests/sglang/test_loader.py"
WEIGHTS = "core/src/enginehouse/weights"
READ_BACK = "tests/core/weights/test_read_back.py"


@dataclass(frozen=True)
class Mutant:
    """A wrong line.

    Attributes:
        name: name in the review that wrote it.
        what: mistake that the line makes.
        file: path relative to the checkout.
        old: text to replace, which occurs once in the file.
        new: text in its place.
        tests: tests that have to find the mistake, as pytest names them.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def sources(self) -> Path:
        """Folder of the mutant's distribution that is on the path, relative to the checkout."""
        parts = Path(self.file).parts
        return Path(*parts[: parts.index("src") + 1])

    @property
    def module(self) -> str:
        """Module that the mutant changes."""
        return ".".join(Path(self.file).relative_to(self.sources).with_suffix("").parts)

    def applied(self, text: str) -> str:
        """Return the file's text with the wrong line.

        Raises:
            ValueError: the line does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {count} times, and has to have it once")
        return text.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "a01",
        "GAE takes the next row's first state for the next one",
        f"{RL}/advantages/tokens.py",
        "values[1:] * (self.row[1:] == self.row[:-1])",
        "values[1:]",
        (f"{ORACLES}::test_an_advantage_is_theirs",),
    ),
    Mutant(
        "a02",
        "the critic learns returns of normalised advantages",
        f"{RL}/advantages/gae.py",
        "returns=tokens.column(advantages + values)",
        "returns=tokens.column(credits + values)",
        (f"{ORACLES}::test_an_advantage_is_theirs",),
    ),
    Mutant(
        "a03",
        "the last token of a row ends no step where its reward is 0",
        f"{RL}/advantages/process_rewards.py",
        "ends[tokens.last] = True",
        "ends[tokens.last] &= True",
        ("tests/rl/test_advantages.py::test_process_rewards_without_any_are_grpo",),
    ),
    Mutant(
        "a04",
        "the KL term counts whole on samples of older weights",
        f"{RL}/losses/policy.py",
        "losses = losses * weights",
        'losses = losses * weights + (1 - weights) * kl_coefficient * extra.get("kl", 0.0)',
        ("tests/rl/test_losses.py::test_clipped_policy_equals_the_formula",),
    ),
    Mutant(
        "a05",
        "GSPO's ratio has the gradient of the whole sequence, too",
        f"{RL}/losses/gspo.py",
        "tokens.row_means(tokens.log_ratio).detach()",
        "tokens.row_means(tokens.log_ratio)",
        (f"{ORACLES}::test_a_loss_and_its_gradient_are_theirs",),
    ),
    Mutant(
        "a06",
        "CISPO's weight has a gradient",
        f"{RL}/losses/cispo.py",
        "tokens.log_ratio.detach().exp()",
        "tokens.log_ratio.exp()",
        (f"{ORACLES}::test_a_loss_and_its_gradient_are_theirs",),
    ),
    Mutant(
        "a07",
        "rows of older weights count as the engines' difference",
        f"{RL}/steps/mismatch.py",
        '(columns["first_version"] == version) & (columns["weight_version"] == version)',
        '(columns["first_version"] <= version) & (columns["weight_version"] <= version)',
        ("tests/rl/steps/test_mismatch.py::test_samples_of_another_version_are_not_compared",),
    ),
    Mutant(
        "a08",
        "the KL term in the reward goes by the rollout's logprobs",
        f"{RL}/losses/kl.py",
        'old = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"',
        'old = "rollout_logprobs"',
        (BY_HAND,),
    ),
    Mutant(
        "a09",
        "every end but stop counts as cut",
        f"{RL}/steps/updates.py",
        'reason == "length" for reason',
        'reason != "stop" for reason',
        (BY_HAND,),
    ),
    Mutant(
        "a10",
        "the critic warms up for a step less",
        f"{RL}/steps/updates.py",
        "step > critic.warmup_steps",
        "step >= critic.warmup_steps",
        (BY_HAND,),
    ),
    Mutant(
        "a11",
        "the actor's old logprobs are of temperature 1",
        f"{RL}/steps/old_logprobs.py",
        "entropy=True), entropy_gradient=False)",
        "entropy=True), entropy_gradient=False, temperature=1.0)",
        (BY_HAND,),
    ),
    Mutant(
        "a12",
        "the reference's logprobs are of temperature 1",
        f"{RL}/steps/reference.py",
        "make_sampling_outputs(self.plan.config.rollout.sampling)",
        "type(make_sampling_outputs(self.plan.config.rollout.sampling))()",
        (BY_HAND,),
    ),
    Mutant(
        "a13",
        "the mismatch is measured in each update, the later ones of other weights",
        "core/src/enginehouse/roles/workers.py",
        "first_loss if first_loss is not None and not steps else loss",
        "first_loss if first_loss is not None else loss",
        (
            "tests/core/weights/test_mismatch_of_replicas.py"
            "::test_an_update_measures_before_it_changes_a_weight_and_then_no_more",
        ),
    ),
    Mutant(
        "a14",
        "rows that are not to be trained on are",
        "core/src/enginehouse/roles/workers.py",
        "mask.values & batch[TRAINED][mask.row]",
        "mask.values",
        ("tests/rl/test_advantages.py::test_no_token_counts_of_a_row_that_is_not_trained_on",),
    ),
    Mutant(
        "a15",
        "KTO's z0 is against the reference of other rows",
        f"{RL}/preferences/loop.py",
        "policy[number:] - reference[number:]",
        "policy[number:] - reference[:number]",
        ("tests/rl/test_preference_training.py::test_a_policy_that_stays_as_it_is_has_no_divergence_from_itself",),
    ),
    Mutant(
        "a16",
        "KTO's mismatched responses are to their own prompts",
        "plugins/rl/src/enginehouse_rl/data/preferences.py",
        "following = [*range(1, len(starts)), 0]",
        "following = [*range(len(starts))]",
        ("tests/rl/data/test_preferences.py::test_mismatched_rows_have_the_response_of_the_next_row",),
    ),
    Mutant(
        "a17",
        "groups that no step may take any more are not given up",
        f"{RL}/episodes/feed.py",
        "self._schedule.find_overdue(self.version + 1)",
        "self._schedule.find_overdue(self.version)",
        ("tests/rl/episodes/test_feed.py::test_extra_groups_are_left_over_with_staleness_0_and_their_tasks_ended",),
    ),
    Mutant(
        "a18",
        "a baseline is sampled in environments that play episodes by themselves",
        f"{RL}/episodes/policies.py",
        "return self._branch(name, self._is_greedy)",
        "return self._branch(name, False)",
        ("tests/rl/episodes/test_runner.py::test_a_baseline_of_episodes_that_are_played_by_themselves_is_greedy_too",),
    ),
    Mutant(
        "a19",
        "a token is chosen in two rows",
        f"{RL}/episodes/drawn_tokens.py",
        "times[:count] += chosen[:count]",
        "times[:count] += 0",
        (
            "tests/rl/episodes/test_checks.py"
            "::test_a_token_that_was_drawn_once_is_chosen_in_one_of_the_rows_that_begin_alike",
        ),
    ),
    Mutant(
        "a20",
        "an episode is as new as its oldest row",
        "core/src/enginehouse/data/columns.py",
        '("advantages", "metrics"), "max")',
        '("advantages", "metrics"), "min")',
        (
            "tests/rl/episodes/test_episode_rows.py"
            "::test_rows_of_an_episode_are_adjacent_and_what_is_the_episodes_stands_in_the_last",
        ),
    ),
    Mutant(
        "a21",
        "the reward model scores an episode that failed",
        f"{RL}/steps/reward_model.py",
        'samples["weight_version"][last] >= 0',
        'samples["weight_version"][last] >= -1',
        (BY_HAND,),
    ),
    Mutant(
        "a22",
        "the first update that changes weights is not checked for its effect",
        "core/src/enginehouse/weights/effect_check.py",
        "(changed and not (self.reads_all and self._change_seen))",
        "(changed and not self.reads_all)",
        ("tests/core/weights/test_sync.py::test_a_new_connection_replaces_the_old_one_and_checks_the_effect_again",),
    ),
    Mutant(
        "a23",
        "what a replica computed last is not kept, so that one dropped update is not seen",
        "core/src/enginehouse/weights/effect_check.py",
        "        self._scored[key] = now, sums\n        if share",
        "        if share",
        ("tests/core/weights/test_sync.py::test_one_dropped_update_of_many_is_found_below_bfloat16",),
    ),
    Mutant(
        "a24",
        "a step's reward goes to the last token, chosen or not",
        "core/src/enginehouse/engines/transcript.py",
        "last = len(self._mask) - 1 - self._mask[::-1].index(True)",
        "last = len(self._mask) - 1",
        (BY_HAND,),
    ),
    Mutant(
        "a25",
        "what a branch draws is not remembered, so that none of it may be trained on",
        f"{RL}/episodes/drawn_tokens.py",
        "return _RecordedPolicy(self._policy.branch(name), self._drawn)",
        "return self._policy.branch(name)",
        ("tests/rl/episodes/test_checks.py::test_a_part_of_a_completion_and_drawn_tokens_that_are_not_chosen_will_do",),
    ),
    Mutant(
        "a26",
        "the gradient of logprobs lacks the temperature",
        f"{TORCH}/modeling/scores.py",
        "else None, slopes / outputs.temperature",
        "else None, slopes",
        ("tests/torch/modeling/test_scores.py::test_masked_logits_have_no_share_and_no_gradient",),
    ),
    Mutant(
        "a27",
        "a response passes above the threshold only",
        f"{RL}/evaluation/validation.py",
        "rewards >= self.pass_threshold",
        "rewards > self.pass_threshold",
        (
            "tests/rl/evaluation/test_validation.py::test_majority_at_k_is_the_share_of_prompts_that_agree_on_a_right_answer",
        ),
    ),
    Mutant(
        "a28",
        "groups under way at a checkpoint are not drawn again after a resume",
        f"{RL}/episodes/tasks.py",
        '"again": [*under_way, *self._again]',
        '"again": [*self._again]',
        ("tests/rl/episodes/test_feed.py::test_what_was_drawn_and_not_trained_on_is_drawn_again_after_a_resume",),
    ),
    Mutant(
        "a29",
        "the KL coefficient is adapted from the config's each step",
        f"{RL}/steps/kl_in_reward.py",
        "adapt_coefficient(used, mean, self._kl.target)",
        "adapt_coefficient(self._kl.coefficient, mean, self._kl.target)",
        (BY_HAND,),
    ),
    Mutant(
        "a30",
        "all turns of an episode draw by one seed",
        f"{RL}/episodes/policies.py",
        "return self._mix_seed(number) if number else self._seed",
        "return self._seed",
        ("tests/rl/episodes/test_runner.py::test_an_episodes_seeds_depend_on_its_number_and_try_alone",),
    ),
    Mutant(
        "a31",
        "rows have baselines of other groups",
        f"{RL}/episodes/scored_group.py",
        "np.repeat(np.array(baselines, np.float32), sizes)",
        "np.resize(np.array(baselines, np.float32), sizes.sum())",
        (
            "tests/rl/episodes/test_episode_rows.py::test_a_token_of_an_episode_cut_into_rows_has_the_credit_that_it_has_uncut",
        ),
    ),
    Mutant(
        "a32",
        "with a critic the actor's old logprobs are lost",
        f"{RL}/steps/values.py",
        "batch.joined(self._values.result())",
        'batch.drop(["old_logprobs"]).joined(self._values.result())',
        (BY_HAND,),
    ),
    Mutant(
        "b01",
        "tokens that were drawn at another temperature are trained on",
        f"{RL}/episodes/drawn_tokens.py",
        "math.isclose(draw.temperature, temperature, rel_tol=1e-6)",
        "True",
        (
            "tests/rl/episodes/test_checks.py"
            "::test_chosen_tokens_of_another_temperature_than_they_are_trained_at_are_refused",
        ),
    ),
    Mutant(
        "b02",
        "an answer without an action costs nothing",
        "plugins/environments/src/enginehouse_environments/gym.py",
        "step.reward if step.is_action else self._unparsed or 0.0",
        "step.reward if step.is_action else 0.0",
        ("tests/environments/test_games.py",),
    ),
    Mutant(
        "b03",
        "an answer that was cut counts as one that closed itself",
        "plugins/environments/src/enginehouse_environments/dialogue.py",
        'self._stopped = completion.finish_reason == "stop"',
        "self._stopped = True",
        (
            "tests/environments/test_dialogue.py"
            "::test_an_answer_that_was_cut_has_not_closed_itself_whatever_its_last_token",
        ),
    ),
    Mutant(
        "b04",
        "a reward is normalised over its group where the whole step is asked for",
        f"{RL}/rewards/weighted.py",
        '"batch": torch.zeros(len(last), dtype=torch.int64)}',
        '"batch": samples["group"][last]}',
        ("tests/rl/test_weighted_rewards.py::test_a_reward_may_be_normalised_over_its_group_or_the_step",),
    ),
    Mutant(
        "cosine",
        "the cosine schedule is the linear one",
        f"{TORCH}/modeling/schedule.py",
        "(1.0 + math.cos(math.pi * progress)) / 2",
        "1.0 - progress",
        ("tests/torch/test_torch_train_schedule.py::test_cosine_decay_is_half_way_down_in_the_middle",),
    ),
    Mutant(
        "r01",
        "what is learned of a turn begins a token early",
        f"{ROWS}/rendering.py",
        "learned[start : start + len(",
        "learned[start - 1 : start + len(",
        (f"{RENDERING}::test_what_is_learned_is_transformers_mask_of_the_assistant",),
    ),
    Mutant(
        "r02",
        "what begins a text stands there twice",
        f"{ROWS}/rendering.py",
        "lacks_it = begins is not None and tuple(ids[: len(begins)]) != begins",
        "lacks_it = begins is not None",
        (f"{RENDERING}::test_a_prompt_has_what_begins_a_text_once_and_nothing_that_ends_it",),
    ),
    Mutant(
        "r03",
        "a key that Parquet made is kept within a call",
        f"{DATA}/messages.py",
        "key: drop_none(item) for",
        "key: item for",
        (f"{RENDERING}::test_keys_that_the_files_format_made_are_absent_at_every_depth",),
    ),
    Mutant(
        "r04",
        "others' turns of a response are learned",
        f"{ROWS}/rendering.py",
        "if reply.others:",
        "if not reply.text:",
        (f"{RENDERING}::test_what_is_learned_is_transformers_mask_of_the_assistant",),
    ),
    Mutant(
        "r05",
        "a text in a chat ends as a plain one",
        f"{ROWS}/rendering.py",
        "end = self.tokenizer.eos_token_id if special else self._replies.turn_end",
        "end = self.tokenizer.eos_token_id",
        (f"{RENDERING}::test_a_turn_ends_as_the_template_ends_it_and_a_text_as_the_tokenizer_does",),
    ),
    Mutant(
        "r06",
        "a response is tokenized by itself",
        f"{ROWS}/rendering.py",
        "return whole[len(prompt) :]",
        "return np.array(self._encode([reply])[0], dtype=np.int32)",
        (f"{RENDERING}::test_prompt_and_response_are_one_text",),
    ),
    Mutant(
        "r07",
        "what a template writes after the end of a turn is learned",
        f"{ROWS}/rendering.py",
        "return ids[:place]",
        "return ids",
        (f"{RENDERING}::test_a_chat_is_what_transformers_makes_of_the_whole",),
    ),
    Mutant(
        "r08",
        "what ends a text ends a prompt",
        f"{ROWS}/rendering.py",
        "special and begins is None",
        "special",
        (f"{RENDERING}::test_a_prompt_has_what_begins_a_text_once_and_nothing_that_ends_it",),
    ),
    Mutant(
        "r09",
        "a reward is not shown the marks of a response",
        "core/src/enginehouse/engines/transcript.py",
        "skip_special_tokens=False",
        "skip_special_tokens=True",
        (f"{RENDERING}::test_the_marks_of_a_response_stay_and_its_end_goes",),
    ),
    Mutant(
        "r10",
        "what the template began of an answer is none of it",
        f"{DATA}/templates.py",
        "return request.partition(head)[2]",
        'return ""',
        (f"{RENDERING}::test_what_the_template_began_is_of_the_answer",),
    ),
    Mutant(
        "r11",
        "a rollout goes on after the end of a turn",
        f"{RL}/episodes/policies.py",
        "else text_ends(tokenizer)",
        "else ()",
        ("tests/rl/episodes/test_runner.py::test_what_ends_a_text_of_the_tokenizer_ends_one_of_any_engine",),
    ),
    Mutant(
        "r12",
        "a row that nobody could score stays in its group",
        f"{RL}/episodes/runner.py",
        "if not self._leaves_out or not any(",
        "if self._leaves_out or not any(",
        ("tests/rl/episodes/test_runner.py::test_a_row_that_nobody_could_score_is_left_out_of_its_group",),
    ),
    Mutant(
        "r13",
        "arguments of calls as text become JSON of JSON",
        f"{DATA}/templates.py",
        "return decoded if isinstance(decoded, dict) else arguments",
        "return arguments",
        (f"{RENDERING}::test_arguments_of_a_call_are_the_same_as_an_object_and_as_text",),
    ),
    Mutant(
        "r14",
        "a template of parts alone loses a text",
        f"{DATA}/templates.py",
        "    return _TEXT in parts and _TEXT not in text",
        "    return False",
        (f"{RENDERING}::test_a_template_of_parts_alone_loses_no_text",),
    ),
    Mutant(
        "r15",
        "a chat whose template ends no turn has no end",
        f"{ROWS}/rendering.py",
        "if end is None or turn_end(self.tokenizer) is not None or",
        "if end is not None or",
        (f"{RENDERING}::test_a_chat_whose_template_ends_no_turn_ends_with_the_end_of_sequence",),
    ),
    Mutant(
        "r16",
        "what a template writes behind a whole chat parts its turns",
        f"{ROWS}/reply_text.py",
        "before = turn + end if len(turn) >= start",
        'before = "" if len(turn) >= start',
        (f"{RENDERING}::test_what_a_template_writes_behind_the_end_of_a_turn_is_not_learned_and_parts_no_turns",),
    ),
    Mutant(
        "w01",
        "SGLang loads a version whose memory has changed since it was staged",
        f"{SGLANG}/loader.py",
        "    with source.checked(rank, ranks):\n        missing",
        "    if True:\n        missing",
        (f"{SGLANG_LOADS}::test_memory_that_differs_from_its_checksum_fails_the_load_by_name",),
    ),
    Mutant(
        "w02",
        "SGLang serves a version that lacks a part of a layer",
        f"{SGLANG}/loader.py",
        "missing = find_unfilled(model, fill)",
        "missing = find_unfilled(model, fill) and []",
        (f"{SGLANG_LOADS}::test_a_version_that_does_not_fill_the_model_fails_by_name",),
    ),
    Mutant(
        "w03",
        "SGLang's function is wrapped anew at each update, ever deeper",
        f"{SGLANG}/loader.py",
        "@cache\ndef",
        "def",
        (f"{SGLANG_LOADS}::test_each_update_is_processed_and_compared_once_and_reports_what_the_model_holds",),
    ),
    Mutant(
        "w04",
        "SGLang's model is not compared with the version after the load",
        f"{SGLANG}/loader.py",
        "lambda: loaded.compare(model)",
        "lambda: loaded.source.close()",
        (f"{SGLANG_LOADS}::test_a_weight_that_changes_between_the_load_and_the_end_of_the_update_fails_it_by_name",),
    ),
    Mutant(
        "w05",
        "SGLang does not pack new weights for its kernels",
        f"{SGLANG}/loader.py",
        "        with loaded.read_back.watch():\n            process(model, target_device)\n",
        "",
        (f"{SGLANG_LOADS}::test_each_update_is_processed_and_compared_once_and_reports_what_the_model_holds",),
    ),
    Mutant(
        "w06",
        "a parameter that does not hold what was sent is not named",
        f"{WEIGHTS}/read_back.py",
        "            if not equal:\n                wrong",
        "            if not equal and first:\n                wrong",
        (f"{SGLANG_LOADS}::test_a_weight_that_changes_between_the_load_and_the_end_of_the_update_fails_it_by_name",),
    ),
    Mutant(
        "w07",
        "a parameter counts as read back although ranks have compared a part of it",
        f"{WEIGHTS}/read_back.py",
        "count == torch.Size(shape).numel()",
        "count",
        (f"{READ_BACK}::test_ranks_together_have_read_a_parameter_of_which_they_hold_every_element",),
    ),
    Mutant(
        "w08",
        "a parameter counts as read back although ranks have compared other versions of it",
        f"{WEIGHTS}/read_back.py",
        "len({*sums}) == 1 and",
        "sums and",
        (f"{READ_BACK}::test_ranks_that_compared_different_versions_have_read_none",),
    ),
    Mutant(
        "w09",
        "an engine that stages while it generates is paused at the start of an update",
        f"{WEIGHTS}/receiver.py",
        "pauses = plan.lends or not self._stages_while_generating",
        "pauses = True",
        (
            "tests/core/weights/test_receiver.py::test_an_engine_that_stages_while_it_generates_is_paused_only_for_the_switch",
        ),
    ),
    Mutant(
        "trust",
        "a tokenizer's code is run unasked",
        "plugins/rl/src/enginehouse_rl/data/rendering.py",
        "trust_remote_code=trust_remote_code",
        "trust_remote_code=True",
        ("tests/rl/test_code_of_models.py::test_whatever_loads_a_model_runs_its_code_only_if_asked",),
    ),
)


def run(mutant: Mutant, log: Path) -> str:
    """Run a mutant's tests in a separate process.

    Returns:
        "killed", "alive", or what is wrong with the mutant.
    """
    with tempfile.TemporaryDirectory(prefix=f"mutant-{mutant.name}-") as folder:
        sources = Path(folder, "src")
        shutil.copytree(ROOT / mutant.sources, sources)
        changed = sources / Path(mutant.file).relative_to(mutant.sources)
        try:
            changed.write_text(mutant.applied(changed.read_text()))
        except ValueError as error:
            return str(error)
        process = get_context("fork").Process(target=_test, args=(mutant, sources, log))
        process.start()
        process.join(LONGEST_SECONDS)
        if process.exitcode is None:
            process.kill()
            return "killed"
        return {0: "alive", 1: "killed"}.get(process.exitcode, f"its tests ended with {process.exitcode}: {log}")


def _test(mutant: Mutant, sources: Path, log: Path) -> None:
    """Run a mutant's tests in this process. Exit with pytest's exit code, or with 9 if another module was tested."""
    import pytest

    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(sources))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ("-q", "-x", "-n0", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", "--hypothesis-seed=0")
    code = int(pytest.main([*options, *mutant.tests]))
    file_tested = Path(importlib.import_module(mutant.module).__file__ or "")
    sys.stdout.flush()
    os._exit(code if file_tested.is_relative_to(sources) else 9)


def run_all(mutants: Sequence[Mutant], jobs: int) -> bool:
    """Run mutants, `jobs` at a time, and print a table; return True if all were killed."""
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    logs = Path(tempfile.mkdtemp(prefix="mutants-"))
    outcomes: dict[str, str] = {}

    def tell(mutant: Mutant) -> None:
        begun = time.monotonic()
        outcomes[mutant.name] = outcome = run(mutant, logs / f"{mutant.name}.log")
        print(f"{mutant.name:7}{outcome:8}{time.monotonic() - begun:6.1f} s  {mutant.what}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(tell, mutants))
    left = {name: outcome for name, outcome in outcomes.items() if outcome != "killed"}
    print(f"{len(outcomes) - len(left)} of {len(outcomes)} killed; what pytest said: {logs}")
    for name, outcome in sorted(left.items()):
        print(f"  {name}: {outcome}")
    return not left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="See whether quick tests find lines that are wrong.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(mutant.name for mutant in MUTANTS)])
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="so many at a time")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    return 0 if run_all(chosen, given.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
