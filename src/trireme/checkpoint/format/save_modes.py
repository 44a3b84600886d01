"""The modes of a checkpoint: which rows of the tables it holds. Dense blocks, marks and positions
are in every one.
"""

from trireme.errors import BadRequest, check_values

SAVE_MODES = ("full", "delta", "base", "batch", "hot")
FLEET_NUMBERS = {0: "full", 1: "delta", 2: "base", 3: "batch"}


def save_mode(mode: str | int) -> str:
    """The name of a mode that is given by name or by Fleet's number. Raises BadRequest: any other.

    full (0): every row. batch (3): as full, at the end of a day.
    delta (1): the rows that changed since the last base or delta (the last full where there is
        none), and the keys removed since; of a table with a ScorePolicy those that its thresholds
        choose.
    base (2): every row worth exporting: of a table with a ScorePolicy those that its thresholds
        choose, of others all.
    hot: the most shown rows, or the most recently pushed ones of tables without shows.
    """
    name = FLEET_NUMBERS.get(mode) if type(mode) is int else mode
    if not isinstance(name, str) or name not in SAVE_MODES:
        raise BadRequest(
            f"save: expected mode {', '.join(SAVE_MODES)} or one of"
            f" {', '.join(str(n) for n in FLEET_NUMBERS)}, found {mode!r}"
        )
    return str(name)


def check_save(mode: str, hot: int | float | None, keep: int | None) -> None:
    """Raises BadRequest: the size of a hot set is out of range, is missing, or comes with another
    mode; or no checkpoint would be kept.
    """
    if (mode == "hot") != (hot is not None):
        raise BadRequest(
            "save: expected hot=, a number of rows or a share of them, with mode 'hot' and no"
            f" other, found hot={hot!r} with {mode!r}"
        )
    is_share = isinstance(hot, float) and 0 < hot <= 1
    if not (hot is None or is_share or (type(hot) is int and hot >= 1)):
        raise BadRequest(
            f"save: expected hot to be a whole number >= 1 or a share in (0, 1], found {hot!r}"
        )
    check_values("save", keep=(keep is None or keep >= 1, ">= 1", keep))
