"""Work that worker 0 does for all workers."""

from collections.abc import Callable
from typing import Any

from trireme.checkpoint.worker_side.server_operations import SAVE_TIMEOUT_S
from trireme.errors import Internal, TriremeError, Unavailable, class_of_code
from trireme.job.cluster import Cluster


def let_first_worker(
    cluster: Cluster, purpose: str, act: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Call `act` on worker 0, unless a predecessor has done so; then all workers meet. Returns what
    `act` returned, or raises its error, on every worker.
    """
    outcome: dict[str, Any] = {}
    error: BaseException | None = None
    if cluster.worker == 0 and not cluster.client.script.has_attended_next():
        try:
            outcome = {"returned": act()}
        except Exception as raised:  # noqa: BLE001 raised below, when the others know
            error = raised
            code = raised.code if isinstance(raised, TriremeError) else Internal.code
            outcome = {"code": code, "message": f"{type(raised).__name__}: {raised}"}
    patient = not cluster.num_streams  # else meetings go on without workers that are silent
    try:
        outcomes = cluster.client.coordinator.gather(
            outcome, [], purpose=f"end of {purpose}", timeout_s=SAVE_TIMEOUT_S, patient=patient
        )
    except TriremeError:  # what kept it from acting may keep it from telling
        if error is None:
            raise
    if error is not None:
        raise error
    first: dict[str, Any] = outcomes[0][0]
    if "code" in first:
        raise class_of_code(first["code"])(f"{purpose}: worker 0 failed: {first['message']}")
    if "returned" not in first:
        raise Unavailable(
            f"{purpose}: expected what worker 0 had done before it was restarted, found that"
            " the coordinator was restarted too and does not know; start the job again and load"
            " the newest checkpoint"
        )
    returned: dict[str, Any] = first["returned"]
    return returned
