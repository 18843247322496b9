"""Every column of a step's batch: its content, its source and its readers.

A batch may have further columns that an advantage or a stage of a plugin adds for a loss. This module does not import
torch, because `enginehouse plan` imports this module.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Column(NamedTuple):
    """A column of a step's batch.

    Attributes:
        each: kind of an entry. `"token"`: a ragged column with the offsets of `input_ids`; `"row"`: a tensor with one
            number per row; `"object"`: one Python object per row. A text may be stored as its bytes.
        dtype: type of the numbers or objects.
        added_by: source of the column. `"samples"` are the scored episodes of a step; others are stages of a step.
        read_by: parts of a run that read the column. `"files"` are the sample files of the run directory.
        of_episode: rule for the value of an episode with several rows, if the column has one number per row: the
            number of the episode's last row, or the sum, minimum or maximum of its rows.
    """

    name: str
    each: Literal["token", "row", "object"]
    dtype: str
    added_by: str
    read_by: tuple[str, ...]
    of_episode: Literal["last", "sum", "min", "max"] = "last"


COLUMNS = (
    Column("input_ids", "token", "int64", "samples", ("engines", "advantages")),
    Column("loss_mask", "token", "bool", "samples", ("engines", "advantages", "losses")),  # the policy's own tokens
    Column("rollout_logprobs", "token", "float32", "samples", ("advantages", "losses", "files")),
    Column("token_rewards", "token", "float32", "samples", ("advantages",)),  # with the KL term; 0 if there are none
    Column("reward", "row", "float32", "samples", ("advantages", "metrics", "files"), "sum"),
    Column("rewards", "row", "float32", "samples", ("advantages",)),  # (rows, k), each reward separately
    Column("baseline", "row", "float32", "samples", ("advantages",)),  # reward of the prompt's greedy response
    Column("group", "row", "int64", "samples", ("advantages", "metrics")),
    Column("episode", "row", "int64", "samples", ("metrics",)),
    Column("response_tokens", "row", "int64", "samples", ("advantages", "metrics"), "sum"),
    Column("first_version", "row", "int64", "samples", ("advantages", "metrics"), "min"),
    Column("weight_version", "row", "int64", "samples", ("advantages", "metrics"), "max"),
    Column("finish_reason", "object", "str", "samples", ("advantages", "metrics", "files")),
    Column("reward_figures", "object", "dict", "samples", ("advantages", "metrics", "files")),
    Column("reward_failure", "object", "str", "samples", ("advantages", "metrics", "files")),
    Column("trace", "object", "Trace", "samples", ("metrics", "files")),
    Column("versions", "object", "list", "samples", ("files",)),  # version of each token, if a row has several
    Column("prompt", "object", "text", "samples", ("files",)),
    Column("response", "object", "text", "samples", ("files",)),
    Column("answer", "object", "text", "samples", ("files",)),
    Column("old_logprobs", "token", "float32", "actor", ("advantages", "losses")),  # absent: the rollout's are used
    Column("reference_logprobs", "token", "float32", "reference", ("advantages", "losses")),
    Column("kl_penalty", "row", "float32", "KL term", ("advantages",), "sum"),  # absent without a KL term
    Column("values", "token", "float32", "critic", ("advantages", "losses")),
    Column("advantages", "token", "float32", "advantage", ("losses", "files")),  # or one number for a row's tokens
    Column("returns", "token", "float32", "advantage", ("losses",)),  # targets of the critic's loss
    Column("trained", "row", "bool", "update", ("engines",)),  # True if the loss counts the row's tokens
    Column("minibatch", "row", "int64", "update", ("engines",)),  # (rows, epochs)
)
BY_NAME = {column.name: column for column in COLUMNS}
TEXTS = tuple(column.name for column in COLUMNS if column.dtype == "text")
FOR_PEOPLE = tuple(column.name for column in COLUMNS if column.each == "object")
"""Columns of samples that only people read: objects and texts."""
NOTES = tuple(name for name in FOR_PEOPLE if name not in TEXTS)
FOR_ADVANTAGES = tuple(column.name for column in COLUMNS if "advantages" in column.read_by)
"""Columns that an advantage may need. If an advantage needs a column, the run includes the stage that adds it."""
OF_SAMPLES = ("old_logprobs", "kl_penalty", *(column.name for column in COLUMNS if column.added_by == "samples"))
"""Columns that any stage may need, because they always have a value: the rollout's logprobs replace missing logprobs of
the actor, and the KL penalty is 0 without a KL term."""
