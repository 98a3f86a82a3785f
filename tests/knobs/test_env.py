"""Start-up settings are offered where the topology gives a reason, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoddp.knobs import Configuration, Setting
from autoddp.knobs.env import NodeAndJob, keeps_memory, start_settings
from autoddp.network.interface_selection import places_here
from autoddp.recipe.env import ENV_ALLOWED
from autoddp.topology.facts import Cpu, Gpu, GpuPair, Nic, Node
from autoddp.topology.nccl.conf import nccl_conf
from autoddp.topology.nccl.tuner import nccl_tuner
from autoddp.topology.rdma.ports import RdmaPort

SOCKETS = {"nccl_socket_threads": 4, "nccl_sockets_per_thread": 4}
PEERS = {"nccl_p2p_level": "SYS"}
NO_PEERS = {"nccl_p2p_disable": "1"}
CHANNELS = [{"nccl_min_channels": 16}, {"nccl_max_channels": 8}]
ANY_NETWORK = [
    {"nccl_algo": "Tree"},
    {"nccl_algo": "Ring"},
    {"nccl_proto": "Simple"},
    {"nccl_buffer_bytes": 8388608},
]


def nccl_settings(
    node: Node, nodes: int, environment: dict[str, str], nccl: tuple[int, ...] = (), tuner: str = ""
) -> list[Setting]:
    return start_settings(NodeAndJob(node, nodes, environment, nccl, tuner))


def node(
    speed: int = 100_000, relation: str = "PIX", p2p: str = "OK", vendor: str = "GenuineIntel", nvlinks: int = 0
) -> Node:
    return Node(
        "here",
        gpus=(Gpu(0), Gpu(1)),
        pairs=(GpuPair(0, 1, relation, nvlinks, nvlink_version=4, p2p=p2p),),
        nics=(Nic("eth0", up=True, speed_mbit=speed),),
        cpu=Cpu(vendor=vendor),
    )


@pytest.mark.parametrize(
    ("here", "nodes", "environment", "expected"),
    [
        (node(), 2, {}, [SOCKETS, *ANY_NETWORK]),
        (node(), 1, {}, []),
        (node(speed=10_000), 2, {}, ANY_NETWORK),
        (node(), 2, {"NCCL_SOCKET_NTHREADS": "2"}, ANY_NETWORK),
        (node(), 2, {"NCCL_SOCKET_NTHREADS": "2", "NCCL_ALGO": "Ring"}, ANY_NETWORK[2:]),
        (node(relation="SYS"), 1, {}, [PEERS]),
        (node(relation="SYS"), 2, {}, [PEERS, SOCKETS, *ANY_NETWORK]),
        (node(relation="SYS", vendor="AuthenticAMD"), 1, {}, [NO_PEERS]),
        (node(relation="SYS", vendor="AuthenticAMD"), 1, {"NCCL_P2P_LEVEL": "SYS"}, []),
        (node(relation="SYS", vendor="HygonGenuine"), 1, {}, [PEERS]),  # it depends on NCCL's version: worth a trial
        (node(nvlinks=4), 1, {}, CHANNELS),
        (node(nvlinks=18), 1, {}, [*CHANNELS, {"nccl_nvls": "0"}]),
        (node(nvlinks=18), 1, {"NCCL_NVLS_ENABLE": "1"}, CHANNELS),
        # With a least number above it NCCL would not keep to the user's most.
        (node(nvlinks=18), 1, {"NCCL_NVLS_ENABLE": "1", "NCCL_MAX_CTAS": "4"}, []),
        (node(relation="SYS", p2p="CNS"), 1, {}, []),
        (node(relation="SYS"), 1, {"NCCL_P2P_LEVEL": "PXB"}, []),
    ],
)
def test_what_is_offered(
    here: Node, nodes: int, environment: dict[str, str], expected: list[dict[str, object]]
) -> None:
    assert nccl_settings(here, nodes, environment) == expected


def test_what_nccl_reads_from_its_files_is_the_users_too(tmp_path: Path) -> None:
    """NCCL takes a file's value only where the environment has none, so one of ours would overrule it."""
    own, of_the_host = tmp_path / "own.conf", tmp_path / "nccl.conf"
    own.write_text("# ours\nNCCL_ALGO=Ring\nNCCL_SOCKET_IFNAME==lo\nno variable\n")
    of_the_host.write_text("NCCL_ALGO=Tree\nNCCL_SOCKET_NTHREADS=2\n")
    environment = {"NCCL_CONF_FILE": str(own)}
    found = nccl_conf(environment, of_the_host)
    assert found == {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_SOCKET_NTHREADS": "2"}
    assert nccl_settings(node(), 2, found) == ANY_NETWORK[2:]
    assert places_here(None, has_gpus=True, environment=environment).named == {"NCCL_SOCKET_IFNAME": ["lo"]}
    assert places_here(None, has_gpus=False, environment=environment).named == {}


def test_trees_are_named_as_this_nccl_understands_them() -> None:
    """From 2.24 on "Tree" alone would end the job at its first broadcast, which has no trees."""
    found = {version: nccl_settings(node(), 2, {}, version) for version in ((2, 23, 4), (2, 24, 0), (2, 29, 1))}
    algorithms = {v: [s["nccl_algo"] for s in settings if "nccl_algo" in s] for v, settings in found.items()}
    trees = ["ring,tree;allreduce:tree", "Ring"]
    assert algorithms == {(2, 23, 4): ["Tree", "Ring"], (2, 24, 0): trees, (2, 29, 1): trees}
    for setting in found[2, 29, 1]:
        for name, value in Configuration(setting).start_variables.items():
            assert ENV_ALLOWED[name](value) is None


def test_a_clouds_tuner_plugin_chooses_algorithms_by_itself() -> None:
    names = {name for setting in nccl_settings(node(), 2, {}, (2, 27, 3), "libnccl-tuner.so") for name in setting}
    assert names == {"nccl_socket_threads", "nccl_sockets_per_thread", "nccl_buffer_bytes"}


def test_how_a_tuner_plugin_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "opt/amazon/ofi-nccl/lib"
    folder.mkdir(parents=True)
    assert nccl_tuner({}, tmp_path) == ""
    assert nccl_tuner({"NCCL_TUNER_PLUGIN": "ofi"}, tmp_path) == "NCCL_TUNER_PLUGIN=ofi"
    assert nccl_tuner({"NCCL_TUNER_CONFIG_PATH": "/etc/gib"}, tmp_path) == "NCCL_TUNER_CONFIG_PATH=/etc/gib"
    library = folder / "libnccl-ofi-tuner.so"
    library.touch()
    assert nccl_tuner({}, tmp_path) == str(library)
    assert nccl_tuner({"NCCL_TUNER_PLUGIN": "none"}, tmp_path) == ""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "libnccl-tuner.so.1").touch()
    assert nccl_tuner({"LD_LIBRARY_PATH": f"/nowhere:{elsewhere}"}, tmp_path) == str(elsewhere / "libnccl-tuner.so.1")


def test_a_tuner_in_the_plugin_of_the_network_is_one_too(tmp_path: Path) -> None:
    """NCCL takes it where no other is there. AWS's has one; that of NVIDIA's own containers (SHARP) has none."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    sharp, aws = libraries / "libnccl-net.so", libraries / "libnccl-net-ofi.so"
    sharp.write_bytes(b"\x7fELF ncclNetPlugin_v8 ncclCollNetPlugin_v8")
    here = {"LD_LIBRARY_PATH": str(libraries)}
    assert nccl_tuner(here, tmp_path) == ""
    aws.write_bytes(b"\x7fELF ncclNetPlugin_v8 ncclTunerPlugin_v3")
    assert nccl_tuner(here, tmp_path) == nccl_tuner({"NCCL_NET_PLUGIN": f"mine,{aws}"}, tmp_path) == str(aws)
    assert nccl_tuner({**here, "NCCL_TUNER_PLUGIN": "None"}, tmp_path) == ""
    # To NCCL an empty name is no name, and any other word than that one is the name of a plugin.
    assert nccl_tuner({**here, "NCCL_TUNER_PLUGIN": ""}, tmp_path) == str(aws)
    assert nccl_tuner({"NCCL_TUNER_PLUGIN": "off"}, tmp_path) == "NCCL_TUNER_PLUGIN=off"


def test_a_plugin_that_a_rank_has_loaded_may_be_anywhere(tmp_path: Path) -> None:
    library, maps = tmp_path / "any where" / "libnccl-net-ofi.so", tmp_path / "maps"
    library.parent.mkdir()
    library.write_bytes(b"ncclTunerPlugin_v3")
    lines = [f"7f0-7f1 r-xp 00000000 00:1f 5    {library}", "7f2-7f3 r--p 00001000 00:1f 6    /usr/lib/libnccl.so.2"]
    maps.write_text("\n".join([*lines, "7f4-7f5 rw-p 00000000 00:00 0"]))
    assert nccl_tuner({}, tmp_path, maps) == str(library)


def port(device: str, rate: float = 400.0, numa: int = 0, state: str = "ACTIVE") -> RdmaPort:
    return RdmaPort(device, 1, state=state, link_layer="InfiniBand", rate_gbps=rate, numa=numa)


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ((port("mlx5_0"), port("mlx5_1")), None),
        ((port("mlx5_0"), port("mlx5_1"), port("mlx5_2", rate=100.0)), "=mlx5_0,mlx5_1"),
        ((port("mlx5_0"), port("mlx5_1", numa=1)), "=mlx5_0"),
        ((port("mlx5_0"), port("mlx5_1", state="DOWN")), None),
    ],
)
def test_rdma_devices_far_from_the_gpus_are_left_out(ports: tuple[RdmaPort, ...], expected: str | None) -> None:
    here = replace(node(nvlinks=18), gpus=(Gpu(0, numa=0), Gpu(1, numa=0)), rdma=ports, gpudirect="dma-buf")
    chosen = [setting["nccl_ib_hca"] for setting in nccl_settings(here, 2, {}) if "nccl_ib_hca" in setting]
    assert chosen == ([] if expected is None else [expected])
    assert {"nccl_gdr_level": "SYS"} not in nccl_settings(here, 2, {})
    by_pcie = replace(here, pairs=(GpuPair(0, 1, "PIX"),))
    assert {"nccl_gdr_level": "SYS"} in nccl_settings(by_pcie, 2, {})


def test_the_long_names_of_rdma_devices_are_good() -> None:
    """udev names a device by its place on the bus; the kernel allows 63 letters, and 15 for an interface."""
    ports = (port("roceP48p1s0f0v12"), port("roceP50p1s0f0v12", numa=1))
    here = replace(node(nvlinks=18), gpus=(Gpu(0, numa=0), Gpu(1, numa=0)), rdma=ports, gpudirect="dma-buf")
    offered = [Configuration(setting) for setting in nccl_settings(here, 2, {})]
    assert Configuration({"nccl_ib_hca": "=roceP48p1s0f0v12"}) in offered


def test_every_setting_is_a_configuration_that_a_recipe_may_carry() -> None:
    here = replace(
        node(relation="SYS", nvlinks=0), rdma=(port("mlx5_0"), port("mlx5_1", numa=1)), gpus=(Gpu(0, numa=0),)
    )
    settings = [*nccl_settings(here, 2, {}), *nccl_settings(node(nvlinks=18), 2, {})]
    assert len(settings) > 8
    for setting in settings:
        for name, value in Configuration(setting).start_variables.items():
            assert ENV_ALLOWED[name](value) is None


def test_what_gloo_and_the_allocator_are_offered() -> None:
    def offered(**facts: object) -> list[Setting]:
        return start_settings(NodeAndJob(None, **{"nodes": 2, "environment": {}, **facts}))  # type: ignore[arg-type]

    together, segments = {"interfaces": "eth0,eth1"}, {"allocator": "expandable_segments:True"}
    assert offered() == []
    assert offered(interfaces="eth0,eth1") == [together]
    # The launcher sets the variable itself, to the one interface that it has chosen.
    assert offered(interfaces="eth0,eth1", environment={"GLOO_SOCKET_IFNAME": "eth0"}) == [together]
    assert offered(interfaces="eth0,eth1", nodes=1) == []
    assert offered(frees_memory=True, nodes=1) == [segments]
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert offered(frees_memory=True, environment={variable: "max_split_size_mb:64"}) == []


def test_malloc_is_offered_where_page_faults_take_much_of_a_step() -> None:
    def offered(share: float, **environment: str) -> list[Setting]:
        return start_settings(NodeAndJob(None, nodes=1, environment=environment, in_page_faults=share))

    assert offered(0.05) == []
    (setting,) = offered(0.3)
    assert setting == {"malloc": keeps_memory()}
    ((variable, value),) = Configuration(setting).start_variables.items()
    assert variable == "GLIBC_TUNABLES"
    assert ENV_ALLOWED[variable](value) is None
    assert ENV_ALLOWED[variable](value + ":glibc.malloc.check=3") is not None
    for theirs in ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        assert offered(0.3, **{theirs: "1"}) == []
