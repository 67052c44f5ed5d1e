"""The process that runs a Ray of this machine, with the processes of one node that is its head too.

Run as `python -m vlora.cluster.on_ray.local_ray`, with a `LocalSettings` on stdin. It reports the start on stdout
(`LocalReport`). The control service is started again when it ends, with its state, so that replicas serve on. When
stdin ends, or Ray's node does, it ends all of them; if this process is killed, the system does. `ray stop` is never
used: it ends every Ray of the machine.
"""

from __future__ import annotations

import os
import select
import sys
from typing import IO

from ray._private import ray_constants
from ray._private.node import Node
from ray._private.parameter import RayParams

from vlora.cluster.on_ray.reports import LocalReport, LocalSettings
from vlora.cluster.on_ray.settings import LOOPBACK, OBJECT_STORE_BYTES
from vlora.wire.framing import pack_value, read_value

_LOOK_S = 0.2


def main() -> None:
    settings = read_value(sys.stdin.buffer, LocalSettings)
    out = os.fdopen(os.dup(1), "wb")
    with open(settings.folder.driver_log, "ab") as log:  # Ray writes to both
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    parameters = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=settings.num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=settings.folder.ray_folder,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # what it is documented to be
        no_monitor=True,  # of the autoscaler, 96 MiB
        gcs_server_port=0,
        dashboard_agent_listen_port=0,
    )
    try:
        # In the main thread, with which the system ends Ray's processes.
        node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:
        _report(out, problem=str(error).strip() or type(error).__name__)
        os._exit(1)
    _report(out, address=node.gcs_address)
    is_closed = False
    while not is_closed:
        ended = {kind for kind, _ in node.dead_processes()}
        if ray_constants.PROCESS_TYPE_RAYLET in ended:
            break
        if ray_constants.PROCESS_TYPE_GCS_SERVER in ended:
            node.kill_gcs_server(check_alive=False)
            node.start_gcs_server()
        is_closed = bool(select.select([sys.stdin], [], [], _LOOK_S)[0])  # nothing follows the settings
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    if is_closed:
        settings.folder.remove()
    os._exit(0 if is_closed else 1)


def _report(out: IO[bytes], *, address: str = "", problem: str = "") -> None:
    out.write(pack_value(LocalReport(address, problem)))
    out.flush()


if __name__ == "__main__":
    main()
