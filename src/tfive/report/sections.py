"""The blocks of the page of a study and of the page of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfive.report.blocks import Block, heading, paragraph, picture, table
from tfive.report.runs import Run
from tfive.report.statistics import rolling_median
from tfive.report.table import AXES, KEPT, PAIRED, StudyTable, final

TITLES = {
    "thought_gain": "thought gain", "content_gain": "content gain", "gain_vs_base": "vs base",
    "other_gain": "another's thought", "empty_gain": "empty thought", "random_gain": "random tokens",
    "mixed_gain": "mixed gain", "mixed_gain_constant": "constant gate", "mixed_gain_oracle": "oracle gate",
    "mixed_gain_other": "gate with another's thought", "no_thought_drift": "no-thought loss − base",
    "useful_fraction": "useful positions", "worst_1_percent": "worst 1 %",
    "no_thought_loss": "no-thought loss", "mean_thought_length": "thought length", "mean_gate": "gate",
    "windows": "windows", "seconds": "seconds", "corpus_tokens": "corpus tokens", "thought_tokens": "thought tokens",
}  # fmt: skip
"""What a number is called on a page."""

SMALL = 0.02
"""Gains nearer to zero than this are printed with one more decimal."""
RUN_COLUMNS = ("method", "seed", "state", "thought gain", "content gain", "mixed gain", "seconds")
HOLD = 0.01
"""Nats by which the loss without a thought may exceed the base model's before the anchor counts as lost."""


def signed(value: float) -> str:
    """How gains are written: small ones with a fourth decimal."""
    return "+.4f" if abs(value) < SMALL else "+.3f"


def number(value: float | None, form: str | None = None) -> str:
    """A number (a gain, unless a form is given), or a dash where there is none."""
    return "–" if value is None else format(value, form or signed(value))


def interval(found: dict[str, Any] | None, form: str | None = None) -> str:
    """Mean (low … high)."""
    if found is None:
        return "–"
    form = form or signed(found["mean"])
    return f"{found['mean']:{form}} ({found['low']:{form}} … {found['high']:{form}})"


def _result(measured: dict[str, Any], name: str) -> str:
    return interval(measured.get(name), ".3f" if name == "useful_fraction" else None)


def study_blocks(found: StudyTable, figures: Sequence[tuple[str, str]] = ()) -> list[Block]:
    """The whole page of a study, from the summary to the limits."""
    blocks = [paragraph(*found["rules"]), heading("In short"), *in_short(found), *in_short_at_equal_cost(found)]
    blocks += [heading("Held-out gains"), *_gains(found)]
    blocks += [picture(name, caption) for name, caption in figures]
    blocks += [heading("Did the anchor hold?"), *_anchor(found)]
    blocks += [heading(_versus(found)), _paired(found)]
    blocks += [heading("Equal cost"), *_cuts(found)]
    blocks += [heading("Step time"), *_step_time(found)]
    blocks += [heading("Thoughts and tokens by role"), *_roles(found)]
    blocks += [heading("Every run"), _runs(found)]
    return [*blocks, heading("What this does not show"), *(paragraph(f"- {line}") for line in found["limits"])]


def variant_blocks(found: StudyTable) -> list[Block]:
    """The gains of a study's table without headings and costs: for variants whose costs are reported elsewhere or whose
    seconds do not compare."""
    return [
        *in_short(found),
        *_gains(found),
        *_anchor(found),
        paragraph(_versus(found)),
        _paired(found),
        _states(found),
    ]


def in_short(found: StudyTable) -> list[Block]:
    """Summary: which methods differ from the reference beyond the 95 % interval."""
    versus, blocks = found["reference"], []
    for name in ("content_gain", "mixed_gain"):
        labels_by: dict[str, list[str]] = {"above": [], "below": [], "not told apart from": []}
        for row in found["differences"]:
            if ends := row["measured"].get(name):
                kind = "above" if ends["low"] > 0 else "below" if ends["high"] < 0 else "not told apart from"
                labels_by[kind].append(row["label"])
        parts = [f"{kind} {', '.join(labels)}" for kind, labels in labels_by.items() if labels]
        if parts:
            blocks.append(paragraph(f"- {TITLES[name].capitalize()} of {versus} at equal steps: {'; '.join(parts)}."))
    return blocks


def in_short_at_equal_cost(found: StudyTable) -> list[Block]:
    """Summary: which methods are ahead of the reference at equal cost."""
    versus, blocks = found["reference"], []
    for axis in ("seconds", "thought_tokens"):
        labels_by: dict[str, list[str]] = {
            "ahead": [],
            "behind": [],
            "equal": [],
            "no measurement of both that early": [],
        }
        for cut in found["cuts"][axis]:
            labels_by[_standing(cut["method"], cut["reference"])].append(cut["label"])
        parts = [f"{kind}: {', '.join(labels)}" for kind, labels in labels_by.items() if labels]
        if found["cuts"][axis]:
            where = f"at equal {TITLES[axis]}, last measurements within the budget, against {versus}"
            blocks.append(paragraph(f"- Content gain {where}: {'; '.join(parts)}."))
    return blocks


def _standing(mine: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether a method is ahead of the reference; measurements before training do not count."""
    first, second = mine.get("content_gain"), other.get("content_gain")
    if not mine["used"] or not other["used"] or first is None or second is None:
        return "no measurement of both that early"
    return "equal" if first == second else "ahead" if first > second else "behind"


def _finished(found: StudyTable) -> list[dict[str, Any]]:
    return [row for row in found["methods"] if "measured" in row]


def _gains(found: StudyTable) -> list[Block]:
    own = ("thought_gain", "content_gain", "gain_vs_base", "useful_fraction", "worst_1_percent")
    controls = ("other_gain", "empty_gain", "random_gain")
    mixed = ("mixed_gain", "mixed_gain_constant", "mixed_gain_oracle", "mixed_gain_other")
    finished = _finished(found)
    first = table(
        ("method", "seeds", "thought gain before", *(TITLES[name] for name in own)),
        (
            (
                row["label"],
                str(len(row["seeds"])),
                number(row["thought_gain_start"]),
                *(_result(row["measured"], name) for name in own),
            )
            for row in finished
        ),
    )
    others = [
        table(
            ("method", *(TITLES[name] for name in names)),
            ((row["label"], *(_result(row["measured"], name) for name in names)) for row in finished),
        )
        for names in (controls, mixed)
    ]
    return [
        paragraph(
            "Nats per token of the continuation (positive is better), at the last checkpoint. Content gain is the loss "
            "with another item's thought minus the loss with one's own; claims of learning rest on it, on the gain "
            "over the base model, and on the loss without a thought staying put."
        ),
        first,
        paragraph("What a program that does not think would score in the thought's place:"),
        others[0],
        paragraph("With the prediction gate, on texts it never saw, beside simpler and wiser gates:"),
        others[1],
    ]


def _anchor(found: StudyTable) -> list[Block]:
    rows = []
    for row in _finished(found):
        drift = row["measured"].get("no_thought_drift")
        held = "–" if drift is None else "yes" if drift["high"] <= HOLD else "no" if drift["low"] > HOLD else "unclear"
        rows.append((row["label"], interval(drift, "+.4f"), held))
    return [
        paragraph(f"Loss without a thought against the base model's; it should not rise by more than {HOLD} nats."),
        table(("method", TITLES["no_thought_drift"], "held"), rows),
    ]


def _versus(found: StudyTable) -> str:
    return f"{found['reference']} minus each other method, paired by seed and position"


def _paired(found: StudyTable) -> Block:
    return table(
        ("against", "seeds", *(TITLES[name] for name in PAIRED)),
        (
            (row["label"], str(len(row["seeds"])), *(interval(row["measured"].get(name)) for name in PAIRED))
            for row in found["differences"]
        ),
    )


def _cuts(found: StudyTable) -> list[Block]:
    shown, versus = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain"), found["reference"]
    blocks = [
        paragraph(
            f"The same logs cut where a method and {versus} had spent equally much: the largest budget that all runs "
            f"of both reached, and each run's last measurement within it, nothing interpolated. In each cell the "
            f"method, then {versus}. Corpus tokens count every text drawn for any role; equal windows are equal actor "
            "texts."
        )
    ]
    for axis in AXES:
        rows = []
        for cut in found["cuts"][axis]:
            mine, other = cut["method"], cut["reference"]
            used = " / ".join(number(one["used"], ",.6g") for one in (mine, other))
            cells = (f"{number(mine[name])} / {number(other[name])}" for name in shown)
            rows.append((cut["label"], f"{cut['budget']:,.6g}", used, *cells))
        blocks.append(table((f"equal {TITLES[axis]}", "budget", "used", *(TITLES[name] for name in shown)), rows))
    return blocks


def _step_time(found: StudyTable) -> list[Block]:
    rows = []
    for row in _finished(found):
        time = row["step_time"]
        whole = {name: value for name, value in time["phases_per_window"].items() if "/" not in name}
        share = sum(whole.values()) or 1.0
        parts = ", ".join(f"{name} {value / share:.0%}" for name, value in whole.items() if value / share >= 0.01)
        mark = " (disturbed)" if time["disturbed"] else ""
        spread = number(time["deviation"], ".3f")
        rows.append(
            (row["label"], f"{number(time['mean'], '.3f')}{mark}", number(time["steady_mean"], ".3f"), spread, parts)
        )
    return [
        paragraph(
            "Seconds of a window divided by its optimizer steps; measuring, diagnoses and saving are left out. All "
            "windows, then without each run's first (which holds the warm-up), with the standard deviation over "
            "windows. Disturbed: several runs shared the machine, so the seconds say little."
        ),
        table(("method", "mean s a step", "after the first window", "deviation", "where it goes"), rows),
    ]


def _roles(found: StudyTable) -> list[Block]:
    finished = _finished(found)
    counts = table(
        (
            "method", "actor thoughts an item", "other thoughts an item (n_aux / N)", "fewer than groups of 8",
            "thought tokens", "corpus tokens",
        ),
        (
            (
                row["label"],
                f"{row['rollouts']['actor_per_item']:g}",
                f"{row['rollouts']['auxiliary_per_item']:g}",
                ("yes" if row["rollouts"]["below_threshold"] else "no") if row["rollouts"]["actor_per_item"] else "–",
                f"{row['tokens']['thought_tokens']:,}",
                f"{row['tokens']['corpus_tokens']:,}",
            )
            for row in finished
        ),
    )  # fmt: skip
    roles = table(
        ("method", "role", "thoughts", "generated tokens", "actor tokens", "scored tokens", "head updates"),
        (
            (row["label"], role, *(f"{amounts[kind]:,}" for kind in amounts))
            for row in finished
            for role, amounts in row["roles"].items()
        ),
    )
    return [
        paragraph(
            "n_aux counts every thought that does not train the actor. Groups of 8 generate 8 thoughts an item; one "
            "actor thought an item stays below them while n_aux / N < 7 (eq:grpo-rollout-threshold)."
        ),
        counts,
        roles,
    ]


def _runs(found: StudyTable) -> Block:
    rows = []
    for run in found["runs"]:
        if run["state"] == "done":
            last = final(run)
            shown = (number(last.get("thought_gain")), number(last.get("content_gain")), number(last.get("mixed_gain")))
            mark = "done, disturbed" if run["disturbed"] else "done"
            mark += f"; {run['note']}" if "note" in run else ""
            rows.append((run["label"], str(run["seed"]), mark, *shown, f"{run['seconds']:.0f}"))
        else:
            reason = f"{run['state']}: {run['failure']}" if run.get("failure") else run["state"]
            rows.append((run["label"], str(run["seed"]), reason, "–", "–", "–", "–"))
    return table(RUN_COLUMNS, rows)


def _states(found: StudyTable) -> Block:
    """Every run without its seconds."""
    return table(RUN_COLUMNS[:-1], (row[:-1] for row in _runs(found).rows))


def story_blocks(page: dict[str, Any]) -> list[Block]:
    """The verdict of a page and its three numbers with their controls."""
    said = page["story"]["verdict"]
    rows = [
        (
            one["title"],
            f"{number(one['value'])} {_between(one)}".strip(),
            f"{one['control']['title']}: {number(one['control']['value'])} {_between(one['control'])}".strip(),
        )
        for one in page["story"]["numbers"]
    ]
    failed = [paragraph(page["failure"])] if page["failure"] else []
    shown = [table(("question", "nats per token (95 % interval)", "control"), rows)] if rows else []
    return [paragraph(f"**{said['headline']}** {said['sentence']}"), *failed, *shown]


def _between(found: dict[str, Any]) -> str:
    low, high = found["low"], found["high"]
    return "" if low is None or high is None else f"({number(low)} … {number(high)})"


def header_blocks(page: dict[str, Any]) -> list[Block]:
    """What a run that is not finished has come to so far: its header and its events."""
    events = page["events"]
    rows = zip(events["window"], events["event"], events["detail"])
    blocks = [table(("", ""), ((one["name"], one["value"]) for one in page["header"]))]
    if events["event"]:
        blocks += [heading("Events"), table(("window", "event", "detail"), ((str(w), e, d) for w, e, d in rows))]
    return blocks


def run_blocks(run: Run, figures: Sequence[tuple[str, str]] = ()) -> list[Block]:
    """The page of one run: where it began, where it ended, what it cost, what happened."""
    events = [line for line in run.metrics() if "event" in line]
    note, moved = run.summary.get("note"), run.summary.get("positions")
    blocks = [
        *([paragraph(f"Note: {note}.")] if note else []),
        paragraph(
            f"{run.summary['method']} on {run.summary['model']}, seed {run.seed}: {run.summary['windows']} windows, "
            f"{run.summary['seconds']:.0f} s, {run.summary['generated_tokens']:,} thought tokens, "
            f"{run.summary.get('reading', 'inline')} reading."
        ),
        *([paragraph(f"Positions: {moved['said']}.")] if moved else []),
        heading("Test texts"),
        _run_gains(run),
        *(picture(name, caption) for name, caption in figures),
        heading("Cost"),
        *_run_cost(run),
        heading("Events"),
        table(
            ("window", "s", "event", "detail"),
            ((str(e["step"]), f"{e['seconds']:.0f}", e["event"], e["detail"]) for e in events),
        )
        if events
        else paragraph("None."),
    ]
    return [block for block in blocks if block.kind != "table" or block.rows]


def _run_gains(run: Run) -> Block:
    first, last = run.test["before"], run.test["after"]
    return table(
        ("number", "before", "after", "95 % interval (texts)"),
        (
            (
                TITLES[name],
                number(first.get(name)),
                number(last.get(name)),
                _text_interval(last.get(f"{name}_interval")),
            )
            for name in KEPT
            if last.get(name) is not None
        ),
    )


def _run_cost(run: Run) -> list[Block]:
    """Seconds of each window's steps, of each phase, and the tokens of each role."""
    seconds, roles = run.step_seconds, run.summary["account"]["roles"]
    kinds = list(next(iter(roles.values()), {}))
    steps = enumerate(zip(seconds, rolling_median(seconds)), 1)
    return [
        table(
            ("window", "s a step", "median of 15"),
            ((str(n), f"{raw:.3f}", f"{median:.3f}") for n, (raw, median) in steps),
        ),
        table(("phase", "s a window"), ((name, f"{value:.3f}") for name, value in run.phase_seconds.items())),
        table(("role", *kinds), ((role, *(f"{amounts[kind]:,}" for kind in kinds)) for role, amounts in roles.items())),
    ]


def _text_interval(ends: Sequence[float | None] | None) -> str:
    if not ends or ends[0] is None or ends[1] is None:
        return "–"
    return f"{ends[0]:+.3f} … {ends[1]:+.3f}"
