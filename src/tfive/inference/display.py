"""Predictions and written texts as a notebook shows them: tokens coloured by what thoughts changed, thoughts between.

Styles stand on the elements themselves: a notebook may strip style sheets, and nothing here needs a script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import torch
from torch import Tensor

_FULL = 2.0
"""Nats at which a colour is strongest."""
_THOUGHT = "border:1px solid #8888;border-radius:4px;padding:0 .25em;margin:0 .15em;font-style:italic"


def coloured(texts: Sequence[str], gains: Tensor, thoughts: Mapping[int, str], note: str) -> str:
    """HTML of tokens with their gains in nats (NaN: no thought serves); `thoughts` by the token they stand after, −1
    before the first."""
    parts = [_thought(thoughts[-1])] if -1 in thoughts else []
    for number, (text, gain) in enumerate(zip(texts, gains.tolist())):
        parts.append(_token(text, gain))
        if number in thoughts:
            parts.append(_thought(thoughts[number]))
    body = "".join(parts)
    return (
        f'<div style="font-family:ui-monospace,monospace;white-space:pre-wrap;line-height:1.7">{body}</div>'
        f'<div style="font-size:85%;opacity:.8">{escape(note)}</div>'
    )


def summary(gains: Tensor, thoughts: int) -> str:
    """One line about all tokens."""
    served = ~gains.isnan()
    if not bool(served.any()):
        return "no thoughts"
    mean = float(torch.nan_to_num(gains).mean())
    return f"{thoughts} thoughts serve {int(served.sum())} of {len(gains)} tokens; {mean:+.4f} nats per token"


def _shown(text: str) -> str:
    """Text as HTML shows it; control characters by their pictures."""
    return escape("".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text))


def _token(text: str, gain: float) -> str:
    shown = _shown(text)
    if gain != gain:
        return f"<span>{shown}</span>"
    strength = min(abs(gain) / _FULL, 1.0) * 0.6
    colour = "46,160,67" if gain >= 0 else "218,54,51"
    style = f"background:rgba({colour},{strength:.2f})"
    return f'<span style="{style}" title="{gain:+.3f} nats">{shown}</span>'


def _thought(text: str) -> str:
    return f'<span style="{_THOUGHT}" title="hidden thought">{_shown(text)}</span>'
