"""What `tfive theory --figures DIR` does: the map of when calibration helps, as numbers and as pictures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.rl.calibration.mixture import mix
from tfive.training.recorder import Recorder
from tfive_lab.theory.landscape import AXES, RULES, UPDATES, Setting, learned_from, make_world, point
from tfive_lab.theory.saddle import solve
from tfive_lab.theory.worlds import World

NAMES = {
    "average": "fixed average",
    "single": "single critic",
    "minimum": "minimum",
    "centering": "score centering",
    "t5": "T⁵ (exact optimum)",
    "true": "true gradient",
}
COLOURS = {
    "average": "#5b6770", "single": "#b58b00", "minimum": "#a2323a", "centering": "#3b7d4f", "t5": "#1f5fa8",
    "true": "#000000",
}  # fmt: skip
AXIS_NAMES = {
    "disagreement": "twin disagreement",
    "mismatch": "sampling mismatch",
    "lag": "policy lag",
    "kappa": "retention limit κ",
    "hidden_share": "hidden share of the losses",
    "offset": "shared critic error",
    "reuse": "updates per window",
}
TRAJECTORIES = (32, 128, 512, 2048)


def draw(folder: Path, worlds: int, *, quiet: bool = False) -> str:
    """Computes the map on `worlds` worlds a setting, writes `map.json` and the figures; returns what to print."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError as error:
        raise UserError(f"--figures needs matplotlib: {install_hint('figures')}") from error
    if worlds < 1:
        raise UserError(f"--worlds {worlds} must be at least 1 for figures")
    folder.mkdir(parents=True, exist_ok=True)
    with Recorder(None, quiet=quiet) as recorder:
        cells = [(axis, value) for axis, values in AXES.items() for value in values]
        points = [asdict(point(axis, value, worlds)) for axis, value in recorder.progress(cells, "settings")]
        data = [asdict(learned_from(n, min(worlds, 12))) for n in recorder.progress(TRAJECTORIES, "head data")]
    (folder / "map.json").write_text(json.dumps(_rounded({"points": points, "head_data": data}), indent=1) + "\n")
    _drift(folder / "drift.png")
    _room(folder / "room.png", worlds)
    _floor(folder / "floor.png", worlds)
    _panels(folder / "gradient_error.png", points, "gradient_error", "reuse", "relative gradient error (median)")
    _panels(folder / "gain.png", points, "gain", "lag", f"return gained after {UPDATES} updates")
    _head_data(folder / "head_data.png", data)
    return f"wrote map.json and 6 figures to {folder}"


def _rounded(value: Any) -> Any:
    """Six significant digits are enough for a map; an undefined error is null."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tfive"}
    )
    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _drift(path: Path) -> None:
    """Conditional means and mean-induced drift of every context, before and after mixing."""
    from tfive.rl.drift import update_factor

    world = make_world(Setting(), 0, 1)
    first, second = world.pair()
    signals = {"average": (first + second) / 2, "t5": mix(solve(world, 0.1).weight_NT, first, second)}
    seen, index = _contexts(world)
    figure, (left, right) = _figure(8, 2.8, 2)
    for shift, (rule, signal) in zip((-0.2, 0.2), signals.items()):
        mean = world.mean_given_context(signal)
        factor = update_factor(world.ratio_NT, signal, world.score_NTP, world.low, world.high)
        drift = (mean.unsqueeze(-1) * world.mean_given_context(factor)).norm(dim=-1)
        place = [x + shift for x in range(len(seen))]
        left.bar(place, mean.flatten()[index].tolist(), 0.4, color=COLOURS[rule], label=NAMES[rule])
        right.bar(place, drift.flatten()[index].tolist(), 0.4, color=COLOURS[rule])
    left.axhline(0, color="black", linewidth=0.5)
    left.set(xlabel="context", ylabel="conditional mean of the advantage")
    right.set(xlabel="context", ylabel="mean-induced drift ‖Δ_μ‖")
    left.legend(frameon=False, loc="lower right")
    _save(figure, path)


def _contexts(world: World) -> tuple[list[int], torch.Tensor]:
    """Each context once, with the flat place of one of its steps."""
    flat, mask = world.context_NT.flatten().tolist(), world.mask_NT.flatten().tolist()
    places: dict[int, int] = {}
    for place, (context, valid) in enumerate(zip(flat, mask)):
        if valid:
            places.setdefault(context, place)
    return list(places), torch.tensor(list(places.values()))


def _room(path: Path, worlds: int) -> None:
    """How much of the offset two critics can remove as they diverge, for several retention limits."""
    figure, axes = _figure(4.6, 3.0)
    spreads = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
    for kappa, style in ((0.02, ":"), (0.1, "--"), (0.3, "-."), (0.9, "-")):
        removed = []
        for spread in spreads:
            found = [solve(make_world(replace(Setting(), disagreement=spread), 0, n), kappa) for n in range(worlds)]
            removed.append(sum(1 - s.risk / s.reference_risk for s in found) / worlds)
        axes.plot(spreads, removed, style, color=COLOURS["t5"], label=f"κ = {kappa:g}")
    axes.set(xlabel=AXIS_NAMES["disagreement"], ylabel="share of the offset removed", ylim=(0, 1), xscale="log")
    axes.legend(frameon=False)
    _save(figure, path)


def _floor(path: Path, worlds: int) -> None:
    """Offset of the average, of the optimum, and the floor that hidden scoring text leaves to a visible baseline."""
    figure, axes = _figure(4.6, 3.0)
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    lines: dict[str, list[float]] = {"fixed average": [], "optimum, κ = 0.9": [], "visible floor": []}
    for share in shares:
        batch = [make_world(replace(Setting(), hidden_share=share, kappa=0.9), 0, n) for n in range(worlds)]
        found = [solve(world, 0.9, world.pair(monte_carlo=True)) for world in batch]
        lines["fixed average"].append(sum(s.reference_risk for s in found) / worlds)
        lines["optimum, κ = 0.9"].append(sum(s.risk for s in found) / worlds)
        lines["visible floor"].append(sum(_hidden_variance(world) for world in batch) / worlds)
    for (name, values), style in zip(lines.items(), ("-", "--", ":")):
        axes.plot(shares, values, style, color="black" if name == "visible floor" else COLOURS["t5"], label=name)
    axes.set(xlabel=AXIS_NAMES["hidden_share"], ylabel="offset R (Monte Carlo advantages)", ylim=(0, None))
    axes.legend(frameon=False)
    _save(figure, path)


def _hidden_variance(world: World) -> float:
    value = world.true_value_NT
    spread = world.given((value - world.given(value, world.state_NT)).square(), world.state_NT)
    return float(world.integral(spread)) / world.pilot.deviation**2


def _panels(path: Path, points: list[dict[str, Any]], key: str, without: str, label: str) -> None:
    """One panel for each parameter that matters to `key`, one line for each rule."""
    figure, axes = _figure(9, 5, 3, 2)
    rules = (*RULES, "true") if key == "gain" else RULES
    for panel, (axis, name) in zip(axes.flatten(), ((a, n) for a, n in AXIS_NAMES.items() if a != without)):
        here = [p for p in points if p["axis"] == axis]
        for rule in rules:
            panel.plot(
                [p["value"] for p in here], [p[key][rule] for p in here], "-" if rule in ("t5", "true") else "--",
                color=COLOURS[rule], label=NAMES[rule], marker=".", linewidth=1,
            )  # fmt: skip
        panel.set(xlabel=name)
    for panel in axes[:, 0]:
        panel.set(ylabel=label)
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    _save(figure, path)


def _head_data(path: Path, data: list[dict[str, Any]]) -> None:
    """How much of the attainable reduction learned heads find in a number of single rollouts."""
    figure, axes = _figure(4.6, 2.6)
    axes.plot([d["trajectories"] for d in data], [d["attained"] for d in data], "-o", color=COLOURS["t5"], markersize=3)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(
        xscale="log", xlabel="head-learning trajectories", ylabel="share of the optimum's reduction", ylim=(0, 1.05)
    )
    _save(figure, path)
