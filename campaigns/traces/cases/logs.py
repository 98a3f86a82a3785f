"""Logs, counters, tables: appended, rewritten, rotated."""

import configparser
import contextlib
import csv
import fileinput
import json
import logging
import logging.handlers
import pickle
from pathlib import Path

from traces.trace import EVERY, files, only, text, trace


@trace(prepare=files("train.log"), after=only("train.log"), where="inside")
def append_a_log(folder, rank, step):
    """open(..., "a"), by print."""
    with open("train.log", "a") as file:
        print(f"step {step}", file=file)
    assert Path("train.log").read_text().endswith(f"step {step}\n")


@trace(prepare=files("train.log"), after=only("train.log"), ranks=EVERY)
def append_from_all_ranks(folder, rank, step):
    """All ranks append to one file."""
    with open(folder / "train.log", "a", buffering=1) as file:
        file.write(f"rank {rank}, step {step}\n")


def _counted(folder: Path) -> None:
    found = json.loads((folder / "runs.json").read_text())
    assert found == {"runs": 5}, f"the counter says {found}"


@trace(prepare=text(runs__json='{"runs": 5}'), after=_counted)
def json_counter(folder, rank, step):
    """A counter that is read, increased and written."""
    count = json.loads((folder / "runs.json").read_text())
    assert count["runs"] == 5 + step
    with open(folder / "runs.json", "w") as file:
        json.dump({"runs": count["runs"] + 1}, file)


@trace(prepare=text(runs__json='{"runs": 5}'), after=_counted)
def json_counter_in_place(folder, rank, step):
    """The same in one open file: read, seek, truncate, write."""
    with open(folder / "runs.json", "r+") as file:
        count = json.load(file)
        file.seek(0)
        file.truncate()
        json.dump({"runs": count["runs"] + 1}, file)


@trace(prepare=text(metrics__csv="step,loss\n1,0.5\n"), after=only("metrics.csv"))
def csv_rows(folder, rank, step):
    """csv.writer appends rows, csv.DictWriter writes a new table."""
    with open(folder / "metrics.csv", "a", newline="") as file:
        csv.writer(file).writerow([step, 0.1])
    with open(folder / f"table{step}.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["step"])
        table.writeheader()
        table.writerow({"step": step})


def _pickled(folder: Path) -> None:
    (folder / "state.pkl").write_bytes(pickle.dumps({"epoch": 3}))


def _still_pickled(folder: Path) -> None:
    assert pickle.loads((folder / "state.pkl").read_bytes()) == {"epoch": 3}


@trace(prepare=_pickled, after=_still_pickled)
def pickle_state(folder, rank, step):
    """pickle.dump over the old state."""
    with open(folder / "state.pkl", "rb") as file:
        found = pickle.load(file)
    with open(folder / "state.pkl", "wb") as file:
        pickle.dump({"epoch": found["epoch"] + 1}, file)


@trace(prepare=text(config__ini="[run]\nname = user\n"), after=only("config.ini"))
def ini_file(folder, rank, step):
    """configparser reads and writes."""
    config = configparser.ConfigParser()
    config.read(folder / "config.ini")
    config["run"]["name"] = f"job {step}"
    with open(folder / "config.ini", "w") as file:
        config.write(file)


@trace(prepare=files("list.txt"), after=only("list.txt"))
def edit_in_place(folder, rank, step):
    """fileinput with inplace: the old file is renamed, its lines are printed into a new one."""
    with fileinput.input(folder / "list.txt", inplace=True, backup=".bak") as lines:
        for line in lines:
            print(line.replace("user", "job"), end="")


@contextlib.contextmanager
def _logger(handler: logging.Handler):
    logger = logging.Logger(f"traces.{type(handler).__name__}", logging.INFO)
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        handler.close()


@trace(prepare=files("train.log"), after=only("train.log"))
def logging_to_a_file(folder, rank, step):
    """logging.FileHandler, once appending and once with mode "w"."""
    with _logger(logging.FileHandler(folder / "train.log", mode="w" if step == 1 else "a")) as logger:
        logger.info("step %d", step)


@trace(prepare=files("train.log", "train.log.1", "train.log.2"), after=only("train.log", "train.log.1", "train.log.2"))
def logging_with_rotation(folder, rank, step):
    """RotatingFileHandler: renames, and removes the oldest."""
    with _logger(logging.handlers.RotatingFileHandler(folder / "train.log", maxBytes=200, backupCount=2)) as logger:
        for number in range(10):
            logger.info("step %d, line %d", step, number)


@trace(prepare=files("train.log", "train.log.2020-01-01"), after=only("train.log", "train.log.2020-01-01"))
def logging_with_daily_rotation(folder, rank, step):
    """TimedRotatingFileHandler: removes what is too old."""
    handler = logging.handlers.TimedRotatingFileHandler(folder / "train.log", when="D", backupCount=1)
    with _logger(handler) as logger:
        handler.doRollover()
        logger.info("step %d", step)


@trace(prepare=files("train.log"), after=only("train.log"))
def logging_watched_file(folder, rank, step):
    """WatchedFileHandler: the file is moved away while it is open, and made again."""
    with _logger(logging.handlers.WatchedFileHandler(folder / "train.log")) as logger:
        logger.info("before")
        (folder / "train.log").rename(folder / "train.log.old")
        logger.info("after")
    assert (folder / "train.log").read_text() == "after\n"


@trace(prepare=text(history__jsonl='{"step": 1}\n'), after=only("history.jsonl"))
def redirected_output(folder, rank, step):
    """contextlib.redirect_stdout into a file."""
    with open(folder / "history.jsonl", "a") as file, contextlib.redirect_stdout(file):
        print(json.dumps({"step": step}))
