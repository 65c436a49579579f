"""Running sums for deterministic runs: what `cumsum` gives, from products with a fixed order of addition."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tfive
from tfive.tree.running_sum import running_sum, running_sum_by_products

ELSEWHERE = {
    "tree/running_sum.py": 1,
    "tree/recurrent/delta_rule.py": 1,
    "tree/fast/delta_kernel.py": 1,
    "tree/fast/mixer.py": 1,
    "tree/picks.py": 1,
}
"""Scans of a device's tensors: the one wrapped here, and four of whole numbers, which are exact in any order."""


@pytest.mark.parametrize("width", [1, 12, 512, 513, 3001])
def test_products_give_the_sums_and_their_gradients(width: int) -> None:
    values = torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [values.clone().requires_grad_() for _ in range(2)]
    ours, torchs = running_sum_by_products(leaves[0]), leaves[1].cumsum(-1)
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
    for found in (ours, torchs):
        found.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-11, atol=1e-10)


def test_elsewhere_it_is_cumsum_itself() -> None:
    values = torch.randn(4, 700)
    assert running_sum(values).equal(values.cumsum(-1))


def test_every_other_scan_goes_through_it() -> None:
    source = Path(tfive.__file__).parent
    found: dict[str, int] = {}
    for path in (*source.glob("tree/**/*.py"), source / "rl" / "reward.py", source / "rl" / "gae.py"):
        count = len(re.findall(r"(?<!tl)\.cumsum\(", path.read_text("utf-8")))
        found |= {path.relative_to(source).as_posix(): count} if count else {}
    assert found == ELSEWHERE
