"""The model card of an exported model: a README.md with the header that model hubs read.

It says what is wrong first, then the page's own verdict and numbers, so that a card cannot flatter either.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tfive.report.page_data import run_of, run_page
from tfive.report.record import RunRecord
from tfive.report.story import verdict

CARD = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TAGS = ("tfive", "hidden-thoughts", "reinforcement-mid-training")

LIMITS = (
    "A thought is text the model wrote for itself. It is no explanation of what the model does, and need not be true.",
    "Nobody has tested this model for safety, bias or truth. What holds for its base model (licence, limits, uses that "
    "are ruled out) holds for it too.",
)


def model_card(folder: Path, exported: dict[str, Any], repo: str | None = None) -> str:
    """The card of what `tfive export` writes of the run in `folder`; `exported` is its record, `repo` where it goes."""
    record, page = RunRecord(run_of(folder)), run_page(folder)
    base = _short(str(exported["base"]))
    thinks = page["story"]["verdict"]["code"] != "no_thoughts"
    title = "a model with hidden thoughts" if thinks else "a control without thoughts"
    parts = [
        _header(record, str(exported["base"]), "adapter" if exported.get("adapter") else "finetune"),
        f"# {_line(record.method)} on {_line(base)}: {title}",
        *_first(record, exported),
        _verdict(page["story"], exported),
        "## What it is",
        _what(record, exported, base, thinks),
        "## Data",
        _data(record),
        "## Figures",
        _figures(record, page["story"]),
        "## Use",
        _use_adapter(base) if exported.get("adapter") else _use(repo),
        "## Limits",
        "\n".join(f"- {line}" for line in (*page["story"]["limits"], *LIMITS)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(record: RunRecord, base: str, relation: str) -> str:
    """YAML that hubs read. JSON texts are YAML texts, whatever they hold."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(base) and not Path(base).exists():
        lines += [f"base_model: {json.dumps(base)}", f"base_model_relation: {relation}"]
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in (*TAGS, record.method))]
    return "\n".join(["---", *lines, "---"])


def _first(record: RunRecord, exported: dict[str, Any]) -> list[str]:
    """What a reader has to know before anything else."""
    found = []
    if exported["actor_updates"] == 0:
        found.append("**Untrained.** No update ever reached this model: these are the weights of the base model.")
    if record.summary.get("note"):
        note = _line(str(record.summary["note"]))
        found.append(f"**Note.** {note[:1].upper()}{note[1:]}.")
    if not exported["finished"]:
        state = f"window {exported['window']}" + (f" of {record.planned}" if record.planned else "")
        found.append(f"**Unfinished.** The run had come to {state} when this was exported.")
    return ["\n>\n".join(f"> {line}" for line in found)] if found else []


def _verdict(story: dict[str, Any], exported: dict[str, Any]) -> str:
    said = story["verdict"]
    if exported["actor_updates"] == 0:
        said = verdict({"thought_gain": 0.0}, thinks=True, state="done", moved=False)
    return f"**{said['headline']}** {said['sentence']}"


def _what(record: RunRecord, exported: dict[str, Any], base: str, thinks: bool) -> str:
    length, horizon = record.setting("thought.length"), record.setting("thought.horizon")
    updates = f"{exported['actor_updates']} updates in {exported['window']} windows"
    trained = f"`{_line(base)}`, trained with the method `{_line(record.method)}` (seed {record.seed}, {updates})"
    if not thinks:
        return f"{trained}, which teaches no thoughts: it is what others are compared with."
    shape = f", of up to {length} tokens, each judged by how much better the next {horizon} tokens are predicted"
    gate = "A gate decides how far each thought is trusted." if exported["gate"] else "It has no gate."
    return f"{trained} to write short hidden thoughts into plain text{shape if length and horizon else ''}. {gate}"


def _data(record: RunRecord) -> str:
    sources = [one for one in record.setting("text.sources", []) if isinstance(one, dict)]
    lines = [f"- `{_line(str(one['name']))}`" for one in sources if one.get("name")]
    known = "\n".join(lines) or "The run was given texts that its configuration does not name."
    sizes = record.setting("text.sequences", {})
    sizes = sizes if isinstance(sizes, dict) else {}
    amounts = ", ".join(f"{name} {count}" for name, count in sizes.items() if isinstance(count, int))
    width = record.setting("text.sequence_length")
    return known + (f"\n\nTexts of {width} tokens: {amounts}." if amounts and width else "")


def _figures(record: RunRecord, story: dict[str, Any]) -> str:
    """The numbers of the page with their controls, and those of the summary beside them."""
    summary = record.summary
    split = "test" if "test" in summary or "test_thought_gain_end" in summary else "dev"
    texts = "test texts, which chose nothing" if split == "test" else "development texts, which were watched"
    if not story["numbers"]:
        return "Nothing was measured."
    rows = ["| | nats per token | 95 % interval | before training | control |", "|---|---|---|---|---|"]
    for one in story["numbers"]:
        beside = one["control"]
        is_loss = beside["metric"] == "no_thought_loss" and beside["value"] is not None
        control = f"{beside['title']}: {format(beside['value'], '.4f') if is_loss else _number(beside['value'])}"
        interval = _interval((one["low"], one["high"]))
        rows.append(f"| {one['title']} | {_number(one['value'])} | {interval} | {_number(one['start'])} | {control} |")
    further = (
        ("Gain over the model before training", "gain_vs_base", "random tokens in its place", "random_gain_end"),
        ("Gain of the gated model", "mixed_gain", "another text's thought, same gate", "mixed_gain_other"),
    )
    for title, name, control, of in further:
        value = summary.get(f"{split}_{name}_end")
        if value is not None:
            interval = _interval(summary.get(f"{split}_{name}_interval"))
            against = f"{control}: {_number(summary.get(f'{split}_{of}'))}"
            rows.append(f"| {title} | {_number(value)} | {interval} | – | {against} |")
    return f"On {texts}.\n\n" + "\n".join(rows)


def _use(repo: str | None) -> str:
    fetched = f'snapshot_download("{repo}")' if repo else '"FOLDER"  # this folder'
    lines = ["from tfive import ThoughtModel"]
    lines += ["from huggingface_hub import snapshot_download"] if repo else []
    code = [*sorted(lines), "", f"folder = {fetched}", "model = ThoughtModel.from_pretrained(folder)"]
    code += ['found = model.predict("A text that it reads and thinks about.")']
    code += ["print(found.mixed_gain, [thought.text for thought in found.thoughts])"]
    fence = "\n".join(["```python", *code, "```"])
    return (
        f"With its thoughts:\n\n{fence}\n\n`tfive play FOLDER` shows them while you type. Without its thoughts it is "
        "an ordinary model: `AutoModelForCausalLM.from_pretrained` of transformers loads the same folder."
    )


def _use_adapter(base: str) -> str:
    return (
        f"These are low-rank updates of {_line(base)}, without its weights. `peft.PeftModel.from_pretrained(model, "
        "FOLDER)` puts them on the base model that `AutoModelForCausalLM.from_pretrained` of transformers loads."
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}".replace("-", "−")


def _interval(ends: Any) -> str:
    low, high = ends or (None, None)
    return "–" if low is None or high is None else f"{_number(low)} … {_number(high)}"


def _short(model: str) -> str:
    """A hub id or a name as it is, a path by its last part: a card goes further than the machine."""
    return model if HUB_ID.fullmatch(model) and not Path(model).exists() else Path(model).name


def _line(text: str) -> str:
    """Text that cannot end its line, its code span or its table cell."""
    return re.sub(r"[\s`|<>\[\]]+", " ", text).strip()
