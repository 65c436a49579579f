"""Steps of the actor and passes of critics and gate ask the device for numbers when they are over, not for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from test_actor import BOTH, acting, actor_on
from test_critics import fitting, twins
from torch.utils._python_dispatch import TorchDispatchMode

from stage import gpt2
from tfive.rl.gate import Experts, Gate
from tfive.rl.settings import GateSettings

pytestmark = pytest.mark.model


class Asked(TorchDispatchMode):
    """Counts how often a loss or norm, a number that is not whole, is asked for as a Python number."""

    times = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.times += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def asked(work: Callable[[], Any]) -> int:
    with Asked() as counted:
        work()
    return counted.times


def test_losses_of_micro_batches_stay_on_the_device() -> None:
    counts = []
    for rows in (8, 1):
        model = gpt2()
        actor, record = actor_on(model, rows=rows, anchor=BOTH), acting(model)
        counts.append(asked(partial(actor.step, record)))
    assert counts[0] == counts[1]


def test_losses_of_a_fitting_pass_stay_on_the_device() -> None:
    record, counts = fitting(), []
    for rows in (8, 1):
        critics = twins("head", rows=rows, minibatches=2)
        frozen = critics.evaluate(record).values_2BRT
        counts.append(asked(partial(critics.fit_pass, record, frozen, 1, 0, warmup=True)))
    assert counts[0] == counts[1]


def test_losses_of_the_gates_minibatches_stay_on_the_device() -> None:
    (first, second), (with_IHD, without_IHD) = torch.randn(2, 8, 3), torch.randn(2, 8, 3, 4)
    mask_IH = torch.ones(8, 3, dtype=torch.bool)
    predictions = Experts(first, second, with_IHD, without_IHD, mask_IH, torch.arange(8))
    gate = Gate(4, GateSettings(passes=2), seed=0, device=torch.device("cpu"), batch=2)
    # How many of the 2 · 4 updates were refused, and the best constant gate.
    assert asked(partial(gate.fit, predictions, 1)) == 2
