"""Finite worlds in which every expectation of the paper can be enumerated in float64.

A world is a list of all N complete trajectories (text x, hidden scoring item W, thought z) with their probability under
the rollout law q. Numbers identify what is known at step t: `state` is the visible prefix (x, z_<t), `context` adds W,
`gate` adds the action to the visible prefix. Every conditional expectation is a sum over trajectories that share a
number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tfive.rl.calibration.mixture import MeanInputs, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, Occupation
from tfive.rl.gae import PilotNormaliser, adaptive_gae, masked_gae
from tfive.rl.reward import checkpoint_rewards, potentials, returns_to_go
from tfive.rng import uniforms

Choice = TypeVar("Choice")


class Draws:
    """Named arrays of a random world: counter-based, so that one array's size never moves another's numbers."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number

    def uniform(self, name: str, *shape: int) -> Tensor:
        count = int(np.prod(shape)) if shape else 1
        values = uniforms(self.seed, f"theory/{name}", self.number, np.arange(count))
        return torch.from_numpy(values).reshape(shape)

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.special.ndtri(self.uniform(name, *shape))

    def pick(self, name: str, *options: Choice) -> Choice:
        return options[int(float(self.uniform(name, 1)) * len(options))]


Row = tuple[int, int, tuple[int, ...]]
"""A complete trajectory by name: text, hidden item, thought."""


@dataclass(frozen=True)
class World:
    """A world is given by laws, losses, critics, normaliser, a frozen weight and clip bounds; all else is computed."""

    name: str
    horizon: int
    weight_N: Tensor
    """p(x, W), without the thought's probability."""
    token_NT: Tensor
    mask_NT: Tensor
    state_NT: Tensor
    context_NT: Tensor
    log_q_SA: Tensor
    log_old_SA: Tensor
    feature_SAP: Tensor
    """π_θ(a|s) ∝ π_old(a|s)·exp(feature·θ): θ = 0 is the recorded policy."""
    theta_P: Tensor
    no_thought_N: Tensor
    loss_NK: Tensor
    checkpoint_NK: Tensor
    scored_NK: Tensor
    value_S2: Tensor
    """The two critics, functions of the visible prefix."""
    gate_weight_SA: Tensor
    """A frozen w(s, a)."""
    pilot: PilotNormaliser
    scale: float = 1.0
    reward_clip: float = 3.0
    low: float = 0.8
    high: float = 1.28
    alpha: float = 1.0
    kappa: float = 0.1
    seed: int = 0
    number: int = 0
    """With `seed`, what the random functions that statements try on this world are drawn from."""

    # Laws -------------------------------------------------------------------------------------------------------------

    def log_policy_SA(self, theta_P: Tensor) -> Tensor:
        """log π_θ for every visible prefix, differentiable in θ."""
        return (self.log_old_SA + self.feature_SAP @ theta_P).log_softmax(-1)

    def taken(self, table_SA: Tensor) -> Tensor:
        """A table's entry for the action of every step, [N, T] (zero where masked)."""
        return torch.where(self.mask_NT, table_SA[self.state_NT, self.token_NT], torch.zeros((), dtype=torch.float64))

    def trajectory_probability(self, log_SA: Tensor) -> Tensor:
        """p(x, W)·Π π(z_t | …), [N], for any policy given as a table of log-probabilities."""
        return self.weight_N * self.taken(log_SA).sum(-1).exp()

    @cached_property
    def probability_N(self) -> Tensor:
        return self.trajectory_probability(self.log_q_SA)

    @cached_property
    def occupation(self) -> Occupation:
        """The exact measure (d, q) of eq:trajectory-occupation, as the trainer's own object."""
        count = self.token_NT.shape[0]
        return Occupation(self.mask_NT, torch.arange(count), self.horizon, self.probability_N * count)

    @cached_property
    def score_NTP(self) -> Tensor:
        """u = ∇_θ log π_θ(a|s) at the world's θ, zero where masked."""
        chance_SA = self.log_policy_SA(self.theta_P).exp()
        centred = self.feature_SAP - torch.einsum("sa,sap->sp", chance_SA, self.feature_SAP).unsqueeze(1)
        return torch.where(self.mask_NT.unsqueeze(-1), centred[self.state_NT, self.token_NT], 0.0)

    @cached_property
    def ratio_NT(self) -> Tensor:
        """ρ = π_θ/π_old with the recorded denominator, 1 where masked."""
        return (self.taken(self.log_policy_SA(self.theta_P)) - self.taken(self.log_old_SA)).exp()

    @cached_property
    def gate_NT(self) -> Tensor:
        return self.state_NT * self.log_q_SA.shape[1] + self.token_NT

    # Expectations -----------------------------------------------------------------------------------------------------

    @cached_property
    def mass_NT(self) -> Tensor:
        """The occupation measure of every step, m_t·p/T_max."""
        return self.mask_NT.double() * self.probability_N.unsqueeze(-1) / self.horizon

    def integral(self, value: Tensor) -> Tensor:
        """E_{d,q}[f], f of shape [N, T, …]."""
        return torch.tensordot(self.mass_NT, value, dims=([0, 1], [0, 1]))

    def given(self, value: Tensor, number_NT: Tensor) -> Tensor:
        """E_q[f | number] spread back over the steps that share it; f is [N, T, …]."""
        flat = number_NT.flatten()
        size = int(flat.max()) + 1
        mass = self.mass_NT.flatten()
        tail = value.shape[2:]
        spread = mass.view(-1, *([1] * len(tail))) * value.reshape(-1, *tail)
        total = torch.zeros(size, *tail, dtype=torch.float64).index_add_(0, flat, spread)
        weight = torch.zeros(size, dtype=torch.float64).index_add_(0, flat, mass)
        safe = torch.where(weight > 0, weight, torch.ones_like(weight)).view(-1, *([1] * len(tail)))
        return (total / safe)[number_NT]

    def mean_given_context(self, value: Tensor) -> Tensor:
        """μ_f(c), the paper's E_q[f | s] with the scoring item fixed."""
        return self.given(value, self.context_NT)

    # Credit, by the trainer's own functions ---------------------------------------------------------------------------

    @cached_property
    def reward_NT(self) -> Tensor:
        phi = potentials(self.no_thought_N, self.loss_NK, self.scored_NK, self.scale, self.reward_clip)
        return checkpoint_rewards(phi, self.checkpoint_NK, self.scored_NK, self.horizon)

    @cached_property
    def return_NT(self) -> Tensor:
        return returns_to_go(self.reward_NT, self.mask_NT)

    @cached_property
    def true_value_NT(self) -> Tensor:
        """V^q(c) = E_q[G_t | c]."""
        return self.mean_given_context(self.return_NT)

    def critic_NT(self, which: int) -> Tensor:
        return torch.where(self.mask_NT, self.value_S2[self.state_NT, which], 0.0)

    def advantage_NT(self, value_NT: Tensor, monte_carlo: bool = False, trace: float | None = None) -> Tensor:
        """Raw GAE of any values: length-adaptive, with a fixed trace, or Monte Carlo (λ = 1)."""
        if trace is None and not monte_carlo:
            return adaptive_gae(self.reward_NT, value_NT, self.mask_NT, self.alpha)
        return masked_gae(self.reward_NT, value_NT, self.mask_NT, 1.0 if trace is None else trace)

    @cached_property
    def _pairs(self) -> dict[tuple[bool, float | None], tuple[Tensor, Tensor]]:
        return {}

    def pair(self, monte_carlo: bool = False, trace: float | None = None) -> tuple[Tensor, Tensor]:
        """Ã₁, Ã₂ under the world's normaliser."""
        key = monte_carlo, trace
        if key not in self._pairs:
            raw = [self.advantage_NT(self.critic_NT(i), monte_carlo, trace) for i in (0, 1)]
            normalise = self.pilot.normalise
            self._pairs[key] = normalise(raw[0], self.mask_NT), normalise(raw[1], self.mask_NT)
        return self._pairs[key]

    @cached_property
    def gate_weight_NT(self) -> Tensor:
        return self.gate_weight_SA[self.state_NT, self.token_NT]

    def calibration_data(self) -> CalibrationData:
        """The world as head-learning data: features are the numbers themselves, so tabular heads can be exact."""
        first, second = self.pair()
        state, context, action = (x.double() for x in (self.state_NT, self.context_NT, self.token_NT))
        values = torch.stack([self.critic_NT(0), self.critic_NT(1)], -1)
        time = torch.arange(1, self.horizon + 1, dtype=torch.float64).expand_as(state) / self.horizon
        inputs = WeightInputs(state[..., None], values, time, action[..., None], self.taken(self.log_old_SA))
        zero = torch.zeros_like(state)
        means = MeanInputs(state[..., None], values, time, 1 - time, zero, context[..., None])
        return CalibrationData(inputs, means, first, second, self.occupation)

    def draws(self) -> Draws:
        return Draws(self.seed, self.number)

    def on_contexts(self, name: str) -> Tensor:
        """A random function of the context, spread over the steps."""
        return self.draws().normal(name, int(self.context_NT.max()) + 1)[self.context_NT]

    def change(self, **changes: object) -> World:
        """A copy with some fields replaced (a matched sampler, another weight …)."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shape:
    """What a random world looks like."""

    texts: int = 2
    hidden: int = 2
    actions: int = 2
    horizon: int = 3
    variable_length: bool = False
    checkpoints: tuple[int, ...] = (3,)
    mismatch: float = 0.3
    lag: float = 0.5
    disagreement: float = 0.5
    offset: float = 0.3
    hidden_share: float = 0.5
    parameters: int = 3


def sequences(actions: int, horizon: int, variable_length: bool) -> list[tuple[int, ...]]:
    """All complete thoughts. With variable length the last action closes the thought."""
    if not variable_length:
        return list(product(range(actions), repeat=horizon))
    close = actions - 1
    found = [seq for seq in product(range(actions), repeat=horizon) if close not in seq[:-1]]
    for length in range(1, horizon):
        found += [(*seq, close) for seq in product(range(close), repeat=length - 1)]
    return found


def random_shape(seed: int, number: int) -> Shape:
    """The shape of random world `number`: sizes, kinds and strengths all vary, edge cases (no mismatch, …) included."""
    draws = Draws(seed, number)
    horizon = draws.pick("horizon", 1, 2, 2, 3, 3)
    early = tuple(t for t in range(1, horizon) if draws.pick(f"checkpoint {t}", True, False))
    return Shape(
        texts=draws.pick("texts", 1, 2),
        hidden=draws.pick("hidden", 1, 2, 3),
        actions=draws.pick("actions", 2, 3),
        horizon=horizon,
        variable_length=draws.pick("variable", False, True),
        checkpoints=(*early, horizon),
        mismatch=draws.pick("mismatch", 0.0, 0.1, 0.5),
        lag=draws.pick("lag", 0.2, 0.8),
        disagreement=draws.pick("disagreement", 0.1, 0.5, 1.0),
        offset=draws.pick("offset", 0.1, 0.5),
    )


def random_world(seed: int, number: int, shape: Shape | None = None) -> World:
    """Random world `number` of a seed, by `random_shape` unless a shape is given."""
    return build(f"random {number}", shape or random_shape(seed, number), Draws(seed, number))


def build(name: str, shape: Shape, draws: Draws) -> World:
    """A world of this shape: laws around each other, losses with a visible and a hidden part, critics around E[V^q |
    s]."""
    thoughts = sequences(shape.actions, shape.horizon, shape.variable_length)
    rows = [(x, w, z) for x in range(shape.texts) for w in range(shape.hidden) for z in thoughts]
    token, mask, state, context = _tables(rows, shape.horizon)
    checkpoint, scored = _checkpoints(rows, shape.checkpoints)
    size = (int(state.max()) + 1, shape.actions)
    old = (0.7 * draws.normal("old", *size)).log_softmax(-1)
    text, item = (
        draws.normal("text", shape.texts, 1).softmax(0),
        draws.normal("item", shape.texts, shape.hidden).softmax(-1),
    )
    loss = _losses(rows, checkpoint, shape, draws)
    world = World(
        name=name,
        horizon=shape.horizon,
        weight_N=torch.stack([(text * item)[x, w] for x, w, _ in rows]),
        token_NT=token,
        mask_NT=mask,
        state_NT=state,
        context_NT=context,
        log_q_SA=(old + shape.mismatch * draws.normal("mismatch", *size)).log_softmax(-1),
        log_old_SA=old,
        feature_SAP=draws.normal("feature", *size, shape.parameters),
        theta_P=shape.lag * draws.normal("theta", shape.parameters),
        no_thought_N=loss[:, 0],
        loss_NK=loss[:, 1:],
        checkpoint_NK=checkpoint,
        scored_NK=scored,
        value_S2=torch.zeros(size[0], 2, dtype=torch.float64),
        gate_weight_SA=draws.uniform("gate", *size),
        pilot=PilotNormaliser(float(0.1 * draws.normal("pilot", 1)), 0.5 + float(draws.uniform("deviation", 1)), 1),
        scale=0.5 + float(draws.uniform("scale", 1)),
        seed=draws.seed,
        number=draws.number,
    )
    return world.change(value_S2=_critics(world, shape, draws))


def _losses(rows: list[Row], checkpoint_NK: Tensor, shape: Shape, draws: Draws) -> Tensor:
    """ℓ_0 and the checkpoint losses, [N, 1 + K]: a part of the visible prefix and a part of the prefix with its
    item."""
    steps = [[0, *row] for row in checkpoint_NK.tolist()]
    whole = [[(x, w, z[:tau]) for tau in taus] for (x, w, z), taus in zip(rows, steps)]
    contexts = {key: i for i, key in enumerate(dict.fromkeys(key for keys in whole for key in keys))}
    states = {key: i for i, key in enumerate(dict.fromkeys((x, z) for x, _, z in contexts))}
    visible, concealed = draws.normal("visible", len(states)), draws.normal("concealed", len(contexts))
    at_context = torch.tensor([[contexts[key] for key in keys] for keys in whole])
    at_state = torch.tensor([[states[x, z] for x, _, z in keys] for keys in whole])
    return 1 + (1 - shape.hidden_share) * visible[at_state] + shape.hidden_share * concealed[at_context]


def _critics(world: World, shape: Shape, draws: Draws) -> Tensor:
    """Both critics: the visible value, plus an error they share, plus an error of their own."""
    target = torch.zeros(world.value_S2.shape[0], dtype=torch.float64)
    target[world.state_NT[world.mask_NT]] = world.given(world.return_NT, world.state_NT)[world.mask_NT]
    shared = shape.offset * draws.normal("shared", target.numel())
    own = shape.disagreement * draws.normal("own", target.numel(), 2)
    return (target + shared).unsqueeze(-1) + own


def _tables(rows: list[Row], horizon: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, validity, and the numbers of visible prefixes and full contexts, each [N, T]."""
    states: dict[object, int] = {}
    contexts: dict[object, int] = {}
    token, state, context = (np.zeros((len(rows), horizon), dtype=np.int64) for _ in range(3))
    mask = np.zeros((len(rows), horizon), dtype=bool)
    for n, (x, w, z) in enumerate(rows):
        token[n, : len(z)], mask[n, : len(z)] = z, True
        for t in range(len(z)):
            state[n, t] = states.setdefault((x, z[:t]), len(states))
            context[n, t] = contexts.setdefault((x, w, z[:t]), len(contexts))
    return torch.from_numpy(token), torch.from_numpy(mask), torch.from_numpy(state), torch.from_numpy(context)


def _checkpoints(rows: list[Row], configured: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The configured steps below the realised length, then the length itself."""
    checkpoint = np.zeros((len(rows), len(configured)), dtype=np.int64)
    for n, (_, _, z) in enumerate(rows):
        steps = [tau for tau in configured if tau < len(z)] + [len(z)]
        checkpoint[n, : len(steps)] = steps
    return torch.from_numpy(checkpoint), torch.from_numpy(checkpoint > 0)
