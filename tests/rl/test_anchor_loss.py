"""The anchors' losses and what they are means over, each against a loop."""

import math

import pytest
import torch
from torch import Tensor

from tfive.rl.losses import anchor_counts, anchor_loss, before_answers


def _case() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    after, plain = (-4 * torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return after.requires_grad_(), plain.requires_grad_(), torch.rand(3, 5, generator=generator) < 0.7


def test_an_anchor_sums_negative_log_probabilities() -> None:
    log_prob, _, mask = _case()
    loss = anchor_loss(log_prob, mask)
    assert float(loss.detach()) == pytest.approx(-sum(float(x) for x in log_prob.detach()[mask]), abs=1e-12)
    loss.backward()
    assert log_prob.grad is not None
    assert torch.equal(log_prob.grad, -mask.double())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
def test_a_mixture_anchor_mixes_probabilities_and_teaches_the_prediction_after_the_thought_alone(share: float) -> None:
    after, plain, mask = _case()
    loss = anchor_loss(after, mask, plain, share)
    loss.backward()
    want = 0.0
    assert after.grad is not None
    for i in range(3):
        for j in range(5):
            mine, other = share * math.exp(after[i, j].item()), (1 - share) * math.exp(plain[i, j].item())
            want -= math.log(mine + other) if mask[i, j] else 0.0
            slope = -mine / (mine + other) if mask[i, j] else 0.0
            assert after.grad[i, j].item() == pytest.approx(slope, abs=1e-12)
    assert loss.item() == pytest.approx(want, abs=1e-12)
    assert plain.grad is None


def test_counts_stop_at_the_ends_of_documents_and_rows() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    positions = torch.tensor([[1, 3], [4, -1]])
    # Row 0: pairs (0,1) (1,2) (3,4); row 1: five. Behind 1: token 2; behind 3: token 4; behind 4: token 5.
    assert anchor_counts(document, positions, horizon=3) == (8, 3)
    assert anchor_counts(document, positions[:, 1:], horizon=1) == (8, 1)


def test_answers_are_the_tokens_after_positions_up_to_the_row_s_end() -> None:
    positions = torch.tensor([[1, 3], [4, -1]])
    # The marked token is the one before an answer's: behind 1 stand 2 and 3, behind 3 stand 4 and 5, behind 4 stands 5.
    assert before_answers(positions, 6, 2).int().tolist() == [[0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert before_answers(positions, 6, 1).int().tolist() == [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert not before_answers(torch.full((2, 3), -1), 6, 4).any()


def test_counts_without_answers_leave_out_what_follows_positions() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    positions = torch.tensor([[1, 3], [4, -1]])
    # Of the pairs (0,1) (1,2) (3,4) only the first stays; of five in row 1 all but (4,5). The other count stays.
    assert anchor_counts(document, positions, 1, answers=False) == (1 + 4, 3)
    assert anchor_counts(document, positions, 1) == (8, 3)
