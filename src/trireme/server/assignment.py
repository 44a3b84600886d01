"""Which job a server belongs to, and which buckets and blocks the bucket map gives it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trireme.errors import Corruption, NotReady, SchemaMismatch, WrongMap
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Array


class Assignment:
    """The job (the coordinator's id of it), the bucket map, and the index of this server in it."""

    def __init__(self) -> None:
        self.job = ""
        self.index = -1
        self._map: BucketMap | None = None

    @property
    def is_in_a_job(self) -> bool:
        """Whether workers have sent a bucket map."""
        return self._map is not None

    @property
    def version(self) -> int:
        """Of the bucket map; 0: there is none."""
        return 0 if self._map is None else self._map.version

    def map(self) -> BucketMap:
        if self._map is None:
            raise NotReady("server: no bucket map yet; the coordinator's first worker brings it")
        return self._map

    def map_of_version(self, version: int) -> BucketMap:
        """The current map, if a request was planned with it. Raises WrongMap: it was planned with
        another one. Corruption: this server has none, so it has lost its state: workers send a map
        before any other request.
        """
        if self._map is None:
            raise lost()
        if version != self._map.version:
            raise WrongMap(
                f"server {self.index}: the request was planned with bucket map {version},"
                f" this server has {self._map.version}"
            )
        return self._map

    def owned_buckets(self) -> npt.NDArray[np.int64]:
        """Buckets of this server, ascending."""
        return self.map().owned_by(self.index)

    def owned_blocks(self) -> Sequence[str]:
        """Ids of this server's blocks, in the order of the map."""
        return self.map().blocks_of(self.index)

    def check_job(self, job: str, index: int, where: str) -> None:
        """Raises SchemaMismatch if this server belongs to another job, or is another server of it.
        where: the state folder, or empty.
        """
        if self.is_in_a_job and (job, index) != (self.job, self.index):
            kept = f", in {where}" if where else ""
            raise SchemaMismatch(
                f"server: expected job {self.job} and server {self.index} of it, whose state is"
                f" here{kept}, found job {job} and server {index}; end the other job first, or"
                " start this one with another --state_dir"
            )

    def check_is_first(self, where: str) -> None:
        """Raises SchemaMismatch if this is another server than the one with the coordinator."""
        if self.index > 0:
            kept = f", whose state is here, in {where}" if where else ""
            raise SchemaMismatch(
                f"server: expected the coordinator at server 0 of the workers' list, found server"
                f" {self.index} of job {self.job}{kept}; list the servers in their order, and start"
                " each with its own --state_dir"
            )

    def is_newer(self, bucket_map: BucketMap) -> bool:
        return self._map is None or bucket_map.version > self._map.version

    def adopt(self, job: str, bucket_map: BucketMap, index: int) -> None:
        """Adopt a bucket map if it is newer than the current one."""
        if self.is_newer(bucket_map):
            self.job, self.index, self._map = job, index, bucket_map


def lost() -> Corruption:
    """A server that has started without the state of its predecessor."""
    return Corruption(
        "server: expected the rows and blocks that were here, found a server that has started over"
        " without them: what no checkpoint holds is lost. Start the job again and load the newest"
        " checkpoint; --durability process keeps a server's state when it is killed"
    )


def consecutive(buckets: Array) -> list[Array]:
    """Ascending buckets, split where numbers are missing."""
    is_end = np.diff(buckets) != 1
    return np.split(buckets, np.flatnonzero(is_end) + 1) if len(buckets) else []
