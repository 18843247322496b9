"""The Bradley-Terry loss fits scores to preferences: the difference of two scores is the log odds of the preference.

Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 1; the margin is
from Touvron et al. 2023, "Llama 2", eq. 2.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from enginehouse_rl.preferences.slopes import Judgement, accuracy, differentiate, make_leaf


def bradley_terry(scores: torch.Tensor, margin: torch.Tensor | None = None) -> Judgement:
    """Compute `-log sigmoid(s_w - s_l - margin)` of each pair.

    Args:
        scores: The scores `(2 * pairs,)`: for each pair the better response, then the worse.
        margin: The minimum difference wanted for each pair, `(pairs,)`; None: 0.
    """
    scores = make_leaf(scores)
    better, worse = scores.view(-1, 2).unbind(1)
    above = better - worse
    losses = -logsigmoid(above if margin is None else above - margin.double())
    metrics = {"accuracy": accuracy(above), "margin": above, "rewards/chosen": better, "rewards/rejected": worse}
    return differentiate(losses, scores, metrics)
