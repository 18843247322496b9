"""The guessing game, and games of gymnasium, by a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from enginehouse.engines.environment import Episode, Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import DataError, UserError
from enginehouse.recipes import chat
from enginehouse_environments.game_processes import GameLost
from enginehouse_environments.games import GuessingGame
from enginehouse_environments.gym import Game, Gym, Rules, plain

LAKE = {"is_slippery": False, "desc": list(chat.LAKE)}
MOVES = list(chat.MOVES)
TOKENIZER = chat.make_tokenizer()
FRESH = {"is_slippery": False}
