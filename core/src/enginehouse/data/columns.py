"""Every column of a step's batch: what it holds, who adds it and who reads it.

A batch may have others, which an advantage or a stage of one's own adds for a loss.
This imports no torch: `plan` reads it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Column(NamedTuple):
    """A column of a step's batch.

    Attributes:
        name: the name.
        each: what an entry is of: `"token"` is a ragged column with the offsets of `input_ids`, `"row"` a tensor of one
            number a row, `"object"` one Python object a row. Texts may travel as their bytes.
        dtype: the type of its numbers, or of its objects.
        added_by: who adds it: `"samples"` are the episodes of a step as they are scored, others are stages of a step.
        read_by: who reads it.
        of_episode: what an episode of several rows has of a column by row: its last row's, or what all rows make.
    """

    name: str
    each: Literal["token", "row", "object"]
    dtype: str
    added_by: str
    read_by: tuple[str, ...]
    of_episode: Literal["last", "sum", "min", "max"] = "last"


COLUMNS = (
    Column("input_ids", "token", "int64", "samples", ("engines", "advantages")),
    Column("loss_mask", "token", "bool", "samples", ("engines", "advantages", "losses")),  # what the policy chose
    Column("rollout_logprobs", "token", "float32", "samples", ("advantages", "losses", "files")),
    Column("token_rewards", "token", "float32", "samples", ("advantages",)),  # or a KL term; where there are none, 0
    Column("reward", "row", "float32", "samples", ("advantages", "metrics", "files"), "sum"),
    Column("rewards", "row", "float32", "samples", ("advantages",)),  # (rows, k), each by itself
    Column("baseline", "row", "float32", "samples", ("advantages",)),  # the reward of the prompt's greedy response
    Column("group", "row", "int64", "samples", ("advantages", "metrics")),
    Column("episode", "row", "int64", "samples", ("metrics",)),
    Column("response_tokens", "row", "int64", "samples", ("advantages", "metrics"), "sum"),
    Column("first_version", "row", "int64", "samples", ("advantages", "metrics"), "min"),
    Column("weight_version", "row", "int64", "samples", ("advantages", "metrics"), "max"),
    Column("finish_reason", "object", "str", "samples", ("advantages", "metrics", "files")),
    Column("reward_figures", "object", "dict", "samples", ("advantages", "metrics", "files")),
    Column("reward_failure", "object", "str", "samples", ("advantages", "metrics", "files")),
    Column("trace", "object", "Trace", "samples", ("metrics", "files")),
    Column("versions", "object", "list", "samples", ("files",)),  # of each token, where a row is of several
    Column("prompt", "object", "text", "samples", ("files",)),
    Column("response", "object", "text", "samples", ("files",)),
    Column("answer", "object", "text", "samples", ("files",)),
    Column("old_logprobs", "token", "float32", "actor", ("advantages", "losses")),  # else the rollout's
    Column("reference_logprobs", "token", "float32", "reference", ("advantages", "losses")),
    Column("kl_penalty", "row", "float32", "KL term", ("advantages",), "sum"),  # absent without such a term
    Column("values", "token", "float32", "critic", ("advantages", "losses")),
    Column("advantages", "token", "float32", "advantage", ("losses", "files")),  # or by row, spread over its tokens
    Column("returns", "token", "float32", "advantage", ("losses",)),  # what the critic's loss compares with
    Column("trained", "row", "bool", "update", ("engines",)),  # whether the row's tokens count
    Column("minibatch", "row", "int64", "update", ("engines",)),  # (rows, epochs)
)
BY_NAME = {column.name: column for column in COLUMNS}
TEXTS = tuple(column.name for column in COLUMNS if column.dtype == "text")
FOR_PEOPLE = tuple(column.name for column in COLUMNS if column.each == "object")
"""Columns of samples that nothing is trained on: objects, and texts."""
NOTES = tuple(name for name in FOR_PEOPLE if name not in TEXTS)
FOR_ADVANTAGES = tuple(column.name for column in COLUMNS if "advantages" in column.read_by)
"""What an advantage may need; for one that does, a run has the stage that adds it."""
OF_SAMPLES = ("old_logprobs", "kl_penalty", *(column.name for column in COLUMNS if column.added_by == "samples"))
"""What a stage may need of the samples, whatever stages came before: the rollout's logprobs stand in for the actor's,
and without a KL term nothing is paid for it."""
