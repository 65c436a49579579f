"""All methods on the embedded model, and the paper's two small studies: `python studies/nano/compare.py`.

Three studies, each run as `tfive compare` would: every method and the control; the warm-up sweep
(app:warmup-ablation); the naive-PPO diagnostic (app:historical-naive-ppo). Given again, the command continues where it
stopped; `--jobs N` runs N cells at a time, a core each, and marks their seconds as disturbed. Results go to
`results/nano-study.json`; `--render` draws `docs/studies/comparison.md` and its figures from that file alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive.cli.report import tabulated
from tfive.errors import UserError
from tfive.report import figures
from tfive.report.blocks import Block, command, heading, markdown, paragraph, picture, table
from tfive.report.runs import Run
from tfive.report.sections import TITLES, number, study_blocks
from tfive.report.table import final
from tfive.training.compare import compare
from tfive_lab.study_files import METHODS, draw_study_figures, write_json

BARS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Thresholds η of the warm-up sweep."""
FROZEN = 20
"""Steps of the diagnostic during which the actor is frozen."""
SETTINGS = ("run.develop_every=2", "qualify.on_failure=stop")
"""What all studies but the diagnostic set beside the preset: a run of T⁵ is T⁵ to the end or a failure."""
NAIVE = (
    "window.windows=60", "window.actor_steps=1", "window.items=48", "actor.reuse_passes=1", "actor.minibatches=1",
    f"ppo.frozen_windows={FROZEN}", "critic.warmup_rounds=1", "run.develop_every=10", "run.checkpoint_every=10",
)  # fmt: skip
"""The diagnostic: one critic, one step a window, the actor frozen for the first 20 of 60 steps, measured every ten."""
ROOT = Path(__file__).resolve().parents[2]
STUDIES = ("main", "warmup", "naive")
"""Studies that are run unless `--only` says otherwise; `--only ablations` runs the ablations of T⁵, `--only parts` its
three parts taken away, `--only rules` both rules of qualification, `--only hindsight` what a warm start adds."""
PARTS = ("t5", *(f"t5+ablation-{part}" for part in ("no-calibration", "single-critic", "no-qualification")),
         "quiet-star-ppo")  # fmt: skip
"""T⁵, then without the learned weight, the second critic and qualification, one at a time; PPO has none of them."""
RULES = ("t5", "t5+qualify.rule=sustained")
"""Algorithm 1's rule, which is the default, and that of Section 4."""
HINDSIGHT = ("t5", "quiet-star-grpo", "quiet-star-ppo", "anchor-only")
WARM = ("warmstart.source=hindsight",)
"""Two rounds of hindsight before the windows, which draw some 53,000 tokens; six windows of T⁵ draw some 36,000."""
ABLATIONS = (
    "fixed-average", "minimum", "single-critic", "no-qualification", "no-calibration", "state-only", "pair-disjoint",
    "pair-bracket", "repeated-prefix", "score-centering",
)  # fmt: skip
"""Presets `ablation-…`; `pair-same` is left out because T⁵ has that pair by default."""


def bar_label(eta: float) -> str:
    """The label of the sweep's run with this threshold."""
    return f"t5+qualify.eta={eta:g}"


def run_study(name: str, asked: argparse.Namespace) -> list[Run]:
    """Run one of the studies, or what is left of it; returns all its runs."""
    methods, settings = {
        "main": (METHODS, SETTINGS),
        "warmup": (tuple(bar_label(eta) for eta in BARS), SETTINGS),
        "naive": (("quiet-star-ppo",), NAIVE),
        "ablations": (("t5", *(f"t5+ablation-{preset}" for preset in ABLATIONS)), SETTINGS),
        "parts": (PARTS, SETTINGS),
        "rules": (RULES, SETTINGS),
        "hindsight": (HINDSIGHT, (*SETTINGS, *WARM)),
    }[name]
    seeds, out = range(asked.sweep_seeds if name in ("warmup", "naive") else asked.seeds), asked.runs / name
    overrides = [*settings, *asked.overrides]
    return compare(["nano"], methods, list(seeds), overrides, out, jobs=asked.jobs, retry=asked.retry)[1]


def results(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the studies asked for and merge their tables into the results file, which is written after each."""
    found: dict[str, Any] = json.loads(asked.out.read_text("utf-8")) if asked.out.is_file() else {}
    for name in asked.only:
        found[name] = tabulated(run_study(name, asked))
        if name == "main":
            found.pop("note", None)
        found["command"] = "python studies/nano/compare.py"
        write_json(asked.out, found)
    return found


def warmup_points(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One point for each run of the sweep: its threshold, its measured warm-up and its final scores, or its failure."""
    points = []
    for run in found["runs"]:
        eta = float(run["label"].rpartition("=")[2])
        point = {"eta": eta, "seed": run["seed"], "state": run["state"], "failure": run.get("failure")}
        if run["state"] == "done":
            last = final(run)
            point |= {name: last.get(name) for name in ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain")}
            point |= {"warmup_seconds": run["warmup_seconds"], "disturbed": run["disturbed"]}
        points.append(point)
    return points


def warmup_blocks(found: dict[str, Any], folder: Path) -> list[Block]:
    """The sweep: final scores against measured warm-up time."""
    points = warmup_points(found)
    finished = [point for point in points if point["state"] == "done"]
    rows = []
    for point in sorted(points, key=lambda one: (one["eta"], one["seed"])):
        names = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain")
        mark = " (disturbed)" if point.get("disturbed") else ""
        seconds = f"{point['warmup_seconds']:.1f}{mark}" if point["state"] == "done" else "–"
        note = "" if point["state"] == "done" else point["failure"] or point["state"]
        rows.append((f"{point['eta']:g}", str(point["seed"]), seconds, *(number(point.get(n)) for n in names), note))
    blocks = [
        heading("The warm-up sweep"),
        *noted(found),
        paragraph(
            "T⁵ with other bars η that both critics must reach on fresh texts before the actor moves "
            "(app:warmup-ablation, there on AIME 2026). Warm-up is the measured time of opening, fitting and testing "
            "before the first actor step; a bar of 0 still needs it. A bar that is never reached ends the run, and the "
            "table says so."
        ),
        table(("η", "seed", "warm-up s", "thought gain", "content gain", "vs base", "mixed gain", ""), rows),
    ]
    if finished and figures.available():
        name, caption = figures.draw_warmup(finished, folder / "comparison-warmup.png")
        blocks.append(picture(f"figures/{name}", caption))
    return blocks


def naive_blocks(found: dict[str, Any], folder: Path) -> list[Block]:
    """The diagnostic: what PPO with one unqualified critic does in sixty steps."""
    shown = ("thought_gain", "mixed_gain", "useful_fraction", "worst_1_percent", "content_gain", "no_thought_drift")
    rows = [
        (str(run["seed"]), f"{point['windows']:g}", *(number(point.get(name)) for name in shown))
        for run in found["runs"]
        for point in run.get("curve", ())
    ]
    failed = [
        f"seed {run['seed']} {run['state']}: {run['failure']}." for run in found["runs"] if run["state"] != "done"
    ]
    curves = [run["curve"] for run in found["runs"] if run["state"] == "done"]
    blocks = [
        heading("Naive PPO"),
        *noted(found),
        paragraph(
            "One critic, no qualification, one step a window of 48 thoughts; the actor is frozen for the first "
            f"{FROZEN} of 60 steps (app:historical-naive-ppo, there on CommonsenseQA and GSM8K). Measured every ten "
            "steps on the same development texts; no-thought prediction is the zero line.",
            *failed,
        ),
        table(("seed", "step", *(TITLES[name] for name in shown)), rows),
    ]
    if curves and figures.available():
        name, caption = figures.draw_diagnostic(curves, FROZEN, folder / "comparison-naive-ppo.png")
        blocks.append(picture(f"figures/{name}", caption))
    return blocks


def rule_blocks(found: dict[str, Any]) -> list[Block]:
    """Both rules of qualification."""
    text = (
        "`t5` asks for fresh passes in every window (`qualify.rule = strict`, Algorithm 1); under `sustained` "
        "(Section 4) critics that failed once may move the actor while patience lasts."
    )
    return _variant_blocks(found, "Two rules of qualification", text, "rules")


def part_blocks(found: dict[str, Any]) -> list[Block]:
    """T⁵'s three parts taken away, one at a time and all."""
    text = (
        "What the paper adds to PPO, taken away one at a time: the learned weight (`no-calibration`: the plain average "
        "of two critics), the second critic (`single-critic`), qualification (`no-qualification`); `quiet-star-ppo` "
        "has none of the three. Equal steps and equal actor thoughts; what the parts cost stands under "
        "[thoughts and tokens by role](#thoughts-and-tokens-by-role)."
    )
    return _variant_blocks(found, "Parts of T⁵", text, "parts")


def ablation_blocks(found: dict[str, Any]) -> list[Block]:
    """The ablations of T⁵: what changes when one of its parts is taken away."""
    text = "Presets of T⁵ with one part replaced; `fixed-average` keeps the machinery and sets κ to 0."
    return _variant_blocks(found, "Ablations of T⁵", text, "ablations")


def hindsight_blocks(found: dict[str, Any]) -> list[Block]:
    """Methods after a warm start from hindsight."""
    text = (
        "Before its first window every model draws eight thoughts at each of some 512 positions and learns those that "
        "in hindsight help most, twice (`warmstart.source = hindsight`); `anchor-only` goes on without rewards. What "
        "T⁵ does with as many tokens and no warm start: [the embedded example](nano.md#after-hindsight)."
    )
    return _variant_blocks(found, "After hindsight", text, "hindsight")


def _variant_blocks(found: dict[str, Any], title: str, text: str, name: str) -> list[Block]:
    """A study of variants of T⁵ in short: its tables without those about cost."""
    blocks = study_blocks(found)
    titles = [block.text if block.kind == "heading" else "" for block in blocks]
    short = [*blocks[: titles.index("Equal cost")], blocks[titles.index("Every run") + 1]]
    inner = [block for block in short if block.kind != "heading"]
    return [
        heading(title),
        *noted(found),
        paragraph(text),
        command(
            f"python studies/nano/compare.py --only {name} --seeds {max(len(r['seeds']) for r in found['methods'])}"
        ),
        *inner[1:],
    ]


def noted(found: dict[str, Any]) -> list[Block]:
    """What the results say of themselves: code and place of older runs. A study that is run again loses its note; that
    of the main table stands over all."""
    return [paragraph(found["note"])] if "note" in found else []


def intro(found: dict[str, Any]) -> list[Block]:
    """What the page is about and how it was made."""
    state = noted(found)
    state += [] if found else [paragraph("The study has not been run yet: `results/nano-study.json` is not there.")]
    return [
        paragraph(
            "Every method of the paper's comparison and the control `anchor-only` (thoughts and anchors, no policy "
            "gradient), on the embedded model and text. All start from the same weights and see the same corpus, "
            "positions, actor texts in the same order, anchors and evaluation; `tfive compare` refuses to tabulate "
            "runs that differ in weights, precision, text, positions, actor texts, steps a window or evaluation. "
            "Results are those of test texts, curves and equal-cost cuts those of development texts. Group "
            "methods train on eight thoughts a position and are measured with one, like the others."
        ),
        command("python studies/nano/compare.py\npython studies/nano/compare.py --jobs 8"),
        paragraph(
            "The first command needs one core and goes on where it stopped. The second runs eight at a time on a core "
            "each, and marks their seconds as disturbed.",
            *_length(found),
            "`--render` draws this page again from `results/nano-study.json`.",
        ),
        *state,
    ]


def _length(found: dict[str, Any]) -> list[str]:
    """How long the runs took, one after the other."""
    spent = {name: sum(run.get("seconds", 0.0) for run in found[name]["runs"]) for name in STUDIES if name in found}
    if not spent:
        return []
    parts = ", ".join(f"{name} {seconds / 60:.0f}" for name, seconds in spent.items())
    return [f"The runs shown here add up to {sum(spent.values()) / 60:.0f} minutes ({parts})."]


def render(found: dict[str, Any], page: Path) -> None:
    """Write the page and its figures."""
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    blocks = intro(found)
    if "main" in found:
        blocks += study_blocks(found["main"], draw_study_figures(found["main"], folder, "comparison"))
    blocks += warmup_blocks(found["warmup"], folder) if "warmup" in found else []
    blocks += naive_blocks(found["naive"], folder) if "naive" in found else []
    blocks += rule_blocks(found["rules"]) if "rules" in found else []
    blocks += part_blocks(found["parts"]) if "parts" in found else []
    blocks += hindsight_blocks(found["hindsight"]) if "hindsight" in found else []
    blocks += ablation_blocks(found["ablations"]) if "ablations" in found else []
    page.write_text(markdown("Comparison of methods", blocks), "utf-8")


def main(given: list[str] | None = None) -> int:
    """Run what is left, tabulate, render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--sweep-seeds", type=int, default=2, help="how many in the sweep and the diagnostic")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a core each")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(STUDIES),
        help="main,warmup,naive,rules,parts,hindsight,ablations",
    )
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--runs", type=Path, default=Path("runs/nano-study"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "nano-study.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "comparison.md")
    parser.add_argument("--render", action="store_true", help="only draw the page from the results")
    asked = parser.parse_args(given)
    known = {*STUDIES, "ablations", "parts", "rules", "hindsight"}
    if unknown := set(asked.only) - known:
        raise UserError(f"--only {','.join(sorted(unknown))}: choose among {', '.join(sorted(known))}")
    if asked.render:
        found = json.loads(asked.out.read_text("utf-8")) if asked.out.is_file() else {}
    else:
        found = results(asked)
    render(found, asked.page)
    print(asked.page)
    return 0


if __name__ == "__main__":
    script(main)
