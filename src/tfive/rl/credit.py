"""How a method credits the tokens of given thoughts at one moment, for reports and never for an update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Credit:
    """Token by token what an update would rest on; a leading axis C counts critics. Masked entries are zero."""

    values_CBRT: Tensor
    """V(s_t) of each critic, before action t."""
    advantages_CBRT: Tensor
    """Ã_t of each critic, normalised as the method does it."""
    returns_BRT: Tensor
    """The full return from action t on, which V(s_t) predicts (eq:critic-return)."""
    weight_BRT: Tensor | None = None
    """w of the first critic's advantage (eq:twin-advantage); None where a method mixes none, or not by a weight."""
    mixed_BRT: Tensor | None = None
    """The advantage the actor would get."""
