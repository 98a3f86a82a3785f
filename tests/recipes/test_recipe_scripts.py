"""The training scripts in recipes/, under torchrun, with two ranks."""

import gzip
import importlib.util
import re
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from launchers import ROOT, SEVERAL, TORCHRUN, environment, run_python, start
from scripts.several import heading

RECIPES = ROOT / "recipes"


FASHION = ["--net", "conv1", "--batch-size", "8", "--epochs", "3", "--steps", "4"]
COMMANDS = {
    # two epochs are enough to be far from guessing (10 %)
    "digits": ["digits/train.py", "--epochs", "2", "--save", "{folder}/digits.pt"],
    # 40 images on 2 ranks are 3 steps of 8: a run on files, over an epoch's end
    "fashion": ["fashion_mnist/train.py", *FASHION, "--data", "{folder}/fashion"],
    # the smallest model; the large ones differ in nothing but size
    "vit": ["vit/train.py", "--model", "tiny", "--batch-size", "4", "--steps", "3"],
    # a few steps learn which characters are frequent
    "characters": ["characters/train.py", "--steps", "100", "--batch-size", "8", "--width", "32"],
}
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


class Trained(NamedTuple):
    """`printed` has what each of COMMANDS printed; `errors` is all that came on stderr."""

    code: int
    folder: Path
    printed: dict[str, str]
    errors: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All recipes on two ranks, in one launch. The launch ends with the first script that fails."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "fashion").mkdir()
    write_fashion(folder / "fashion")
    commands = {}
    for name, (script, *options) in COMMANDS.items():
        words = [str(RECIPES / script), *(option.replace("{folder}", str(folder)) for option in options)]
        if name == "vit":
            words.insert(0, str(ROOT / "tests" / "run_with_torchvision.py"))
        if name != "vit" or HAS_TORCHVISION:
            commands[name] = shlex.join(words)
    launch = start(TORCHRUN, folder / "out", ["--nproc-per-node", "2", SEVERAL, *commands.values()]).wait()
    printed = {}
    for name, command in commands.items():
        of_this = launch.stdout.partition(f"{heading(command)}\n")[2]
        printed[name] = of_this.partition(heading(""))[0]
    return Trained(launch.returncode, folder, printed, launch.stderr)


def find_number(pattern: str, text: str, errors: str) -> float:
    """The number that stands at the group of `pattern`, which has to occur exactly once."""
    found = re.findall(pattern, text)
    assert len(found) == 1, text + errors[-3000:]
    return float(found[0])


def load_script(name: str) -> ModuleType:
    """Import recipes/`name`/train.py without running it."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / name / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fashion() -> ModuleType:
    """recipes/fashion_mnist/train.py as a module."""
    return load_script("fashion_mnist")


def idx_bytes(values: np.ndarray) -> bytes:
    """`values` in the idx format."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_fashion(folder: Path, pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> dict[str, np.ndarray]:
    """Fill `folder` with a small Fashion-MNIST; return its four arrays by file name."""
    generator = np.random.default_rng(0)
    arrays = {}
    for part, number in (("train", 40), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte"] = generator.integers(0, 256, (number, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = generator.integers(0, 10, number, np.uint8)
    for name, values in arrays.items():
        (folder / (name + suffix)).write_bytes(pack(idx_bytes(values)))
    return arrays


def test_all_end_well(trained: Trained) -> None:
    assert trained.code == 0, trained.errors[-3000:]


# ---------------------------------------------------------------------- digits


def test_digits_learns_and_saves_only_where_told(trained: Trained) -> None:
    printed = trained.printed["digits"]
    assert 60 < find_number(r"test accuracy ([\d.]+) %\n", printed, trained.errors) <= 100
    assert printed.count("ms per step") == 2
    assert (trained.folder / "digits.pt").stat().st_size > 4 * 540_362
    assert not list(trained.folder.glob("out/*/*"))


def test_digits_test_images_are_not_trained_on() -> None:
    """The split is complete, and no image is on both sides."""
    training, test = load_script("digits").load_split()
    images = {image.numpy().tobytes() for image in training.tensors[0]}
    assert len(training) + len(test) == 1797
    assert not images & {image.numpy().tobytes() for image in test.tensors[0]}


# --------------------------------------------------------------- fashion_mnist


@pytest.mark.parametrize(("net", "parameters"), [("conv2", 431_080), ("conv1", 29_330)])
def test_fashion_networks_have_the_published_sizes(fashion: ModuleType, net: str, parameters: int) -> None:
    """These two sizes are what makes a measurement comparable with others'."""
    assert sum(parameter.numel() for parameter in fashion.NETWORKS[net]().parameters()) == parameters


@pytest.mark.parametrize(("pack", "suffix"), [(bytes, ""), (gzip.compress, ".gz")], ids=["plain", "gzipped"])
def test_fashion_reads_what_was_written(
    fashion: ModuleType, tmp_path: Path, pack: Callable[[bytes], bytes], suffix: str
) -> None:
    """Images and labels come back as they were, from plain and from gzipped files."""
    arrays = write_fashion(tmp_path, pack, suffix)
    for (images, labels), part in zip(fashion.load_data(tmp_path), ("train", "t10k"), strict=True):
        assert np.array_equal(images.numpy()[:, 0], arrays[f"{part}-images-idx3-ubyte"])
        assert np.array_equal(labels.numpy(), arrays[f"{part}-labels-idx1-ubyte"])


IMAGES = "train-images-idx3-ubyte"
BAD_FILES = {
    "missing": (None, rf"{IMAGES}: no such file, and no {IMAGES}.gz beside it"),
    "empty": (b"", "starts with nothing, not with 00000803"),
    "labels for images": (idx_bytes(np.zeros(3, np.uint8)), "starts with 00000801, not with 00000803"),
    "cut in the head": (bytes([0, 0, 8, 3, 0]), "ends after 5 bytes, within its head of 16"),
    "cut in the values": (idx_bytes(np.zeros((2, 28, 28), np.uint8))[:-1], "holds 1567 values, .* 2x28x28 = 1568"),
    "other size": (idx_bytes(np.zeros((40, 32, 32), np.uint8)), "its images are 32x32 pixels, not 28x28"),
    "too few": (idx_bytes(np.zeros((39, 28, 28), np.uint8)), "holds 39 images, but there are 40 labels"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_fashion_names_a_bad_file_and_its_fault(
    fashion: ModuleType, tmp_path: Path, content: bytes | None, message: str
) -> None:
    """One line, with the file in it."""
    write_fashion(tmp_path)
    (tmp_path / IMAGES).unlink()
    if content is not None:
        (tmp_path / IMAGES).write_bytes(content)
    with pytest.raises(fashion.DataError, match=message) as raised:
        fashion.load_data(tmp_path)
    assert IMAGES in str(raised.value)
    assert "\n" not in str(raised.value)


def test_fashion_names_a_broken_gzip_file(fashion: ModuleType, tmp_path: Path) -> None:
    """A download that was cut off, and a file that only carries the name."""
    path = tmp_path / f"{IMAGES}.gz"
    for content in (gzip.compress(bytes(1000))[:-9], b"not found"):
        path.write_bytes(content)
        with pytest.raises(fashion.DataError, match=rf"{IMAGES}\.gz: cannot be read"):
            fashion.read_idx(tmp_path / IMAGES, 3)


def test_fashion_stops_after_steps(trained: Trained) -> None:
    printed = trained.printed["fashion"]
    assert printed.startswith(f"conv1 on 40 images: {trained.folder / 'fashion'}\n")
    assert re.findall(r"(\d+) steps  loss [\d.]+  \d+ images/s", printed) == ["3", "1"]
    assert 0 <= find_number(r"test accuracy ([\d.]+) %\n", printed, trained.errors) <= 100


# ------------------------------------------------------------------------- vit


@pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
def test_vit_tiny_runs(trained: Trained) -> None:
    printed = trained.printed["vit"]
    assert "tiny: 0.1 M parameters, 4 images on each of 2 ranks\n" in printed
    assert find_number(r"([\d.]+) ms per step", printed, trained.errors) > 0
    assert find_number(r"([\d.]+) images/s", printed, trained.errors) > 0


def test_vit_without_torchvision_says_what_to_do(tmp_path: Path) -> None:
    """One line, on a machine where torchvision is absent (here: hidden by a package that cannot be imported)."""
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError(\"No module named 'torchvision'\")\n")
    runs = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run_python(["-c", runs, str(RECIPES / "vit" / "train.py")], env=environment())
    assert done.returncode == 1
    assert done.stderr.startswith("error: torchvision cannot be imported (No module named 'torchvision'). HINT: pip")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*/train.py")), ids=lambda path: path.parent.name)
def test_scripts_do_not_know_who_starts_them(script: Path) -> None:
    """They are what autoddp promises to run unmodified."""
    assert "autoddp" not in script.read_text()


def test_characters_learns(trained: Trained) -> None:
    """From the ln(128) nats of a blind guess."""
    assert find_number(r"test loss (\d+\.\d+)", trained.printed["characters"], trained.errors) < 3.3
