"""GPUs and machines of `trireme launch`: which workers they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ports import free_ports
from trireme.errors import BadRequest
from trireme.launch.machines import gpu_variables, spread
from trireme.launch.placement import LaunchConfig, choose_placement

IPS = ("127.0.0.1", "127.0.0.2")


def config(**options: Any) -> LaunchConfig:
    return LaunchConfig(command=("-m", "train"), **options)


def test_a_worker_per_gpu_holds_rows_unless_there_are_servers() -> None:
    alone = spread(config(gpus=("0", "2")), {})
    assert (alone.server_num, alone.worker_num, alone.gpus) == (0, 2, ("0", "2"))
    beside = spread(config(gpus=("0", "2"), server_num=1), {})
    assert (beside.server_num, beside.worker_num) == (1, 2)
    without = spread(config(nproc_per_node=3), {})
    assert (without.server_num, without.worker_num, without.gpus) == (0, 3, ())
    assert spread(config(server_num=1, worker_num=2), {}) == config(server_num=1, worker_num=2)


@pytest.mark.parametrize(
    ("options", "env", "gpus"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "4,5"}, ("4", "5")),
        ({}, {"FLAGS_selected_gpus": "0,1"}, ("0", "1")),
        ({}, {"CUDA_VISIBLE_DEVICES": "4,5,6", "FLAGS_selected_gpus": "0,2"}, ("4", "6")),
        ({"gpus": ("5",)}, {"CUDA_VISIBLE_DEVICES": "4,5", "FLAGS_selected_gpus": "0"}, ("5",)),
        ({"gpus": ("GPU-1",)}, {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, ("GPU-1",)),
    ],
)
def test_gpus_come_from_the_option_or_the_variables(
    options: dict[str, Any], env: dict[str, str], gpus: tuple[str, ...]
) -> None:
    assert spread(config(**options), env).gpus == gpus


def test_each_machine_starts_the_workers_of_its_own_address() -> None:
    port = free_ports(IPS, 2)
    options = {"ips": IPS, "gpus": ("0", "1"), "start_port": port}
    for host, own in zip(IPS, ((0, 1), (2, 3)), strict=True):
        one = spread(config(**options), {"POD_IP": host, "PADDLE_NUM_TRAINERS": "2"})
        assert one == spread(config(**options, host=host), {})
        assert one.workers == tuple(f"{ip}:{port + i}" for ip in IPS for i in range(2))
        placement = choose_placement(one)
        placement.close()
        assert (placement.workers, placement.workers_host) == (own, True)
        assert placement.gpus == dict(zip(own, ("0", "1"), strict=True))
    assert gpu_variables("5") == {"CUDA_VISIBLE_DEVICES": "5", "FLAGS_selected_gpus": "0"}
    assert spread(config(ips=("127.0.0.1", "192.0.2.1"), nproc_per_node=1), {}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "expected --server_num or --servers before the script"),
        ({"gpus": ("0", "0")}, {}, "expected --gpus to name different GPUs, found 0,0"),
        *(
            ({"gpus": gpus}, {}, f"--gpus to name GPUs by number, .* found '{wrong}' in")
            for gpus, wrong in ((("",), ""), (("-1",), "-1"), (("0", "one"), "one"))
        ),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "or GPUs for a job without servers"),
        ({"ips": ("127.0.0.1", ""), "gpus": ("0",)}, {}, "--ips to name different machines"),
        ({"ips": ("127.0.0.1",) * 2, "gpus": ("0",)}, {}, "--ips to name different machines"),
        ({"gpus": ("3",)}, {"CUDA_VISIBLE_DEVICES": "4,5"}, "among those of CUDA_VISIBLE_DEVICES"),
        ({}, {"FLAGS_selected_gpus": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, "FLAGS_selected_gpus to"),
        ({"ips": IPS, "gpus": ("0",)}, {}, "found 127.0.0.1, 127.0.0.2; name it with --host"),
        ({"ips": ("192.0.2.1",), "gpus": ("0",)}, {}, "in --ips 192.0.2.1, found none"),
        ({"ips": IPS, "gpus": ("0",), "host": "127.0.0.3"}, {}, "--host 127.0.0.3 to be one of"),
        ({"ips": IPS}, {"CUDA_VISIBLE_DEVICES": ""}, "expected --server_num or --servers before"),
        ({"ips": IPS, "worker_num": 2}, {}, "expected --ips with --gpus or --nproc_per_node alone"),
        ({"gpus": ("0",), "start_port": 5}, {}, "expected --ips with --start_port"),
        ({"nproc_per_node": 0}, {}, "expected --nproc_per_node as an integer >= 1"),
        ({"nproc_per_node": 2, "worker_num": 1}, {}, "the number of workers, 1, found 2"),
        ({"nproc_per_node": 2, "workers": ("a:1",)}, {}, "the number of workers, 1, found 2"),
        (
            {"nproc_per_node": 2, "worker_num": 1, "server_num": 1, "heter_worker_num": (1,)},
            {},
            "the number of workers, 1, found 2",
        ),
        ({"server_num": 1, "worker_num": 1, "host": "10.0.0.1"}, {}, "--workers or --heter_w"),
        ({"join": ("a:1",), "host": "10.0.0.1"}, {}, "with --host 10.0.0.1, which is one"),
        ({"gpus": ("0",)}, {"PADDLE_NUM_TRAINERS": "2"}, "number of machines in --ips, 1, found 2"),
    ],
)
def test_contradictions_are_refused(
    options: dict[str, Any], env: dict[str, str], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        spread(config(**options), env)


def test_workers_beside_compute_workers_may_be_counted_per_machine() -> None:
    options: dict[str, Any] = {"server_num": 1, "heter_worker_num": (1,), "nproc_per_node": 2}
    assert spread(config(**options), {}).worker_num == 2


@pytest.mark.parametrize("name", ["durability", "log_bytes", "memory", "ssd_dir"])
def test_a_worker_that_joins_has_no_options_of_servers(name: str) -> None:
    with pytest.raises(BadRequest, match=f"because the job has the rest, found --{name}"):
        choose_placement(config(join=("127.0.0.1:1",), **{name: "5"}))


def test_workers_and_gpus_are_as_many() -> None:
    with pytest.raises(BadRequest, match="a GPU for each of the 3 workers of this machine"):
        choose_placement(spread(config(gpus=("0", "1"), server_num=0, worker_num=3), {}))
