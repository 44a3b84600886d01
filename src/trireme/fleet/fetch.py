"""Fleet's options of what a pass prints, as a Report."""

from collections.abc import Sequence
from typing import Any

from trireme.errors import BadRequest
from trireme.train import Report
from trireme.train.loop.reporting import check_names


def report_of(
    metrics: Sequence[str],
    *,
    fetch_list: Sequence[str] = (),
    fetch_info: Sequence[str] = (),
    print_period: int = 100,
    debug: bool = False,
    stat_var_names: Sequence[str] | None = None,
    **others: Any,
) -> tuple[Report, dict[str, Any]]:
    """The report that Fleet's options ask for, and the other options.

    Args:
        metrics: names of the metrics that the pass computes.
        fetch_list: values that worker 0 prints every `print_period` batches; see trireme.Report.
        fetch_info: what the line calls them; empty: their names.
        debug: also print where the time goes.
        stat_var_names: metrics whose figures are of all workers; None: all.
    """
    check_names("fleet", fetch_list=fetch_list, fetch_info=fetch_info)
    if fetch_info and len(fetch_info) != len(fetch_list):
        raise BadRequest(
            f"fleet: expected one text in fetch_info for each of the {len(fetch_list)} names in"
            f" fetch_list, found {len(fetch_info)}"
        )
    if print_period < 1:
        raise BadRequest(f"fleet: expected print_period >= 1, found {print_period}")
    if unknown := [name for name in stat_var_names or () if name not in metrics]:
        raise BadRequest(
            f"fleet: expected stat_var_names of the metrics {', '.join(metrics) or '(none)'},"
            f" found {', '.join(unknown)}"
        )
    report = Report(
        values=fetch_list,
        labels=fetch_info,
        period=print_period,
        timing=debug,
        merged=stat_var_names,
    )
    return report, others
