"""report.html in a browser, as people see it: Debian's Chromium without a window, steered by selenium.

On a telephone's width and a desk's, in light and dark: nothing is asked of the network, nothing is complained about,
nothing reaches out of the page, no text is cut, and all text has contrast.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launchers import whole
from page_samples import HOSTILE, diagnosis, saying, starts, summary

from autoddp.diagnose import CAUSES
from autoddp.diagnose.findings import NOTHING
from autoddp.report.page import page, write_page

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)


def every_cause() -> dict[str, Any]:
    """Each cause is proved, and mended after the others."""
    content = summary(8)
    found = content["diagnosis"]
    one, step = found["findings"][0], found["step_ms"]
    found["findings"] = [one | {"cause": cause, "ms": step / (4 + n)} for n, cause in enumerate(CAUSES)]
    found["waterfall"] += [{"cause": cause, "step_ms": step * 0.9**n} for n, cause in enumerate(CAUSES)]
    return content


def trials_without_a_time() -> dict[str, Any]:
    """Refused, failed and cut short, with long reasons."""
    content = copy.deepcopy(summary())
    for number, state in ((0, "refused"), (1, "failed"), (3, "cut short")):
        content["trials"][number] |= {"state": state, "seconds": None, "reason": "gradient error above the limit " * 3}
    return content


def parts_are_wrong() -> dict[str, Any]:
    """The page names many places of the summary."""
    content = copy.deepcopy(summary(trials=40))
    content |= {"headroom": "x", "topology": 7}
    content["diagnosis"]["findings"] = "x"
    for trial in content["trials"]:
        trial["seconds"] = "x"
    return content


SAMPLES = {
    "two ranks": summary,
    "one rank": lambda: summary(1),
    "64 ranks and 100 trials": lambda: summary(64, 100),
    "next to nothing": lambda: {"schema": 1, "trials": []},
    "a diagnosis alone": lambda: {"schema": 1, "diagnosis": diagnosis(8)},
    "nothing could be measured": lambda: {"schema": 1, "diagnosis": NOTHING | {"not_measured": ["everything: …"]}},
    "one trial": lambda: summary(trials=1),
    "a script without DDP": starts,
    "trials without a time": trials_without_a_time,
    "parts are wrong": parts_are_wrong,
    "all causes": every_cause,
    "hostile texts": lambda: saying(HOSTILE),
    "from right to left": lambda: saying("تدريب النموذج الكبير 🚀 אימון.py"),
    "long names with blanks": lambda: saying(" ".join(['the second paper\'s "best" run'] * 9)),
    "long words": lambda: saying("/a" * 150),
}


DIFFERENT = {
    "64 ranks and 100 trials",
    "next to nothing",
    "trials without a time",
    "all causes",
    "hostile texts",
    "long words",
}
"""The samples whose pages have least in common."""


WIDTHS, SCHEMES = (1280, 390), ("light", "dark")

LOOK = """
const faults = [], near = 1.0, wide = arguments[0];
const told = (what, node) => faults.push(what + ': ' + (node.textContent || node.outerHTML).trim().slice(0, 80));
document.querySelectorAll('details').forEach(one => one.open = true);
if (document.documentElement.scrollWidth > wide) faults.push('the page is ' + document.documentElement.scrollWidth);
for (const picture of document.querySelectorAll('svg')) {
  const frame = picture.getBoundingClientRect();
  if (frame.width < 1 || frame.height < 1) told('an empty picture', picture);
  if (frame.left < -near || frame.right > wide + near) told('a picture outside of the page', picture);
  const ends = [];
  for (const part of picture.querySelectorAll('rect, line, circle, text')) {
    const box = part.getBoundingClientRect();
    if (box.left < frame.left - near || box.right > frame.right + near) told('outside of its picture', part);
    if (box.top < frame.top - 2 || box.bottom > frame.bottom + 2) told('above or below its picture', part);
    if (part.tagName === 'text') ends.push([box.left, box.right]);
  }
  ends.sort((a, b) => a[0] - b[0]);
  ends.forEach((end, n) => { if (n && end[0] < ends[n - 1][1]) told('words that touch', picture); });
}
const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const colour = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const behind = node => {
  for (; node; node = node.parentElement) {
    const found = colour(getComputedStyle(node).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let words = 0;
while (walker.nextNode()) {
  const text = walker.currentNode, node = text.parentElement;
  if (!text.data.trim() || node.closest('svg, script')) continue;
  const range = document.createRange();
  range.selectNodeContents(text);
  const scrolled = node.closest('pre.wide');
  const frame = (scrolled || node.closest('td, th, p, li, pre, dd, dt, h1, h2, h3, figcaption, summary, footer, .name, '
    + '.value, .swatch')).getBoundingClientRect();
  for (const box of range.getClientRects()) {
    words += 1;
    if (scrolled) continue;
    // Where blanks are kept, the one at which a line ends has a box of its own, which may reach out unseen.
    if (box.width < 6 && getComputedStyle(node).whiteSpace === 'pre-wrap') continue;
    if (box.left < frame.left - near || box.right > frame.right + near) told('text outside of its place', node);
    if (box.left < 0 || box.right > wide) told('text outside of the page', node);
  }
  if (scrolled && (frame.right > wide || getComputedStyle(scrolled).overflowX !== 'auto')) told('cut text', node);
  if (parseFloat(getComputedStyle(node).fontSize) < 11) told('small text', node);
  const [one, other] = [light(colour(getComputedStyle(node).color)), light(behind(node))];
  if ((Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) < 4.5) told('little contrast', node);
}
for (const word of document.querySelectorAll('.heat svg text')) {
  const at = word.getBoundingClientRect(), middle = (at.left + at.right) / 2;
  for (const cell of word.closest('svg').querySelectorAll('rect')) {
    const box = cell.getBoundingClientRect();
    if (middle < box.left || middle > box.right) continue;
    const look = getComputedStyle(cell), opacity = Number(look.fillOpacity), page = behind(word);
    const mixed = colour(look.fill).map((part, n) => part * opacity + page[n] * (1 - opacity));
    const [one, other] = [light(colour(getComputedStyle(word).fill)), light(mixed)];
    if ((Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) < 4.5) told('little contrast in a cell', word);
  }
}
if (!words) faults.push('there are no words');
if (document.scripts.length) faults.push('there are scripts');
if (document.images.length) faults.push('there are images');
return faults;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for word in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(word)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to start as root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


def faults(browser: Any, place: Path, width: int, scheme: str) -> list[str]:
    """What is wrong with a page at that width in that colour scheme."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(place.as_uri())
    found = list(browser.execute_script(LOOK, width))
    found += [f"complaint: {entry['message']}" for entry in browser.get_log("browser")]
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            found += [f"request: {url}"] if url != place.as_uri() else []
    shown = browser.execute_script("return window.innerWidth")  # a telephone shows a page that is too wide as a whole
    found += [f"the page is {shown} wide"] if shown != width else []
    dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark is (scheme == "dark")
    return found


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a sample, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    def written(name: str) -> Path:
        place = folder / f"{name}.html"
        if not place.exists():
            write_page(place, SAMPLES[name]())
        return place

    return written


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [name if name in DIFFERENT else whole(name) for name in SAMPLES])
def test_all_is_inside_the_page(
    name: str, width: int, scheme: str, page_of: Callable[[str], Path], browser: Any
) -> None:
    assert faults(browser, page_of(name), width, scheme) == []


def test_dark_is_dark(page_of: Callable[[str], Path], browser: Any) -> None:
    shown = {}
    for scheme in SCHEMES:
        faults(browser, page_of("two ranks"), 1280, scheme)
        shown[scheme] = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert shown == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


@pytest.mark.parametrize("width", WIDTHS)
def test_names_of_causes_are_not_broken(width: int, page_of: Callable[[str], Path], browser: Any) -> None:
    faults(browser, page_of("all causes"), width, "light")
    find = """return [...document.querySelectorAll('.row .name')].filter(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return new Set([...range.getClientRects()].map(box => box.top)).size > 1;
    }).map(one => one.textContent)"""
    assert browser.execute_script(find) == []


def test_paper_is_white(page_of: Callable[[str], Path], browser: Any) -> None:
    faults(browser, page_of("two ranks"), 1280, "dark")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    ink = browser.execute_script("return getComputedStyle(document.body).color")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert ink == "rgb(27, 31, 36)"


def test_hostile_texts_are_words(page_of: Callable[[str], Path], browser: Any) -> None:
    faults(browser, page_of("hostile texts"), 1280, "light")
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in HOSTILE)
    assert browser.execute_script("return document.querySelector('h1').textContent") == shown
    assert browser.title == f"{shown}: report of autoddp"


SPOILED = {
    "a request": ("<h2>", "<img src='http://127.0.0.1:9/x.png'><h2>", "request: http://127.0.0.1:9/x.png"),
    "a request that the policy stops": ("<h2>", "<img src='http://127.0.0.1:9/x.png'><h2>", "complaint: "),
    "a script": ("<h2>", "<script>console.error('no')</script><h2>", "there are scripts"),
    "a wide picture": ("<h2>", "<svg width='2000' height='9'><title>x</title></svg><h2>", "a picture outside"),
    "a part outside": ("<rect", "<rect x='99%' width='50%' height='3'/><rect", "outside of its picture"),
    "a long word": ("<h2>", f"<p style='white-space: nowrap'>{'long ' * 99}</p><h2>", "text outside of its place"),
    "no contrast": ("<h2>", "<p style='color: #888'>pale</p><h2>", "little contrast: pale"),
    "words that touch": ("<rect", "<text x='1%' y='9'>one</text><text x='2%' y='9'>two</text><rect", "words that"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_checks_see(name: str, browser: Any, tmp_path: Path) -> None:
    before, after, expected = SPOILED[name]
    text = page(summary())
    assert before in text
    spoiled = text.replace(before, after, 1)
    if name != "a request that the policy stops":
        spoiled = spoiled.replace("Content-Security-Policy", "x")
    (tmp_path / "page.html").write_text(spoiled)
    assert any(fault.startswith(expected) for fault in faults(browser, tmp_path / "page.html", 390, "light"))
