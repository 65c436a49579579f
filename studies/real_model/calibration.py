"""What a learned weight is worth on a real model: its offset against the fixed average's, every attempt listed.

    python studies/real_model/calibration.py smollm2-135m-toy studies/real_model/calibration.toml study.toml \\
        --pairs same bracket:0.7 --out found.json

For each pair of critics: fit, qualify, pilot (Algorithm 1 up to line 2, critics of one seed), then learn a weight with
each set of calibration settings (`--routes`) on the same head-training texts. All attempts are measured on development
texts (roles `head_validate` and `probe`) by the unbiased estimator (products over independent continuations of one
prefix) and by the cross-fitted one (total and visible part); whole documents are the units of every error and fold. The
attempt with the clearest reduction by *both* there is measured once more, on the documents of the role `actor`, which
nothing here has used before.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import RunFailed
from tfive.methods.t5 import T5
from tfive.models.load import Loaded, load_model
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.heads import WeightHead
from tfive.rl.calibration.mixture import FixedWeight, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, displacement, energy
from tfive.rl.calibration.saddle import Candidate
from tfive.rl.clusters import Estimate
from tfive.rl.continuations import at_step, side_by_side
from tfive.rl.critics import CriticValues
from tfive.rl.diagnosis import twins
from tfive.rl.drift import offset, offset_difference
from tfive.rl.settings import HALVES
from tfive.rl.trajectory import Trajectories
from tfive.text.prepared import PreparedCorpus
from tfive.training.build import build
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.training.recorder import Recorder
from tfive_lab.study_files import software_versions, write_json

ROUTES: dict[str, dict[str, Any]] = {
    "default": {},
    "state-only": {"mode": "state"},
    "time-only": {},
    "tight": {"kappa": 0.02},
    "wide": {"width": 256, "dropout": 0.3},
    "slow": {"weight_lr": 3e-4, "steps": 1200, "evaluate_every": 60},
}
"""What each route sets of `[calibration]`. `time-only` is a control: its weight sees nothing but the step."""


class TimeOnly(nn.Module):
    """A weight head that is shown nothing but the step."""

    def __init__(self, head: WeightHead) -> None:
        super().__init__()
        self.head = head

    def _blind(self, inputs: WeightInputs) -> WeightInputs:
        return replace(
            inputs.state_only(),
            prefix_NTD=torch.zeros_like(inputs.prefix_NTD),
            value_NT2=torch.zeros_like(inputs.value_NT2),
        )

    def standardize(self, inputs: WeightInputs, mask_NT: Tensor) -> None:
        self.head.standardize(self._blind(inputs), mask_NT)

    def forward(self, inputs: WeightInputs) -> Tensor:
        out: Tensor = self.head(self._blind(inputs))
        return out


@dataclass
class Stage:
    """Algorithm 1 after the pilot with one pair of critics: everything frozen but the calibration heads."""

    pair: str
    method: T5
    config: Config
    corpus: PreparedCorpus

    def calibrator(self, route: str) -> Calibrator:
        """Fresh heads with the settings of a route."""
        settings = self.config.calibration.model_copy(update=ROUTES[route])
        parts = self.method.parts
        made = Calibrator(
            parts.rollout.engine,
            parts.critics.critics[0].head.last.in_features,
            settings,
            seed=self.config.run.seed,
            rows=self.config.run.texts_per_pass,
        )
        if route == "time-only":
            made.weight_head = TimeOnly(made.weight_head)  # type: ignore[assignment]
        return made

    def data(self, role: str, window: int) -> CalibrationData:
        """Fresh trajectories of a role as the heads read them; their clusters are whole documents."""
        parts, normaliser = self.method.parts, self.method.normaliser
        assert normaliser is not None
        fresh = parts.rollout.collect(role, window)
        judged = parts.critics.evaluate(fresh)
        parts.critics.release()
        data = parts.calibrator.data(parts.critics.advantages(fresh, judged), judged, normaliser)
        unit_N = self.documents(fresh)[fresh.thoughts.valid_BR]
        return replace(data, occupation=replace(data.occupation, text_N=unit_N))

    def documents(self, some: Trajectories) -> Tensor:
        """`[B, R]`: the document each branch stands in; documents packed into one sequence do not see each other."""
        items_BP, positions_BP = (t.clamp(min=0).cpu().numpy() for t in (some.texts.items_BP, some.texts.positions_BP))
        number_BP = self.corpus.document[items_BP // self.corpus.per_text, positions_BP].astype("int64")
        return torch.from_numpy(number_BP).to(some.texts.items_BP.device)


class Untouched:
    """A ledger that hands out the actor's half of the pool for any role: critics are fitted in the first window alone,
    to the other half, and the actor is not trained here."""

    def __init__(self, corpus: PreparedCorpus) -> None:
        self.numbers = corpus.sequences("train", HALVES[0])

    def draw(self, role: str, window: int, attempt: int = 0) -> Any:
        """All of the actor's sequences."""
        return self.numbers


@dataclass
class Judges:
    """What candidates are measured on: trajectories (cross-fitted estimator) and continuations (unbiased one)."""

    data: CalibrationData
    probe: Trajectories
    judged: CriticValues

    @classmethod
    def drawn(cls, stage: Stage, window: int) -> Judges:
        """Fresh ones of a window."""
        parts, normaliser = stage.method.parts, stage.method.normaliser
        assert parts.probe is not None
        assert normaliser is not None
        data = stage.data("head_validate", window)
        probe = parts.probe.draw(window, FixedWeight(), normaliser)
        judged = parts.critics.evaluate(probe)
        parts.critics.release()
        return cls(data, probe, judged)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="+", help="presets and TOML files, as for tfive train")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="key=value")
    parser.add_argument("--prepared", type=Path, help="a prepared corpus folder, instead of text.sources")
    parser.add_argument("--pairs", nargs="+", default=["same", "disjoint", "bracket:0.7", "bracket:0.9"])
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--seconds", type=float, help="begin no further pair after this time")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(given)


def prepared_stage(
    config: Config, pair: str, loaded: Loaded, corpus: PreparedCorpus, recorder: Recorder
) -> tuple[Stage, dict[str, Any]]:
    """Lines 1 and 2 of Algorithm 1 and the pilot for one pair; raises `RunFailed` where critics do not qualify."""
    kind, _, expectile = pair.partition(":")
    update: dict[str, Any] = {"pair": kind} | ({"expectile": float(expectile)} if expectile else {})
    config = config.model_copy(update={"critic": config.critic.model_copy(update=update)})
    fresh = Loaded(**{**vars(loaded), "model": copy.deepcopy(loaded.model)})
    method = build(config, fresh, corpus, recorder).method
    assert isinstance(method, T5)
    while method.phase != "calibrate":
        method.advance()
    assert method.normaliser is not None
    report = {"deviation": method.normaliser.deviation}
    report |= {k: method.report[k] for k in ("r2", "r2_per_step", "value_spread", "value_disagreement", "critic_loss")}
    return Stage(pair, method, config, corpus), report


def contexts(probe: Trajectories, value_BRT: Tensor, continuations: int) -> Tensor:
    """`[N, M]`: the value at each probed step, continuations of one prefix side by side."""
    return side_by_side(probe, at_step(probe, value_BRT), continuations)


def line(estimate: Estimate) -> dict[str, Any]:
    """A mean with its text-clustered error, its z and the number of texts."""
    return {**asdict(estimate), "z": estimate.mean / estimate.error if estimate.error > 0 else None}


def judge(
    stage: Stage, calibrator: Calibrator, candidate: Candidate, judges: Judges, window: int, *, whole: bool = False
) -> dict[str, Any]:
    """The offsets of a frozen candidate and of the fixed average; `whole` adds both cross-fitted offsets."""
    normaliser = stage.method.normaliser
    assert normaliser is not None
    many = stage.config.calibration.continuations
    data, mixture = judges.data, candidate.mixture
    mixed = calibrator.advantage(judges.probe, judges.judged, normaliser, mixture).need("advantage_BRT")
    fixed = calibrator.advantage(judges.probe, judges.judged, normaliser, FixedWeight()).need("advantage_BRT")
    text_N = contexts(judges.probe, stage.documents(judges.probe)[..., None].expand_as(mixed), many)[:, 0]
    mixed_NM, fixed_NM = (contexts(judges.probe, value, many) for value in (mixed, fixed))
    weight = mixture.weight(data.weight_inputs)
    moved = float(data.occupation.mean(displacement(weight, data.first_NT, data.second_NT)))
    signal = float(data.occupation.mean(energy(data.first_NT, data.second_NT)))
    mask = data.occupation.mask_NT
    found = calibrator.offsets(data, mixture, window) if whole else calibrator.changes(data, mixture, window)
    return {
        "contexts": len(text_N),
        "unbiased_mixture": line(offset(mixed_NM, text_N)),
        "unbiased_average": line(offset(fixed_NM, text_N)),
        "unbiased_change": line(offset_difference(mixed_NM, fixed_NM, text_N)),
        "cross_fitted": {k.removeprefix("cross_fit_"): v for k, v in found.items()},
        "retention": moved / signal,
        "signal": signal,
        "weight_mean": float(weight[mask].mean()),
        "weight_deviation": float(weight[mask].std()),
    }


def clearest(attempts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The attempt whose weaker reduction (unbiased or cross-fitted visible, in standard errors) is largest.

    Controls, attempts that kept the average, and attempts beyond κ are no candidates; None without one.
    """

    def weaker(attempt: dict[str, Any]) -> float:
        found = attempt["development"]
        visible = found["cross_fitted"]["change_visible"] / found["cross_fitted"]["change_visible_error"]
        return max(found["unbiased_change"]["z"], visible)

    moved = [
        a
        for a in attempts
        if a["route"] != "time-only" and a["mixture"] != "average" and a["development"]["retention"] <= a["kappa"]
    ]
    return min(moved, key=weaker, default=None)


def provenance(
    asked: argparse.Namespace, config: Config, corpus: PreparedCorpus, device: torch.device
) -> dict[str, Any]:
    """What it takes to repeat the study."""
    return {
        "command": "python studies/real_model/calibration.py",
        "configuration": config.leaves(),
        "config_sha256": hashlib.sha256(config.to_toml().encode()).hexdigest(),
        "pairs": asked.pairs,
        "routes": {name: ROUTES[name] for name in asked.routes},
        "corpus": corpus.fingerprint,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": software_versions(),
    }


def main() -> int:
    asked, start = arguments(), time.perf_counter()
    config = Config.load(*asked.sources, overrides=asked.overrides)
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(config.model.name, device=placement.device, dtype=placement.compute)
    corpus = PreparedCorpus(asked.prepared) if asked.prepared else corpus_of(config, loaded=loaded)
    attempts: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    kept: dict[tuple[str, str], tuple[Stage, Calibrator, Candidate]] = {}
    with Recorder(None, quiet=True) as recorder, placement.no_autocast():
        for pair in asked.pairs:
            began = time.perf_counter()
            if asked.seconds is not None and began - start > asked.seconds:
                pairs.append({"pair": pair, "failed": f"not begun: {asked.seconds} s had passed"})
                continue
            try:
                stage, report = prepared_stage(config, pair, loaded, corpus, recorder)
            except RunFailed as failure:
                pairs.append({"pair": pair, "failed": str(failure)})
                continue
            judges, training = Judges.drawn(stage, 1), stage.data("head_train", 1)
            pairs.append({"pair": pair, **report, **twins(judges.data), "fit_seconds": time.perf_counter() - began})
            print(json.dumps(pairs[-1]), flush=True)
            for route in asked.routes:
                began = time.perf_counter()
                calibrator = stage.calibrator(route)
                candidate = calibrator.learn(training, 1)
                attempts.append(
                    {
                        "pair": pair,
                        "route": route,
                        "kappa": calibrator.settings.kappa,
                        "mixture": candidate.mixture.name,
                        "step": candidate.step,
                        "multiplier": candidate.multiplier,
                        "development": judge(stage, calibrator, candidate, judges, 1),
                        "seconds": time.perf_counter() - began,
                    }
                )
                show(attempts[-1], "development")
                kept[pair, route] = (stage, calibrator, candidate)
        best = clearest(attempts)
        if best is not None:
            stage, calibrator, candidate = kept[best["pair"], best["route"]]
            best["chosen"] = True
            stage.method.parts.rollout.ledger = Untouched(corpus)  # type: ignore[assignment]
            judges = Judges.drawn(stage, 2)
            best["confirmation"] = judge(stage, calibrator, candidate, judges, 2, whole=True)
            show(best, "confirmation")
    document = {**provenance(asked, config, corpus, placement.device), "critics": pairs, "attempts": attempts}
    write_json(asked.out, document)
    return 0


def show(attempt: dict[str, Any], where: str) -> None:
    """Print one line for an attempt."""
    found = attempt[where]
    change, cross = found["unbiased_change"], found["cross_fitted"]
    parts = [f"{attempt['pair']:12} {attempt['route']:10} {where[:7]}"]
    parts.append(f"R(1/2) {found['unbiased_average']['mean']:.4f} change {change['mean']:+.5f} ± {change['error']:.5f}")
    for name in ("change", "change_visible"):
        if name in cross:
            parts.append(f"cross {name[6:] or 'total'} {cross[name]:+.5f} ± {cross[name + '_error']:.5f}")
    parts.append(f"C/Q {found['retention']:.4f} w {found['weight_mean']:.2f}±{found['weight_deviation']:.2f}")
    print(" | ".join(parts), flush=True)


if __name__ == "__main__":
    script(main)
