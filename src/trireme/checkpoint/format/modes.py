"""What a checkpoint holds of the tables. Dense blocks, marks and positions are in every one."""

from __future__ import annotations

from trireme.errors import BadRequest

FLEET_NUMBERS = {0: "full", 1: "delta", 2: "base", 3: "batch"}
MODES = ("full", "delta", "base", "batch", "hot")


def mode_of(mode: str | int) -> str:
    """The name of a mode that is given by name or by Fleet's number.

    full (0): every row.
    delta (1): the rows that changed since the last base or delta (the last full where there is
        none), and the keys removed since; of a table with a ScorePolicy those that its thresholds
        choose.
    base (2): every row that is worth exporting: of a table with a ScorePolicy those that its
        thresholds choose, of others all.
    batch (3): as full, at the end of a day.
    hot: the most shown rows, or the most recently pushed ones of tables without shows.

    Raises:
        BadRequest: anything else.
    """
    name = FLEET_NUMBERS.get(mode) if type(mode) is int else mode
    if name not in MODES:
        raise BadRequest(
            f"save: expected mode {', '.join(MODES)} or one of"
            f" {', '.join(str(n) for n in FLEET_NUMBERS)}, found {mode!r}"
        )
    return str(name)
