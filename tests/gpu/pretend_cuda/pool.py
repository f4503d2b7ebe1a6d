"""Pools whose ranks have pretend devices."""

import json
from collections.abc import Mapping
from pathlib import Path

from parallel_runtime.devices import Device
from parallel_runtime.pool.pool import Pool

GPU = Path(__file__).resolve().parents[1]
ENGINE = "pretend_cuda.engine:PretendEngine"


class PretendPool(Pool):
    """A pool on `cuda:0` and so on, or with `shared` all ranks on `cuda:0`. `folder` is its own, for its settings.

    Its ranks run the product of the folder `copy`, where there is one.
    """

    def __init__(self, ranks: int, folder: Path, *, shared: bool = False, copy: Path | None = None) -> None:
        self._told = folder / "pretend.json"
        self.tell({})
        path = tuple(str(place) for place in (GPU, folder, copy) if place is not None)
        devices = tuple(Device("cuda", 0 if shared else index) for index in range(ranks))
        self._sites = folder / "sites.txt"
        super().__init__(devices, threads_per_rank=1, engine=ENGINE, python_path=path, deadline_s=60.0)

    def sites(self) -> list[str]:
        """Where the product allocated since `record` was told, first come first; they are forgotten."""
        found = list(dict.fromkeys(self._sites.read_text(encoding="utf-8").splitlines()))
        self._sites.unlink()
        return found

    def books(self) -> list[dict[str, int]]:
        """What each rank's allocator had "allocated" and "reserved", in bytes, when it last answered."""
        places = [self._told.with_name(f"book.{rank}.json") for rank in range(len(self.devices))]
        return [json.loads(place.read_text(encoding="utf-8")) for place in places]

    def tell(self, settings: Mapping[str, object]) -> None:
        """How requests are run from now on."""
        written = self._told.with_suffix(".new")
        written.write_text(json.dumps(settings), encoding="utf-8")
        written.replace(self._told)

    def forgive(self) -> None:
        """Forget failures: three in a minute are too many for a pool, not for this."""
        self._generations.failures.forget()
