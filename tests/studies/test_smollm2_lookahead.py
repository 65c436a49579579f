"""Guesses of the next sentence: which words are chosen, where they stand, what is left out, and what the pages say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import lookahead
import prose
import prose_lookahead
import pytest

from tfive.config.config import Config
from tfive.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ENDS = ("_interval.1", "_interval.2")
GAINS = ("thought_gain", "content_gain")
TABLES = ("lookahead_worth", "lookahead")

TEXT = (
    "The old harbour was quiet. Fishermen carried heavy baskets across the wooden pier towards the market. it rained."
)


class Words:
    """A tokenizer with one token a word or comma."""

    def encode(self, text: str, **_: Any) -> list[str]:
        return re.findall(r"\w+|,|\.", text)

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"offset_mapping": [match.span() for match in re.finditer(r"\w+|,|\.", text)]}


@pytest.fixture
def pattern() -> re.Pattern[str]:
    return re.compile(Config.load(str(lookahead.PRESET)).text.positions.pattern)


def chooser(room: int) -> lookahead.Chooser:
    count = Counter({word.lower(): 10 + len(word) for word in lookahead.WORD.findall(TEXT)})
    return lookahead.Chooser(count, frozenset({"the", "across"}), Words().encode, room)


def test_a_working_holds_rare_words_of_the_next_sentence_in_its_order(pattern: re.Pattern[str]) -> None:
    found = list(lookahead.places(TEXT, pattern, chooser(99)))
    assert [TEXT[: place.at].rsplit(" ", 1)[1] for place in found] == ["quiet.", "market.", "rained."]
    assert found[0].after == " heavy, baskets, wooden, pier, market"
    assert found[0].before == " harbour, quiet"
    # No sentence begins with a small letter, and none at the end of the text.
    assert [place.after for place in found[1:]] == [None, None]


def test_words_are_left_out_until_a_working_fits(pattern: re.Pattern[str]) -> None:
    assert next(lookahead.places(TEXT, pattern, chooser(3))).after == " heavy, pier"
    assert next(lookahead.places(TEXT, pattern, chooser(2))).after is None


def test_pieces_end_with_sentences_and_lose_nothing(pattern: re.Pattern[str]) -> None:
    found = list(lookahead.pieces(TEXT, Words(), pattern, 12))
    assert found[0] == ("The old harbour was quiet.", 6)
    assert "".join(text for text, _ in found).replace(" ", "") == TEXT.replace(" ", "")
    assert all(tokens <= 12 for _, tokens in found)


def test_a_document_has_one_role() -> None:
    roles = Counter(lookahead.role(bytes(28) + number.to_bytes(4, "big")) for number in range(0, 2**32, 2**24))
    assert {name: round(count / 256, 1) for name, count in roles.items()} == {"held": 0.1, "warm": 0.4, "runs": 0.5}


def test_runs_become_the_tables_of_words_to_come(tmp_path: Path) -> None:
    keys = [f"development.{name}{end}" for name in prose_lookahead.GAINS for end in ("", *ENDS)]
    start = {"thought_gain": -0.25, "content_gain": 0.006, "no_thought_loss": 3.5}
    asked = ["--lookahead", str(tmp_path), "--results", str(tmp_path)]
    for number, name in enumerate((*prose_lookahead.WRITERS, *prose_lookahead.READERS)):
        with pytest.raises(UserError, match=f"no run {name} in it"):
            prose.main(asked)
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"step": step, "development.texts": 9.0, **dict.fromkeys(keys, -0.5 + step)} for step in (0, 1)]
        for line in lines:
            line["development.no_thought_loss"] = 3.25
        critics = {"step": 1, "r2.1": 0.25, "r2.2": 0.5, "actor_updates.qualified": 8.0}
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [lines[0], critics, lines[1]])), "utf-8")
        after = {"thought_gain": 0.25 if name == "anchor-only" else number}
        with pytest.raises(UserError, match=f"{name}: is cut off or no run"):
            prose.main(asked)
        if name == "t5":
            after = {"thought_gain": 0.25}
        report = {"rounds": [], "before": start, "after": after, "spent": {}}
        (folder / "warmstart.json").write_text(json.dumps(report), "utf-8")
        warm = "[warmstart]\nsteps = 3\nlr = 1e-4\nreading = 2\n"
        config = f'method = "t5"\n[thought]\nreading = "inline"\n[run]\nseed = 0\n[window]\nwindows = 1\n{warm}'
        (folder / "config.toml").write_text(config, "utf-8")
        roles = {"account": {"roles": {"actor": {"trajectories": 4096}}}}
        (folder / "status.json").write_text(json.dumps(roles), "utf-8")
    with pytest.raises(UserError, match=r"told\.json: not what lookahead_gains"):
        prose.main(asked)
    told: dict[str, Any] = {name: [0.5, 0.25, 0.75] for name in (*prose_lookahead.KINDS, "mean", "loss")}
    told |= dict.fromkeys(("items", "texts", "thoughts", "length", "closed"), 1)
    words = {"own": [4.0, 0.0244, 0.13], "empty": [0.0, 0.0, 0.0]}
    (tmp_path / "writer" / "told.json").write_text(json.dumps({**told, "words": words, "examples": []}), "utf-8")
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end of table -->\n" for name in TABLES), "utf-8")
    assert prose.main([*asked, "--page", str(page), "--code", "abc"]) == 0
    found = json.loads((tmp_path / prose_lookahead.RESULTS).read_text("utf-8"))
    assert (found["code"], found["runs"]["t5"]["r2"], found["runs"]["t5"]["admitted"]) == ("abc", [[0.25, 0.5]], 1)
    shown = page.read_text("utf-8")
    assert "| the model's own guess | +0.500 (+0.250 … +0.750) | 4.0 | 2.4 % | 13.0 % |" in shown
    assert "| nothing between the delimiters | +0.500 (+0.250 … +0.750) | – | – | – |" in shown
    ends = [line.split("|")[1:3] for line in shown.splitlines() if "after it" in line]
    assert ends == [[" T⁵ after it ", " 1 "], [" anchors alone after it ", " 1 "], [" T⁵ after it ", " 1 "]]


def test_the_pages_say_of_words_to_come_what_was_measured() -> None:
    found = json.loads((ROOT / "results" / prose_lookahead.RESULTS).read_text("utf-8"))
    files = ("docs/studies/smollm2-study.md", "README.md", "docs/howto/tune.md", "docs/howto/diagnostics.md")
    page, readme, tune, diagnostics = ((ROOT / name).read_text("utf-8") for name in files)
    page = page.split("## Words to come")[1].split("\n## ")[0]
    runs, told, words = found["runs"], found["told"], found["told"]["words"]
    writer, own, slow, control = (runs[name] for name in ("writer", "t5", "t5-slow", "anchor-only"))
    config = Config.load(str(lookahead.PRESET))
    for run in runs.values():
        for key in ("steps", "windows", "seed"):
            section = {"steps": "warmstart", "windows": "window", "seed": "run"}[key]
            assert run["settings"][f"{section}.{key}"] == getattr(getattr(config, section), key)
    assert own["settings"]["warmstart.reading"] == config.warmstart.reading
    assert own["warmstart"]["after"] == control["warmstart"]["after"], "anchors alone went on from the same start"
    kept = int(writer["warmstart"]["rounds"][0]["kept"])
    asked = config.warmstart
    assert f"in {asked.steps} updates the model learns {kept:,} such thoughts" in page
    assert f"{asked.reading} updates of careful reading" in page
    assert f"{told['texts']} texts of documents that no run saw, {told['items']:,} places" in page
    assert f"Development texts, {writer['texts']} of them" in page
    true, foreign, guess, repeated, nothing = (
        told[name][0] for name in ("true", "true_other", "own", "before", "empty")
    )
    assert f"gain {true:.2f} nats a token and another text's lose {-foreign:.2f}" in page
    assert f"{words['true'][1]:.0%}".replace("%", " %") + " of its words stand among" in page
    assert f"{100 * words['own'][1]:.1f} % of the words that the model guesses come" in page
    assert f"before the place {100 * words['before'][1]:.1f} % come again" in page
    assert f"cost {-guess:.2f}, these {-repeated:.2f}, nothing between the delimiters {-nothing:.2f}" in page
    assert f"{100 * foreign / (foreign - true):.0f} % would have to be right" in page
    assert f"is worth {prose_lookahead.signed(told['best_or_none'][0])}" in page
    written, later = (
        [runs[name]["measured"][at]["content_gain"] for name in ("writer", "gated-writer")] for at in (0, -1)
    )
    assert min(low for _, low, _ in (told["own − other"], *written)) > 0
    spread, signed = prose_lookahead.spread, prose_lookahead.signed
    assert f"is {spread(told['own − other'])} here and {spread(written[0])} after writing alone" in page
    assert f"behind gates {spread(written[1])}. " in page
    assert f"later these two are {spread(later[0])} and {spread(later[1])}" in page
    stood = [f"{100 * words[name][2]:.1f} %" for name in ("own", "other")]
    assert f"{stood[0]} of its words stood there before, {stood[1]} of another's" in page
    first = own["measured"][0]
    assert f"then costs {-first['thought_gain'][0]:.3f} and an empty one {-first['empty_gain'][0]:.3f}" in page
    assert f"content gain is {prose_lookahead.spread(first['content_gain'])}" in page
    ends = [[prose_lookahead.signed(run["measured"][-1][name][0]) for name in GAINS] for run in (own, control)]
    assert f"T⁵ end at {ends[0][0]} and {ends[0][1]}, anchors alone at {ends[1][0]} and {ends[1][1]}" in page
    tests = [run["test"] for run in (own, slow)]
    ended = f"{spread(tests[0]['thought_gain'])[:-1]}; {signed(tests[0]['start']['thought_gain'])} before rewards)"
    assert f"T⁵ ends at {ended} and a content gain of {spread(tests[0]['content_gain'])}" in page
    gentler = f"{spread(tests[1]['thought_gain'])} and {signed(tests[1]['content_gain'][0])}"
    assert f"after the gentler start at {gentler}" in page
    assert control["test"] is None
    weaker = [min(pair) for pair in own["r2"]]
    assert f"{weaker[0]:.2f} in the first and {weaker[-1]:.2f} in the last" in page
    assert own["admitted"] + slow["admitted"] == len(own["r2"]) + len(slow["r2"]) == 12
    assert f"({own['actor_thoughts']:,} thoughts of T⁵, {control['actor_thoughts']:,} of the control)" in page
    cost = f"of the words it guesses itself {100 * words['own'][1]:.1f} % come, and such guesses cost {-guess:.2f}"
    assert f"gains {true:.2f} nats a token from the true ones, but {cost}" in readme
    beside = f"{signed(written[0][0])} beside {prose_lookahead.signed(writer['measured'][0]['thought_gain'][0])}"
    assert beside in tune
    assert beside in diagnostics
