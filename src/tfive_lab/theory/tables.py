"""Tabular heads: one number per visible prefix and action, one per context. In a finite world they can express
anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive_lab.theory.worlds import World


class TableWeight(nn.Module):
    """w(s, a) = sigmoid(table); all ½ at first."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.logit = nn.Parameter(torch.zeros(states * actions, dtype=torch.float64))

    def forward(self, inputs: WeightInputs) -> Tensor:
        number = inputs.prefix_NTD[..., 0].long() * self.actions + inputs.action_NTE[..., 0].long()
        return torch.sigmoid(self.logit[number])


class TableMean(nn.Module):
    """h(c) = table, all 0 at first. With the scoring features blanked it falls back to one number per visible
    prefix."""

    def __init__(self, contexts: int, states: int) -> None:
        super().__init__()
        self.context = nn.Parameter(torch.zeros(contexts, dtype=torch.float64))
        self.state = nn.Parameter(torch.zeros(states, dtype=torch.float64))

    def forward(self, inputs: MeanInputs) -> Tensor:
        number = inputs.scoring_NTF[..., 0].long()
        return self.context[number] + self.state[inputs.prefix_NTD[..., 0].long()]


def table_heads(world: World) -> tuple[TableWeight, TableMean]:
    """Fresh heads that fit the world."""
    states, actions = world.log_q_SA.shape
    return TableWeight(states, actions), TableMean(int(world.context_NT.max()) + 1, states)
