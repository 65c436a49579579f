"""The study of hindsight alone: its tables are those of the results, and pages say what these hold."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import scripts
from tfive.errors import UserError
from tfive_lab.estimates import over_seeds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study() -> Any:
    return scripts.script("studies/answers/from_hindsight.py")


@pytest.fixture(scope="module")
def tables(study: Any) -> Any:
    return sys.modules["hindsight_tables"]


@pytest.fixture(scope="module")
def found(study: Any) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(study.RESULTS.read_text("utf-8"))
    return kept


def test_the_page_shows_the_committed_results(study: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    emptied = study.PAGE.read_text("utf-8")
    for name in study.TABLES:
        before, _, rest = emptied.partition(f"<!-- table: {name} -->\n")
        emptied = f"{before}<!-- table: {name} -->\n{rest[rest.index('<!-- end of table -->') :]}"
    page.write_text(emptied, "utf-8")
    assert study.main(["--page", str(page)]) == 0
    assert page.read_text("utf-8") == study.PAGE.read_text("utf-8")


def test_the_readme_shows_them_in_short(study: Any, tables: Any, found: dict[str, Any]) -> None:
    readme = study.README.read_text("utf-8")
    assert study.filled(readme, study.BRIEF, found) == readme
    emptied = readme.replace(tables.without_workings(found), "")
    assert emptied != readme
    assert study.filled(emptied, study.BRIEF, found) == readme


def right(model: dict[str, Any], condition: str = "own", kind: str = "every") -> float:
    return round(100 * model["results"][kind]["accuracy"][condition][0], 1)


def test_pages_tell_what_was_answered(study: Any, tables: Any, found: dict[str, Any]) -> None:
    some = found[study.SECOND]
    gsm8k = some["benchmarks"]["gsm8k"]
    cells = {(cell["start"], cell["method"]): cell["accuracy"] for cell in some["cells"]}

    def ends(method: str, asked: str) -> list[float]:
        each = (cells[start, method] for start in (study.BARE, study.START))
        return [right(one["benchmarks"]["gsm8k"] if asked == "gsm8k" else one) for one in each]

    starts = [right(gsm8k[name]) for name in (study.BARE, study.START)]
    cold, lots = (right(gsm8k[name]) for name in (study.COLD, study.LOTS))
    t5, control = ends("t5", "gsm8k"), ends("anchor-only", "gsm8k")
    readme, page = (ROOT / "README.md").read_text("utf-8"), study.PAGE.read_text("utf-8")
    assert f"| 0.5B | {1 + len(study.AGAIN)} | {cold} | {lots} (1) | " in readme
    assert f" | {control[0]} ({control[0] - starts[0]:+.1f}; 1) | ".replace("-", "−") in readme
    for start, told in ((study.BARE, "+2.1, −0.6 … +4.8"), (study.START, "+2.8, −0.3 … +5.9")):
        trained = cells[start, "t5"]["benchmarks"]["gsm8k"]
        assert tables._apart(trained, gsm8k[start], some) == told.replace(", ", " (") + ")"
        assert told in page
    assert f"has {cold} ({right(gsm8k[study.COLD], 'none')} without a thought), and {lots} after" in page
    for row, place in (("bare sheets", 0), ("sheets with lines shown", 1)):
        assert f"| {row} | {starts[place]} | {t5[place]} | {control[place]} |" in page
    assert f"at {t5[1]} and {ends('t5', 'fresh')[1]}." in page
    sampled = [right(gsm8k[name], "sampled") for name in (study.LOTS, study.COLD)]
    assert f"({lots} instead of {cold} %), sampled ones a little better ({sampled[0]} instead of {sampled[1]};" in page
    seconds = {key: round(cell["measured"][-1]["training_seconds"]) for cell in some["cells"]
               for key in [(cell["start"], cell["method"])]}  # fmt: skip
    t5_seconds, control_seconds = (
        [seconds[start, method] for start in (study.START, study.BARE)] for method in ("t5", "anchor-only")
    )
    assert f"T⁵ {t5_seconds[0]} seconds on sheets with lines and {t5_seconds[1]} on bare ones" in page
    assert f"the controls {control_seconds[0]} and {control_seconds[1]} (13 windows)" in page


def test_the_table_by_lines_shown_is_that_of_the_answers(study: Any, tables: Any, found: dict[str, Any]) -> None:
    some = found[study.SECOND]
    lots, bare = (some["accuracy"][name] for name in (study.LOTS, study.BARE))
    none = round(right(bare, kind="all") - right(lots, kind="all"), 1)
    kinds = some["missing"].split()
    assert [kinds.count(kind) for kind in ("1", "2", "all")] == [
        bare["results"][kind]["items"] for kind in ("1", "2", "all")
    ]
    row = next(line for line in tables.bare(found).splitlines() if "as many by lot" in line)
    assert float(row.split("|")[4].split()[0]) == pytest.approx(none, abs=0.11)


def test_starts_are_what_the_page_says_of_them(study: Any, found: dict[str, Any]) -> None:
    first, second = (found[seed]["starts"] for seed in (study.FIRST, study.SECOND))
    noted, own, wide, bare, lots = first["noted"], first["own"], second["wide"], second["bare"], second["lots"]
    page = study.PAGE.read_text("utf-8")
    gains = [f"{one:+.3f}" for one in (noted["before"]["content_gain"], noted["after"]["content_gain"])]
    assert f"({gains[0]} → {gains[1]})" in page
    after = [one["after"]["no_thought_loss"] - one["after"]["thought_gain"] for one in (noted, own)]
    assert f"the noted start is ahead, {after[0]:.3f} to {after[1]:.3f}" in page
    kept = [f"{100 * one['kept'] * 8 / one['thoughts']:.0f}" for one in own["rounds"]]
    assert f"Kept were {kept[0]} % (then {kept[1]} and {kept[2]} %)" in page
    rest = [[f"{100 * one['kept'] * 8 / one['thoughts']:.0f}" for one in each["rounds"] if "kept" in one]
            for each in (wide, bare, lots)]  # fmt: skip
    assert "in the third form {}, {} and {}.".format(*rest[0]) in page
    assert "it is {}, {} and {} %, no more".format(*rest[1]) in page
    assert "and {}, {} and {} % for the model that learned by lot".format(*rest[2]) in page
    counts = [sum(int(one.get("kept", 0)) for one in each["rounds"]) for each in (lots, bare)]
    assert f"{counts[0]:,} in all instead of {counts[1]:,}" in page
    problems = found[study.FIRST]["accuracy"][study.START]["results"]["every"]["problems"]
    assert f"{problems} of the fresh problems" in page
    assert f"{100 * noted['rounds'][-1]['informed']:.0f} % came" in page
    assert f"from {gains[0]} to {own['after']['content_gain']:+.3f}" in page
    assert noted["rounds"][-1]["informed"] > noted["rounds"][0]["informed"] > 0
    assert all(one["informed"] == 0 for one in own["rounds"])
    assert wide["before"] == own["before"]
    thought = [f"{one['after']['thought_gain']:+.3f}" for one in (wide, own)]
    less = own["after"]["no_thought_loss"] - wide["after"]["no_thought_loss"]
    assert f"ends at {thought[0]} instead of {thought[1]}, the loss without a thought lower by {less:.2f}" in page
    content = [one["content_gain"] for one in (bare["before"], bare["after"], lots["after"])]
    assert f"goes from {content[0]:+.3f} to {content[1]:+.3f}" in page
    assert f"with the same reading, bring {content[2]:+.3f}" in page
    assert lots["rounds"][0]["kept"] == bare["rounds"][0]["kept"]  # the same thoughts drawn, other ones learned
    assert lots["rounds"][0]["learned"] != bare["rounds"][0]["learned"]


def test_the_larger_model_is_what_pages_say(study: Any, tables: Any, found: dict[str, Any]) -> None:
    some = found[study.LARGER]
    gsm8k, runs = some["benchmarks"]["gsm8k"], {cell["method"]: cell for cell in some["cells"]}
    t5, control = (runs[method] for method in ("t5", "anchor-only"))
    cold, begun = gsm8k[study.LARGE_COLD], gsm8k[study.LARGE]
    readme, page = (ROOT / "README.md").read_text("utf-8"), study.PAGE.read_text("utf-8")
    own, other = (one["accuracy"]["benchmarks"]["gsm8k"] for one in (t5, control))
    shares = [right(one) for one in (cold, begun, own, other)]
    ends = [f"{end:.1f} ({end - shares[1]:+.1f})" for end in shares[2:]]
    assert f"| 1.5B | 1 | {shares[0]} | – | {shares[1]} | 56.5 (+1.0) | – | {ends[0]} |" in readme
    assert "With 1.5B T⁵ is 5.8 above anchors alone (2.8 … 8.9)" in readme
    assert f"take this model from {shares[0]} to {shares[1]} % of GSM8K's test** (greedy; sampled from" in page
    assert f"sampled from {right(cold, 'sampled')} to {right(begun, 'sampled')})" in page
    fresh = [right(some["accuracy"][name]) for name in (study.LARGE_COLD, study.LARGE)]
    assert f"from {fresh[0]} to {fresh[1]} % of fresh problems, in four minutes" in page
    assert some["starts"]["larger"]["seconds"] < 240
    assert tables._apart(own, other, some) == "+5.8 (+2.8 … +8.9)"
    assert tables._apart(own, begun, some) == "+6.8 (+3.7 … +10.0)"
    assert tables._apart(own, other, some, "sampled") == "+5.6 (+2.1 … +9.0)"
    assert tables._apart(t5["accuracy"], some["accuracy"][study.LARGE], some) == "+1.1 (−1.9 … +4.1)"
    for model, told in (
        (some["accuracy"][study.LARGE], "+4.7 (+1.4 … +8.1)"),
        (control["accuracy"], "+4.3 (+0.9 … +7.7)"),
    ):
        assert tables._apart(t5["accuracy"], model, some, "sampled") == told
    # Content gain, paired by text: the numbers of a text add up over its items.
    long_tables = scripts.script("studies/answers/long_tables.py")
    assert long_tables.texts_apart([t5], [control], "content_gain") == "+0.073 (+0.006 … +0.140)"
    assert long_tables.texts_apart([t5], [control], "thought_gain") == "+0.023 (−0.041 … +0.087)"
    gains = [one["test"]["content_gain"][0] for one in (t5, control)]
    assert f"{gains[0]:+.3f} and {gains[1]:+.3f} of {len(t5['by_text']['items'].split())} test texts" in page
    last = t5["measured"][-1]
    assert f"these are {last['steps']} updates and {last['actor_thoughts']:,} thoughts" in page
    assert f"under way ({last['training_seconds']:.0f} s)" in page
    assert f"(13 windows, {control['measured'][-1]['training_seconds']:.0f} s; as in" in page
    # Beside the run of the same method that began with given workings: the same questions.
    given = next(
        cell
        for cell in json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))["cells"]
        if cell["method"] == "t5" and cell.get("start") == "careful-128-1.5b" and cell["settings"]["run.seed"] == 23
    )
    before = given["accuracy"]["benchmarks"]["gsm8k"]
    assert f"T⁵ ends at {right(before)} and GRPO at" in page
    assert f"T⁵ has {right(given['accuracy'])} % there and {right(t5['accuracy'])} here" in page
    assert tables._apart(own, before, some) == "+5.1 (+1.5 … +8.8)"
    kinds = some["missing"].split()
    for none_shown, told in ((False, "−10.4 (−14.7 … −6.0)"), (True, "+3.2 (−3.0 … +9.5)")):
        which = [number for number, kind in enumerate(kinds) if (kind == "all") == none_shown]
        assert tables._apart(t5["accuracy"], given["accuracy"], some, "own", which) == told
    # What an own thought adds to none, before and after, and how often the right number stands in it.
    for first, second, won in (
        (some["accuracy"][study.LARGE], some["accuracy"][study.LARGE_COLD], (15.1, 3.5)),
        (begun, cold, (3.5, 11.5)),
    ):
        plain = [100 * one["results"]["every"]["accuracy"]["none"][0] for one in (first, second)]
        wrote = [100 * one["results"]["every"]["accuracy"]["own"][0] for one in (first, second)]
        assert (plain[0] - plain[1], wrote[0] - wrote[1] - plain[0] + plain[1]) == pytest.approx(won, abs=0.051)
    numbers = [f"{100 * one['right_number_in_thought']:.1f} %" for one in (cold, begun, own)]
    assert f"in {numbers[0]} of the thoughts as it comes and in {numbers[1]} of the start's" in page
    assert f"more right numbers in thoughts ({numbers[2]})" in page
    # Content gain less thought gain is what another's thought costs.
    costs = [one["test"]["content_gain"][0] - one["test"]["thought_gain"][0] for one in (t5, control)]
    assert f"another's thought costs more ({costs[0] - costs[1]:.3f}, " in page


def test_over_seeds_means_are_those_of_the_answers(study: Any, tables: Any, found: dict[str, Any]) -> None:
    every = (study.SECOND, *study.AGAIN)
    runs = {(seed, cell["method"]): cell["accuracy"] for seed in every for cell in found[seed]["cells"]
            if cell["start"] == study.BARE}  # fmt: skip
    begun = {seed: found[seed]["accuracy"][study.BARE] for seed in every}
    gsm8k = {seed: found[seed]["benchmarks"]["gsm8k"][study.BARE] for seed in every}
    readme, page = (ROOT / "README.md").read_text("utf-8"), study.PAGE.read_text("utf-8")

    def shares(models: list[dict[str, Any]]) -> list[float]:
        return [100 * one["results"]["every"]["accuracy"]["own"][0] for one in models]

    asked = {
        "GSM8K's test": (gsm8k, lambda one: one["benchmarks"]["gsm8k"]),
        "fresh problems": (begun, lambda one: one),
    }
    said = {}
    for name, (starts, of) in asked.items():
        before, after = shares([starts[seed] for seed in every]), shares([of(runs[seed, "t5"]) for seed in every])
        won = [one - other for one, other in zip(after, before, strict=True)]
        mean, half = over_seeds(won)
        assert half is not None
        ends = f"{mean - half:.1f} … {'+' * (mean < half)}{mean + half:.1f}".replace("-", "−")
        said[name] = (statistics.fmean(before), statistics.fmean(after), mean, ends)
    first, fresh = said.values()
    told = f"hindsight ends at {first[0]:.1f} and T⁵ at {first[1]:.1f} (+{first[2]:.1f}, 2.4 … 5.7 over problems"
    assert f"{told}, {first[3]} over seeds)" in page
    assert f"at {fresh[0]:.1f} and {fresh[1]:.1f} (+{fresh[2]:.1f}, 3.3 … 7.3 and {fresh[3]};" in page
    row = next(line for line in readme.splitlines() if line.startswith("| 0.5B | 3 |"))
    assert row.split(" | ")[4] == f"{first[0]:.1f}"
    assert row.endswith(f" | {first[1]:.1f} (+{first[2]:.1f}) |")
    assert f"T⁵ adds {first[2]:.1f} points (2.4 … 5.7 over problems, {first[3]} over seeds)" in readme.replace(
        "… 8", "… +8"
    )
    row = next(
        line for line in tables.seeds_apart(found).splitlines() if "| T⁵ minus its start | 26, 27, 28 | greedy" in line
    )
    assert f"| +{first[2]:.1f} (+2.4 … +5.7; over seeds " in row
    behind = [
        statistics.fmean(shares([of(runs[seed, "quiet-star-grpo"]) for seed in study.AGAIN]))
        - statistics.fmean(shares([of(runs[seed, "t5"]) for seed in study.AGAIN]))
        for _, of in asked.values()
    ]
    assert f"T⁵ is {behind[0]:.1f} points behind on GSM8K's test (−0.9 … 3.5) and {-behind[1]:.1f} ahead" in page
    assert (
        f"is {behind[0]:.1f} ahead of T⁵ from the same on GSM8K's test and {-behind[1]:.1f} behind on fresh" in readme
    )
    kinds = found[study.SECOND]["missing"].split()
    for wanted, words in ((True, "lines shown"), (False, "none shown")):
        some = [number for number, kind in enumerate(kinds) if (kind != "all") == wanted]
        pairs = [(runs[seed, "t5"], begun[seed], found[seed]) for seed in every]
        gains = [100 * float(tables._differences(*pair, "own", some)[0].double().mean()) for pair in pairs]
        shown = [f"{one:+.1f}".replace("-", "−") for one in gains]
        assert f"{words} {shown[0]}, {shown[1]} and {shown[2]}" in page
    content = {
        (seed, cell["method"]): cell for seed in every for cell in found[seed]["cells"] if cell["start"] == study.BARE
    }
    one, two = ([content[seed, "t5"]["test_start"]["content_gain"], content[seed, "t5"]["test"]["content_gain"][0],
                 content[seed, "quiet-star-grpo"]["test"]["content_gain"][0]] for seed in study.AGAIN)  # fmt: skip
    texts = [f"{value if isinstance(value, float) else value[0]:+.3f}" for value in (*one, *two)]
    assert f"from {texts[0]} to {texts[1]} with T⁵ and {texts[2]} with GRPO, and from" in page
    assert f"GRPO, and from {texts[3]} to {texts[4]} and {texts[5]}" in page
    # Over problems, by hand: what a problem wins is added up over the seeds before it is squared.
    judged = [(found[seed], runs[seed, "t5"], begun[seed]) for seed in study.AGAIN]
    clusters = found[study.SECOND]["clusters"]["test"].split()
    moved: dict[str, float] = {}
    whole = sum(int(a) - int(b) for _, one, two in judged
                for a, b in zip(one["verdicts"]["own"], two["verdicts"]["own"], strict=True)) / 2  # fmt: skip
    middle = whole / len(clusters)
    for _, one, two in judged:
        each = [int(a) - int(b) for a, b in zip(one["verdicts"]["own"], two["verdicts"]["own"], strict=True)]
        here = sum(each) / len(each)
        for value, cluster in zip(each, clusters, strict=True):
            moved[cluster] = moved.get(cluster, 0.0) + (value - here) / len(clusters) / 2
    half = 1.96 * (sum(one**2 for one in moved.values()) * len(moved) / (len(moved) - 1)) ** 0.5
    told = tables._apart_over_seeds(judged, "own")
    ends_told = [f"{100 * one:+.1f}".replace("-", "−") for one in (middle, middle - half, middle + half)]
    assert told.startswith(f"{ends_told[0]} ({ends_told[1]} … {ends_told[2]};")


def test_runs_of_one_seed_take_the_place_of_those_of_it_alone(
    study: Any, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collected(runs: Path) -> dict[str, Any]:
        told = json.loads(json.dumps(found[study.SECOND]))
        for one in (*told["accuracy"].values(), *(cell["accuracy"] for cell in told["cells"])):
            one["missing"] = "1" if runs.name == "other" and one is told["cells"][0]["accuracy"] else told["missing"]
        if runs.name == "two":
            told["cells"][0]["settings"]["run.seed"] = 27
        if runs.name == "apart":
            told["cells"][0]["accuracy"]["clusters"] = " ".join(["0"] * len(told["missing"].split()))
        if runs.name == "few":
            del told["accuracy"][study.LOTS]
        return told

    monkeypatch.setattr(study, "collect", collected)
    files = {name: tmp_path / f"{name}.json" for name in ("wide", "bare", "lots")}
    for name, path in files.items():
        path.write_text(json.dumps(found[study.SECOND]["starts"][name]), "utf-8")
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text(study.PAGE.read_text("utf-8"), "utf-8")
    out.write_text(json.dumps({**found, study.SECOND: {}}), "utf-8")
    given = [word for name, path in files.items() for word in ("--start", f"{name}={path}")]
    assert study.main(["--runs", str(tmp_path / "one"), *given, "--out", str(out), "--page", str(page)]) == 0
    assert json.loads(out.read_text("utf-8")) == found
    assert page.read_text("utf-8") == study.PAGE.read_text("utf-8")
    for runs, why in (
        ("two", "runs of 2 seeds"),
        ("other", "models were asked different questions"),
        ("apart", "test and test: other questions cannot be paired"),
        ("few", "seed 26 has no model lots-128; nothing was written"),
    ):
        with pytest.raises(UserError, match=why):
            study.main(["--runs", str(tmp_path / runs), *given, "--out", str(out), "--page", str(page)])
    files["bare"].write_text("", "utf-8")
    with pytest.raises(UserError, match=r"bare.json: is not what start.py prints last"):
        study.main(["--runs", str(tmp_path / "one"), *given, "--out", str(out), "--page", str(page)])
    with pytest.raises(UserError, match="--start: needs --runs"):
        study.main([*given, "--out", str(out), "--page", str(page)])
    with pytest.raises(UserError, match="seed 25 has no start noted"):
        study.main(["--out", str(tmp_path / "none.json"), "--page", str(page)])
    assert json.loads(out.read_text("utf-8")) == found
    # Starts that are not given anew stay.
    assert study.main(["--runs", str(tmp_path / "one"), "--out", str(out), "--page", str(page)]) == 0
    assert json.loads(out.read_text("utf-8")) == found
    assert page.read_text("utf-8") == study.PAGE.read_text("utf-8")


@pytest.mark.parametrize("start", ["other=README.md", "own=nowhere.json", "own"])
def test_a_start_that_is_not_there_is_refused(study: Any, tmp_path: Path, start: str) -> None:
    with pytest.raises(UserError, match="give one of noted, own, wide, bare, lots, larger, and a file that is there"):
        study.main(["--runs", str(tmp_path), "--start", start, "--out", str(tmp_path / "out.json")])
    assert not list(tmp_path.iterdir())


def test_lots_take_as_many_thoughts_as_hindsight_does() -> None:
    begun = scripts.script("studies/answers/start.py")
    draw = torch.Generator().manual_seed(0)
    own, other, none = (torch.rand(60, 8, generator=draw) for _ in range(3))
    valid = torch.rand(60, 8, generator=draw) > 0.2
    _, _, useful = begun.chosen(own, other, none, valid, 4)
    lot = begun.ByLuck(7)
    branch, gain, taken = lot(own, other, none, valid, 4)
    assert useful.any()
    assert taken.sum() == useful.sum()
    assert valid.gather(1, branch)[taken].all()
    assert (branch == torch.tensor([0, 4])).all()
    assert torch.allclose(gain, other.view(60, 2, 4).mean(-1) - own[:, ::4])
    # By lot among all: neither the first of them nor those that help, others in every round and with every seed.
    assert not torch.equal(taken, useful)
    assert taken[30:].any()
    assert taken[:30].sum() < 0.8 * taken.sum()
    rounds = [taken, lot(own, other, none, valid, 4)[2], begun.ByLuck(8)(own, other, none, valid, 4)[2]]
    assert all(not torch.equal(rounds[one], rounds[two]) for one, two in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(begun.ByLuck(7)(own, other, none, valid, 4)[2], taken)
