"""Which machine gets a replica, and what a machine gives it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vlora.cluster.on_ray.places import Machine, Places
from vlora.cluster.on_ray.reports import Need
from vlora.cluster.on_ray.settings import Folder, is_free
from vlora.cluster.on_ray.site import SITE_VARIABLE, Site, taken_slot, write_site
from vlora.errors import BadConfig

ONE, TWO = (
    Machine("vlora-1", "a", "10.0.0.1", cpus=4, gpus=2, memory_bytes=8 << 30),
    Machine("vlora-2", "b", "10.0.0.2", cpus=8, gpus=0, memory_bytes=64 << 30),
)


def chosen(places: Places, name: str, *machines: Machine) -> str:
    found = places.choose(name, machines)
    assert found is not None
    return found.key


def test_replicas_go_where_the_most_room_is_and_stay() -> None:
    places = Places(Need(cpus=2), {})
    found = [chosen(places, f"r{index}", ONE, TWO) for index in range(6)]
    assert found == ["vlora-2", "vlora-2", "vlora-1", "vlora-2", "vlora-1", "vlora-2"]
    assert chosen(places, "r2", ONE, TWO) == "vlora-1"
    with pytest.raises(BadConfig) as caught:
        places.choose("r6", [ONE, TWO])
    assert str(caught.value) == (
        "no machine has room for r6, which needs 2 CPUs; 10.0.0.1 has 4 CPUs and 2 replicas, 10.0.0.2 has 8 CPUs and 4 "
        "replicas; let another machine join, or change `replicas` in the plan"
    )
    places.leave("r0")
    assert chosen(places, "r6", ONE, TWO) == "vlora-2"


@pytest.mark.parametrize(
    ("need", "room"),
    [
        (Need(cpus=4), {"vlora-1": 1, "vlora-2": 2}),
        (Need(cpus=1, gpus=1), {"vlora-1": 2, "vlora-2": 0}),
        (Need(cpus=1, memory_bytes=4 << 30), {"vlora-1": 2, "vlora-2": 8}),
    ],
)
def test_the_scarcest_resource_decides(need: Need, room: dict[str, int]) -> None:
    assert {machine.key: machine.room(need) for machine in (ONE, TWO)} == room


def test_a_replica_of_a_lost_machine_gets_another_one() -> None:
    places = Places(Need(cpus=2), {})
    assert chosen(places, "r", ONE, TWO) == "vlora-2"
    assert chosen(places, "r", ONE) == "vlora-1"
    assert chosen(places, "r", ONE, TWO) == "vlora-1"
    with pytest.raises(BadConfig, match="which needs 2 CPUs; none has joined; let another"):
        places.choose("other", [])


def test_a_replica_that_does_not_start_is_tried_on_other_machines() -> None:
    places, third = Places(Need(cpus=4), {}), ONE._replace(key="vlora-3", cpus=2)  # which has no room
    tried = []
    for _ in range(4):
        tried.append(chosen(places, "r", ONE, TWO, third))
        places.fail("r")
    assert tried == ["vlora-2", "vlora-1", "vlora-2", "vlora-1"]
    assert chosen(places, "other", ONE, TWO, third) == "vlora-2"


def test_a_later_keeper_waits_for_the_machine_of_a_running_replica() -> None:
    places = Places(Need(cpus=2), {"r": "vlora-2"})
    assert places.choose("r", [ONE], wait_for_home=True) is None
    assert chosen(places, "r", ONE, TWO) == "vlora-2"
    places = Places(Need(cpus=2), {"r": "vlora-2"})
    assert chosen(places, "r", ONE) == "vlora-1"  # after its patience
    places = Places(Need(cpus=2), {"r": "vlora-2"})
    assert chosen(places, "r", ONE, TWO) == "vlora-2"
    found = places.choose("r", [ONE], wait_for_home=True)  # it was there, and is lost since
    assert found is not None and found.key == "vlora-1"


def a_site(tmp_path: Path, *, ports: int = 3, num_gpus: int = 0, **variables: str) -> Site:
    # Above the ports that the system gives to connections.
    first = next(first for first in range(61_000, 65_000, 10) if all(map(is_free, range(first, first + ports))))
    return Site(
        key="vlora-1",
        folder=str(tmp_path),
        host="127.0.0.1",
        first_port=first,
        last_port=first + ports - 1,
        cert_file="c",
        key_file="k",
        model="m",
        num_gpus=num_gpus,
        variables=variables,
    )


def test_replicas_of_a_machine_have_different_ports_and_gpus(tmp_path: Path) -> None:
    site = a_site(tmp_path, num_gpus=5, CUDA_VISIBLE_DEVICES="3,4,5,6,7")
    with taken_slot(site, 2) as one, taken_slot(site, 2) as two:
        assert (one.place, two.place) == (0, 1)
        assert [site.environ(slot.place, 2)["CUDA_VISIBLE_DEVICES"] for slot in (one, two)] == ["3,4", "5,6"]
        with pytest.raises(
            BadConfig, match=r"^127\.0\.0\.1 has 5 GPUs, which 2 replicas use; let another machine join"
        ):
            taken_slot(site, 2).__enter__()
    with taken_slot(site, 2) as again:
        assert again.place == 0


def test_a_slot_is_held_by_the_process_that_has_inherited_it(tmp_path: Path) -> None:
    site = a_site(tmp_path)
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with taken_slot(site, 0) as slot:
        replica = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(slot.file,), close_fds=True
        )
    with replica:
        assert replica.stdout is not None and replica.stdout.readline()
        with taken_slot(site, 0) as other:
            assert other.place == slot.place + 1
        replica.kill()
    with taken_slot(site, 0) as again:
        assert again.place == slot.place


def test_a_port_of_another_program_is_skipped(tmp_path: Path) -> None:
    site = a_site(tmp_path, ports=2)
    with socket.create_server(("", site.first_port)):
        with taken_slot(site, 0) as slot:
            assert (slot.place, slot.port) == (0, site.first_port + 1)
        with (
            socket.create_server(("", site.last_port)),
            pytest.raises(BadConfig, match=r"^all ports from \d+ to \d+ of"),
        ):
            taken_slot(site, 0).__enter__()


def test_a_site_is_read_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    site, folder = a_site(tmp_path, OMP_NUM_THREADS="3"), Folder(str(tmp_path))
    write_site(folder, site)
    write_site(folder, site)
    assert Site.read({SITE_VARIABLE: folder.site_file}) == site and Site.read({}) is None
    found = site.environ(0, 0)
    assert found["OMP_NUM_THREADS"] == "3" and found[SITE_VARIABLE] is None
    assert found["VLORA_REPLICAS_OF"] == str(tmp_path) and os.listdir(tmp_path) == ["site"]
