"""Learned delimiters: the two input embeddings a run may train instead of writing its delimiters as text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.tree.layout import ThoughtPlan


class Delimiters(nn.Module):
    """The two learned input embeddings, opening and close; they never are vocabulary rows."""

    def __init__(self, weight_2D: Tensor) -> None:
        super().__init__()
        self.weight_2D = nn.Parameter(weight_2D.detach().clone().float())

    @staticmethod
    def from_model(model: PreTrainedModel, plan: ThoughtPlan) -> Delimiters:
        """Started from the mean input embedding of each delimiter's text."""
        embedding = model.get_input_embeddings()
        device = next(embedding.parameters()).device
        rows = [embedding(torch.tensor(ids, device=device)).mean(0) for ids in (plan.open_ids, plan.close_ids)]
        return Delimiters(torch.stack(rows))
