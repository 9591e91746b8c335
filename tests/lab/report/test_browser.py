"""The page in a real browser. It is skipped where there is none; CI installs one."""

from __future__ import annotations

import pytest

from lab.report import browser as chromium
from lab.report.fake_records import comparison, record, write
from rootfree_lab.report import figures, write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.program() is None,
        reason="Chromium is not installed (Debian: apt-get install chromium)",
    ),
]

SHOWN = "[...document.querySelectorAll('#runs-table tbody:not([hidden])')]"
SORTED = "[...document.querySelectorAll('th[aria-sort]')].map(h => [h.dataset.key, h.ariaSort])"


def column(key: str) -> str:
    """The values of a column of the runs that are shown, top to bottom."""
    heads = "[...document.querySelectorAll('#runs-table th')]"
    place = f"{heads}.findIndex(h => h.dataset.key === '{key}')"
    values = f"{SHOWN}.map(b => b.rows[0].cells[n].dataset.value ?? null)"
    return f"(() => {{ const n = {place}; return {values} }})()"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    incomplete = record("<b>bold</b>", final={"test_error": None}, curve=[], completed=False)
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "FORMATS", ("svg",))  # the page holds drawings of its own
        return write_report(write(folder / "records.jsonl", [*comparison(), incomplete])).page


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    driven = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield driven
    driven.close()


@pytest.fixture
def browser(chrome, page):
    chrome.look(width=1280)
    chrome.open(page)
    yield chrome
    complaints = [
        event for event in chrome.events
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]  # fmt: skip
    assert complaints == []


def test_nothing_is_requested_but_the_page(browser, page):
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [page.as_uri()]


def test_a_click_sorts_and_another_turns_round(browser):
    before = browser.run(column("label"))
    assert browser.run(SORTED) == []
    browser.click("th[data-key=test_error] button")
    assert browser.run(SORTED) == [["test_error", "ascending"]]
    found = browser.run(column("test_error"))
    numbers = [float(value) for value in found[:-1]]
    assert numbers == sorted(numbers)
    assert found[-1] is None  # what is missing stays last
    browser.click("th[data-key=test_error] button")
    assert browser.run(SORTED) == [["test_error", "descending"]]
    found = browser.run(column("test_error"))
    assert [float(value) for value in found[:-1]] == numbers[::-1]
    assert found[-1] is None
    assert sorted(browser.run(column("label"))) == sorted(before)
    assert browser.run("location.hash") == "#sort=test_error&order=descending"


@pytest.mark.parametrize("key", ["Enter", " "])
def test_the_keyboard_sorts(browser, key):
    browser.run("document.querySelector('th[data-key=optimizer] button').focus()")
    browser.press("Tab")  # to the next heading
    assert browser.run("document.activeElement.parentElement.dataset.key") == "seed"
    browser.press(key)
    assert browser.run(SORTED) == [["seed", "ascending"]]
    seeds = browser.run(column("seed"))
    assert seeds == sorted(seeds, key=float)
    assert browser.run("document.activeElement.parentElement.dataset.key") == "seed"


def test_numbers_sort_as_numbers_and_divergence_is_largest(browser):
    browser.click("th[data-key=train_loss] button")
    values = [value for value in browser.run(column("train_loss")) if value is not None]
    assert values[-1] == "Infinity"
    assert [float(value) for value in values] == sorted(map(float, values))


def test_the_filter_takes_words(browser):
    browser.run("document.getElementById('filter').focus()")
    browser.type("ADAMW cifar10 2")
    assert browser.run("document.getElementById('shown').textContent") == "6 of 31 runs"
    browser.run("document.getElementById('filter').select()")
    browser.type("diverged")
    assert browser.run(column("label")) == ["AdamW"]
    browser.run("document.getElementById('filter').select()")
    browser.type("<b>bold")
    assert browser.run(column("label")) == ["<b>bold</b>"]


def test_the_address_restores_order_and_filter(browser, page):
    browser.open(page, "#sort=label&order=descending&filter=vit_tiny")
    assert browser.run(SORTED) == [["label", "descending"]]
    found = browser.run(column("label"))
    assert found == sorted(found, key=str.lower, reverse=True)
    assert browser.run("document.getElementById('shown').textContent") == "15 of 31 runs"
    browser.open(page, "#sort=no-such-column&order=sideways")
    assert browser.run(SORTED) == []
    browser.open(page, "#runs")
    assert browser.run("scrollY") > 0


def test_a_config_opens_and_travels_with_its_run(browser):
    browser.click("tbody .open")
    state = "document.querySelector('[aria-controls=config-0]').ariaExpanded"
    hidden = "document.getElementById('config-0').hidden"
    assert (browser.run(state), browser.run(hidden)) == ("true", False)
    assert '"lr": 0.1' in browser.run("document.getElementById('config-0').textContent")
    browser.click("th[data-key=label] button")
    same = "document.getElementById('config-0').previousElementSibling.cells[0].textContent"
    assert browser.run(same) == "SGD"
    browser.run("document.querySelector('[aria-controls=config-0]').click()")
    assert (browser.run(state), browser.run(hidden)) == ("false", True)


def test_the_axis_can_be_chosen(browser):
    shown = (
        "[...document.querySelectorAll('.panels')].filter(p => p.checkVisibility())"
        ".map(p => p.classList[1])"
    )
    assert browser.run(shown) == ["epoch", "epoch"]
    browser.click("fieldset label:has([value=seconds])")
    assert browser.run(shown) == ["seconds", "epoch"]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_screen_in_both_schemes(browser, width, dark):
    browser.look(width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    widths = browser.run(
        "[...document.querySelectorAll('figure > svg')].filter(s => s.checkVisibility())"
        ".map(s => s.getBoundingClientRect().width)"
    )
    assert len(widths) == 2 * (3 + 1)
    assert all(250 < found <= width for found in widths)
    style = "getComputedStyle(document.documentElement)"
    background = "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
    assert browser.run(f"{style}.backgroundColor") == background
    ink = browser.run("getComputedStyle(document.querySelector('figure svg g[style*=ink]')).fill")
    assert ink == ("rgb(228, 231, 235)" if dark else "rgb(36, 41, 46)")
    assert browser.screenshot().startswith(b"\x89PNG")


def test_on_paper_all_axes_are_there_and_colours_are_those_of_day(browser):
    browser.look(width=720, dark=True, media="print")  # A4 without its margins
    assert browser.run("document.documentElement.scrollWidth") == 720
    visible = "[...document.querySelectorAll('.panels')].filter(p => p.checkVisibility()).length"
    assert browser.run(visible) == 6
    background = "getComputedStyle(document.documentElement).backgroundColor"
    assert browser.run(background) == "rgb(255, 255, 255)"
    assert browser.print().startswith(b"%PDF")
