"""Days of the data, as Fleet writes them."""

from datetime import datetime, timezone

from trireme.errors import BadRequest


def seconds_of_day(what: str, date: object) -> int:
    """Seconds since 1970 at the beginning of the day (UTC). Raises BadRequest: no such day, or one
    before 1970 or after 2105.
    """
    try:
        day = datetime.strptime(str(date), "%Y%m%d").replace(tzinfo=timezone.utc)
        seconds = int(day.timestamp())
    except ValueError:
        seconds = -1
    if not isinstance(date, str) or len(date) != 8 or not 0 < seconds < 2**32:
        raise BadRequest(f"{what}: expected a day of 1970 to 2105 like '20190720', found {date!r}")
    return seconds
