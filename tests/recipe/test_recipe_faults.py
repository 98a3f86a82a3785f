"""Each way for a recipe to be wrong ends as one line with the file, the key, the rule and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoddp.errors import RecipeError
from autoddp.recipe import load, save

SOUND = Path(__file__).with_name("sound.autoddp.toml").read_text(encoding="utf-8")
BACK = "; put it back, or tune again with --trials 20"
REMOVE = "; correct or remove it"
TEXT = ": must be one line of text in quotes"
CAP = ": must be a number from 0.5 to 100000 MiB"
EXPORT = "; if the job needs it, export it"
POSITIVE = ": must be a finite number above 0"
LIST = ': must be a list of one or more texts, as ["cpu"]'
COUNTS = ": must be a list of whole numbers, 1 or more, as [4, 8]"
LEVELS = '"LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "1", "2", "3", "4", "5", "6"'
OF_ALL = ": must have nodes, 2, numbers, of which the sum is world_size, 8"
NEWER = "schema = 2: written by a newer autoddp; upgrade it from its checkout: git pull, then pip install -e ."

BAD = [
    # what is replaced, by what, the exact line after "train.autoddp.toml: "
    ("schema = 1", "", "schema: missing; a recipe begins with schema = 1, is this one?"),
    ("schema = 1", "schema = 2", NEWER),
    ("schema = 1", "schema = 2\nnew = 1", NEWER),
    ("schema = 1", "schema = 0", "schema = 0: must be a whole number, 1 or more"),
    ("schema = 1", 'schema = "1"', 'schema = "1": must be a whole number, 1 or more'),
    ("schema = 1", "schema = true", "schema = true: must be a whole number, 1 or more"),
    ("[env]", "[envv]", "envv: unknown key (did you mean 'env'?)" + REMOVE),
    ("[env]", '["a\\u001bb\\n"]', '"a\\u001bb\\n": unknown key' + REMOVE),
    ("world_size =", "wrld_size =", "fits.wrld_size: unknown key (did you mean 'world_size'?)" + REMOVE),
    ("autoddp =", "autodp =", "made_by.autodp: unknown key (did you mean 'autoddp'?)" + REMOVE),
    ("trials =", "trails =", "evidence.trails: unknown key (did you mean 'trials'?)" + REMOVE),
    ("speedup_low = 1.39", "speed = 1", "ladder[1].speed: unknown key (did you mean 'speedup'?)" + REMOVE),
    ("nodes = 2\n", "", "fits.nodes: missing" + BACK),
    ("headroom = 0.384\n", "", "evidence.headroom: missing" + BACK),
    ('date = "2025-11-20T21:00:00Z"', "date = 2025-11-20", 'made_by.date = "2025-11-20"' + TEXT),
    ('torch = "2.13.0"\npython', "torch = 2.13\npython", "made_by.torch = 2.13" + TEXT),
    ('"the exact rung wins 21 %"', '""', 'evidence.why = ""' + TEXT),
    ('"the exact rung wins 21 %"', '"\\u001b[31m"', 'evidence.why = "\\u001b[31m"' + TEXT),
    ('why = "the', 'run = ""\nwhy = "the', 'evidence.run = ""' + TEXT),
    ('why = "the', 'run = 3\nwhy = "the', "evidence.run = 3" + TEXT),
    ('why = "the', 'rnu = "x"\nwhy = "the', "evidence.rnu: unknown key (did you mean 'run'?)" + REMOVE),
    ("world_size = 8", "world_size = 0", "fits.world_size = 0: must be a whole number, 1 or more"),
    ("world_size = 8", "world_size = true", "fits.world_size = true: must be a whole number, 1 or more"),
    ("world_size = 8", "world_size = 8.0", "fits.world_size = 8.0: must be a whole number, 1 or more"),
    ("world_size = 8", "world_size = 0x" + "f" * 5000, "fits.world_size = …: too large for a whole number of 64 bits"),
    ("nodes = 2", "nodes = 0", "fits.nodes = 0: must be a whole number, 1 or more"),
    ("nodes = 2", "nodes = 9", "fits.nodes = 9: must not exceed world_size, 8"),
    ("nodes = 2", "nodes = 2\nranks_of_nodes = [8]", "fits.ranks_of_nodes = [8]" + COUNTS),
    ("nodes = 2", "nodes = 2\nranks_of_nodes = [8, 0]", "fits.ranks_of_nodes = [8, 0]" + COUNTS),
    ("nodes = 2", "nodes = 2\nranks_of_nodes = [4, 5]", "fits.ranks_of_nodes = [4, 5]" + OF_ALL),
    ("nodes = 2", "nodes = 1", 'fits.digest = "84095ccab6049765": [fits] was edited by hand' + BACK),
    ('["NVIDIA H100 80GB HBM3"]', "[]", "fits.devices = []" + LIST),
    ('["NVIDIA H100 80GB HBM3"]', "[1]", "fits.devices = [1]" + LIST),
    ('["NVIDIA H100 80GB HBM3"]', '"cpu"', 'fits.devices = "cpu"' + LIST),
    ("[configuration]\nbucket_cap_mb = 50", "", "configuration: missing" + BACK),
    (
        "bucket_cap_mb = 50\n",
        "buket_cap_mb = 50\n",
        "configuration.buket_cap_mb: unknown key (did you mean 'bucket_cap_mb'?)" + REMOVE,
    ),
    ("bucket_cap_mb = 50\n", "bucket_cap_mb = 0\n", "configuration.bucket_cap_mb = 0" + CAP),
    ("bucket_cap_mb = 50\n", "bucket_cap_mb = nan\n", "configuration.bucket_cap_mb = NaN" + CAP),
    ("bucket_cap_mb = 50\n", "bucket_cap_mb = true\n", "configuration.bucket_cap_mb = true" + CAP),
    ("bucket_cap_mb = 50\n", 'hook = "powersgd"\n', 'configuration.hook = "powersgd": needs powersgd_rank beside it'),
    ("bucket_cap_mb = 50\n", "powersgd_rank = 2\n", 'configuration.powersgd_rank: needs hook = "powersgd" beside it'),
    (
        "bucket_cap_mb = 50\n",
        "bucket_cap_mb = 50\nbucket_cap_mb_list = [1]\n",
        "configuration.bucket_cap_mb_list: excludes bucket_cap_mb, keep one of them",
    ),
    (
        '{hook = "bf16"}',
        '{hook = "bf17"}',
        'ladder[1].configuration.hook = "bf17": must be one of "fp16", "bf16", "powersgd"',
    ),
    (
        '{hook = "bf16"}',
        '"bf16"',
        'ladder[1].configuration = "bf16": must be a table; write [ladder[1].configuration] above its keys',
    ),
    ("OMP_NUM_THREADS =", "LD_PRELOAD =", "env.LD_PRELOAD: not a variable that a recipe may set" + EXPORT),
    (
        "OMP_NUM_THREADS =",
        "OMP_NUM_THREAD =",
        "env.OMP_NUM_THREAD: not a variable that a recipe may set (did you mean 'OMP_NUM_THREADS'?)" + EXPORT,
    ),
    ('OMP_NUM_THREADS = "4"', "OMP_NUM_THREADS = 4", "env.OMP_NUM_THREADS = 4" + TEXT),
    ('OMP_NUM_THREADS = "4"', 'OMP_NUM_THREADS = "4\\n"', 'env.OMP_NUM_THREADS = "4\\n"' + TEXT),
    ('OMP_NUM_THREADS = "4"', 'OMP_NUM_THREADS = "4\\u0000"', 'env.OMP_NUM_THREADS = "4\\u0000"' + TEXT),
    *[
        ('OMP_NUM_THREADS = "4"', f'{name} = "{value}"', f'env.{name} = "{value}": {problem}')
        for name, value, problem in [
            ("OMP_NUM_THREADS", "-5", 'must be a whole number from 1 to 1024 in quotes, as "1"'),
            ("OMP_NUM_THREADS", "99999999", 'must be a whole number from 1 to 1024 in quotes, as "1"'),
            ("OMP_NUM_THREADS", "", 'must be a whole number from 1 to 1024 in quotes, as "1"'),
            ("MKL_NUM_THREADS", "4 ", 'must be a whole number from 1 to 1024 in quotes, as "1"'),
            ("MALLOC_ARENA_MAX", "0", 'must be a whole number from 1 to 4096 in quotes, as "1"'),
            ("NCCL_BUFFSIZE", "-1", 'must be a whole number from 1 to 2147483647 in quotes, as "1"'),
            ("NCCL_BUFFSIZE", "9" * 40, 'must be a whole number from 1 to 2147483647 in quotes, as "1"'),
            ("NCCL_NTHREADS", "100", 'must be one of "64", "128", "256", "512"'),
            ("NCCL_IB_DISABLE", "yes", 'must be one of "0", "1"'),
            ("NCCL_P2P_LEVEL", "NODE", f"must be one of {LEVELS}"),
            ("NCCL_NET_GDR_LEVEL", "sys", f"must be one of {LEVELS}"),
            ("NCCL_SOCKET_FAMILY", "6", 'must be one of "AF_INET", "AF_INET6"'),
            ("NCCL_ALGO", "/tmp/x", 'must be words of NCCL with commas between them, as "Ring,Tree"'),
            ("GLOO_SOCKET_IFNAME", "eth0,", "must be names of network interfaces with commas between them"),
            ("GLOO_SOCKET_IFNAME", "../eth0", "must be names of network interfaces with commas between them"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable", 'must be options, as "expandable_segments:True"'),
            ("GOMP_CPU_AFFINITY", "all", 'must be numbers of CPUs, as "0-7 16-23"'),
        ]
    ],
    (
        "bucket_cap_mb = 50\n",
        f"bucket_cap_mb_list = {[1] * 33}\n",
        "configuration.bucket_cap_mb_list = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,…: "
        "must be a list of 1 to 32 sizes from 0.5 to 100000 MiB",
    ),
    ("headroom = 0.384", "headroom = 1.01", "evidence.headroom = 1.01: must be a number from 0 to 1"),
    ("headroom = 0.384", "headroom = nan", "evidence.headroom = NaN: must be a number from 0 to 1"),
    ("headroom = 0.384", "headroom = true", "evidence.headroom = true: must be a number from 0 to 1"),
    ("trials = 20", "trials = -1", "evidence.trials = -1: must be a whole number, 0 or more"),
    ("baseline_ms_per_step = 31", "baseline_ms_per_step = 0", "evidence.baseline_ms_per_step = 0" + POSITIVE),
    ("baseline_ms_per_step = 31", "baseline_ms_per_step = inf", "evidence.baseline_ms_per_step = Infinity" + POSITIVE),
    ("speedup = 1.21", "speedup = -1", "ladder[0].speedup = -1" + POSITIVE),
    (
        "speedup = 1.21",
        "speedup = 2",
        "ladder[0].speedup = 2: must lie between speedup_low, 1.19, and speedup_high, 1.23",
    ),
    (
        "speedup_low = 1.19",
        "speedup_low = 1.24",
        "ladder[0].speedup = 1.21: must lie between speedup_low, 1.24, and speedup_high, 1.23",
    ),
    (
        'rung = "near"',
        'rung = "exact"',
        'ladder[1].rung = "exact": its configuration stands on another rung; write rung = "near"',
    ),
    (
        'rung = "near"',
        'rung = "close"',
        'ladder[1].rung = "close": must be one of "exact", "near", "lossy", "batch"',
    ),
    (
        "speedup_low = 1.39",
        "speedup_low = 1.39\nspeedup_low_over = {exact = 0}",
        "ladder[1].speedup_low_over.exact = 0" + POSITIVE,
    ),
    (
        "speedup_low = 1.39",
        "speedup_low = 1.39\nspeedup_low_over = {near = 1.1}",
        "ladder[1].speedup_low_over.near: unknown key" + REMOVE,
    ),
    (
        "speedup_low = 1.39",
        "speedup_low = 1.39\nspeedup_low_over = 1.1",
        "ladder[1].speedup_low_over = 1.1: must be a table; write [ladder[1].speedup_low_over] above its keys",
    ),
    ('rung = "near"', "rung = []", 'ladder[1].rung = []: must be one of "exact", "near", "lossy", "batch"'),
    (
        'rung = "exact"\nconfiguration = {bucket_cap_mb = 50}',
        'rung = "near"\nconfiguration = {hook = "fp16"}',
        'ladder[1].rung = "near": stands on the ladder twice; keep the better one',
    ),
]


@pytest.mark.parametrize(("old", "new", "line"), BAD, ids=[line[:60] for _, _, line in BAD])
def test_each_fault_is_one_exact_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    file = tmp_path / "train.autoddp.toml"
    assert old in SOUND
    file.write_text(SOUND.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load(file)
    assert str(caught.value) == f"{file}: {line}"
    assert str(caught.value).isprintable()


def test_a_recipe_is_a_regular_file_of_bounded_size(tmp_path: Path) -> None:
    """A pipe would wait for a writer, and a device or a huge file would fill the memory."""
    pipe, huge = tmp_path / "pipe.toml", tmp_path / "huge.toml"
    os.mkfifo(pipe)
    huge.write_bytes(b"#" * (2**20 + 1))
    for place, problem in (
        (pipe, "no regular file, so not a recipe; name a file such as proj.train.autoddp.toml"),
        (Path("/dev/zero"), "no regular file, so not a recipe; name a file such as proj.train.autoddp.toml"),
        (huge, "larger than 64 KiB, so not a recipe; tune again with --trials 20"),
    ):
        with pytest.raises(RecipeError) as caught:
            load(place)
        assert str(caught.value) == f"{place}: {problem}"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a pipe"])
def test_no_recipe_replaces_what_is_no_file(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "train.autoddp.toml"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place = Path("/dev/null")
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe")
        place.symlink_to("pipe")
    before = place.lstat()
    with pytest.raises(RecipeError, match="no regular file, so no recipe is written there; name another file"):
        save(SOUND, place, previous=tmp_path / "previous.toml")
    after = place.lstat()
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert not (tmp_path / "previous.toml").exists()
