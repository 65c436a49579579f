"""Before the first window, random positions of training texts move to where thoughts differ in use.

A pilot draws several thoughts at random positions of the texts that actor and critics learn from, with the weights that
the run begins with. What it finds is foreseen for every token of every training and calibration text
(`rl/thought_variance.py`), and `text.positions.variance` of the positions are drawn in proportion to that. Development
and test texts keep theirs: what is measured does not depend on the pilot. It is the same for every method with
thoughts, and kept in the run's folder, so a run that goes on does not do it again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from tfive import rng
from tfive.config.config import Config
from tfive.distributed.transfer import transferred
from tfive.distributed.world import SINGLE, World
from tfive.errors import RunFailed, UserError
from tfive.inference.thought_model import plan_for
from tfive.models.load import Loaded
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import HALVES
from tfive.rl.thought_variance import THOUGHTS, Fit, Foresight, entropies, fit, pilot_gains, repeated
from tfive.telemetry import Telemetry
from tfive.text.items import Ints, Mask, choose, eligible
from tfive.text.placing import redrawn
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import KINDS
from tfive.training.memory_limits import engine_options
from tfive.training.warmstart import begun_parts
from tfive.training.warmstart_kept import WarmStart
from tfive.tree.admission import admit
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch

PLACES, REPORT = "positions.safetensors", "positions.json"
ROLE = "positions"
PLACED = ("train", "calibration")
"""Splits whose positions move: everything that trains the actor, fits critics or tests them."""


@dataclass(frozen=True)
class MovedPositions:
    """The corpus with the positions of the run, and what the pilot found."""

    corpus: PreparedCorpus
    report: dict[str, Any]


def positions_move(config: Config) -> bool:
    """Whether a run of this configuration moves positions."""
    return config.text.positions.variance > 0 and config.spec.trains and config.spec.thinks


def move_positions(
    config: Config,
    loaded: Loaded,
    corpus: PreparedCorpus,
    telemetry: Telemetry,
    folder: Path,
    warmed: WarmStart | None,
    world: World = SINGLE,
) -> MovedPositions | None:
    """Move positions as `text.positions.variance` says, or take those that `folder` keeps; None if it is 0. The
    processes of `world` read a share of the texts each, and the first one writes what all came to."""
    if not positions_move(config):
        return None
    if transferred(world, (folder / REPORT).is_file(), 0):
        return _restored(corpus, telemetry, folder)
    pilot = Pilot(config, loaded, corpus, warmed, world)
    with telemetry.phase("admit"):
        admit(pilot.engine, corpus.sequence_length + pilot.engine.plan.reach)
    with telemetry.phase(ROLE):
        moved = pilot.moved(telemetry)
    if world.leads:
        _keep(moved, folder)
    telemetry.event(ROLE, moved.report["said"], window=0)
    return moved


def said(report: dict[str, Any]) -> str:
    """The report in a sentence."""
    return (
        f"{report['moved']:,} of {report['positions']:,} training positions moved to where thoughts differ: on texts "
        f"left out of a pilot of {report['pilot']:,} positions and {report['thoughts']:,} thoughts, their gains have "
        f"{report['lift']:.2f} times the variance of random places (by entropy alone {report['lift_entropy']:.2f}, by "
        f"the true variance {report['lift_true']:.2f})"
    )


class Pilot:
    """The model as the run begins with it, and the texts whose positions it draws."""

    def __init__(
        self,
        config: Config,
        loaded: Loaded,
        corpus: PreparedCorpus,
        warmed: WarmStart | None,
        world: World = SINGLE,
    ) -> None:
        self.world = world
        self.config, self.corpus, self.settings = config, corpus, config.text.positions
        plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=THOUGHTS)
        self.engine = TreeModel(
            loaded.model,
            plan,
            engine_options(config, loaded),
            *begun_parts(loaded.model, plan, warmed, trainable=False),
        )
        self.gap = self.settings.min_gap or config.thought.horizon
        self.seed = config.run.seed
        self.rows = max(1, config.run.rollout_texts // THOUGHTS)

    def moved(self, telemetry: Telemetry) -> MovedPositions:
        """Pilot, regression, new positions."""
        if self.engine.unread:
            raise RunFailed(
                "text.positions.variance: the reading gates are shut, so all thoughts gain the same; use a warm start, "
                "or text.positions.variance = 0"
            )
        texts = self.pilot_texts().to(self.engine.device)
        gain_BPG, tokens = pilot_gains(
            self.engine, texts, self.config.sampling, seed=self.seed, role=ROLE, rows=self.rows, world=self.world
        )
        valid_BP = (texts.positions_BP >= 0).cpu()
        gain_NG = gain_BPG[valid_BP]
        if not bool(torch.isfinite(gain_NG).all()):
            raise RunFailed("text.positions.variance: the pilot met gains that are not finite; check the model")
        if not bool((gain_NG.double().var(-1) > 0).any()):
            raise RunFailed(
                f"text.positions.variance: at each of {len(gain_NG)} positions all thoughts gain the same, so there is "
                "nothing to place by; set text.positions.variance = 0"
            )
        horizon = self.engine.plan.horizon
        drawn = {"trajectories": gain_NG.numel(), "generated_tokens": tokens}
        drawn |= {"scored_tokens": (gain_NG.numel() + len(gain_NG)) * horizon}
        telemetry.count(ROLE, **drawn)
        states_ND, entropy_N = self._states(texts, valid_BP)
        text_N = torch.arange(len(valid_BP))[:, None].expand_as(valid_BP)[valid_BP]
        found = fit(states_ND, gain_NG, text_N)
        positions, kinds, moved = self._draw(found.foresight, telemetry)
        report = self._report(found, gain_NG, fit(entropy_N[:, None], gain_NG, text_N))
        report |= {"moved": moved, "positions": int((positions[self._rows] >= 0).sum()), "amounts": drawn}
        # One process's numbers: a last bit of the regression may differ between machines.
        report = dict(transferred(self.world, report, 0))
        report["digest"] = hashlib.sha256(np.ascontiguousarray(positions).tobytes()).hexdigest()[:20]
        return MovedPositions(self.corpus.with_positions(positions, kinds), report | {"said": said(report)})

    @property
    def _rows(self) -> Ints:
        return np.concatenate([self.corpus.sequences(split) for split in PLACED])

    def pilot_texts(self) -> TextBatch:
        """Texts of the pool that actor and critics learn from, with positions drawn at random from all they allow."""
        numbers = np.concatenate([self.corpus.sequences("train", half) for half in HALVES])
        numbers = numbers[rng.permutation(self.seed, f"{ROLE}/texts", 0, len(numbers))]
        many = self.corpus.per_text
        counts = [many if kind == "uniform" else 0 for kind in KINDS]
        rows, places, left = [], [], self.settings.pilot
        for number in numbers.tolist():
            allowed_S = eligible(self.corpus.document[number], self.corpus.horizon)
            draws_S = rng.uniforms(self.seed, f"{ROLE}/pilot", 0, number, 0, np.arange(len(allowed_S)))
            found = [p for p, _ in choose({"uniform": allowed_S}, counts, draws_S, self.gap)][:left]
            if found:
                rows.append(number)
                places.append([*found, *[-1] * (many - len(found))])
                left -= len(found)
            if not left:
                break
        batch, positions_BP = self.corpus.batch(rows), torch.tensor(places)
        items_BP = torch.tensor(rows)[:, None] * many + torch.arange(many)
        return replace(batch, positions_BP=positions_BP, items_BP=torch.where(positions_BP >= 0, items_BP, -1))

    def _states(self, texts: TextBatch, valid_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden state at every position of the pilot, and the entropy of the next token there; on the CPU."""
        states, entropy, count = [], [], len(texts.tokens_BS)
        for part in self.world.beating(micro_batches(self.world.computed(count), self.rows)):
            some, valid = texts.rows(part.start, part.stop), valid_BP[part]
            row_BP = torch.arange(len(valid))[:, None].expand_as(valid)
            here_ND = self.engine.read(some).hidden_BSD[row_BP[valid], some.positions_BP.cpu()[valid]]
            states.append(here_ND.float().cpu())
            entropy.append(entropies(self.engine, here_ND).cpu())
        own = int(valid_BP[self.world.share(count)].sum())
        states_ND, entropy_N = self.world.gather_ragged([torch.cat(states)[:own], torch.cat(entropy)[:own]])
        return states_ND, entropy_N

    def _draw(
        self, foresight: Foresight, telemetry: Telemetry
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int8], int]:
        """Positions and kinds of all texts, those of training and calibration texts drawn anew where they move, and how
        many are elsewhere now."""
        positions, kinds = np.array(self.corpus.positions), np.array(self.corpus.kinds)
        rows = self._rows
        own = rows[self.world.share(len(rows))]
        blocks = [own[part] for part in micro_batches(len(own), self.config.run.rollout_texts)]
        for block in telemetry.progress(blocks, "placing thoughts", len(blocks)):
            hidden_BSD = self.engine.read(self.corpus.batch(block).to(self.engine.device)).hidden_BSD
            weight_BS = foresight.variance(hidden_BSD).cpu().numpy()
            for number, weight_S in zip(block.tolist(), weight_BS):
                weight_S = weight_S * eligible(self.corpus.document[number], self.corpus.horizon)
                draws_S = rng.uniforms(self.seed, f"{ROLE}/draw", 0, number, 0, np.arange(len(weight_S)))
                positions[number], kinds[number] = redrawn(
                    positions[number], kinds[number], self._moving(number), weight_S, draws_S, self.gap
                )
        for whole in (positions, kinds):
            (every,) = self.world.gather_ragged([torch.from_numpy(whole[own])])
            whole[rows] = every.numpy()
        moved = [np.setdiff1d(positions[number], self.corpus.positions[number]).size for number in rows.tolist()]
        return positions, kinds, sum(moved)

    def _moving(self, number: int) -> Mask:
        """bool `[P]`: the random positions of a text that fall to `variance` rather than `uniform`."""
        many = self.corpus.per_text
        share = self.settings.variance / (self.settings.variance + self.settings.uniform)
        draw_P = rng.uniforms(self.seed, f"{ROLE}/moving", 0, number * many + np.arange(many))
        return (self.corpus.kinds[number] == KINDS.index("uniform")) & (draw_P < share)

    def _report(self, found: Fit, gain_NG: Tensor, by_entropy: Fit) -> dict[str, Any]:
        alike, true = repeated(gain_NG)
        return {
            "pilot": len(gain_NG),
            "thoughts": gain_NG.numel(),
            "deviation": float(gain_NG.double().var(-1).mean().sqrt()),
            "halves_correlation": alike,
            "r2": found.r2,
            "r2_entropy": by_entropy.r2,
            "lift": found.lift,
            "lift_entropy": by_entropy.lift,
            "lift_true": true,
            "penalty": found.penalty,
        }


def _keep(moved: MovedPositions, folder: Path) -> None:
    """Write positions and report; the report comes last, and where it is, everything is."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = moved.corpus
    save_file({"positions": np.asarray(corpus.positions), "kinds": np.asarray(corpus.kinds)}, folder / PLACES)
    beside = folder / f".{REPORT}"
    beside.write_text(json.dumps({**moved.report, "sha256": _sha256(folder / PLACES)}) + "\n", "utf-8")
    os.replace(beside, folder / REPORT)


def _restored(corpus: PreparedCorpus, telemetry: Telemetry, folder: Path) -> MovedPositions:
    """What a run that goes on began with, counted as it was (a checkpoint's account takes its place)."""
    try:
        report = dict(json.loads((folder / REPORT).read_text("utf-8")))
        if report.pop("sha256") != _sha256(folder / PLACES):
            raise ValueError("its checksum differs")
        state = load_file(folder / PLACES)
        placed = corpus.with_positions(state["positions"], state["kinds"])
        telemetry.count(ROLE, **report["amounts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UserError(
            f"{folder / PLACES}: not the positions that the run began with ({reason}); restore it and {REPORT}, or "
            "start another run"
        ) from error
    return MovedPositions(placed, report)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
