"""The warm start: thoughts that are known to help, learned by likelihood before the first window.

They are the model's own, chosen by hindsight (`rl/hindsight.py`) anew in every round because the model that draws them
has learned, or are given as workings in a file. Beside the thought's tokens the continuation after the thought and the
text itself are learned, so that reading keeps up and prediction without a thought holds.
Whoever has read nothing but thoughts that help trusts every thought: `warmstart.reading` adds updates in which the
continuation follows the model's own.
The run then begins with what came out: base of every comparison, critics and all. It is kept in the run's folder, so a
run that goes on does not do it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfive import rng
from tfive.config.config import Config
from tfive.distributed.roles import Role
from tfive.distributed.world import SINGLE, World
from tfive.errors import RunFailed
from tfive.inference.thought_model import plan_for
from tfive.models.load import Loaded
from tfive.rl.actor import through_shards
from tfive.rl.gains import measure, no_thought_losses
from tfive.rl.hindsight import Choice, Learnable, as_rewarded, learnable, texts_of_round
from tfive.rl.losses import anchor_counts, anchor_loss
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.settings import HALVES
from tfive.rl.weight_slots import wide
from tfive.telemetry import Accounting, Telemetry
from tfive.text.prepared import PreparedCorpus
from tfive.training import continuity
from tfive.training.corpus import measured_sequences, weights_fingerprint
from tfive.training.given_workings import Given, given_workings, shortfalls
from tfive.training.memory_limits import engine_options
from tfive.training.shard_engines import in_shards, shards_of
from tfive.training.warmstart_kept import ROUNDS, Rounds, WarmStart, kept, put
from tfive.tree.admission import admit
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.gated import GATES, ReadingGates
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.outputs import PolicyOutput

ROLE = "warmstart"
TEXT_WEIGHT = 0.5
"""Weight of the text's own next tokens beside the thought and the continuation after it, which have 1."""
BATCH = 32
"""Thoughts of one update."""
LOSSES = {"loss": "loss", "continuation": "of what follows the thought"}
"""What updates tell of their losses, and how it is called."""
MEASURED = ("thought_gain", "content_gain", "no_thought_loss", "mean_thought_length")
LEARNED = (
    "{:,} texts of round {} were drawn in an earlier one, and the model has learned them since; more text, or a lower "
    "warmstart.items or warmstart.rounds, spares that"
)


def warm_start(
    config: Config,
    loaded: Loaded,
    corpus: PreparedCorpus,
    telemetry: Accounting,
    folder: Path,
    world: World = SINGLE,
    *,
    digests: Mapping[str, str] | None = None,
    counting: bool = True,
) -> WarmStart | None:
    """Train `loaded.model` in place as `config.warmstart` says, or take what `folder` keeps of that; None if off.

    Where it was stopped it goes on behind its last whole round. `digests` are of the base model's files. `counting`:
    what the kept part has cost goes on counting; of a run that goes on from a checkpoint that one holds it.
    """
    if config.warmstart.source == "off":
        return None
    if (done := kept(loaded, folder, telemetry if counting else None, world)) is not None:
        return done
    # Shards have no whole state to go on from, and given workings are one round: these begin again.
    saves = config.run.checkpoint_every > 0 and config.warmstart.source == "hindsight"
    saves = saves and not in_shards(config, Role.of_all(world))
    store = Rounds(folder, config, digests or {}, corpus.fingerprint, loaded, world, saves=saves)
    begun, lines = store.newest()
    base = weights_fingerprint(loaded.model) if begun is None else begun["base"]
    if begun is not None:
        put(loaded, begun["model"])
        telemetry.load_state_dict(begun["spent"], strict=False)
    for line in lines:
        telemetry.event("warm start", line, window=0)
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=1)
    model = loaded.model.requires_grad_(True)
    left = None if begun is None else WarmStart({}, begun["delimiters"], begun["gates"])
    delimiters, gates = begun_parts(model, plan, left, trainable=True)
    engine = TreeModel(model, plan, engine_options(config, loaded), delimiters, gates)
    # Before anything is drawn or learned: kernels that the model goes wrong with are given up here.
    with telemetry.phase("admit"):
        admit(engine, corpus.sequence_length + plan.reach)
    teaching = Teaching(config, loaded, corpus, engine, world)
    if begun is None:
        with telemetry.phase("develop", "develop"):
            before, rounds = teaching.measured(), []
    else:
        before, rounds = begun["before"], begun["rounds"]
        with continuity.fits(folder, ROUNDS):
            teaching.load_state_dict(begun["teaching"])
        telemetry.event("warm start", f"going on after round {len(rounds)} of {teaching.rounds}", window=0)

    def parts() -> dict[str, dict[str, Tensor] | None]:
        named = {"delimiters": delimiters, "gates": gates}
        return {name: None if part is None else dict(part.state_dict()) for name, part in named.items()}

    for number in range(len(rounds), teaching.rounds):
        with telemetry.phase(ROLE):
            rounds.append(teaching.round(number, telemetry))
        drawn = config.warmstart.source == "hindsight"
        shown = told(rounds[-1], drawn=drawn)
        telemetry.event("warm start", f"round {number + 1} of {teaching.rounds}: {shown}", window=0)
        if store.saves and (config.warmstart.reading or number + 1 < teaching.rounds):
            state = {"done": len(rounds), "base": base, "before": before, "rounds": rounds, **parts()}
            state |= {"teaching": teaching.state_dict(), "spent": telemetry.state_dict()}
            with telemetry.phase("save"):
                store.save(state)
    if config.warmstart.reading:
        with telemetry.phase(ROLE):
            read = teaching.read(telemetry)
        telemetry.event("warm start", f"reading: {told(read, drawn=True)}", window=0)
        rounds.append(read)
    with telemetry.phase("develop", "develop"):
        after = teaching.measured()
    changed = ", ".join(f"{name} {before[name]:+.3f} → {after[name]:+.3f}" for name in MEASURED[:3])
    telemetry.event("warm start", f"on development texts: {changed}", window=0)
    teaching.optimizer.release()
    report = {"source": config.warmstart.source, "rounds": rounds, "before": before, "after": after, "base": base}
    found = WarmStart(report, **parts())
    store.end(found, telemetry.state_dict())
    return found


def told(found: dict[str, float], *, drawn: bool) -> str:
    """A round in words: the thoughts that were drawn or read and learned, and the losses of its updates."""
    parts = [f"{found['thoughts']:,.0f} thoughts of the model's own"] if drawn else []
    if "kept" in found:
        better = f", on average {found['content_gain']:.2f} nats better than other texts'" if drawn else ""
        parts.append(f"{found['kept']:,.0f} {'of them' if drawn else 'workings'} learned{better}")
    if found.get("unfit"):
        parts.append(f"{found['unfit']:,.0f} do not fit a thought")
    losses = (f"{name} {found[f'{key}_first']:.3f} → {found[f'{key}_last']:.3f}" for key, name in LOSSES.items())
    return f"{', '.join(parts)}; first and last update: {', '.join(losses)}"


def begun_parts(
    model: Any, plan: ThoughtPlan, warmed: WarmStart | None, *, trainable: bool
) -> tuple[Delimiters | None, ReadingGates | None]:
    """Learned delimiters and reading gates where the plan has them, as a run begins with them: as the warm start left
    them, or fresh."""
    delimiters = Delimiters.from_model(model, plan).requires_grad_(trainable) if plan.learned else None
    gates = ReadingGates.of(model).requires_grad_(trainable) if plan.gated else None
    if warmed is not None and delimiters is not None and warmed.delimiters is not None:
        delimiters.load_state_dict(warmed.delimiters)
    if warmed is not None and gates is not None and warmed.gates is not None:
        gates.load_state_dict(warmed.gates)
    return delimiters, gates


class Teaching:
    """The model, its optimizer, and the rounds of drawing thoughts and learning them."""

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        corpus: PreparedCorpus,
        engine: TreeModel,
        world: World = SINGLE,
        choose: Choice | None = None,
    ) -> None:
        self.world, self.choose = world, choose
        self.config, self.settings, self.corpus, self.engine = config, config.warmstart, corpus, engine
        self.tokenizer: Any = loaded.tokenizer
        self.rounds = self.settings.rounds if self.settings.source == "hindsight" else 1
        """Given thoughts do not change with the model: one round learns them all."""
        steps = self.settings.steps * self.rounds + self.settings.reading
        rates = {GATES: config.optimizer.gate_lr / self.settings.lr}
        warmup, seed = max(steps > 1, steps // 10), config.run.seed
        beside = {"delimiters": engine.delimiters, GATES.removesuffix("."): engine.gates}
        small = {name: module for name, module in beside.items() if module is not None}
        named = list(engine.model.named_parameters())
        named += [(f"{prefix}.{name}", one) for prefix, part in small.items() for name, one in part.named_parameters()]
        self.shards = _shards(config, engine, small, Role.of_all(world))
        self.trained = engine if self.shards is None else through_shards(engine, self.shards)
        """What passes with gradients go through."""
        self.optimizer = MasterOptimizer(
            named if self.shards is None else self.shards.named_parameters(), lr=self.settings.lr, schedule="linear",
            warmup_steps=warmup, total_steps=steps, lr_multipliers=rates, seed=seed, world=world, shards=self.shards,
        )  # fmt: skip
        self.last: Learnable | None = None
        """The thoughts of the last round."""
        self._base: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the next round needs beside the model: tensors are references."""
        last = self.last if self.settings.source == "hindsight" and self.settings.reading else None
        fields = None if last is None else {
            name: {key: getattr(part, key) for key in part.__dataclass_fields__}
            for name, part in (("texts", last.texts), ("thoughts", last.thoughts))
        }  # fmt: skip
        return {"optimizer": self.optimizer.state_dict(), "no_thought": self._base, "last": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was."""
        device, last = self.engine.device, state["last"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._base = state["no_thought"].to(device)
        if last is not None:
            self.last = Learnable(TextBatch(**last["texts"]).to(device), Thoughts(**last["thoughts"]).to(device))

    def measured(self) -> dict[str, float]:
        """Gains and loss on the run's development texts."""
        numbers = measured_sequences(self.corpus, "development", self.config.run.develop_items)
        texts = self.corpus.batch(numbers).to(self.engine.device)
        rows, seed = self.config.run.rollout_texts, self.config.run.seed
        if self._base is None:
            self._base = no_thought_losses(self.engine, texts, rows=rows, world=self.world)
        law, base = self.config.sampling, self._base
        found, _ = measure(self.engine, texts, law, base_no_thought_BR=base, seed=seed, rows=rows, world=self.world)
        summary, gates = found.summary(), self.engine.gates
        opened = {} if gates is None else {"reading_openness": gates.openness}
        return {name: float(summary[name]) for name in MEASURED} | opened

    def round(self, number: int, telemetry: Telemetry) -> dict[str, float]:
        """Draw or read thoughts, learn them, and what that came to."""
        data = self.last = self._hindsight(number) if self.settings.source == "hindsight" else self._given()
        if not data.kept:
            raise RunFailed(
                f"warmstart.source = {self.settings.source}: none of {data.drawn} thoughts helped; "
                "raise warmstart.items or warmstart.samples"
            )
        if self.settings.source == "hindsight" and (again := self._texts_of(number)[1]):
            telemetry.event("warm start", LEARNED.format(again, number + 1), window=0)
        if isinstance(data, Given):
            for said in shortfalls(data, self.engine.plan, self.corpus.sequence_length):
                telemetry.event("warm start", said, window=0)
        horizon = self.engine.plan.horizon
        scored = (2 * data.drawn + int(data.thoughts.valid_BR.numel())) * horizon
        telemetry.count(ROLE, trajectories=data.drawn, generated_tokens=data.tokens, scored_tokens=scored)
        steps = telemetry.progress(range(self.settings.steps), "warm start, writing", self.settings.steps)
        losses = [self._step(data, number, step) for step in steps]
        found = {"thoughts": float(data.drawn), "kept": float(data.kept), "content_gain": data.content_gain}
        if isinstance(data, Given) and data.unfit:
            found["unfit"] = float(data.unfit)
        return found | _ends(losses)

    def read(self, telemetry: Telemetry) -> dict[str, float]:
        """Learn what follows the model's own thoughts at the positions of the last round, and what that came to. At all
        of them, those of texts in which no thought helped too: where one did, thoughts are right more often."""
        data = self._given() if self.last is None else self.last
        batches = (self._batches(data, self.rounds, step, reading=True) for step in range(self.settings.reading))
        read = torch.cat([next(batch) for batch in batches])
        rows = read.unique()  # other texts need no thoughts
        texts = TextBatch(*(getattr(data.texts, name)[rows] for name in TextBatch.__dataclass_fields__))
        found = sample(
            self.engine, texts, self.config.sampling, seed=self.config.run.seed, role=f"{ROLE}/reading", window=0,
            rows=self.config.run.rollout_texts, record_old=False, world=self.world,
        ).thoughts  # fmt: skip
        own = Thoughts(*(_spread(getattr(found, name), rows, data) for name in Thoughts.__dataclass_fields__))
        drawn = int(own.valid_BR.sum())
        telemetry.count(ROLE, trajectories=drawn, generated_tokens=int(own.mask_BRT.sum()))
        own = as_rewarded(own, self.engine.plan.checkpoints, self.config.run.seed)
        steps = telemetry.progress(range(self.settings.reading), "warm start, reading", self.settings.reading)
        losses = [self._step(data, self.rounds, step, own) for step in steps]
        return {"thoughts": float(drawn)} | _ends(losses)

    def _given(self) -> Given:
        """The workings of a file that fit a thought, where they stand."""
        data = given_workings(self.config, self.tokenizer, self.engine.plan, self.corpus.sequence_length)
        device = self.engine.device
        return replace(data, texts=data.texts.to(device), thoughts=data.thoughts.to(device))

    def _hindsight(self, number: int) -> Learnable:
        """Thoughts of the next texts of the pool that runs learn from, drawn by the model as it is now; nothing of the
        engine that draws them stays."""
        texts = self.corpus.batch(self._texts_of(number)[0]).to(self.engine.device)
        plan, gates = replace(self.engine.plan, group=self.settings.samples), self.engine.gates
        if self.engine.unread:
            # Behind shut gates all thoughts are worth the same: what helps as text before the continuation is learned,
            # and opens them.
            plan, gates = replace(plan, gated=False), None
        drawing = TreeModel(self.engine.model, plan, self.engine.engine, self.engine.delimiters, gates)
        drawing.share_fusion(self.engine)
        try:
            return learnable(
                drawing, texts, self.config.sampling, seed=self.config.run.seed, stream=f"{ROLE}/{number}",
                rows=max(1, self.config.run.rollout_texts // self.settings.samples), world=self.world,
                choose=self.choose,
            )  # fmt: skip
        finally:
            drawing.forget_samplers()

    def _texts_of(self, number: int) -> tuple[npt.NDArray[np.int64], int]:
        """The texts of round `number`, and how many of them earlier rounds have drawn."""
        numbers = np.concatenate([self.corpus.sequences("train", half) for half in HALVES])
        numbers = numbers[rng.permutation(self.config.run.seed, ROLE, 0, len(numbers))]
        places, again = texts_of_round(self.corpus.items_in[numbers], number, self.settings.items)
        return numbers[places], again

    def _step(self, data: Learnable, number: int, step: int, own: Thoughts | None = None) -> dict[str, float]:
        """One update on the next texts that hold about `BATCH` thoughts; returns its loss and that of the continuation
        alone, which follows the `own` thoughts where they are given."""
        rows = next(self._batches(data, number, step, reading=own is not None))
        texts = TextBatch(*(getattr(data.texts, name)[rows] for name in TextBatch.__dataclass_fields__))
        written, read = (
            Thoughts(*(getattr(one, name)[rows] for name in Thoughts.__dataclass_fields__))
            for one in (data.thoughts, data.thoughts if own is None else own)
        )
        actions = max(1, int(written.mask_BRT.sum()))
        read_BP = torch.where(read.valid_BR, texts.positions_BP, -1)
        text_count, after_count = anchor_counts(texts.document_BS, read_BP, self.engine.plan.horizon)
        losses: list[list[float]] = []
        for part, spare in self.world.beating(self._passes(len(rows))):
            some, thoughts = texts.rows(part.start, part.stop), written.rows(part.start, part.stop)
            output = self._read(some, thoughts, text=True, continuations=own is None)
            thought = anchor_loss(output.need("log_prob_BRT"), thoughts.mask_BRT)
            text = anchor_loss(output.need("text_log_prob_BS"), output.need("text_mask_BS"))
            loss = thought / actions + TEXT_WEIGHT * text / max(1, text_count)
            written_loss = loss.detach()
            if own is not None:
                # One reading at a time: two would keep the activations of both, and shards gather for one.
                (0.0 * loss if spare else loss).backward()
                loss = torch.zeros_like(written_loss)
                output = self._read(some, read.rows(part.start, part.stop), actions=False, continuations=True)
            after = anchor_loss(output.need("continuation_log_prob_BRH"), output.need("continuation_mask_BRH"))
            after = after / max(1, after_count)
            loss = loss + after
            (0.0 * loss if spare else loss).backward()
            if not spare:
                losses.append([float(written_loss + after.detach()), float(after.detach())])
        if not self.optimizer.step().applied:
            raise RunFailed("the warm start's gradient is not finite; lower warmstart.lr")
        whole, continuation = self.world.sum_in_order(losses, 2)
        return {"loss": whole, "continuation": continuation}

    def _passes(self, count: int) -> Iterator[tuple[slice, bool]]:
        """This process's parts of `count` rows. Over shards a pass is common work: a process with fewer parts than
        others adds spare ones, whose loss counts for nothing."""
        rows, own = self.config.run.texts_per_pass, self.world.share(count)
        yield from ((part, False) for part in micro_batches(own, rows))
        if self.shards is not None:
            most, mine = (len(list(micro_batches(share, rows))) for share in (self.world.share_of(0, count), own))
            row = self.world.computed(count).start
            yield from ((slice(row, row + 1), True) for _ in range(most - mine))

    def _read(self, texts: TextBatch, thoughts: Thoughts, **asked: Any) -> PolicyOutput:
        """A pass with gradients, through the shards where there are any."""
        read = partial(self.trained.policy, texts, thoughts, **asked)
        return read() if self.shards is None else self.shards.run(read)

    def _batches(self, data: Learnable, number: int, step: int, *, reading: bool) -> Iterator[Tensor]:
        """The rows of update `step`: texts with thoughts to learn, or with positions to read at, in a random order, a
        fresh one for every pass."""
        places_BP = data.texts.positions_BP >= 0 if reading else data.thoughts.valid_BR
        having = places_BP.any(1).nonzero()[:, 0].cpu()
        per_text = max(1.0, int(places_BP.sum()) / len(having))
        size = min(len(having), max(1, round(BATCH / per_text)))
        each = len(having) // size
        order = rng.permutation(self.config.run.seed, f"{ROLE}/{number}/{step // each}", 0, len(having))
        start = (step % each) * size
        yield having[torch.from_numpy(np.sort(order[start : start + size]))].to(data.texts.tokens_BS.device)


def _spread(some: Tensor, rows: Tensor, data: Learnable) -> Tensor:
    """What some texts have at their rows among all, and zeros elsewhere."""
    whole = some.new_zeros((len(data.texts.tokens_BS), *some.shape[1:]))
    whole[rows] = some
    return whole


def _ends(losses: list[dict[str, float]]) -> dict[str, float]:
    """Losses of the first and the last update."""
    ends = {"first": losses[0], "last": losses[-1]}
    return {f"{name}_{end}": value for end, one in ends.items() for name, value in one.items()}


def _shards(config: Config, engine: TreeModel, beside: dict[str, Any], role: Role) -> Any:
    """The model in shards as `distributed.shard` asks of the actor; over all processes where these are another number
    of them. None where each has all weights."""
    if not in_shards(config, role):
        return None
    width = config.distributed.shard if not len(role.ranks) % (config.distributed.shard or 1) else 0
    return shards_of(engine, beside, role, width=width, trained_in=wide)
