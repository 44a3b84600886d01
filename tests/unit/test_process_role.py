"""Roles: which role the environment assigns to a process, and which settings are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trireme.errors import BadRequest
from trireme.job.durability import Durability
from trireme.launch import environment
from trireme.launch.environment import VARIABLES
from trireme.launch.process_role import ProcessRole, read_role

LIST = "10.89.176.11:36000,10.89.176.12:36000"
SERVERS = ("10.89.176.11:36000", "10.89.176.12:36000")
# Exactly what Fleet's user guide sets by hand, machine B.
FLEET_SERVER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": LIST,
    "TRAINING_ROLE": "PSERVER",
    "POD_IP": "10.89.176.12",
    "PADDLE_PORT": "36000",
    "PADDLE_TRAINERS_NUM": "2",
}
FLEET_WORKER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": LIST,
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
}
OWN_WORKER = {
    "TRIREME_ROLE": "worker",
    "TRIREME_SERVERS": LIST,
    "TRIREME_INDEX": "0",
    "TRIREME_NUM_WORKERS": "3",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_role_is_embedded_only_when_nothing_is_set() -> None:
    role = read_role({"HOME": "/root", "POD_IP": "10.0.0.1"})
    assert role.role == "embedded"
    assert (role.index, role.num_workers, role.servers, role.listen) == (0, 1, (), None)
    assert role.describe().startswith("trireme: embedded")


def test_role_of_a_fleet_server_is_found_by_its_address() -> None:
    role = read_role(FLEET_SERVER)
    assert (role.role, role.index, role.num_workers) == ("server", 1, 2)
    assert (role.servers, role.listen) == (SERVERS, "10.89.176.12:36000")
    assert role.describe() == (
        "trireme: server 1 of 2, listening on 10.89.176.12:36000, 2 workers (from TRAINING_ROLE, "
        "PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, POD_IP:PADDLE_PORT)"
    )


def test_role_of_a_fleet_worker_needs_no_address_of_its_own() -> None:
    role = read_role(FLEET_WORKER)
    assert (role.role, role.index, role.num_workers, role.servers) == ("worker", 1, 2, SERVERS)
    assert role.listen is None
    launched = {
        **FLEET_WORKER,
        "POD_IP": "10.0.0.9",
        "PADDLE_PORT": "6170",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.8:6170,10.0.0.9:6170",
    }
    assert read_role(launched).index == 1


def test_role_under_torchrun_is_a_worker_of_the_named_servers() -> None:
    role = read_role({"RANK": "3", "WORLD_SIZE": "4", "TRIREME_SERVERS": " a:1 , b:2 "})
    assert (role.role, role.index, role.num_workers) == ("worker", 3, 4)
    assert role.servers == ("a:1", "b:2")
    assert "RANK" in role.source
    assert "WORLD_SIZE" in role.source
    assert "TRIREME_SERVERS" in role.source


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
HOSTING = {
    "TRIREME_ROLE": "worker",
    "TRIREME_SERVERS": LIST,
    "TRIREME_INDEX": "1",
    "TRIREME_NUM_WORKERS": "2",
    "TRIREME_LISTEN": SERVERS[1],
}


def test_role_under_torchrun_without_servers_is_a_worker_that_hosts_the_rows() -> None:
    role = read_role({**RANKS, "LOCAL_WORLD_SIZE": "2"})
    assert (role.role, role.index, role.num_workers, role.hosts) == ("worker", 1, 2, True)
    assert (role.master, role.local_num, role.servers) == ("10.0.0.1:29500", 2, ())
    assert "worker 1 of 2, which host the rows, meeting at 10.0.0.1:29500" in role.describe()
    assert not read_role({**RANKS, "TRIREME_SERVERS": LIST}).hosts
    assert read_role({**RANKS, "RANK": "0", "WORLD_SIZE": "1"}).role == "embedded"


def test_a_timeout_beyond_what_the_system_can_wait_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"TRIREME_TIMEOUT_S to be at most 1e\+08 s, found '1e18'"):
        read_role({"TRIREME_TIMEOUT_S": "1e18"})


@pytest.mark.parametrize(("restarts", "ends"), [("3", True), ("0", False), (None, False)])
def test_sigterm_ends_workers_that_torchrun_may_start_again(
    restarts: str | None, ends: bool
) -> None:
    env = {} if restarts is None else {"TORCHELASTIC_MAX_RESTARTS": restarts}
    role = read_role({**RANKS, "TRIREME_SERVERS": LIST, **env})
    assert role.ends_at_sigterm == ends


def test_role_of_a_worker_that_listens_at_its_place_among_the_servers_is_to_host_it() -> None:
    role = read_role({**HOSTING, "TRIREME_LISTEN_FD": "7"})
    assert (role.hosts, role.listen, role.listen_fd) == (True, SERVERS[1], 7)
    assert role.servers == SERVERS


COLLECTIVE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": LIST,
    "PADDLE_CURRENT_ENDPOINT": SERVERS[1],
}


def test_role_of_fleets_collective_variables_is_a_worker_that_hosts_the_rows() -> None:
    for env in (COLLECTIVE, {**COLLECTIVE, "TRAINING_ROLE": "TRAINER"}):
        role = read_role(env)
        assert (role.index, role.num_workers, role.hosts) == (1, 2, True)
        assert (role.listen, role.servers) == (SERVERS[1], SERVERS)
    for servers in ("PADDLE_PSERVERS_IP_PORT_LIST", "TRIREME_SERVERS"):
        role = read_role({**COLLECTIVE, "TRAINING_ROLE": "TRAINER", servers: "c:1"})
        assert (role.role, role.servers, role.hosts) == ("worker", ("c:1",), False)


def test_a_process_has_one_gpu_by_its_place_among_the_visible_ones() -> None:
    assert read_role({}).gpu is None
    assert read_role({"FLAGS_selected_gpus": "3"}).gpu == 3
    role = read_role({**RANKS, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (role.gpu, role.local_index, role.local_num) == (None, 1, 2)
    several = {"FLAGS_selected_gpus": "0,1"}
    with pytest.raises(BadRequest, match=r"one GPU for a process in FLAGS_selected_gpus.*--gpus"):
        read_role(several)
    assert read_role({**FLEET_SERVER, **several}).gpu is None


def test_own_variables_win_over_fleets_and_torchruns() -> None:
    role = read_role({**FLEET_SERVER, "RANK": "7", "WORLD_SIZE": "9", **OWN_WORKER})
    assert (role.role, role.index, role.num_workers) == ("worker", 0, 3)
    assert read_role({**FLEET_WORKER, "TRIREME_INDEX": "0"}).index == 0
    assert read_role({**FLEET_WORKER, "TRIREME_SERVERS": "c:5"}).servers == ("c:5",)


def test_arguments_win_over_all_variables() -> None:
    role = read_role(FLEET_WORKER, index=0, num=5, servers=["x:1"], timeout_s=2.5, threads=3)
    assert (role.index, role.num_workers, role.servers) == (0, 5, ("x:1",))
    assert (role.timeout_s, role.threads) == (2.5, 3)
    alone = read_role(FLEET_WORKER, role="embedded")
    assert alone.role == "embedded"
    assert "not PADDLE_PSERVERS_IP_PORT_LIST" in alone.describe()
    server = read_role(FLEET_WORKER, role="server", index=0)
    assert (server.role, server.listen) == ("server", SERVERS[0])


def test_server_is_known_by_its_number_or_its_address() -> None:
    env = {"TRIREME_ROLE": "server", "TRIREME_SERVERS": LIST}
    by_index = read_role({**env, "TRIREME_INDEX": "1"})
    by_address = read_role({**env, "TRIREME_LISTEN": SERVERS[1]})
    assert by_index.listen == by_address.listen == SERVERS[1]
    assert by_index.index == by_address.index == 1
    assert by_index.num_workers == 0
    behind = read_role({**env, "TRIREME_INDEX": "1", "TRIREME_LISTEN": "0.0.0.0:36000"})
    assert (behind.index, behind.listen) == (1, "0.0.0.0:36000")


def test_server_may_know_its_address_only() -> None:
    for role in (
        read_role({}, role="server", listen="127.0.0.1:0"),
        read_role({"TRIREME_ROLE": "server", "TRIREME_LISTEN": "127.0.0.1:0"}),
    ):
        assert (role.servers, role.num_workers, role.listen) == ((), 0, "127.0.0.1:0")
        assert role.describe().startswith("trireme: server, listening on 127.0.0.1:0 (from ")
    handed = read_role({"TRIREME_LISTEN_FD": "7"}, role="server", listen="127.0.0.1:6000")
    assert (handed.listen, handed.listen_fd) == ("127.0.0.1:6000", 7)
    listed = read_role({"TRIREME_SERVERS": LIST}, role="server", listen=SERVERS[1])
    assert (listed.index, listed.servers) == (1, SERVERS)


def test_tuning_variables_reach_every_role() -> None:
    tuning = {
        "TRIREME_TIMEOUT_S": "7.5",
        "TRIREME_KEYS": "keys/w0",
        "TRIREME_ROOT": "some/root",
        "TRIREME_THREADS": "4",
        "TRIREME_METRICS": "9100",
        "TRIREME_LIMITS": "tables_max=3",
        "TRIREME_STORE_HOSTS": "minio",
        "TRIREME_DEVICE_GPU": "cpu",
        "TRIREME_DEVICE_NPU": "cuda:1",
    }
    for env in ({}, FLEET_SERVER, FLEET_WORKER, OWN_WORKER):
        role = read_role({**env, **tuning})
        assert (role.timeout_s, role.insecure) == (7.5, False)
        assert (role.keys, role.root, role.threads) == ("keys/w0", "some/root", 4)
        assert (role.metrics, role.limits) == ("127.0.0.1:9100", "tables_max=3")
        assert (role.store_hosts, role.devices) == ("minio", (("gpu", "cpu"), ("npu", "cuda:1")))
        assert read_role({**env, **tuning}, metrics="[::]:0").metrics == "[::]:0"
        assert read_role(env).metrics is None
        assert read_role({**env, "TRIREME_INSECURE": "1"}).insecure


def test_keys_and_insecure_exclude_each_other() -> None:
    with pytest.raises(BadRequest, match="TRIREME_KEYS or argument insecure, found both"):
        read_role({"TRIREME_KEYS": "keys"}, insecure=True)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (without(FLEET_WORKER, "TRAINING_ROLE"), ["TRAINING_ROLE", "TRIREME_ROLE"]),
        (without(FLEET_WORKER, "PADDLE_PSERVERS_IP_PORT_LIST"), ["PADDLE_PSERVERS_IP_PORT_LIST"]),
        (without(FLEET_WORKER, "PADDLE_TRAINERS_NUM"), ["PADDLE_TRAINERS_NUM"]),
        (without(FLEET_WORKER, "PADDLE_TRAINER_ID"), ["PADDLE_TRAINER_ID"]),
        (without(FLEET_SERVER, "POD_IP"), ["POD_IP", "PADDLE_PORT"]),
        (without(FLEET_SERVER, "PADDLE_PORT"), ["POD_IP", "PADDLE_PORT"]),
        (without(FLEET_SERVER, "PADDLE_PSERVERS_IP_PORT_LIST"), ["PADDLE_PSERVERS_IP_PORT_LIST"]),
        ({"PADDLE_PORT": "36000"}, ["TRAINING_ROLE"]),
        ({"PADDLE_TRAINER_ID": "0"}, ["TRAINING_ROLE"]),
        ({"TRIREME_SERVERS": LIST}, ["TRIREME_ROLE", "TRIREME_SERVERS"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE", "TRIREME_SERVERS"]),
        ({"RANK": "0", "TRIREME_SERVERS": LIST}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "2", "TRIREME_SERVERS": LIST}, ["RANK"]),
        *[(without(OWN_WORKER, name), [name]) for name in OWN_WORKER],
        ({"TRIREME_ROLE": "server", "TRIREME_SERVERS": LIST}, ["TRIREME_INDEX", "TRIREME_LISTEN"]),
    ],
)
def test_half_an_environment_is_an_error_that_names_the_variables(
    env: dict[str, str], names: list[str]
) -> None:
    with pytest.raises(BadRequest, match=r"^init: ") as caught:
        read_role(env)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**FLEET_WORKER, "RANK": "0", "WORLD_SIZE": "2"}, ["TRAINING_ROLE", "RANK", "both"]),
        ({**FLEET_WORKER, "PADDLE_TRAINER_ENDPOINTS": "a:1"}, ["PADDLE_TRAINER_ENDPOINTS", "2"]),
        ({**FLEET_WORKER, "PADDLE_TRAINER_ID": "2"}, ["PADDLE_TRAINER_ID", "found 2"]),
        ({**FLEET_SERVER, "POD_IP": "10.0.0.1"}, ["POD_IP:PADDLE_PORT", "10.0.0.1:36000", LIST]),
        ({**FLEET_SERVER, "TRIREME_INDEX": "0"}, ["TRIREME_INDEX and POD_IP:PADDLE_PORT", LIST]),
        ({**FLEET_WORKER, "PADDLE_TRAINER_ENDPOINTS": "a:1,"}, ["ENDPOINTS as host:port", "a:1,"]),
        *[
            ({**FLEET_WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": wrong}, ["host:port", wrong])
            for wrong in ("a:6000;b:6000", "http://a:60", "::1:60", "a b:1", "[x]:1", "a:\uff11")
        ],
        ({**OWN_WORKER, "TRIREME_ROLE": "embedded"}, ["TRIREME_ROLE", "TRIREME_SERVERS"]),
        ({**OWN_WORKER, "TRIREME_LISTEN": "a:1"}, ["TRIREME_LISTEN"]),
        ({**HOSTING, "TRIREME_INDEX": "0"}, ["TRIREME_LISTEN", SERVERS[1]]),
        ({**HOSTING, "TRIREME_NUM_WORKERS": "3"}, ["as many servers as workers", "2 and 3"]),
        ({**HOSTING, "TRIREME_STREAMS": "4"}, ["TRIREME_STREAMS=4", "may not come and go"]),
        ({**RANKS, "TRIREME_STREAMS": "4"}, ["TRIREME_STREAMS=4", "may not come and go"]),
        ({**OWN_WORKER, "TRIREME_ROLE": "server", "TRIREME_INDEX": "2"}, ["TRIREME_INDEX", "2"]),
    ],
)
def test_contradictions_are_errors_with_both_sides(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(BadRequest, match=r"^init: expected ") as caught:
        read_role(env)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRIREME_ROLE", "trainer"),
        ("TRIREME_SERVERS", "a:1,a:1"),
        ("TRIREME_SERVERS", "a:0"),
        ("TRIREME_SERVERS", "a:65536"),
        ("TRIREME_SERVERS", "a"),
        ("TRIREME_SERVERS", "a:1,"),
        ("TRIREME_INDEX", "-1"),
        ("TRIREME_INDEX", "one"),
        ("TRIREME_NUM_WORKERS", "0"),
        ("TRIREME_TIMEOUT_S", "0"),
        ("TRIREME_TIMEOUT_S", "inf"),
        ("TRIREME_TIMEOUT_S", "soon"),
        ("TRIREME_INSECURE", "yes"),
        ("TRIREME_THREADS", "0"),
        ("TRIREME_METRICS", "a:b"),
        ("TRIREME_METRICS", "65536"),
    ],
)
def test_bad_values_are_errors_that_name_variable_and_value(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_role({**OWN_WORKER, name: value})
    assert name in str(caught.value)
    assert value.split(",")[-1] in str(caught.value)


def test_misspelt_variables_are_errors_with_the_nearest_name() -> None:
    with pytest.raises(BadRequest, match="TRIREME_SERVER; did you mean TRIREME_SERVERS") as caught:
        read_role({"TRIREME_SERVER": LIST})
    assert all(name in str(caught.value) for name in VARIABLES)


@pytest.mark.parametrize("service", ["TRIREME", "TRIREME_SERVERS"])
def test_variables_that_kubernetes_makes_of_a_service_are_not_misspelt(service: str) -> None:
    of_service = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "6000",
        f"{service}_SERVICE_PORT_RPC": "6000",
        f"{service}_PORT": "tcp://10.0.0.1:6000",
        f"{service}_PORT_6000_TCP": "tcp://10.0.0.1:6000",
        f"{service}_PORT_6000_TCP_ADDR": "10.0.0.1",
    }
    assert read_role({**OWN_WORKER, **of_service}) == read_role(OWN_WORKER)
    with pytest.raises(BadRequest, match="TRIREME_PORT; did you mean"):
        read_role({**OWN_WORKER, "TRIREME_PORT": "6000"})


def test_unknown_fleet_roles_are_refused() -> None:
    with pytest.raises(BadRequest, match="PSERVER, TRAINER, HETER_TRAINER, found 'COORDINATOR'"):
        read_role({**FLEET_WORKER, "TRAINING_ROLE": "COORDINATOR"})


def test_empty_variables_count_as_unset() -> None:
    assert read_role(dict.fromkeys([*OWN_WORKER, *FLEET_WORKER], " ")).role == "embedded"


def test_read_role_reads_the_real_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN_WORKER.items():
        monkeypatch.setenv(name, value)
    assert read_role() == read_role(OWN_WORKER)
    assert isinstance(read_role(), ProcessRole)


def test_durability_is_passed_to_servers_and_refused_for_embedded_tables() -> None:
    keeping = {"TRIREME_DURABILITY": "machine", "TRIREME_STATE_DIR": "/s", "TRIREME_LOG_BYTES": "9"}
    role = read_role({"TRIREME_ROLE": "server", "TRIREME_LISTEN": "127.0.0.1:0", **keeping})
    assert (role.durability, role.state_dir, role.log_bytes) == ("machine", "/s", 9)
    skipping = {"TRIREME_SKIP_RECORDS": "/s/log-00000001:64", **keeping}
    role = read_role({"TRIREME_ROLE": "server", "TRIREME_LISTEN": "127.0.0.1:0", **skipping})
    assert role.skip_records == "/s/log-00000001:64"
    assert read_role({**OWN_WORKER, **keeping}).role == "worker"
    for env in ({}, {"TRIREME_ROLE": "embedded"}, RANKS, HOSTING):
        with pytest.raises(BadRequest, match="TRIREME_DURABILITY=machine, found tables embedded"):
            read_role({**env, **keeping})
        assert read_role({**env, "TRIREME_DURABILITY": "none"}).role != "server"
    with pytest.raises(BadRequest, match="expected TRIREME_DURABILITY as one of none, process"):
        read_role({"TRIREME_DURABILITY": "always"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "process"}, "expected a folder for a server's state"),
        ({"folder": Path("x")}, "expected process or machine"),
        ({"log_bytes": 5}, "expected process or machine"),
        (
            {"mode": "machine", "folder": Path("x"), "log_bytes": 0},
            "log_bytes as an integer >= 1, found 0",
        ),
    ],
)
def test_durability_settings_must_be_complete(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Durability(**options)


def test_a_worker_that_joins_needs_the_servers_alone() -> None:
    joining = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": LIST, "TRIREME_JOIN": "1"}
    role = read_role(joining)
    assert (role.role, role.is_late, role.servers) == ("worker", True, SERVERS)
    assert role.describe().startswith("trireme: a late worker, servers 10.89.176.11")
    for name in ("TRIREME_INDEX", "TRIREME_NUM_WORKERS", "TRIREME_STREAMS"):
        with pytest.raises(BadRequest, match=rf"joins a job \(TRIREME_JOIN\).* found {name}"):
            read_role({**joining, name: "1"})
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    server = {"TRIREME_ROLE": "server", "TRIREME_LISTEN": "127.0.0.1:6000"}
    for kind, place in (("worker", ranks), ("server", server)):  # not a job of their own
        with pytest.raises(BadRequest, match=f"join a job .TRIREME_JOIN., found a {kind}; TRIREME"):
            read_role({**place, "TRIREME_JOIN": "1"})


def test_streams_that_workers_share_out_reach_workers_and_embedded_tables() -> None:
    assert read_role({**OWN_WORKER, "TRIREME_STREAMS": "16"}).streams == 16
    assert read_role({"TRIREME_STREAMS": "4"}).streams == 4
    assert read_role(OWN_WORKER, streams=5).streams == 5
    assert read_role(OWN_WORKER).streams == 0
    with pytest.raises(BadRequest, match="TRIREME_STREAMS to be an integer >= 1, found '0'"):
        read_role({"TRIREME_STREAMS": "0"})


def test_only_what_torch_reads_as_it_is_loaded_is_set_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_at_load", None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning sets it
    assert environment.set_too_late() == []  # torch was loaded after the script began
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    environment.note_load()
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    assert environment.set_too_late() == []
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert environment.set_too_late() == ["OMP_PROC_BIND"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (without(FLEET_WORKER, "PADDLE_TRAINER_ID"), "TRAINING_ROLE=TRAINER"),
        (without(FLEET_SERVER, "POD_IP", "PADDLE_PORT"), "TRAINING_ROLE=PSERVER"),
    ],
)
def test_a_role_is_shown_as_it_was_set(env: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_role(env)


def test_of_the_options_of_durability_those_without_effect_are_named() -> None:
    with pytest.raises(BadRequest, match=r"TRIREME_DURABILITY\) with --state_dir, found none"):
        Durability(folder=Path("state"))
    with pytest.raises(BadRequest, match="with --state_dir and --log_bytes, found none"):
        Durability(folder=Path("state"), log_bytes=0)
