"""Roles in heterogeneous jobs: what the environment says of compute workers, and what is wrong."""

from __future__ import annotations

import pytest

from trireme.errors import BadRequest
from trireme.launch.process_role import read_role

SERVERS = "10.0.0.1:6000,10.0.0.2:6000"
HETER = "gpu=10.0.0.3:7000,npu=10.0.0.4:7000"
OWN = {
    "TRIREME_ROLE": "heter",
    "TRIREME_SERVERS": SERVERS,
    "TRIREME_HETER": HETER,
    "TRIREME_INDEX": "1",
    "TRIREME_NUM_WORKERS": "3",
}
WORKER = {**OWN, "TRIREME_ROLE": "worker"}
LISTED = (("gpu", "10.0.0.3:7000"), ("npu", "10.0.0.4:7000"))
# What Fleet's launcher gives the processes of a job of 2 trainers and 2 heterogeneous workers.
FLEET = {
    "PADDLE_PSERVERS_IP_PORT_LIST": SERVERS,
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.5:6100,10.0.0.6:6100",
    "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": "10.0.0.3:7000,10.0.0.4:7000",
    "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": "",
    "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": "10.0.0.5:6100,10.0.0.6:6100",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_STAGE_TRAINERS_NUM": "[2, 2]",
    "STAGE_ID": "2",
    "STAGE_NUM": "2",
    "HETER_DEVICE_TYPE": "gpu",
    "TRAINING_ROLE": "HETER_TRAINER",
    "POD_IP": "10.0.0.4",
    "PADDLE_PORT": "7000",
}
FLEET_TRAINER = {
    **FLEET,
    "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": "10.0.0.3:7000,10.0.0.4:7000",
    "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": "",
    "STAGE_ID": "1",
    "HETER_DEVICE_TYPE": "cpu",
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINER_ID": "1",
    "POD_IP": "10.0.0.6",
    "PADDLE_PORT": "6100",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_compute_worker_is_known_by_its_place_in_the_list() -> None:
    role = read_role({**OWN, "TRIREME_LISTEN_FD": "5", "TRIREME_LABEL": "npu"})
    assert (role.role, role.label, role.index, role.num_workers) == ("heter", "npu", 1, 3)
    assert (role.heter, role.listen, role.listen_fd) == (LISTED, "10.0.0.4:7000", 5)
    assert role.servers == tuple(SERVERS.split(","))
    assert role.describe() == (
        "trireme: compute worker 1 of 2, npu, listening on 10.0.0.4:7000, for 3 workers, servers"
        " 10.0.0.1:6000, 10.0.0.2:6000 (from TRIREME_ROLE, TRIREME_SERVERS, TRIREME_INDEX,"
        " TRIREME_NUM_WORKERS, TRIREME_LABEL, TRIREME_HETER, TRIREME_LISTEN_FD)"
    )
    by_address = {**without(OWN, "TRIREME_INDEX"), "TRIREME_LISTEN": "10.0.0.3:7000"}
    assert (read_role(by_address).index, read_role(by_address).label) == (0, "gpu")
    behind = read_role({**OWN, "TRIREME_LISTEN": "0.0.0.0:7000"})
    assert (behind.index, behind.listen) == (1, "0.0.0.0:7000")
    assert read_role({**OWN, "TRIREME_DURABILITY": "process"}).role == "heter"


def test_workers_and_servers_of_the_job_know_its_compute_workers() -> None:
    role = read_role(WORKER)
    assert (role.role, role.heter, role.label) == ("worker", LISTED, "")
    assert "compute workers 10.0.0.3:7000 (gpu), 10.0.0.4:7000 (npu)" in role.describe()
    assert read_role({**OWN, "TRIREME_ROLE": "server"}).heter == LISTED
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "TRIREME_SERVERS": SERVERS, "TRIREME_HETER": HETER}
    assert (read_role(ranks).index, read_role(ranks).heter) == (3, LISTED)


def test_fleets_variables_make_trainers_and_compute_workers_of_label_gpu() -> None:
    role = read_role(FLEET)
    assert (role.role, role.index, role.label, role.num_workers) == ("heter", 1, "gpu", 2)
    assert role.heter == (("gpu", "10.0.0.3:7000"), ("gpu", "10.0.0.4:7000"))
    assert role.listen == "10.0.0.4:7000"
    trainer = read_role(FLEET_TRAINER)
    assert (trainer.role, trainer.index, trainer.heter) == ("worker", 1, role.heter)
    server = {**FLEET, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6000"}
    assert (read_role(server).index, read_role(server).heter) == (1, role.heter)


def test_labels_of_trireme_heter_go_with_fleets_devices() -> None:
    labels = {"TRIREME_HETER": HETER}
    with pytest.raises(
        BadRequest, match=r"HETER_DEVICE_TYPE .* 1 in PADDLE_ALL_.*, gpu, found npu"
    ):
        read_role({**FLEET, "HETER_DEVICE_TYPE": "npu"})
    assert read_role({**FLEET, **labels, "HETER_DEVICE_TYPE": "npu"}).label == "npu"
    assert read_role({**FLEET_TRAINER, **labels}).heter == LISTED


@pytest.mark.parametrize(
    ("env", "names"),
    [
        *[(without(OWN, name), [name]) for name in OWN],
        ({"TRIREME_HETER": HETER}, ["TRIREME_ROLE", "TRIREME_HETER"]),
        ({"TRIREME_LABEL": "gpu"}, ["TRIREME_ROLE", "TRIREME_LABEL"]),
        (
            {**OWN, "TRIREME_LABEL": "gpu"},
            ["TRIREME_LABEL", "compute worker 1", "npu", "found gpu"],
        ),
        ({**OWN, "TRIREME_INDEX": "2"}, ["TRIREME_INDEX", "compute workers in TRIREME_HETER = 2"]),
        ({**OWN, "TRIREME_JOIN": "1"}, ["TRIREME_JOIN", "found a heter"]),
        (
            {**without(OWN, "TRIREME_INDEX"), "TRIREME_LISTEN": "a:1"},
            ["TRIREME_LISTEN", "TRIREME_HETER", "10.0.0.4:7000", "found a:1"],
        ),
        ({**WORKER, "TRIREME_LABEL": "gpu"}, ["TRIREME_LABEL=gpu", "no label of a worker"]),
        ({**WORKER, "TRIREME_ROLE": "embedded"}, ["TRIREME_ROLE", "TRIREME_HETER"]),
        (
            {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": SERVERS, "TRIREME_JOIN": "1"}
            | {"TRIREME_HETER": HETER},
            ["TRIREME_JOIN", "TRIREME_HETER"],
        ),
        (
            {**WORKER, "TRIREME_NUM_WORKERS": "2", "TRIREME_LISTEN": "10.0.0.2:6000"},
            ["TRIREME_HETER", "workers that host the rows"],
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
            | {"TRIREME_HETER": HETER},
            ["TRIREME_HETER", "workers that host the rows"],
        ),
        *[
            (without(FLEET, name), [name])
            for name in ("POD_IP", "PADDLE_PORT", "HETER_DEVICE_TYPE")
        ],
        (
            without(FLEET, "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"),
            ["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST", "PADDLE_STAGE_TRAINERS_NUM"],
        ),
        ({**FLEET, "POD_IP": "10.0.0.9"}, ["POD_IP:PADDLE_PORT", "10.0.0.9:7000"]),
        ({**FLEET, "STAGE_ID": "1"}, ["STAGE_ID", "2 to 2", "found 1"]),
        ({**FLEET, "STAGE_ID": "3"}, ["STAGE_ID", "2 to 2", "found 3"]),
        ({**FLEET_TRAINER, "STAGE_ID": "2"}, ["STAGE_ID 1 of a trainer", "found 2"]),
        ({**FLEET, "STAGE_NUM": "3"}, ["STAGE_NUM", "[2, 2]", "found 3"]),
        ({**FLEET, "PADDLE_STAGE_TRAINERS_NUM": "[2, 1]"}, ["PADDLE_STAGE_TRAINERS_NUM", "[2, 1]"]),
        ({**FLEET, "PADDLE_STAGE_TRAINERS_NUM": "2+2"}, ["PADDLE_STAGE_TRAINERS_NUM", "'2+2'"]),
        (
            {**FLEET_TRAINER, "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": "10.0.0.9:1"},
            ["PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST", "found 10.0.0.9:1"],
        ),
    ],
)
def test_half_or_contradicting_variables_are_errors_that_name_them(
    env: dict[str, str], names: list[str]
) -> None:
    with pytest.raises(BadRequest, match=r"^init: ") as caught:
        read_role(env)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "value", ["a:1", "gpu=a", "gpu=a:1,gpu=a:1", "GPU=a:1", "=a:1", "gpu=a:1,", "2=a:1"]
)
def test_a_list_of_compute_workers_has_labels_and_different_addresses(value: str) -> None:
    with pytest.raises(BadRequest, match="TRIREME_HETER") as caught:
        read_role({**OWN, "TRIREME_HETER": value})
    assert value.split(",")[-1].split("=")[-1] in str(caught.value)
