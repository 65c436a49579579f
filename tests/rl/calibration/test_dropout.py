"""Masks of dropout that are drawn once: the very ones torch draws, for whoever asks after the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tfive.rl.calibration.dropout import Dropout, MaskTape, taped

SHAPES = ((5, 7), (3, 4, 2), (5, 7), (11,))
CPU = torch.device("cpu")


def dropped(layer: nn.Module, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [layer(torch.full(shape, 0.3)) for shape in SHAPES]


@pytest.mark.parametrize("room", [0, 40, 10_000])
def test_a_tape_gives_what_torch_would_draw(room: int) -> None:
    expected = dropped(nn.Dropout(0.4).train())
    layer, tape = Dropout(0.4).train(), MaskTape(room)
    for _ in range(3):
        with taped(layer, tape, CPU):
            assert all(a.equal(b) for a, b in zip(dropped(layer), expected))
    assert all(a.equal(b) for a, b in zip(dropped(layer), expected))


def test_a_longer_reader_goes_on_where_a_shorter_one_stopped() -> None:
    expected = dropped(nn.Dropout(0.4).train())
    layer, tape = Dropout(0.4).train(), MaskTape()
    with taped(layer, tape, CPU):
        torch.manual_seed(0)
        assert layer(torch.full(SHAPES[0], 0.3)).equal(expected[0])
    with taped(layer, tape, CPU):
        assert all(a.equal(b) for a, b in zip(dropped(layer), expected))


def test_what_is_kept_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tape = Dropout(0.4).train(), MaskTape()
    with taped(layer, tape, CPU):
        dropped(layer)
    monkeypatch.setattr(torch.Tensor, "bernoulli_", None)
    with taped(layer, tape, CPU):
        dropped(layer)


def test_another_shape_is_an_error_and_evaluation_drops_nothing() -> None:
    layer, tape = Dropout(0.4).train(), MaskTape()
    with taped(layer, tape, CPU):
        layer(torch.ones(4))
        layer.eval()
        assert layer(torch.ones(4)).equal(torch.ones(4))
    layer.train()
    with taped(layer, tape, CPU), pytest.raises(ValueError, match="shape"):
        layer(torch.ones(5))
