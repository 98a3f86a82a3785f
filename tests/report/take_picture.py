"""The picture in the README, made of a real run's page: docs/pictures/report.png.

    python tests/report/take_picture.py .autoddp/20251121-200000-host-4711/summary.json docs/pictures/report.png

It shows the page's beginning in few colours. It needs Chromium, its driver, selenium and pillow.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver

from autoddp.report.page import page

WIDTH, COLOURS = 1000, 192
LAST = "The ladder: what other settings give"  # the first part that is not on the picture


def main(summary: str, picture: str) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.add_argument("--headless=new")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "report.html"
        place.write_text(page(json.loads(Path(summary).read_text(encoding="utf-8"))), encoding="utf-8")
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(place.as_uri())
        find = "return [...document.querySelectorAll('h2')].find(one => one.textContent === arguments[0]).offsetTop"
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": browser.execute_script(find, LAST) - 20, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        browser.quit()
    whole = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    whole.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
