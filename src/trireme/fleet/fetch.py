"""Fleet's options of what a pass prints, as a Report."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.errors import BadRequest
from trireme.train import Report
from trireme.train.loop.reporting import check_names


def report_of(
    metrics: Sequence[str],
    fetch_list: Sequence[str],
    fetch_info: Sequence[str],
    print_period: int,
    debug: bool,
    stat_var_names: Sequence[str] | None,
) -> Report:
    """metrics: names of those that the pass computes. Raises BadRequest, with Fleet's names."""
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
    return Report(
        values=fetch_list,
        labels=fetch_info,
        period=print_period,
        timing=debug,
        merged=stat_var_names,
    )
