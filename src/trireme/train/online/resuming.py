"""Where a run over passes continues: at its last stop, or after its newest checkpoint."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from trireme.errors import BadRequest, Corruption
from trireme.train.online.donefiles import BASES, DELTAS, DoneFiles, PassPoint, StopRecord
from trireme.train.online.publishing import Publisher
from trireme.train.trainer import Trainer

log = logging.getLogger("trireme")


def resume(trainer: Trainer, publisher: Publisher) -> StopRecord | None:
    """Load the checkpoint of the last stop, or else the newest listed one that can be loaded, and
    bring the publisher to its state. Every worker calls it. Returns where the run stands; None:
    nothing is listed. Raises Corruption: none of the listed checkpoints can be loaded.
    """
    own = _listed(publisher.done_files) if trainer.cluster.worker == 0 else {}
    replies = trainer.cluster.client.coordinator.gather(
        own, [], purpose="resume passes", patient=True
    )
    listed: dict[str, Any] = replies[0][0]
    failure: Exception | None = None
    for record, is_stop in _candidates(listed):
        try:
            _load(trainer, publisher, record, is_stop=is_stop)
        except (Corruption, BadRequest) as error:
            failure = error
            instead = "going further back" if is_stop else "trying the one before"
            log.warning("stream: %s cannot be loaded, %s: %s", record.path, instead, error)
            continue
        publisher.key, publisher.last_export = record.key, record.exported
        if trainer.cluster.worker == 0 and listed["checkpoints"]:
            publisher.remove_dropped()
        where = f"after pass {record.point.day}/{record.point.number}"
        if record.within is not None:
            where = f"within pass {record.within.day}/{record.within.number}"
        log.info("stream: continuing %s, from %s", where, record.path)
        return record
    if failure is not None:
        raise Corruption(
            f"train_passes: expected one of {len(listed['checkpoints'])} checkpoints listed below"
            f" {publisher.path} to load, found none that does"
        ) from failure
    return None


def _listed(done_files: DoneFiles) -> dict[str, Any]:
    """What the done-files list, for the other workers."""
    checkpoints, stopped = done_files.checkpoints(), done_files.stopped()
    exports = [*done_files.exports(BASES), *done_files.exports(DELTAS)]
    body: dict[str, Any] = {
        "checkpoints": [[c.point.day, c.point.number, c.key, c.path] for c in checkpoints],
        "exports": [[*_made_after(export.path), export.path] for export in exports],
    }
    newest = max((checkpoint.point for checkpoint in checkpoints), default=None)
    if stopped is not None and (newest is None or newest <= stopped.point):
        body["stopped"] = stopped.to_json()
    return body


def _candidates(listed: Mapping[str, Any]) -> Iterator[tuple[StopRecord, bool]]:
    """Where the run may continue, best first; whether it is a stop."""
    if "stopped" in listed:
        yield StopRecord.from_json(listed["stopped"]), True
    for day, number, key, path in reversed(listed["checkpoints"]):
        earlier = [export for export in listed["exports"] if export[:2] <= [day, number]]
        last_export = max(earlier)[2] if earlier else None
        yield StopRecord(PassPoint(day, number), None, key, last_export, path), False


def _load(trainer: Trainer, publisher: Publisher, record: StopRecord, *, is_stop: bool) -> None:
    options = publisher.stops.storage_options
    if not is_stop:
        trainer.load(record.path, storage_options=options)
    elif (path := trainer.resume(publisher.stops.path, storage_options=options)) != record.path:
        raise Corruption(f"train_passes: expected the checkpoint {record.path}, found {path}")


def _made_after(path: str) -> tuple[str, int]:
    """Day and pass after which an export was made: DAY/base, DAY/base-PASS, DAY/delta-PASS."""
    *_, day, name = path.split("/")
    return day, int(name.partition("-")[2] or 0)
