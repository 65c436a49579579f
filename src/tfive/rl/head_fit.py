"""Fitting value heads in replayed steps: of a critic that trains its head alone a step is some hundred small kernels,
which take longer to launch than to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.distributed.world import World
from tfive.rl.critic import BaseActivations
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.trajectory import placed
from tfive.rl.unseen import UnseenSteps
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep

LossOf = Callable[[Tensor], Tensor]
"""The loss summed over the valid steps of some texts, given their rows on the device."""


@dataclass(frozen=True)
class _Fit:
    """The steps of one critic on one fitting set."""

    given: tuple[object, ...]
    """What they were made for: the very objects."""
    step_on: ReplayedStep
    steps: UnseenSteps
    sum_1: Tensor
    """The sum of the losses so far."""


class HeadFits:
    """The steps of all critics on the fitting set at hand. A graph serves all passes over it."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self.graphs = graphs
        self._fits: dict[int, _Fit] = {}
        self._whole: tuple[Sequence[BaseActivations], BaseActivations] | None = None

    def whole(self, parts: Sequence[BaseActivations], size: int, texts: int) -> BaseActivations | None:
        """The activations of all texts out of micro-batches of `size`, once for all critics; None where memory does
        not hold them a second time."""
        if self._whole is None or self._whole[0] is not parts:
            self._whole = None
            try:
                joined = parts[0] if len(parts) == 1 else BaseActivations.gathered(parts, size, torch.arange(texts))
            except torch.OutOfMemoryError:
                return None
            self._whole = parts, joined
        return self._whole[1]

    def run(
        self,
        critic: int,
        optimizer: MasterOptimizer,
        loss_of: LossOf,
        given: tuple[object, ...],
        work: Sequence[tuple[Tensor, int]],
        device: torch.device,
        world: World,
    ) -> tuple[float, bool]:
        """One step for the rows and the count of valid steps of every minibatch of `work`: the sum of their losses, and
        whether every gradient was finite. `loss_of` is a function of `given` and of the critic's weights alone."""
        fit = self._fits.get(critic)
        if fit is None or any(one is not other for one, other in zip(fit.given, given, strict=True)):
            fit = self._fits[critic] = self._made(optimizer, loss_of, given, device)
        fit.sum_1.zero_()
        counts = placed(torch.tensor([count for _, count in work], dtype=torch.float64), device)
        for number, (rows, _) in enumerate(world.beating(work)):
            fit.step_on(placed(rows, device), counts[number])
        refused = fit.steps.settle(len(work))
        return float(fit.sum_1), not refused

    def _made(
        self, optimizer: MasterOptimizer, loss_of: LossOf, given: tuple[object, ...], device: torch.device
    ) -> _Fit:
        steps, sum_1 = UnseenSteps(optimizer), torch.zeros(1, dtype=torch.float64, device=device)

        def step(rows: Tensor, count: Tensor) -> None:
            loss = loss_of(rows)
            steps.step(loss / count.to(loss.dtype))
            sum_1.add_(loss.detach().double())

        return _Fit(given, ReplayedStep(step, (), device, self.graphs), steps, sum_1)

    def release(self) -> None:
        """Let go of the fitting set and of the graphs."""
        self._whole = None
        if self._fits:
            self._fits.clear()
            self.graphs.release()

    def close(self) -> None:
        """The same, with the memory that graphs leave to later ones."""
        self.release()
        self.graphs.close()
