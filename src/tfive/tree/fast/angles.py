"""Rotary angles by position, found once: a step of sampling looks them up by one kernel, where models compute them anew
by ten or so.

Local shape letters: P positions, t rotated features, n nodes of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.attention import Attending
from tfive.tree.fast.fused import Angles
from tfive.tree.hf import Backbone


def handed_angles(backbone: Backbone, position_Bn: Tensor, tree: Attending, dtype: torch.dtype) -> Angles | None:
    """Cosines and sines, each `[B, n, t]`, that the model hands its blocks in a pass of this precision over nodes at
    these positions; None where it hands them nothing of the kind."""
    handed: list[Any] = []

    def note(hidden_states: Tensor, *_: Any, **given: Any) -> Tensor:
        handed.append(given.get("position_embeddings"))
        return hidden_states

    embeds = position_Bn.new_zeros(*position_Bn.shape, backbone.config.hidden_size, dtype=dtype)
    backbone.run(embeds, position_Bn, tree, fused=[note] * len(backbone.blocks))
    if not isinstance(handed[0], tuple) or len(handed[0]) != 2:
        return None
    return handed[0][0], handed[0][1]


def angle_table(backbone: Backbone, positions: int, tree: Attending, like: Tensor) -> Tensor | None:
    """The same `[P, 2t]` of the first positions, on the device and in the precision of `like`; None where they are not
    the work of one module, or of the position alone."""
    module = getattr(backbone.base, "rotary_emb", None)
    kind = getattr(module, "rope_type", None)
    if module is None or not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return None
    angles = handed_angles(backbone, torch.arange(positions, device=like.device)[None], tree, like.dtype)
    if angles is None or any(part.shape[:2] != (1, positions) for part in angles):
        return None
    return torch.cat(angles, -1)[0]


def looked_up(table_Pt: Tensor, position_Bn: Tensor) -> Angles:
    """The angles of nodes at these positions; those of a node stand side by side."""
    cos, sin = F.embedding(position_Bn, table_Pt).chunk(2, -1)
    return cos, sin
