"""report.html: its numbers are the summary's, what the summary lacks is named, and texts of others do nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import re
import stat
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from page_samples import HOSTILE, diagnosis, saying, stages, starts, summary
from study.simulated import SimulatedJob, error_of, facts

from autoddp.diagnose.findings import NOTHING
from autoddp.errors import UsageError
from autoddp.knobs import Rung
from autoddp.report import summary as summary_of
from autoddp.report import write_summary
from autoddp.report.page import page, write_page
from autoddp.report.page_content import Timeline, page_content
from autoddp.report.page_pictures import heat_map, one_step, stages_of, trials
from autoddp.study import Observer, Study, StudySettings
from autoddp.timing import median
from autoddp.units import figure, milliseconds, ratio

TEMPLATES = Path(__file__).resolve().parents[2] / "autoddp" / "report" / "templates"
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Parsed(HTMLParser):
    """A page's elements with their attributes, and its text without style and with the pictures' titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        self.elements.append((tag, dict(attrs)))
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        self._style = False
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]


def said(text: str) -> str:
    """The page's text, with one blank between words."""
    return " ".join(Parsed(text).text.split())


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def written(value: float) -> set[str]:
    """A number as the page may write it: as it is, as seconds or ms in ms, in percent, as a ratio."""
    found = {f"{value:g}", f"{value:.3g}", f"{value:.2f}", f"{value:.4g}"}
    for ms in (value, value * 1e3):
        found.add(f"{ms:.0f}" if ms >= 99.95 else f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}")
        found |= {f"{ms:.1f}" if ms < 9.95 else f"{ms:.0f}"}
    return found | {f"{value * 100:.0f}", f"{value * 100:.1f}", f"{value * 100:.2g}"}


def test_every_number_is_the_summarys() -> None:
    content = summary()
    found = content["diagnosis"]
    read = page_content(content)
    assert read.diagnosis is not None
    known: set[str] = set()
    for leaf in leaves({**content, "timelines": []}):
        if isinstance(leaf, str):
            known |= set(re.findall(r"\d+(?:\.\d+)?", leaf))
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            known |= written(leaf)
    derived = [
        *(ms for one in read.diagnosis.ranks for ms in stages_of(one).values()),
        *(sum(each) / 2 for each in zip(*(stages_of(one).values() for one in read.diagnosis.ranks), strict=True)),
        sum(row["step_ms"] for row in found["ranks"]) / 2,
        *(a["step_ms"] - b["step_ms"] for a, b in zip(found["waterfall"], found["waterfall"][1:], strict=False)),
        *(one["ms"] / found["step_ms"] for one in found["findings"] if one["ms"]),
        median([median(block) for block in content["finals"]["baseline_rounds"]]),
        *(content["baseline"]["seconds"] / one["seconds"] for one in content["trials"] if one["seconds"]),
        median([abs(one["predicted"] / one["seconds"] - 1) for one in content["trials"] if one["seconds"]]),
    ]
    for number in derived:
        known |= written(number)
    fixed = {"99", "3", "1", "61", "24.0", "16", "0", "32", "8", "1.2"}  # of captions, of knobs' own words, and sizes
    text = said(page(content))
    step = text[text.index("Step ") : text.index("The ladder: ")]
    numbers = set(re.findall(r"\d+(?:\.\d+)?", text.replace(step, "").replace("0.1.0", "")))
    assert numbers - known - fixed == set()
    assert len(numbers) > 100


def test_what_matters_is_there() -> None:
    content = summary()
    text = said(page(content))
    assert text.index("One rank computes 9.31 ms longer") < text.index("Why a step takes its time")
    assert "straggler 9.31 ms per step, 17 % 8.83 to 9.93 ms proved rank 1 Rank 1 computes longer." in text
    assert "data_loader 6.13 ms per step, 11 % 5.74 to 6.56 ms proved all ranks" in text
    assert "small_batch suspected Computing takes less" in text
    assert "nvidia-smi -q -d CLOCK" in text
    steps = [f"{one['step_ms']:.1f}" for one in content["diagnosis"]["waterfall"]]
    assert f"straggler a step a step takes {steps[1]} ms saved: 9.21 ms {steps[1]} ms 9.21 ms less" in text
    assert "rank 1 on node0, backward: 27.1 ms" in text
    for one in content["ladder"]:
        gain = one["speedup"]
        assert "×{} ({} to {})".format(*(ratio(gain[name]) for name in ("ratio", "low", "high"))) in text
    for one in content["trials"]:
        ms = "" if one["seconds"] is None else f"{one['seconds'] * 1e3:.1f}"
        assert f"{one['number']} {one['rung']} " in text
        assert ms in text
    assert "failed: RuntimeError: no memory" in text
    assert "4 hosts, 25 Gbit/s 51.2 71 %" in text
    assert "NUMA 0: CPUs 0-1" in text
    assert 'hook = "bf16"' in text
    assert "host_device_copy: the job runs on CPUs." in text


@pytest.mark.parametrize("objective", ["steps", "regex:max:rate ([0-9.]+)", "regex:min:took ([0-9.]+)"])
def test_a_script_without_ddp_has_its_starts(objective: str) -> None:
    content = starts(objective)
    aim = content["objective"]
    text = said(page(content))
    unit = "ms per step" if objective == "steps" else "as printed"
    shown = milliseconds if objective == "steps" else figure
    better = "faster" if objective == "steps" else "better"
    gain = "×{} {} {} → {} {} (99 % interval: ×{} to ×{})".format(
        ratio(aim["gain"]["ratio"]),
        better,
        shown(aim["as_written"]),
        shown(aim["tuned"]),
        unit,
        ratio(aim["gain"]["low"]),
        ratio(aim["gain"]["high"]),
    )
    assert f"Won {gain} by threads=1 training: nothing is changed" in text
    assert "Start with these settings from now on: autoddp train.py Start as before: torchrun train.py" in text
    assert f"Made better: {objective} . Each measurement is a start" in text
    assert "3 threads=1 " in text
    assert " threads=1 threads=4 " not in text
    assert "failed: RuntimeError: planted" in text
    for numbers in (aim["rounds"]["as_written"], aim["rounds"]["finalists"][0]["numbers"]):
        assert len(numbers) >= 3
        assert ", ".join(map(shown, numbers)) in text
    assert "malloc its steps fill no memory" in text
    for of_ddp in (
        " of gradients",
        "Headroom",
        "headroom",
        "The ladder",
        "Every trial",
        "trace",
        "No step was recorded",
    ):
        assert of_ddp not in text
    assert "autoddp diagnose with the same script says what its communication costs." in text


def test_a_script_without_ddp_that_stays_as_it_is_has_a_page() -> None:
    content = starts()
    content["objective"] |= {"tuned": None, "gain": None, "rounds": {"as_written": [], "finalists": []}}
    content["decision"] = {"configuration": {}, "why": "nothing was better"}
    text = said(page(content))
    assert "Won nothing The script's own settings stay. As written: " in text
    assert "Do now" not in text, "the recipe says that nothing is to be set"
    assert "Tune again: autoddp train.py" in said(page(content | {"recipe_text": ""}))
    assert "Final rounds: no setting was better than the script as written, or there was no time." in text
    content["objective"]["starts"] = content["objective"]["starts"][:1]
    assert "Other settings: none was tried." in said(page(content))


LACKS = [
    ("diagnosis", "Why a step takes its time", "no diagnosis was made"),
    ("diagnosis.ranks", "Every rank and stage", "The stages of a step on each rank."),
    ("diagnosis.waterfall", "Mending one cause after another", "A step after mending causes: "),
    ("diagnosis.samples_per_second", "samples per second", "Samples per second: "),
    ("timelines", "One step of all ranks", "no step was recorded"),
    ("headroom", "Headroom, which is ", "The headroom: "),
    ("trials", "Every trial", "no trial was run"),
    ("ladder", "The ladder: what", "no configuration reached the final rounds"),
    ("topology", "autoddp probe", "The topology of this host."),
    ("what_if", "What if", "nothing was predicted"),
    ("recipe_text", "Its text", "it is not part of this summary"),
]


@pytest.mark.parametrize(("key", "shown", "sentence"), LACKS)
@pytest.mark.parametrize("nothing", ["absent", "null"])
def test_what_is_missing_is_left_out_and_named(key: str, shown: str, sentence: str, nothing: str) -> None:
    content = summary()
    whole = said(page(content))
    assert shown in whole
    assert sentence not in whole
    *above, last = key.split(".")
    place = content
    for name in above:
        place = place[name]
    if nothing == "absent":
        del place[last]
    else:
        place[last] = None
    text, lacking = said(page(content)).split(" Not measured ")
    assert shown not in text
    assert sentence in lacking


def test_next_to_nothing_is_a_page() -> None:
    text = said(page({"schema": 1, "trials": []}))
    assert text.count("Not measured") == 1
    assert "no trial was run" in text


def test_predictions_of_no_trial_are_named() -> None:
    content = summary()
    for trial in content["trials"]:
        trial.pop("predicted", None)
    text = said(page(content))
    assert "Predictions of the trials: none was made." in text
    assert "predicted before" not in text


def test_the_script_as_written_is_said_to_stay_or_what_is_launched() -> None:
    content = summary()
    launched = next(one for one in content["ladder"] if one["configuration"] == content["decision"]["configuration"])
    text = said(page(content))
    assert f"→ {launched['seconds'] * 1e3:.1f} ms per step" in text
    assert f"{launched['rung']} (launched)" in text
    content["decision"]["configuration"] = {}
    text = said(page(content))
    assert "The script's own settings stay." in text
    assert "(launched)" not in text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "neither trials nor a diagnosis"),
        ({"schema": 1}, "neither trials nor a diagnosis"),
        ({"schema": 1, "objective": "steps"}, "objective: Expected `object`, got `str`"),
        ({"schema": 2, "trials": []}, "a summary of schema 1 was expected"),
        ({"trials": []}, "a summary of schema 1 was expected"),
        ({"schema": "1", "trials": []}, "a summary of schema 1 was expected"),
        ({"schema": 1, "trials": {}}, "trials: Expected `array`, got `object`"),
        ({"schema": 1, "diagnosis": "x"}, "diagnosis: Expected `object`, got `str`"),
        ({"schema": 1, "trials": 1, "diagnosis": "x"}, "trials: Expected `array`, got `int`; diagnosis: Exp"),
    ],
)
def test_what_is_no_summary_is_refused(content: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        page(content)


WRONG: list[tuple[str, Any, str, str]] = [
    # where, what stands there, which part is left out and why, a sentence that would be false or a number without it
    ("job", "x", "job: Expected `object`, got `str`", "2 ranks on 1 host, gloo"),
    ("job.backend", 7, "job.backend: Expected `str`, got `int`", ", gloo"),
    ("topology", ["x"], "topology: Expected `str`, got `array`", "The topology of this host."),
    ("diagnosis", [1], "diagnosis: Expected `object`, got `array`", "no diagnosis was made in this run"),
    ("diagnosis.findings", "x", "diagnosis.findings: Expected `array`, got `str`", "No cause takes 3 % of a step"),
    ("diagnosis.findings.0.ms", "x", "diagnosis.findings[0].ms: Expected `float`, got `str`", "9.31 ms per"),
    ("diagnosis.findings.0.cause", 1, "diagnosis.findings[0]: cause: Expected `str`, got `int`", "9.31 ms per step,"),
    ("diagnosis.ranks", {}, "diagnosis.ranks: Expected `array`, got `object`", "The stages of a step on each rank."),
    (
        "diagnosis.ranks.0.data_ms",
        "x",
        "diagnosis.ranks[0]: data_ms: Expected `float`, got `str`",
        "all ranks All wait",
    ),
    ("diagnosis.ranks.0.data_ms", None, "diagnosis.ranks[0]: Object missing required field `data_ms`", "all ranks All"),
    ("diagnosis.waterfall.1", 7, "diagnosis.waterfall: Expected `object`, got `int`", "none was proved"),
    ("trials.0.configuration", 7, "trials[0]: configuration: Expected `object`, got `int`", "9 trials as a table"),
    ("trials.0.seconds", -1, "trials[0].seconds: Expected `float` >= 0.0", "-1000"),
    ("decision", "x", "decision: Expected `object`, got `str`", "The script's own settings stay."),
    ("timelines", 1, "timelines: Expected `array`, got `int`", "no step was recorded"),
    ("timelines.0.steps.0", "x", "timelines[0]: steps: Expected `float`, got `str`", "rank 0 on node0, backward: 6"),
    ("wall_seconds.total", [], "wall_seconds.total: Expected `float`, got `array`", "after 1 min"),
]


@pytest.mark.parametrize(("where", "value", "told", "not_said"), WRONG)
def test_a_part_that_is_wrong_is_left_out_and_named(where: str, value: Any, told: str, not_said: str) -> None:
    content = copy.deepcopy(summary())
    *above, last = [int(name) if name.isdigit() else name for name in where.split(".")]
    place: Any = content
    for name in above:
        place = place[name]
    place[last] = value
    assert page_content(content).left_out == (told,)
    before, lacking = said(page(content)).split(" Not measured ")
    assert f"A part of summary.json is wrong and left out here: {told}" in lacking
    assert not_said not in before + lacking
    assert "Every trial" in before


def test_sentences_begin_with_a_capital_letter_and_names_stay() -> None:
    content = copy.deepcopy(summary())
    found = content["diagnosis"]
    found["verdict"] = ["every rank waits", "data_loader: mending it saves 9 ms", "2 ranks give more"]
    found["not_measured"] = ["the data loader: none is read"]
    found["findings"][0]["text"] = "after the backward pass all ranks wait"
    content["decision"]["why"] = "no significant gain"
    text = said(page(content))
    for sentence in (
        "Every rank waits",
        "data_loader: mending",
        "2 ranks give",
        "The data loader: none",
        "No signific",
    ):
        assert f" {sentence}" in text
    assert " After the backward pass all ranks wait" in text


def test_where_nothing_could_be_measured_the_page_says_why_and_no_more() -> None:
    lacking = ["everything: the script builds no DDP model"]
    text = page({"schema": 1, "diagnosis": NOTHING | {"not_measured": lacking}})
    assert "Nothing could be measured: see below why." in said(text)
    assert "Not measured Everything: the script builds no DDP model. One step of all ranks" in said(text)
    assert "none was proved" not in said(text)
    assert "Samples per second" not in said(text)
    assert '<section class="cards">' not in text  # which would be an empty box


def test_a_summary_says_not_itself_what_is_left_out() -> None:
    assert page_content({"schema": 1, "trials": [], "left_out": ["x"]}).left_out == ()


def test_of_very_many_wrong_parts_some_are_named() -> None:
    content = copy.deepcopy(summary(trials=100))
    for trial in content["trials"]:
        trial["seconds"] = "x"
    lacking = said(page(content)).split(" Not measured ")[1]
    assert lacking.count("is wrong and left out here") == 20
    assert "80 more parts of summary.json are wrong and left out here." in lacking


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, of long lists the first two elements."""
    keys = value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


@pytest.mark.parametrize("value", [None, "x", [], [7], 7, -0.5, {}, {"x": 1}, math.nan, True], ids=repr)
def test_a_page_is_drawn_whatever_one_part_is(value: Any) -> None:
    _drawn_whatever_one_part_is(summary(), value, each=20)  # the others are alike, and other values have other places
    _drawn_whatever_one_part_is(starts(), value, each=5)


def _drawn_whatever_one_part_is(content: dict[str, Any], value: Any, each: int) -> None:
    whole = json.dumps(content)
    everywhere = list(places(json.loads(whole)))
    assert len(everywhere) > 50
    for number, (*above, last) in enumerate(everywhere, len(repr(value))):
        if number % each:
            continue
        content = json.loads(whole)
        place: Any = content
        for key in above:
            place = place[key]
        place[last] = value
        if (*above, last) in (("schema",), ("objective",), ("objective", "text")):
            continue  # then it is no summary
        assert not re.search(r"\b(None|nan|NaN|inf)\b", said(page(content))), (*above, last)


@pytest.mark.parametrize("depth", [100, 900, 950, 970, 985])
def test_settings_of_lists_in_lists_are_shown_or_refused(depth: int) -> None:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    content = summary()
    content["trials"][0]["configuration"] = {"deep": nested}
    with contextlib.suppress(ValueError):
        assert "deep=[" in page(content)


def test_next_to_no_time_is_none() -> None:
    """Or quotients would be infinite."""
    content = summary()
    content["diagnosis"] |= {"step_ms": 1e-320}
    for trial in content["trials"]:
        trial["seconds"] = 5e-324
    content["baseline"]["seconds"] = 1e11
    assert not re.search(r"\b(inf|nan)\b", said(page(content)))


def test_predictions_of_trials_that_failed_are_told() -> None:
    content = summary()
    for trial in content["trials"]:
        trial |= {"seconds": None, "state": "failed", "reason": "no memory"}
    text = said(page(content))
    assert "A line across a column is what was predicted before the trial." in text
    assert " predicted against as written " in text


def test_thousands_of_ranks_have_numbers() -> None:
    rows = page_content({"schema": 1, "trials": [], "diagnosis": diagnosis(3000)})
    assert rows.diagnosis is not None
    *_, axis = heat_map(rows.diagnosis.ranks)
    assert re.findall(r">(\d+)</text>", axis.svg) == ["0", "512", "1024", "1536", "2048", "2560"]


@pytest.mark.whole  # half a minute of drawing
def test_of_very_many_ranks_the_slowest_are_shown() -> None:
    content = summary(3000)
    text = page(content)
    words = said(text)
    assert len(text) < 5_000_000
    assert "Of 3000 ranks, these are the 1024 that need longest by themselves." in words
    assert "1976 ranks are left out, for room." in words
    assert "rank 2999 on node374, backward" in text
    assert "rank 0 on node0, backward" not in text
    assert "3000 ranks on 1 host" in words
    assert "data_loader 6.13 ms per step" in words


def test_summary_json_is_json(tmp_path: Path) -> None:
    """A refused trial has no seconds, and a number that is not finite is no JSON."""
    job = SimulatedJob(error=lambda configuration: error_of(math.inf, finite=False))
    outcome = Study(job, facts(), StudySettings(trials=9, allow=Rung.LOSSY), Observer()).run()
    assert any(one.state == "refused" for one in outcome.trials)
    write_summary(tmp_path / "summary.json", summary_of(outcome, {}, ""))
    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert {one["seconds"] for one in found["trials"] if one["state"] == "refused"} == {None}
    assert "refused: " in said(page(found))


def test_texts_of_others_do_nothing() -> None:
    harmless, harmful = summary(), saying(HOSTILE)
    text = page(harmful)
    assert not CONTROL.search(text)
    expected, found = Parsed(page(harmless)), Parsed(text)
    assert set(found.tags) == set(expected.tags)
    assert "script" not in found.tags
    assert "img" not in found.tags
    names = {name for _, attributes in found.elements for name in attributes}
    assert names == {name for _, attributes in expected.elements for name in attributes}
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in HOSTILE)
    assert found.text.count(shown) > 40
    assert "49" not in shown


def test_texts_of_a_script_without_ddp_do_nothing() -> None:
    content = starts()
    content |= dict.fromkeys(("script", "run", "recipe", "topology", "recipe_text"), HOSTILE)
    aim = content["objective"]
    aim["text"] = content["decision"]["why"] = HOSTILE
    content["job"]["left_out"] = {HOSTILE: HOSTILE}
    content["commands"] = {"autoddp": HOSTILE, "torchrun": HOSTILE}
    for one in (*aim["starts"], *aim["rounds"]["finalists"]):
        one |= {"configuration": {HOSTILE: HOSTILE}, "reason": HOSTILE, "state": HOSTILE}
    content["decision"]["configuration"] = {HOSTILE: HOSTILE}
    text = page(content)
    assert not CONTROL.search(text)
    expected, found = Parsed(page(starts())), Parsed(text)
    assert set(found.tags) == set(expected.tags)
    assert {name for _, attributes in found.elements for name in attributes} == {
        name for _, attributes in expected.elements for name in attributes
    }
    assert "49" not in "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in HOSTILE)


def test_nothing_comes_from_outside() -> None:
    text = page(summary())
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    for tag, attributes in Parsed(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image", "a")
        assert not {"src", "href", "action", "data", "srcset", "xlink:href", "style"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text


def test_only_pictures_pass_unescaped() -> None:
    unsafe = [path.name for path in sorted(TEMPLATES.iterdir()) if re.search(r"\bsafe\b|autoescape", path.read_text())]
    assert unsafe == ["pictures.html"]


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 64])
def test_any_number_of_ranks(ranks: int) -> None:
    content = summary(ranks)
    text = page(content)
    assert "nan" not in re.sub("[a-z]nan|nan[a-z]", "", "".join(SVG.findall(text)))
    map_of = heat_map(page_content(content).diagnosis.ranks)  # type: ignore[union-attr]
    heights = [int(found) for row in map_of for found in re.findall(r'<svg[^>]* height="(\d+)"', row.svg)]
    assert len(map_of) == 10
    assert sum(heights) < 250
    step = one_step(page_content(content).timelines)
    assert step is not None
    assert step.aligned
    assert len(step.rows) == ranks + 1
    assert (
        sum(
            int(found)
            for row in step.rows
            for found in re.findall(r'height="(\d+)" role|<svg[^>]* height="(\d+)"', row.svg)
            for found in found
            if found
        )
        < 32 * 25 + 64 * 16
    )
    assert len(text) < 600_000


def test_the_late_rank_stands_out() -> None:
    content = page_content(summary(8))
    assert content.diagnosis is not None
    hot = {row.name: row.svg.count('class="hot"') for row in heat_map(content.diagnosis.ranks)}
    assert hot == {**dict.fromkeys(hot, 0), "backward": 1}
    (cell,) = re.findall(
        r'<rect[^>]*class="hot"[^>]*><title>(.*?)</title>',
        "".join(row.svg for row in heat_map(content.diagnosis.ranks)),
    )
    assert cell.startswith("rank 7 on node0, backward: ")


def test_a_trial_without_a_time_says_why_everywhere() -> None:
    content = copy.deepcopy(summary())
    content["trials"][0] |= {"state": "refused", "seconds": None, "reason": "gradient error 7 % of a sum"}
    content["trials"][1] |= {"state": "failed", "seconds": None, "reason": ""}
    content["trials"][3] |= {"state": "measured", "seconds": None}
    content["trials"][4] |= {"state": "cut short", "reason": "far slower than the best"}
    content["trials"][5] |= {"state": "refused", "reason": "gradient error 9 %"}
    text = said(page(content))
    first = content["trials"][0]["rung"]
    assert f"trial 1, {first}: refused: gradient error 7 % of a sum" in text  # in the picture
    assert "refused: gradient error 7 % of a sum refused " in text  # in the table, with the word where the ms would be
    assert "because it was refused: gradient error 7 % of a sum." in text  # below the ladder
    assert text.count("failed: no reason is known") == 2
    assert text.count("failed: RuntimeError: no memory") == 2
    assert text.count("its time is not in summary.json") == 2
    assert "its time is not in summary.json unknown " in text
    assert text.count("cut short: far slower than the best") == 2
    assert text.count("refused: gradient error 9 %") == 3
    assert "A red mark stands for a trial without a time; the table says why it has none." in text


def test_the_column_of_one_trial_is_narrow() -> None:
    drawn = ElementTree.fromstring(trials(page_content(summary(trials=1)).trials, 0.03))
    assert [one.get("width") for one in drawn.findall("rect")] == ["9.50%"]


def test_a_hundred_trials() -> None:
    content = summary(trials=100)
    text = page(content)
    assert said(text).count("failed: RuntimeError") == 2
    assert "100 trials as a table" in said(text)
    drawn = ElementTree.fromstring(trials(page_content(content).trials, 0.03))
    assert len(drawn.findall("rect")) == 99
    assert len(text) < 600_000


def test_buckets_that_were_not_recorded_are_named() -> None:
    content = summary()
    for timeline in content["timelines"]:
        timeline |= {"buckets": [], "no_buckets": "the script has a hook of its own", "a newer field": 7}
    text = said(page(content))
    assert "Its buckets were not recorded: the script has a hook of its own." in text
    assert "in grey, its buckets" not in text


def test_where_the_clocks_are_wrong_each_rank_begins_at_its_own_zero() -> None:
    content = summary(2)
    content["timelines"][1]["began"] = 7.0
    step = one_step(page_content(content).timelines)
    assert step is not None
    assert not step.aligned
    assert "could not be aligned" in said(page(content))


def test_buckets_that_travel_at_once_stand_below_each_other() -> None:
    content = summary(2)
    step = one_step(page_content(content).timelines)
    assert step is not None
    assert step.buckets == 4
    drawn = ElementTree.fromstring(step.rows[0].svg)
    tops = [one.get("y") for one in drawn.findall("rect") if one.get("class") == "bucket"]
    assert len(tops) == 4
    assert len(set(tops)) == 2


def test_the_axis_of_a_step_has_few_ticks_whatever_its_length() -> None:
    for length in (1e-4 * 1.1**n for n in range(150)):
        step = one_step([Timeline(rank=0, began=0.0, error=0.0, steps=(length,))])
        assert step is not None
        *_, axis = step.rows
        assert 3 <= axis.svg.count("</text>") <= 7, length


def test_a_number_that_is_damaged_is_drawn_inside_the_picture() -> None:
    """Any one leaf of a summary is replaced: by 0, by what is far too large, by another type."""
    chance, drawn = random.Random(1), 0
    wanted = [0, 0.0, -1, -0.5, 1e-9, 1e9, 1e300, 2**70, math.inf, math.nan, None, "", "x", [], {}, True]
    for _ in range(100):
        content = copy.deepcopy(summary())
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = chance.choice(list(keys))
            if not isinstance(place[key], (dict, list)) or not place[key]:
                break
            place = place[key]
        place[key] = chance.choice(wanted)
        if content["schema"] != 1:
            continue
        text = page(content)
        drawn += 1
        for picture in SVG.findall(text):
            for element in ElementTree.fromstring(picture).iter():
                for name in ("x", "width", "x1", "x2", "cx"):
                    share = element.get(name, "0%")
                    assert not share.endswith("%") or 0 <= float(share[:-1]) <= 100, (key, place[key])
                for name in ("y", "height", "y1", "y2"):
                    assert float(element.get(name, "0")) >= 0, (key, place[key])
    assert drawn > 90


def test_one_finding_may_cost_and_a_cause_may_make_it_worse() -> None:
    content = summary()
    content["diagnosis"]["findings"][0] |= {"ms": -1.5, "low": -2.5, "high": 0.5}
    content["diagnosis"]["waterfall"][2]["step_ms"] = content["diagnosis"]["waterfall"][1]["step_ms"] + 3.0
    text = said(page(content))
    assert "−1.50 ms per step −2.50 to 0.50 ms" in text
    assert "3.00 ms more" in text


def test_waiting_is_a_part_of_what_is_exposed() -> None:
    content = page_content({"schema": 1, "trials": [], "diagnosis": diagnosis(2)})
    assert content.diagnosis is not None
    for one, row in zip(content.diagnosis.ranks, (stages(0, 2), stages(1, 2)), strict=True):
        parts = stages_of(one)
        assert sum(parts.values()) == pytest.approx(row["step_ms"])
        assert parts["transfer"] + parts["waiting"] == pytest.approx(row["exposed_ms"])


def test_the_file_is_private_and_replaces_only_a_report(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    write_page(place, summary())
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    first = place.read_text()
    write_page(place, summary(8))
    assert place.read_text() != first
    for content in ("<html>mine</html>", json.dumps(summary())):
        place.write_text(content)
        with pytest.raises(UsageError, match=r"not a report of autoddp, so it is not replaced"):
            write_page(place, summary())
        assert place.read_text() == content
    place.unlink()
    place.mkdir()
    with pytest.raises(UsageError, match="no regular file"):
        write_page(place, summary())
    assert sorted(os.listdir(tmp_path)) == ["report.html"]


def test_a_linked_report_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.touch()
    link.symlink_to(real)
    write_page(link, summary())
    assert link.is_symlink()
    assert real.read_text().startswith("<!DOCTYPE html>")


def test_the_first_screen_says_why_what_was_won_and_what_to_do() -> None:
    content = summary()
    content["commands"] = {"autoddp": "autoddp train.py", "torchrun": "torchrun --nproc-per-node 2 train.py"}
    content["decision"]["further"] = "lossy"
    first, rest = said(page(content)).split(" Why a step takes its time ")
    for words in (
        "Slow because one rank is slower than the others 9.31 ms of every step",
        "1 more proved cause below",
        "Won ×",
        "Do now nvidia-smi -q -d CLOCK.",
        "Train with these settings from now on: autoddp train.py",
        "add --allow lossy",
        "Train as before: torchrun --nproc-per-node 2 train.py",
    ):
        assert words in first
    assert "Computing takes less than the latency." in rest
    assert "<details>\n<summary>1 cause suspected, not proved</summary>" in page(content)


@pytest.mark.parametrize("more", [{}, {"pace": 1.0, "seconds": 1.0}])
def test_what_was_won_is_told_against_the_rounds_that_it_comes_from(more: dict[str, float]) -> None:
    """Other finals may go on, and where loaders are the limit, no step counts as shorter than their pace."""
    content = summary()
    chosen = content["decision"]["configuration"]
    (launched,) = (one for one in content["ladder"] if one["configuration"] == chosen)
    launched |= more
    as_written = [median(steps) for steps in content["finals"]["baseline_rounds"][: len(launched["rounds"])]]
    before = median([max(seconds, more.get("pace", 0.0)) for seconds in as_written])
    content["finals"]["baseline_rounds"] = [*content["finals"]["baseline_rounds"], *[[9.0]] * 99]
    assert f"faster {milliseconds(before)} → {milliseconds(launched['seconds'])} ms per step" in said(page(content))


def test_many_samples_per_second_have_no_exponent() -> None:
    content = summary()
    content["diagnosis"]["samples_per_second"] = 20480.3
    assert "20480 samples per second in all" in said(page(content))


def test_what_to_do_where_nothing_was_won() -> None:
    content = summary() | {"commands": {"autoddp": "autoddp train.py", "torchrun": "torchrun train.py"}}
    content["decision"] = {"configuration": {}, "why": "undecided: --budget 3m would decide it"}
    text = said(page(content))
    assert "Won nothing The script's own settings stay. A step takes" in text
    assert "torchrun train.py" not in text  # it is what trains anyway
    assert "Tune again" not in text  # there is a recipe
    assert "Tune again: autoddp train.py" in said(page(content | {"recipe_text": ""}))
