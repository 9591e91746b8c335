"""The page in a real browser. It is skipped where there is none; CI installs one."""

from __future__ import annotations

import shutil

import pytest

from lab.report.fake_records import comparison, record, write
from rootfree_lab.report import figures, write_report

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

# The browser of the system: Playwright's own would have to be downloaded.
PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
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
def tab():
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=PROGRAM, args=flags)
        yield browser.new_page()
        browser.close()


@pytest.fixture
def browser(tab, page):
    """The page, freshly opened; what it asks for and complains about is watched."""
    asked, complaints = [], []

    def ask(request):
        asked.append(request.url)

    def complain(message):
        complaints.append(str(message))

    tab.on("request", ask)
    tab.on("console", complain)
    tab.on("pageerror", complain)
    tab.emulate_media(color_scheme="light", media="screen")
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.goto("about:blank")  # a new fragment alone would not load the file again
    tab.goto(page.as_uri())
    assert set(asked) == {page.as_uri()}
    yield tab
    for event, listener in (("request", ask), ("console", complain), ("pageerror", complain)):
        tab.remove_listener(event, listener)
    assert complaints == []


def test_a_click_sorts_and_another_turns_round(browser):
    before = browser.evaluate(column("label"))
    assert browser.evaluate(SORTED) == []
    browser.click("th[data-key=test_error] button")
    assert browser.evaluate(SORTED) == [["test_error", "ascending"]]
    found = browser.evaluate(column("test_error"))
    numbers = [float(value) for value in found[:-1]]
    assert numbers == sorted(numbers)
    assert found[-1] is None  # what is missing stays last
    browser.click("th[data-key=test_error] button")
    assert browser.evaluate(SORTED) == [["test_error", "descending"]]
    found = browser.evaluate(column("test_error"))
    assert [float(value) for value in found[:-1]] == numbers[::-1]
    assert found[-1] is None
    assert sorted(browser.evaluate(column("label"))) == sorted(before)
    assert browser.evaluate("location.hash") == "#sort=test_error&order=descending"


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts(browser, key):
    browser.focus("th[data-key=model] button")
    browser.keyboard.press("Tab")  # to the next heading
    assert browser.evaluate("document.activeElement.parentElement.dataset.key") == "seed"
    browser.keyboard.press(key)
    assert browser.evaluate(SORTED) == [["seed", "ascending"]]
    seeds = browser.evaluate(column("seed"))
    assert seeds == sorted(seeds, key=float)
    assert browser.evaluate("document.activeElement.parentElement.dataset.key") == "seed"


def test_numbers_sort_as_numbers_and_divergence_is_largest(browser):
    browser.click("th[data-key=train_loss] button")
    values = [value for value in browser.evaluate(column("train_loss")) if value is not None]
    assert values[-1] == "Infinity"
    assert [float(value) for value in values] == sorted(map(float, values))


def test_the_filter_takes_words(browser):
    browser.fill("#filter", "ADAMW cifar10 2")
    assert browser.inner_text("#shown") == "6 of 31 runs"
    browser.fill("#filter", "diverged")
    assert browser.evaluate(column("label")) == ["AdamW"]
    browser.fill("#filter", "<b>bold")
    assert browser.evaluate(column("label")) == ["<b>bold</b>"]


def test_the_address_restores_order_and_filter(browser, page):
    def open_with(fragment):
        browser.goto("about:blank")
        browser.goto(page.as_uri() + fragment)

    open_with("#sort=label&order=descending&filter=vit_tiny")
    assert browser.evaluate(SORTED) == [["label", "descending"]]
    found = browser.evaluate(column("label"))
    assert found == sorted(found, key=str.lower, reverse=True)
    assert browser.inner_text("#shown") == "15 of 31 runs"
    open_with("#sort=no-such-column&order=sideways")
    assert browser.evaluate(SORTED) == []
    open_with("#runs")
    assert browser.evaluate("scrollY") > 0


def test_a_config_opens_and_travels_with_its_run(browser):
    button, config = browser.locator("[aria-controls=config-0]"), browser.locator("#config-0")
    button.click()
    assert (button.get_attribute("aria-expanded"), config.is_visible()) == ("true", True)
    assert '"lr": 0.1' in config.inner_text()
    browser.click("th[data-key=label] button")
    same = "document.getElementById('config-0').previousElementSibling.cells[0].dataset.value"
    assert browser.evaluate(same) == "SGD"
    button.click()
    assert (button.get_attribute("aria-expanded"), config.is_visible()) == ("false", False)


def test_the_axis_can_be_chosen(browser):
    def shown():
        panels = browser.locator(".panels").all()
        return [panel.get_attribute("class").split()[1] for panel in panels if panel.is_visible()]

    assert shown() == ["epoch", "epoch"]
    browser.click("fieldset label:has([value=seconds]) >> nth=0")
    assert shown() == ["seconds", "epoch"]


def test_a_desktop_shows_every_table_whole(browser):
    """No column is cut off, and each run's settings can be read, at 1440 pixels."""
    browser.set_viewport_size({"width": 1440, "height": 900})
    for box in browser.locator(".scroll").all():
        inner, outer = box.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert inner <= outer, box.get_attribute("aria-label")
    settings = browser.locator("#runs-table td.settings").first
    assert settings.inner_text() == "lr 0.1, weight_decay 0.0005"
    assert settings.evaluate("e => e.getBoundingClientRect().right") < 1440


def test_files_beside_the_page_can_be_opened_from_disk(browser, page):
    links = browser.locator(".downloads a").evaluate_all("all => all.map(a => a.href)")
    names = {link.rpartition("/")[2] for link in links}
    assert {"runs.csv", "curves.csv", "table.tex"} < names
    assert {name for name in names if name.endswith(".svg")}
    with browser.expect_download() as waiting:
        browser.click(".downloads a[href='runs.csv']")
    assert waiting.value.path().read_bytes() == (page.parent / "runs.csv").read_bytes()


@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_screen_in_both_schemes(browser, width, dark):
    browser.set_viewport_size({"width": width, "height": 900})
    browser.emulate_media(color_scheme="dark" if dark else "light")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    drawn = [svg for svg in browser.locator("figure > svg").all() if svg.is_visible()]
    assert len(drawn) == 2 * (3 + 1)
    assert all(250 < svg.bounding_box()["width"] <= width for svg in drawn)
    style = "getComputedStyle(document.documentElement)"
    background = "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
    assert browser.evaluate(f"{style}.backgroundColor") == background
    ink = "getComputedStyle(document.querySelector('figure svg g[style*=ink]')).fill"
    assert browser.evaluate(ink) == ("rgb(228, 231, 235)" if dark else "rgb(36, 41, 46)")


def test_on_paper_all_axes_are_there_and_colours_are_those_of_day(browser):
    browser.set_viewport_size({"width": 720, "height": 900})  # A4 without its margins
    browser.emulate_media(color_scheme="dark", media="print")
    assert browser.evaluate("document.documentElement.scrollWidth") == 720
    assert sum(panel.is_visible() for panel in browser.locator(".panels").all()) == 6
    background = "getComputedStyle(document.documentElement).backgroundColor"
    assert browser.evaluate(background) == "rgb(255, 255, 255)"
    assert browser.pdf().startswith(b"%PDF")
