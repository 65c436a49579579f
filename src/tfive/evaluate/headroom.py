"""Headroom: what thoughts could be worth on a text before anything is trained.

At every position several thoughts are drawn. Gains against no thought, in nats a token: of the model's own thought, of
another text's, of the empty one, of the best of all drawn ones by the real continuation (and of the best of them and
none), and of the true working where the text has one. And how much of the difference between thoughts at one position a
critic of prefix and thought foresees on texts that it was not fitted on: without that, no value function can help a
policy choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.roles import Role
from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.clusters import clustered_mean
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.gains import emptied, foreign
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories, last_loss
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts

COLUMNS = ("own", "other", "empty", "mean", "best", "best_or_none", "true", "true_other", "spread", "content")


@dataclass(frozen=True)
class HeadroomTexts:
    """What is measured: texts, the kind of every position, the source of every text, workings by item number."""

    texts: TextBatch
    kind_BP: Tensor
    kinds: tuple[str, ...]
    source_B: tuple[str, ...]
    working: dict[int, tuple[int, ...]]


def true_thoughts(own: Thoughts, texts: TextBatch, working: dict[int, tuple[int, ...]], plan: ThoughtPlan) -> Thoughts:
    """The true working in place of every thought that has one, closed where it fits."""
    true = Thoughts(*(getattr(own, field.name).clone() for field in fields(own)))
    stop = () if plan.stop_id is None else (plan.stop_id,)
    for row, branch in own.valid_BR.nonzero().tolist():
        ids = working.get(int(texts.items_BP[row, branch]))
        if ids is not None:
            ids = (*ids, *stop)[: plan.length]
            true.tokens_BRT[row, branch, : len(ids)] = torch.tensor(ids, device=true.tokens_BRT.device)
            true.length_BR[row, branch] = len(ids)
            true.closed_BR[row, branch] = ids[-1] == plan.stop_id
    return true


def losses_after(
    engine: TreeModel, texts: TextBatch, thoughts: Thoughts, rows: int, world: World = SINGLE
) -> tuple[Tensor, Tensor]:
    """Losses after whole thoughts and without them, `[B, R]` each, on the CPU."""
    after, without, count = [], [], len(texts.tokens_BS)
    for part in world.beating(micro_batches(world.computed(count), rows)):
        some = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
        scores = engine.score(*some, whole=True)
        after.append(last_loss(scores.losses_BRK, scores.mask_BRK).float().cpu())
        without.append(scores.no_thought_BR.float().cpu())
    after_BR, without_BR = world.gather_all([(torch.cat(after), 0), (torch.cat(without), 0)], count)
    return after_BR, without_BR


@torch.no_grad()
def draw(
    model: ThoughtModel, texts: TextBatch, many: int, *, seed: int, rows: int, world: World = SINGLE
) -> tuple[Thoughts, Tensor, Tensor]:
    """`many` thoughts at every position, branch p·many + g, the loss `[B, P, many]` after each, and ℓ_0 `[B, P]`."""
    plan = replace(model.plan, group=many)
    engine = TreeModel(model.model, plan, model.settings, model.delimiters, model.gates)
    few = max(1, rows // 8)
    thoughts = sample(
        engine, texts, model.sampling, seed=seed, role="headroom", window=0, rows=few, record_old=False, world=world
    ).thoughts
    after_BR, without_BR = losses_after(engine, texts, thoughts, few, world)
    count = texts.positions_BP.shape[1]
    return thoughts, after_BR.view(len(after_BR), count, many), without_BR.view(len(after_BR), count, many)[:, :, 0]


def measure(
    model: ThoughtModel,
    sampled: HeadroomTexts,
    *,
    many: int,
    seed: int,
    rows: int,
    critic: CriticSettings | None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """All gains, over every item and by source and kind of position; with `critic`, what one foresees of them. The
    processes of `world` read a share of the texts each, and all of them have the answer."""
    texts = sampled.texts.to(model.model.device)
    thoughts, after_BPG, without_BP = draw(model, texts, many, seed=seed, rows=rows, world=world)
    engine = TreeModel(model.model, replace(model.plan, group=1), model.settings, model.delimiters, model.gates)
    own = thoughts.branches(0, None, many)
    valid_BP = own.valid_BR.cpu()
    controls = {"other": foreign(own, near=True), "empty": emptied(own)}

    def gained(after: Thoughts) -> Tensor:
        return without_BP - losses_after(engine, texts, after, rows, world)[0]

    gain = {name: gained(one) for name, one in controls.items()}
    gain_BPG = without_BP[..., None] - after_BPG
    gain |= {"own": gain_BPG[..., 0], "mean": gain_BPG.mean(-1), "best": gain_BPG.amax(-1)}
    gain["best_or_none"] = gain["best"].clamp(min=0)
    gain |= {"spread": gain_BPG.std(-1), "content": gain_BPG[..., 0] - gain["other"]}
    known_BP = torch.tensor([[int(item) in sampled.working for item in row] for row in texts.items_BP.tolist()])
    if bool((known_BP & valid_BP).any()):
        true = true_thoughts(own, texts, sampled.working, model.plan)
        gain["true"] = gained(true)
        gain["true_other"] = gained(foreign(true, near=True))
    number_BP = torch.arange(len(valid_BP))[:, None].expand_as(valid_BP)

    def row(chosen_BP: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"items": int(chosen_BP.sum()), "texts": int(number_BP[chosen_BP].unique().numel())}
        found["loss"] = _estimate(without_BP, chosen_BP, number_BP)
        for name in (name for name in COLUMNS if name in gain):
            some_BP = chosen_BP & known_BP if name.startswith("true") else chosen_BP
            if bool(some_BP.any()):
                found[name] = _estimate(gain[name], some_BP, number_BP)
        return found

    found: dict[str, Any] = {"thoughts": many, "all": row(valid_BP), "by_source": {}, "by_kind": {}}
    for source in dict.fromkeys(sampled.source_B):
        of_source_B1 = torch.tensor([one == source for one in sampled.source_B])[:, None]
        found["by_source"][source] = row(valid_BP & of_source_B1)
    for number, kind in enumerate(sampled.kinds):
        if bool((chosen_BP := valid_BP & (sampled.kind_BP == number)).any()):
            found["by_kind"][kind] = row(chosen_BP)
    if critic is not None:
        found["critic"] = foreseen(
            model, texts, thoughts, gain_BPG, critic, seed=seed, rows=max(1, rows // 8), world=world
        )
    return found


def _estimate(value_BP: Tensor, chosen_BP: Tensor, text_BP: Tensor) -> list[float]:
    """Mean and 95 % interval over texts."""
    one = clustered_mean(value_BP[chosen_BP], text_BP[chosen_BP])
    return [one.mean, *one.interval()]


def foreseen(
    model: ThoughtModel,
    texts: TextBatch,
    thoughts: Thoughts,
    gain_BPG: Tensor,
    settings: CriticSettings,
    *,
    seed: int,
    rows: int,
    world: World = SINGLE,
) -> dict[str, Any]:
    """A critic, fitted as a run fits it to the gains of half of the texts, on the other half: R² over all thoughts, and
    within positions, where a thought's gain is compared with those of the others there."""
    many, split = gain_BPG.shape[-1], len(gain_BPG) // 2
    plan = replace(model.plan, group=many)
    base = FrozenBase(model.model, plan, settings, model.settings)
    own = build_pair(model.model, plan, settings, engine=model.settings, seed=seed)[:1]
    critics = Critics(base, own, settings, alpha=1.0, seed=seed, rows=rows, roles=[Role.of_all(world)])
    halves = []
    for part in (slice(0, split), slice(split, None)):
        some = TextBatch(*(getattr(texts, field.name)[part] for field in fields(texts)))
        these = Thoughts(*(getattr(thoughts, field.name)[part] for field in fields(thoughts)))
        halves.append((Trajectories("headroom", 0, some, these), gain_BPG[part].flatten(1).to(texts.tokens_BS.device)))
    (fitting, target_BR), (held_out, other_BR) = halves
    if not bool(fitting.thoughts.valid_BR.any()) or not bool(held_out.thoughts.valid_BR.any()):
        raise UserError("the critic needs positions in both halves of the texts; give more texts, or --critic-passes 0")
    known = target_BR[fitting.thoughts.valid_BR]
    centre, scale = float(known.mean()), max(float(known.std()), 1e-6)
    returns_BRT = ((target_BR - centre) / scale)[..., None].expand(fitting.mask_BRT.shape) * fitting.mask_BRT
    fitting = fitting.having(returns_BRT=returns_BRT)
    frozen = critics.evaluate(fitting).values_2BRT
    for number in range(settings.head_passes + settings.passes):
        if number >= critics.head_passes:
            critics.unfreeze()
        critics.fit_pass(fitting, frozen, 0, number, warmup=True)
    value_BRT = critics.evaluate(held_out).values_2BRT[0].float()
    last_BR = (held_out.thoughts.length_BR.clamp(min=1) - 1)[..., None]
    guess_BR = value_BRT.gather(-1, last_BR)[..., 0] * scale + centre
    valid_BPG = held_out.thoughts.valid_BR.view(len(guess_BR), -1, many)
    return explained(other_BR.view(valid_BPG.shape), guess_BR.view(valid_BPG.shape), valid_BPG)


def explained(gain_BPG: Tensor, guess_BPG: Tensor, valid_BPG: Tensor) -> dict[str, Any]:
    """R² of the guesses over all thoughts and within positions, the share of all variance that lies within positions,
    and what the guessed best of a position gains beyond its mean."""
    keep = valid_BPG[..., 0]
    gain, guess = gain_BPG[keep].double(), guess_BPG[keep].double()
    total = (gain - gain.mean()).square().mean()
    within, aim = gain - gain.mean(-1, keepdim=True), guess - guess.mean(-1, keepdim=True)
    taken = within.gather(-1, guess.argmax(-1, keepdim=True))[..., 0]

    def share(error: Tensor, of: Tensor) -> float | None:
        return float(1 - error / of) if float(of) > 0 else None

    return {
        "items": len(gain),
        "r2": share((gain - guess).square().mean(), total),
        "r2_within": share((within - aim).square().mean(), within.square().mean()),
        "within_share": float(within.square().mean() / total) if float(total) > 0 else None,
        "taking_the_guessed_best": float(taken.mean()),
        "taking_the_best": float(within.amax(-1).mean()),
    }


TITLES = {
    "items": "items", "loss": "loss without", "own": "own", "other": "another's", "empty": "empty", "mean": "mean",
    "best": "best of all", "best_or_none": "best or none", "spread": "spread", "true": "true working",
    "content": "content gain",
}  # fmt: skip


def headroom_table(found: dict[str, Any]) -> str:
    """The gains as Markdown, and what the critic foresaw in a sentence."""
    rows = {"all": found["all"]}
    rows |= {f"source {name}": row for name, row in found["by_source"].items() if len(found["by_source"]) > 1}
    rows |= {f"{name} positions": row for name, row in found["by_kind"].items() if len(found["by_kind"]) > 1}
    lines = ["| texts | " + " | ".join(TITLES.values()) + " |", "|" + "---|" * (len(TITLES) + 1)]
    for name, row in rows.items():
        cells = [str(row["items"])]
        for key in list(TITLES)[1:]:
            one: Sequence[float] | None = row.get(key)
            sign = "" if key == "loss" else "+"
            cells.append("–" if one is None else f"{one[0]:{sign}.3f} ({one[1]:{sign}.3f} … {one[2]:{sign}.3f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append(
        "\nnats per token of the text behind a thought, against none (95 %; above 0 is better). own: a thought that "
        f"the model draws; another's: of another text; mean, best of all: of {found['thoughts']} own ones, the best "
        "picked with the continuation in sight; best or none: none where all harm; spread: how far they lie apart; "
        "content gain: own minus another's"
    )
    best = found["all"]["best_or_none"]
    worth = f"could gain {best[0]:+.3f}" if best[1] > 0 else "gains nothing that shows"
    lines.append(f"choosing among this model's own thoughts, by one who knows what follows, {worth}")
    if "critic" in found:
        critic = found["critic"]
        shown = {name: "–" if critic[name] is None else f"{critic[name]:+.3f}" for name in ("r2", "r2_within")}
        lines.append(
            f"\na critic of prefix and thought on {critic['items']} positions of other texts: R² {shown['r2']}, within "
            f"positions {shown['r2_within']}; its choice of {found['thoughts']} is worth "
            f"{critic['taking_the_guessed_best']:+.3f} of {critic['taking_the_best']:+.3f}"
        )
    return "\n".join(lines)
