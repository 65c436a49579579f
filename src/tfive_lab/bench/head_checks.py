"""Small heads fitted by replayed graphs against the same launched step by step: calibration's, critics', the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tfive.distributed.world import SINGLE
from tfive.rl.calibration.heads import MeanHead, WeightHead
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, Occupation
from tfive.rl.calibration.saddle import CalibrationPlan, calibrating
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.critic import ValueHead
from tfive.rl.gate import Experts, Gate
from tfive.rl.head_fit import HeadFits
from tfive.rl.initial import InitialWeights
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import GateSettings
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.fast.side_by_side import Task, alone, together
from tfive_lab.bench.checks import Check, gap

STEPS = 6
"""Tokens of a made-up thought."""
BOUND = 1e-5
"""Largest difference of a weight."""


def learned_heads(device: torch.device, graphs: CudaGraphs | None) -> list[Tensor]:
    """The heads of two calibrations on made-up trajectories, in minibatches of which the last is smaller; with `graphs`
    the two are learned side by side, and so are parts of each."""
    learning = [partial(_learning, device, seed) for seed in range(2)]
    return [tensor for heads in alone(together(graphs, learning)) for tensor in heads]


def _learning(device: torch.device, seed: int, graphs: CudaGraphs | None) -> Task[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    count, steps = 70 - 8 * seed, STEPS
    prefix, value, time = drawn(count, steps, 32), drawn(count, steps, 2), drawn(count, steps)
    visible = WeightInputs(prefix, value, time, drawn(count, steps, 8), drawn(count, steps))
    context = MeanInputs(prefix, value, time, 1 - time, drawn(count, steps), drawn(count, steps, 12))
    mask_NT = torch.ones(count, steps, dtype=torch.bool, device=device)
    occupation = Occupation(mask_NT, torch.arange(count, device=device) // 2, steps)
    data = CalibrationData(visible, context, drawn(count, steps), drawn(count, steps), occupation)
    weight_head = WeightHead(32, 8, dropout=0.1).to(device)
    mean_head = MeanHead(32, 12).to(device)
    weight_head.standardize(visible, mask_NT)
    mean_head.standardize(context, mask_NT)
    settings = CalibrationSettings(steps=30, warm_steps=30, batch=16, mean_steps=2, evaluate_every=10)
    plan = CalibrationPlan.of(settings, graphs)
    found = yield from calibrating(weight_head, mean_head, data, plan, seed=seed)
    moved = torch.tensor([line["moment"] for line in found.trace])
    return [moved, *(p.detach().cpu() for head in (weight_head, mean_head) for p in head.parameters())]


def fitted_value_head(device: torch.device, graphs: CudaGraphs | None) -> list[Tensor]:
    """A critic's head after two passes over made-up returns, in minibatches of which the last is smaller; without
    `graphs` by a loop that waits for the norm of every gradient."""
    generator, texts, branches = torch.Generator().manual_seed(1), 14, 5
    features = torch.randn(texts, branches, STEPS, 32, generator=generator).to(device)
    returns = torch.randn(texts, branches, STEPS, generator=generator).to(device)
    head, step_T = ValueHead(32, STEPS, InitialWeights(0, "check"), width=16).to(device), torch.arange(STEPS).to(device)
    optimizer = MasterOptimizer(list(head.named_parameters()), lr=1e-2)

    def loss_of(rows: Tensor) -> Tensor:
        return 0.5 * (head(features[rows], step_T) - returns[rows]).square().sum()

    work = [(rows, len(rows) * branches * STEPS) for rows in torch.arange(texts).split(4)]
    fits = None if graphs is None else HeadFits(graphs)
    for _ in range(2):
        if fits is not None:
            fits.run(0, optimizer, loss_of, (features,), work, device, SINGLE)
            continue
        for rows, count in work:
            (loss_of(rows.to(device)) / count).backward()
            optimizer.step()
    if fits is not None:
        fits.close()
    return [p.detach().cpu() for p in head.parameters()]


def fitted_gate(device: torch.device, graphs: CudaGraphs | None) -> list[Tensor]:
    """The prediction gate after two passes over made-up predictions, in minibatches of which the last is smaller."""
    generator, items = torch.Generator().manual_seed(2), 150
    logs = -torch.rand(2, items, 8, generator=generator)
    states = torch.randn(2, items, 8, 32, generator=generator)
    mask = torch.rand(items, 8, generator=generator) > 0.2
    given = [one.to(device) for one in (*logs, *states, mask, torch.arange(items))]
    gate = Gate(32, GateSettings(passes=2), seed=0, device=device, graphs=graphs)
    loss = gate.fit(Experts(*given), 1)
    return [torch.tensor(loss), *(p.detach().cpu() for p in gate.gate.parameters())]


FITS: dict[str, Callable[[torch.device, CudaGraphs | None], list[Tensor]]] = {
    "replayed steps side by side": learned_heads,
    "replayed fit of a critic's head": fitted_value_head,
    "replayed fit of the gate": fitted_gate,
}


def head_checks(device: torch.device) -> Iterator[Check]:
    """Each fit with steps recorded and replayed, dropout included, against the same launched one by one."""
    for name, fit in FITS.items():
        graphs = CudaGraphs.on(device, wanted=True, frequent=True)
        if graphs is None:
            yield Check("heads", name, None, None, "not used: only CUDA devices record steps")
            continue
        apart = [gap(a, b) for a, b in zip(fit(device, graphs), fit(device, None), strict=True)]
        note = f"launched: {graphs.trouble}" if graphs.trouble else ""
        yield Check("heads", name, max(apart), BOUND, note)
        graphs.close()
