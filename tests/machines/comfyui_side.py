"""`python -m machines.comfyui_side FOLDER ADDRESS`: the server and a pool in a process that a case can kill.

Prints the port, then `running` once steps over two machines run, which never end.
"""

import sys
from pathlib import Path

from machines.world import SILENCE_S
from machines.worlds import tiny_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.machines.connection import read_token
from parallel_runtime.machines.server import MachineServer
from parallel_runtime.machines.versions import own_versions
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

if __name__ == "__main__":
    folder, address = Path(sys.argv[1]), sys.argv[2]
    server = MachineServer(f"{address}:0", read_token(folder / "token"), versions=own_versions(""), silence_s=SILENCE_S)
    print(server.port, flush=True)  # noqa: T201
    machines = server.wait_for(1, 60)
    model = tiny_model(folder / "models1")
    pool = Pool(parse_devices("cpu:1").devices, threads_per_rank=1, machines=lambda _: machines)
    model.error(pool, ParallelPlan(ring=2))
    print("running", flush=True)  # noqa: T201
    while True:
        model.error(pool, ParallelPlan(ring=2))
