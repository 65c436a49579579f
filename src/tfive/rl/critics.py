"""The critics of a run, one or a pair: fitting to full returns (eq:value-loss), values of trajectories, and GAEs
(eq:masked-gae)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.roles import Role
from tfive.distributed.sharding import Sharding
from tfive.distributed.world import World
from tfive.errors import RunFailed
from tfive.rl.critic import BaseActivations, Critic, CriticOutput, FrozenBase
from tfive.rl.gae import adaptive_gae
from tfive.rl.head_fit import HeadFits
from tfive.rl.losses import clipped_value_loss, expectile_value_loss, squared_value_loss
from tfive.rl.onlooker import Onlooker
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.pass_size import PassSize
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import HEADS_ALONE, CriticSettings, head_texts
from tfive.rl.siblings import unit_of_others
from tfive.rl.trajectory import Trajectories, placed
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Lower


@dataclass(frozen=True)
class CriticValues:
    """Every critic's values `[2, B, R, T]` and features `[2, B, R, T, E]` of some trajectories, detached."""

    values_2BRT: Tensor
    features_2BRTE: Tensor

    def rows(self, part: slice | Tensor) -> CriticValues:
        """The same of some texts."""
        return CriticValues(self.values_2BRT[:, part], self.features_2BRTE[:, part])


class Critics:
    """Separately parameterised critics with an optimizer each; the frozen base is run once per trajectory set.

    T⁵ has two; the leading axis of their tensors is the number of critics, 2 or 1.
    """

    def __init__(
        self,
        base: FrozenBase,
        critics: Sequence[Critic],
        settings: CriticSettings,
        *,
        alpha: float,
        seed: int,
        rows: int,
        siblings: int = 1,
        read_rows: int | PassSize | None = None,
        roles: Sequence[Role] = (),
        shards: Sequence[Sharding | None] = (),
        graphs: CudaGraphs | None = None,
    ) -> None:
        """`rows`: texts of a pass with gradients; `read_rows`: of one without, as many unless given. `siblings`:
        thoughts a position, where its advantages have a unit of their own (`gae.unit`). `roles` says which processes
        have which critic, one process all of them unless it is given; the weights of a critic that this process does
        not have may be on no device. `shards`: of each critic that this process has, where its weights are trained in
        shards of which `critics` are the whole copies. `graphs` capture steps of critics that train heads alone."""
        self.roles, self.shards = tuple(roles) or (Role(),) * len(critics), tuple(shards) or (None,) * len(critics)
        self.apart = any(role.apart for role in self.roles)
        """Whether each critic has processes of its own."""
        self.base, self.critics, self.settings = base, tuple(critics), settings
        self.alpha, self.seed, self.rows, self.siblings = alpha, seed, rows, siblings
        self.passes = PassSize.of(read_rows or rows, alone=self.roles[0].every.size == 1)
        """Texts of a pass without gradients."""
        self.head_passes = 0 if settings.adapt in HEADS_ALONE else settings.head_passes
        """Passes of the value-head warm-up; 0 if only heads are trained anyway."""
        self.head_only = self.head_passes > 0
        self.trained = [
            own if held is None else own.over(held.model, held.beside["head"])
            for own, held in zip(self.critics, self.shards)
        ]
        """What passes with gradients go through."""
        self.optimizers = [
            Onlooker() if role.members is None else self._optimizer(number, role.members)
            for number, role in enumerate(self.roles)
        ]
        self._read: tuple[TextBatch, Thoughts, World, int, list[BaseActivations]] | None = None
        self.fits = None if graphs is None else HeadFits(graphs)

    @property
    def read_rows(self) -> int:
        """Texts of a pass without gradients."""
        return self.passes.rows

    @property
    def least_unit(self) -> float:
        """The smallest unit that advantages can be in (`rl.siblings.unit_of_others`); 1 where they have none."""
        return self.siblings**-0.5

    def _optimizer(self, number: int, members: World) -> MasterOptimizer:
        held = self.shards[number]
        head = self.settings.head_lr / self.settings.lr
        return MasterOptimizer(
            self.critics[number].trainable() if held is None else held.named_parameters(),
            lr=self.settings.lr,
            lr_multipliers={"head.": head},
            seed=self.seed,
            world=members,
            shards=held,
        )

    def unfreeze(self) -> None:
        """End of the value-head warm-up: from here on the adapted blocks are trained as well."""
        self.head_only = False

    def shared(self, trajectories: Trajectories, world: World) -> list[BaseActivations]:
        """The activations below the critics of each micro-batch that this process computes as one of `world`: those
        that came with the trajectories, or by a pass, cached for the ones last asked for."""
        texts, thoughts = trajectories.texts, trajectories.thoughts
        if trajectories.lower_BND is not None and not self.base.probes:
            own = micro_batches(world.computed(len(texts.tokens_BS)), self.read_rows)
            block = self.base.first_block
            return [BaseActivations(lower=Lower(trajectories.lower_BND[part], block)) for part in own]
        read, rows = self._read, self.read_rows
        asked = (texts, thoughts, world)
        if read is None or any(one is not other for one, other in zip(read, asked)) or read[3] != rows:
            self._read = None
            mine = micro_batches(world.computed(len(texts.tokens_BS)), rows)
            parts = (trajectories.rows(part) for part in world.beating(mine))
            found = [self._base_activations(part) for part in parts]
            self._read = read = (*asked, rows, found)
        return read[4]

    def _base_activations(self, some: Trajectories) -> BaseActivations:
        """What critics need of some texts; probes take theirs from activations that came with them."""
        if some.lower_BND is None:
            return self.base.read(some.texts, some.thoughts, features=False)
        return self.base.probed(some.texts, some.thoughts, Lower(some.lower_BND, self.base.first_block))

    def _features(self, critic: Critic, some: Trajectories, read: BaseActivations) -> Tensor:
        """Features of every state; during the value-head warm-up no gradient goes below the head."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.head_only):
            return critic.features(some.texts, some.thoughts, read)

    def release(self) -> None:
        """Drop the cached activations of the last trajectories."""
        self._read = None
        if self.fits is not None:
            self.fits.release()

    def let_go(self) -> None:
        """Drop what captured steps keep as well, their memory included."""
        if self.fits is not None:
            self.fits.close()

    @torch.no_grad()
    def evaluate(self, trajectories: Trajectories) -> CriticValues:
        """Values and features of every prefix before an action, by every critic with its present weights."""
        numbers = range(len(self.critics))
        if not self.apart:
            read = partial(self._read_by, numbers, self.roles[0].every, trajectories)
            values_2BRT, features_2BRTE = self.passes.fit(read, self.release)
        else:
            # Each group reads its critic at the same time as the others; then all hear of all.
            own = [
                None if role.members is None else self._read_by([number], role.members, trajectories)
                for number, role in zip(numbers, self.roles)
            ]
            device = trajectories.mask_BRT.device
            found = [[one.to(device) for one in role.told(mine)] for role, mine in zip(self.roles, own)]
            values_2BRT, features_2BRTE = (torch.cat(parts) for parts in zip(*found))
        if not bool(torch.isfinite(values_2BRT).all()):
            raise RunFailed(f"a critic diverged: values of the {trajectories.role} set are not finite; lower critic.lr")
        return CriticValues(values_2BRT, features_2BRTE)

    def _read_by(self, numbers: Sequence[int], world: World, trajectories: Trajectories) -> list[Tensor]:
        """Values `[n, B, R, T]` and features `[n, B, R, T, E]` by some of the critics, texts split over `world`."""
        views: list[list[Any]] = [[] for _ in numbers]
        shared, count = self.shared(trajectories, world), len(trajectories.texts.tokens_BS)
        parts = micro_batches(world.computed(count), self.read_rows)
        for part, read in world.beating(zip(parts, shared)):
            some = trajectories.rows(part)
            for view, critic in zip(views, (self.critics[number] for number in numbers)):
                view.append(critic.evaluate(self._features(critic, some, read), some.mask_BRT, some))
        own_2BRT = torch.stack([torch.cat([v.values_BRT for v in one]) for one in views])
        own_2BRTE = torch.stack([torch.cat([v.hidden_BRTE for v in one]) for one in views])
        return world.gather_all([(own_2BRT, 1), (own_2BRTE, 1)], count)

    def advantages(self, trajectories: Trajectories, values: CriticValues) -> Trajectories:
        """The trajectories with each critic's masked, length-adaptive GAEs from the same rewards (eq:masked-gae), in
        units of how far the position's other thoughts lie apart where `siblings` says so."""
        mask_BRT, rewards_BRT = trajectories.mask_BRT, trajectories.need("rewards_BRT")
        gae_2BRT = adaptive_gae(rewards_BRT, values.values_2BRT.to(rewards_BRT.dtype), mask_BRT, self.alpha)
        if self.siblings > 1:
            whole_BR = trajectories.need("returns_BRT")[..., 0]
            gae_2BRT = gae_2BRT / unit_of_others(whole_BR, trajectories.thoughts.valid_BR, self.siblings)[..., None]
        return trajectories.having(values_2BRT=values.values_2BRT, gae_2BRT=gae_2BRT)

    def fit_pass(
        self, trajectories: Trajectories, frozen_2BRT: Tensor | None, window: int, number: int, *, warmup: bool
    ) -> list[float]:
        """One pass of every critic over the fitting set; returns each one's mean loss, before its updates.

        `frozen_2BRT` is the pre-fit prediction around which the loss is clipped (eq:value-loss), where it `clips`.
        Minibatches are whole texts; a process reads those of them whose activations it holds.
        """
        self._require_halves(trajectories)
        steps = self._minibatches(len(trajectories.texts.tokens_BS), window, number)
        given = (trajectories, frozen_2BRT, warmup)
        # Each group fits its critic; then they tell one another what it came to. The weights stay where they are.
        own = [
            None if role.members is None else self._fit(critic, role.members, steps, *given)
            for critic, role in enumerate(self.roles)
        ]
        found = [role.told(one) for role, one in zip(self.roles, own)]
        diverged = [critic for critic, one in enumerate(found) if not one["sound"]]
        if diverged:
            raise RunFailed(f"critic {diverged[0] + 1} diverged in window {window}: its gradient is not finite")
        return [float(one["loss"]) for one in found]

    def _minibatches(self, texts: int, window: int, number: int) -> list[Tensor]:
        """The texts of every step of one pass, ascending."""
        order = rng.permutation(self.seed, f"critic/{number}", window, texts)
        parts = np.array_split(order, min(self.settings.minibatches, texts))
        return [torch.from_numpy(np.sort(part)) for part in parts]

    def _fit(
        self,
        critic: int,
        world: World,
        steps: Sequence[Tensor],
        trajectories: Trajectories,
        frozen_2BRT: Tensor | None,
        warmup: bool,
    ) -> dict[str, float]:
        """One critic's updates by the processes of `world`: its mean loss, and whether every gradient was finite."""
        texts = len(trajectories.texts.tokens_BS)
        shared = self.passes.fit(partial(self.shared, trajectories, world), self.release)
        first, fitted = world.computed(texts).start, self._fitted(trajectories)
        # What the host needs of the set is fetched once; losses stay on the device until the pass is over.
        steps_B = trajectories.mask_BRT.sum((1, 2)).cpu()
        sees_B = self._sees(critic, trajectories, torch.arange(texts)).cpu()
        chosen = [own[sees_B[own]] for own in steps]
        work = [(own, count) for own in chosen if (count := int(steps_B[own].sum()))]
        seen = max(sum(count for _, count in work), 1)
        largest, states = max((len(own) for own, _ in work), default=0), trajectories.mask_BRT[0].numel()
        judge = self.critics[critic]
        rows = self.rows if judge.tree else head_texts(self.rows, largest, states, judge.head.features)
        fits = self.fits if self._replays(critic, world, work, rows) else None
        whole = None if fits is None else fits.whole(shared, self.read_rows, texts)
        if fits is not None and whole is not None:
            read_of = whole.rows

            def loss_of(rows: Tensor) -> Tensor:
                return self._loss(critic, fitted, rows, read_of(rows), frozen_2BRT, warmup)

            given, device = (trajectories, shared, frozen_2BRT, warmup), trajectories.mask_BRT.device
            total, sound = fits.run(critic, self.optimizers[critic], loss_of, given, work, device, world)
            return {"loss": total / seen, "sound": sound}
        losses = list[Tensor]()
        for own, count in work:
            passes = self._passes(own, texts, world, rows, common=self.shards[critic] is not None)
            for some, spare in world.beating(passes):
                read = BaseActivations.gathered(shared, self.read_rows, some - first)
                loss = self._loss(critic, fitted, some, read, frozen_2BRT, warmup)
                (0.0 * loss if spare else loss / count).backward()
                if not spare:
                    losses.append(loss.detach().double())
            if not self.optimizers[critic].step().applied:
                return {"loss": math.nan, "sound": False}
        parts = [[value] for value in torch.stack(losses).tolist()] if losses else []
        return {"loss": world.sum_in_order(parts, 1)[0] / seen, "sound": True}

    def _replays(self, critic: int, world: World, work: Sequence[tuple[Tensor, int]], rows: int) -> bool:
        """Whether a critic's steps can be captured: one process, the head alone, a step in one pass, and no host."""
        alone = world.size == 1 and self.shards[critic] is None and self.critics[critic].tree is None
        whole = all(len(chosen) <= rows for chosen, _ in work)
        return bool(work) and alone and whole and self.optimizers[critic].steps_unseen

    def _fitted(self, trajectories: Trajectories) -> Trajectories:
        """The set with what steps read of it alone: each takes rows of every tensor there is."""
        seen = ("no_thought_BR", "no_thought_token_BRH", "foreign_BR", "potentials_BRT", "others_BRN")
        names = ("returns_BRT", *(seen if any(critic.sees for critic in self.critics) else ()))
        kept: dict[str, Any] = {name: getattr(trajectories, name) for name in names}
        return Trajectories(trajectories.role, trajectories.window, trajectories.texts, trajectories.thoughts, **kept)

    def _passes(
        self, chosen: Tensor, texts: int, world: World, rows: int, *, common: bool
    ) -> list[tuple[Tensor, bool]]:
        """The parts, of `rows` texts, of a step's `chosen` texts that this process reads. Over shards a pass is
        `common` work: a process with fewer parts than others adds spare ones, whose loss counts for nothing."""
        shares = [world.share_of(rank, texts) for rank in range(world.size)]
        mine = [chosen[(chosen >= share.start) & (chosen < share.stop)] for share in shares]
        parts = [some for some in mine[world.rank].split(rows) if len(some)]
        most = max(-(-len(some) // rows) for some in mine) if common else 0
        row = torch.tensor([world.computed(texts).start])
        return [(some, False) for some in parts] + [(row, True)] * (most - len(parts))

    def _sees(self, critic: int, trajectories: Trajectories, rows: Tensor) -> Tensor:
        """Which of these texts a critic fits: all, or its half in a disjoint pair, always the same by item number."""
        first_item_B = trajectories.texts.items_BP[rows].amax(1).clamp(min=0)
        if self.settings.pair != "disjoint":
            return torch.ones_like(first_item_B, dtype=torch.bool)
        per_text = trajectories.texts.items_BP.shape[1]
        return (first_item_B // per_text) % 2 == critic

    def _require_halves(self, trajectories: Trajectories) -> None:
        """Stop if a critic of a disjoint pair would silently stay unfitted."""
        if self.settings.pair != "disjoint":
            return
        all_rows = torch.arange(len(trajectories.texts.tokens_BS))
        for critic in range(len(self.critics)):
            own = all_rows[self._sees(critic, trajectories, all_rows).cpu()]
            if not bool(trajectories.mask_BRT[own].any()):
                raise RunFailed(
                    f"critic.pair = disjoint: none of the {len(all_rows)} fitting texts of this window "
                    f"is in the half of critic {critic + 1}; raise window.items or use critic.pair = same"
                )

    def fits_squares(self, warmup: bool) -> bool:
        """Whether a pass minimises half the squared error itself, not a clipped or tilted one."""
        return self.settings.pair != "bracket" and (warmup or self.settings.loss == "squared")

    def clips(self, warmup: bool) -> bool:
        """Whether a pass clips its loss around the prediction before the fit."""
        return self.settings.pair != "bracket" and not self.fits_squares(warmup)

    def _loss(
        self,
        critic: int,
        trajectories: Trajectories,
        rows: Tensor,
        read: BaseActivations,
        frozen_2BRT: Tensor | None,
        warmup: bool,
    ) -> Tensor:
        rows = placed(rows, trajectories.mask_BRT.device)
        some = trajectories.rows(rows)
        mask = some.mask_BRT
        own, held = self.trained[critic], self.shards[critic]

        def evaluated() -> CriticOutput:
            return own.evaluate(self._features(own, some, read), mask, some)

        value = (evaluated() if held is None else held.run(evaluated)).values_BRT
        target = some.need("returns_BRT").to(value.dtype)
        if self.settings.pair == "bracket":
            expectile = self.settings.expectile if critic else 1 - self.settings.expectile
            return expectile_value_loss(value, target, mask, expectile)[0]
        if self.fits_squares(warmup):
            return squared_value_loss(value, target, mask)[0]
        if frozen_2BRT is None:
            raise ValueError("a clipped value loss needs the prediction before the fit")
        return clipped_value_loss(value, target, frozen_2BRT[critic][rows].to(value.dtype), mask, self.settings.clip)[0]

    def exact(self, *, kept: bool = True) -> list[dict[str, Tensor]]:
        """Each critic's exact weights by name, whole, on the host of every process that has them `kept`; all must call
        it. One tensor after another is put together and sent: a device may have no room for all."""
        return [self._exact_of(role, one, kept) for role, one in zip(self.roles, self.optimizers)]

    @staticmethod
    def _exact_of(role: Role, optimizer: MasterOptimizer, kept: bool) -> dict[str, Tensor]:
        found, names = dict[str, Tensor](), role.told(list(optimizer.masters()))
        own = optimizer.whole_masters()
        for name in names:
            weight = role.told(None if role.members is None else next(own)[1])
            if kept:
                found[name] = weight.cpu()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments; those of a critic that this process does not have are pieces without elements."""
        own = [
            None if role.members is None else {"critic": dict(critic.state_dict()), "optimizer": optimizer.state_dict()}
            for role, critic, optimizer in zip(self.roles, self.critics, self.optimizers)
        ]
        found = [role.state(one) for role, one in zip(self.roles, own)]
        return {
            "head_only": self.head_only,
            "critics": [one["critic"] for one in found],
            "optimizers": [one["optimizer"] for one in found],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head_only = bool(state["head_only"])
        for role, critic, optimizer, weights, moments in zip(
            self.roles, self.critics, self.optimizers, state["critics"], state["optimizers"]
        ):
            if role.members is not None:
                critic.load_state_dict(weights)
                optimizer.load_state_dict(moments)
        self.release()
