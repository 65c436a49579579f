"""The page in a real browser: no errors, no requests, by keyboard, with texts that break careless pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser as browsers
import kept_thoughts
import page_samples as samples
import pytest
from browser import Opened
from thought_samples import HOSTILE, Data, explorer

from recorded import run
from tfive.report import assembly
from tfive.report.assembly import page_html
from tfive.report.page_data import page_data

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(browsers.missing_reason() is not None, reason=str(browsers.missing_reason()))

Open = Callable[..., "Page"]

PAGES: dict[str, Callable[[], Data]] = {
    "run": samples.run_page,
    "no thoughts": lambda: samples.run_page(explorers=[]),
    "one window": lambda: samples.run_page(
        explorers=[explorer(12, 1)],
        x={"development": samples.axis_values(1), "training": samples.axis_values(1, 1)},
        series={
            group: {name: {"value": [0.1], "low": [0.0], "high": [0.2]} for name in names}
            for group, names in {"development": ["thought_gain", "content_gain"], "training": ["r2.1", "r2.2"]}.items()
        },
    ),
    "failed": lambda: samples.bare_page(state="failed", failure="returns without variance: all thoughts are alike"),
    "old format": lambda: samples.run_page(
        explorers=[],
        timeline=None,
        critics=None,
        weights=None,
        absent={"explorers": "This run was written by an older version."},
    ),
    "study": samples.study_page,
    "unfinished study": lambda: samples.bare_page(
        kind="study", compare={**samples.study_page()["compare"], "methods": [], "differences": []}
    ),
    "evaluation": samples.evaluation_page,
    "hostile": lambda: samples.run_page(title=HOSTILE[0], explorers=[explorer(30, 3, None, HOSTILE)]),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.launched() as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")

    def file(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(page_html(PAGES[name]()), "utf-8")
        return path

    return file


@pytest.fixture
def show(browser: Browser, files: Callable[[str], Path]) -> Iterator[Open]:
    """Opens one of PAGES; at the end nothing may have gone wrong on it."""
    opened: list[Opened] = []

    def show(name: str = "run", fragment: str = "", **settings: Any) -> Page:
        opened.append(Opened(browser, **settings))
        return opened[-1].open(files(name), fragment)

    yield show
    for one in opened:
        one.close()


def number(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace("−", "-").replace("+", ""))


def until(page: Page, condition: str) -> None:
    """Waits for a condition; the page's policy forbids the evaluation that the browser's own waiting uses."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never came true: {condition}")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_draws_itself_within_a_phone_s_width(show: Open, name: str) -> None:
    page = show(name, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    shown = page.locator("main > section").evaluate_all("all => all.map(one => one.id)")
    thinks = name in ("run", "one window", "hostile", "failed", "no thoughts", "old format")
    expected = {
        "study": ["story", "thoughts", "compare"],
        "unfinished study": ["story", "compare"],
        "evaluation": ["story", "evaluation"],
    }
    assert shown == (["story", "thoughts", "training"] if thinks else expected[name])
    assert page.locator("h1").inner_text() == PAGES[name]()["title"]


def test_missing_parts_say_why_in_one_line(show: Open) -> None:
    assert "No thoughts were kept" in show("no thoughts").locator("#thoughts .absent").inner_text()
    assert show("old format").locator("#thoughts .absent").inner_text() == "This run was written by an older version."
    failed = show("failed")
    assert "returns without variance" in failed.locator(".failure").inner_text()
    assert "no curves" in failed.locator("#training .absent").inner_text()
    assert "no earlier moment" in show("one window").locator("#thoughts .slide").inner_text()


def test_hostile_texts_stay_texts(show: Open) -> None:
    page = show("hostile", fragment="#item=t5:0:1000:w20", width=390)
    shown = page.locator(".reader").inner_text()
    for text in HOSTILE:
        assert text.strip("\u200f") in shown
    tokens = " ".join(page.locator("#thoughts tbody .token").all_inner_texts())
    assert HOSTILE[0] in tokens
    assert page.title() == HOSTILE[0]
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_what_a_run_wrote_is_what_the_page_shows(browser: Browser, tmp_path: Path) -> None:
    folder = kept_thoughts.keep(run(tmp_path / "r", "t5", 0, 0.2))
    data = page_data([folder])
    path = tmp_path / "page.html"
    path.write_text(page_html(data), "utf-8")
    opened = Opened(browser)
    page = opened.open(path, "#item=t5:0:103:w2")
    assert page.locator("#thoughts .count").inner_text() == "6 of 6 thoughts"
    explorer = data["explorers"][0]
    gain = explorer["snapshots"][2]["content_gain"][3] * explorer["quantities"]["gain"]
    assert number(page.locator(".figures dd").first.inner_text()) == pytest.approx(gain, abs=1e-3)
    tokens = kept_thoughts.places(6)["tokens"][1]
    following = page.locator("table.losses tbody th").all_text_contents()
    assert [token.strip() for token in following] == [
        kept_thoughts.WORDS[token].strip() or "∅" for token in tokens[7:10]
    ]
    opened.close()


def test_a_keyboard_reaches_a_thought_and_its_neighbours(show: Open) -> None:
    page = show()
    page.locator("#thoughts input[type=search]").focus()
    for _ in range(4):  # two choosers, the slider, the list
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "listbox"
    first = page.locator(".link").get_attribute("href")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    row = page.locator("#thoughts .row[aria-selected=true]")
    assert row.get_attribute("aria-posinset") == "3"
    assert page.locator("#thoughts .virtual").get_attribute("aria-activedescendant") == row.get_attribute("id")
    assert page.locator(".link").get_attribute("href") != first
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('.place[aria-pressed=true]')")
    chosen = page.evaluate("document.activeElement.dataset.item")
    step = "ArrowRight" if page.locator(".place").last.get_attribute("data-item") != chosen else "ArrowLeft"
    page.keyboard.press(step)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('.place[aria-pressed=true]')")
    assert page.evaluate("document.activeElement.dataset.item") != chosen
    assert page.locator("#thoughts .row[aria-selected=true]").count() == 1


def test_search_leaves_only_thoughts_and_places_that_hold_the_words(show: Open) -> None:
    page = show()
    page.locator("#thoughts input[type=search]").fill("Box HOLDS")
    found, total = page.locator("#thoughts .count").inner_text().split(" of ")
    assert 0 < int(found) < 120
    assert total == "120 thoughts"
    page.locator("#thoughts input[type=search]").fill("no such words")
    assert page.locator("#thoughts .count").inner_text() == "0 of 120 thoughts"
    assert "No thought passes" in page.locator("#thoughts .side .absent").inner_text()


def test_filters_show_harm_alone_and_worst_first(show: Open) -> None:
    page = show()
    shot = PAGES["run"]()["explorers"][0]["snapshots"][2]
    page.get_by_label("Largest harm").check()
    harmed = sorted(gain for gain in shot["thought_gain"] if gain < 0)
    assert page.locator("#thoughts .count").inner_text() == f"{len(harmed)} of 120 thoughts"
    assert number(page.locator(".figures dd").nth(1).inner_text()) == pytest.approx(harmed[0] / 1000, abs=5e-4)
    page.get_by_label("Own worse than another’s").check()
    worst = min(shot["content_gain"])
    assert number(page.locator("#thoughts .row .gain").first.inner_text()) == pytest.approx(worst / 1000, abs=6e-3)
    page.get_by_label("Gate open").check()
    assert page.locator("#thoughts .count").inner_text().startswith(f"{sum(gate >= 50 for gate in shot['gate'])} of")
    page.get_by_label("In text order").check()
    page.locator("#thoughts select").first.select_option("letters")
    assert page.locator("#thoughts .count").inner_text() == "60 of 120 thoughts"
    assert "letters" in page.locator(".view .aside").first.inner_text()


def test_the_slider_shows_the_same_place_at_another_moment(show: Open) -> None:
    page = show(fragment="#item=t5:0:1007:w20")
    data = PAGES["run"]()["explorers"][0]
    for snapshot in (2, 1, 0):
        length = data["snapshots"][snapshot]["length"]
        start = sum(length[:7])
        tokens = data["snapshots"][snapshot]["tokens"][start : start + length[7]]
        thought = "".join(data["pieces"][token] for token in tokens).strip().replace("\n", "⏎")
        assert page.locator(".inserted bdi").inner_text() == thought
        assert page.locator(".link").get_attribute("href") == f"#item=t5:0:1007:w{data['windows'][snapshot]}"
        assert page.locator("#window-slider").get_attribute("aria-valuetext") == (
            f"{data['names'][snapshot]}, window {data['windows'][snapshot]}"
        )
        page.locator("#window-slider").press("ArrowLeft")
    assert "No critic had values" in page.locator(".tables .absent").inner_text()


def test_token_tables_show_the_numbers_of_the_item(show: Open) -> None:
    page = show(fragment="#item=t5:0:1001:w20")
    data = PAGES["run"]()["explorers"][0]["snapshots"][2]
    start, detail = data["length"][0], data["detail"]
    cells = page.locator(".tables table").first.locator("tbody tr").first.locator("td").all_inner_texts()
    columns = [*detail["values"], detail["returns"], *detail["advantages"], detail["weight"], detail["mixed"]]
    assert [number(cell) for cell in cells] == [column[start] / 100 for column in columns]
    cells = page.locator("table.losses tbody tr").first.locator("td").all_inner_texts()
    losses = [detail[name][8] / 100 for name in ("without", "own", "other", "empty")]
    assert number(cells[0]) == pytest.approx(losses[0] - losses[1], abs=1e-9)
    assert [number(cell) for cell in cells[1:]] == [*losses, detail["gate"][8] / 100]


def test_a_link_opens_its_item_and_choosing_one_makes_a_link(show: Open) -> None:
    page = show(fragment="#item=t5:0:1042")
    assert page.locator(".place[aria-pressed=true]").get_attribute("data-item") == "42"
    page.locator("#thoughts .virtual").press("ArrowDown")
    address = page.evaluate("location.hash")
    assert address == "#item=t5:0:1043:w20"
    page.evaluate("location.hash = '#item=t5:0:1003:w10'")
    page.locator(".place[aria-pressed=true][data-item='3']").wait_for()
    assert page.locator("#window-slider").input_value() == "1"


def test_a_place_of_the_text_can_be_clicked(show: Open) -> None:
    page = show()
    other = page.locator(".place[aria-pressed=false]").first
    item = other.get_attribute("data-item")
    other.click()
    assert page.locator(".place[aria-pressed=true]").get_attribute("data-item") == item


def test_twenty_thousand_items_stay_few_elements_and_few_bytes(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "many.html"
    path.write_text(page_html(samples.run_page(explorers=[explorer(20_000, 1, 500)])), "utf-8")
    assert path.stat().st_size < 3_000_000
    opened = Opened(browser)
    page = opened.open(path)
    box = page.locator("#thoughts .virtual")
    box.press("End")
    assert page.locator("#thoughts .row[aria-selected=true]").get_attribute("aria-posinset") == "20000"
    assert page.locator("#thoughts .row").count() < 60
    assert page.locator("#thoughts .count").inner_text() == "20,000 of 20,000 thoughts"
    opened.close()


def test_names_explain_themselves_on_focus_and_escape_hides_it(show: Open) -> None:
    page = show()
    page.locator("#story .number .term").first.focus()
    assert "base model's loss" in page.locator("#tooltip").inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tooltip"
    page.keyboard.press("Escape")
    assert page.locator("#tooltip").is_hidden()
    page.locator("#training .term").first.hover()
    assert "loss without a thought" in page.locator("#tooltip").inner_text()


def test_curves_zoom_and_change_their_axis(show: Open) -> None:
    page = show()
    page.locator("#training figure").first.scroll_into_view_if_needed()
    over = page.locator("#training figure .u-over").first
    over.wait_for()
    assert str(page.locator("#training figure .uplot").first.get_attribute("aria-label")).startswith("Gains on")
    drawn = "[...charts.drawn].find((one) => one.label.startsWith('Gains'))?.plot.scales.x"
    extent = f"[{drawn}?.min, {drawn}?.max]"
    assert page.evaluate(extent) == [0, 20]
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=4)
    page.mouse.up()
    low, high = page.evaluate(extent)
    assert 2 < low < 8 < 12 < high < 18
    page.get_by_role("button", name="Theme").click()
    until(page, f"{extent}[0] === {low}")
    over.dblclick()
    assert page.evaluate(extent) == [0, 20]
    page.get_by_label("seconds", exact=True).check()
    until(page, f"{extent}[1] === 134")


def test_equal_cost_takes_each_run_s_last_measurement_within_the_budget(show: Open) -> None:
    page = show("study")
    compare = PAGES["study"]()["compare"]
    slider = page.locator("#budget-slider")
    slider.evaluate("range => { range.value = 500; range.dispatchEvent(new Event('input')); }")
    most = max(max(run["x"]["seconds"]) for run in compare["runs"])
    expected = {}
    for label in ("t5", "rlp"):
        last = [
            max(
                (at, value)
                for at, value in zip(run["x"]["seconds"], run["series"]["content_gain"]["value"])
                if at <= most / 2
            )
            for run in compare["runs"]
            if run["label"] == label and run["series"]
        ]
        expected[label] = sum(value for _, value in last) / len(last)
    rows = page.get_by_role("region", name="At equal cost").locator("tbody tr")
    shown = {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows.all()}
    assert {label: number(cells[0]) for label, cells in shown.items()} == pytest.approx(expected, abs=6e-4)
    assert number(shown["rlp"][1]) == pytest.approx(expected["rlp"] - expected["t5"], abs=6e-4)
    assert "t5 is above" in page.get_by_role("region", name="Paired differences").inner_text()
    page.locator("#compare select").nth(1).select_option("windows")
    assert page.evaluate("document.activeElement.value") == "windows"
    page.locator("#compare figure.wide .u-over").wait_for()
    assert "by windows" in str(page.locator("#compare figure.wide .uplot").get_attribute("aria-label"))


def test_two_models_answers_stand_side_by_side(show: Open) -> None:
    page = show("evaluation")
    page.get_by_label("Only the second right").check()
    assert page.locator("#evaluation .row[aria-selected=true]").inner_text().split()[:2] == ["✗", "✓"]
    assert page.locator("#evaluation .answers article").count() == 2
    assert "Answer of model 1 to item 1:" in page.locator("#evaluation .answers article").nth(1).inner_text()
    assert "not told apart" in page.get_by_role("region", name="Benchmarks").inner_text()


def test_print_leaves_the_controls_out_and_draws_every_curve(show: Open) -> None:
    page = show(theme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("#top").is_hidden()
    assert page.locator("#thoughts .controls").is_hidden()
    assert page.locator("#thoughts .reader").is_visible()
    assert page.locator("#training figure.later:not(:has(.uplot, svg))").count() == 0
    assert page.evaluate("charts.css('--paper')") == "rgba(251, 250, 247, 1)"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.evaluate("charts.css('--paper')") == "rgba(22, 23, 27, 1)"


def test_a_served_page_follows_its_run_and_keeps_its_place(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "LIVE", {"every": 0.05})
    before = samples.run_page(state="running")
    after = samples.run_page(version="2", title="later", live=None)
    opened = Opened(browser)
    page = opened.page
    page.route(
        "http://page.test/**",
        lambda route: {
            "": lambda: route.fulfill(body=page_html(before, live=True), content_type="text/html; charset=utf-8"),
            "version": lambda: route.fulfill(json={"version": "2", "state": "running"}),
            "data": lambda: route.fulfill(json=after),
        }[route.request.url.rpartition("/")[2].partition("#")[0]](),
    )
    page.goto("http://page.test/#item=t5:0:1007:w10")
    page.locator("#thought-search").focus()
    until(page, "document.title === 'later'")
    assert page.locator(".place[aria-pressed=true]").get_attribute("data-item") == "7"
    assert page.locator("#window-slider").input_value() == "1"
    assert page.evaluate("document.activeElement.id") == "thought-search"
    assert opened.errors == []
    opened.context.close()
