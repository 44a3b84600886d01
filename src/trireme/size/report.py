"""The text that `trireme size` prints for a table."""

from collections.abc import Iterator

from trireme.drawing import columns, size
from trireme.size.estimate import PENDING_KEY_BYTES, Need


def of_table(need: Need, num_rows: int, num_servers: int, delta_share: float) -> Iterator[str]:
    """Lines about a table. need: of the server with the most buckets. num_rows: of all servers."""
    schema = need.schema
    admission = "" if schema.admission is None else f", admission {schema.admission['name']}"
    yield (
        f"table {schema.name}: {num_rows:,} rows of {', '.join(map(str, schema.dims))}"
        f" {schema.dtype} weights, rule {schema.rule['name']}, policy {schema.policy['name']}"
        f"{admission}"
    )
    head = ["per row", f"{num_servers} servers", "each"]
    lines = [["memory", *head], *_memory(need, num_rows, num_servers), [""] * 4]
    lines += [["disk", *head], *_disk(need, num_rows, delta_share)]
    if num_servers == 1:
        lines = [[*line[:2], line[3].replace("each", "in all")] for line in lines]
    yield from columns(lines)
    yield ""
    yield from _notes(need)


def _memory(need: Need, num_rows: int, num_servers: int) -> Iterator[list[str]]:
    scale = num_rows / max(need.num_rows, 1)
    parts = need.parts_of_row()
    parts["index"] = need.index / max(need.num_rows, 1)
    for name, per_row in parts.items():
        yield _line(name, per_row, per_row * num_rows, per_row * need.num_rows)
    if need.pending:
        yield _line("pending keys", None, need.pending * scale, need.pending)
    fixed = need.marks + need.table.bytes
    yield _line("fixed parts", None, fixed * num_servers, fixed)
    everywhere = (need.memory - fixed) * scale + fixed * num_servers
    yield _line("all", sum(parts.values()), everywhere, need.memory)


def _disk(need: Need, num_rows: int, delta_share: float) -> Iterator[list[str]]:
    scale = num_rows / max(need.num_rows, 1)
    for name, num_bytes in (
        ("full checkpoint", need.checkpoint),
        (f"delta of {100 * delta_share:g} %", need.delta(delta_share)),
    ):
        yield _line(name, need.file_row_bytes, num_bytes * scale, num_bytes)


def _line(name: str, per_row: float | None, everywhere: float, each: float) -> list[str]:
    row = "" if per_row is None else f"{per_row:.1f} B"
    return [f"  {name}", row, size(everywhere), size(each)]


def _notes(need: Need) -> Iterator[str]:
    growth = max(need.index_max - need.index, 0.0)
    yield (
        "growing: rows take memory 2 MiB at a time, the index an eighth of a bucket at a time: at"
        f" most {size(growth)} more on a server"
    )
    if need.schema.head_class is not None and not need.head_share:
        yield (
            "rows with a head only (embedx_threshold): none are counted; --heads P sets their per"
            " cent"
        )
    if len(need.schema.dims) > 1 and not need.shares:
        yield (
            f"dims: all rows are counted with {max(need.schema.dims)} weights; --dims sets the per"
            " cent of rows that have each dim"
        )
    admission = need.schema.admission or {}
    if admission.get("name") == "count_filter" and admission["sketch_bytes"] is None:
        yield (
            f"admission: about {PENDING_KEY_BYTES:.0f} B for each key that was seen and has no row"
            " yet (--pending_keys); shrink() removes old ones, as it does rows"
        )
    yield "while a checkpoint is written: up to a tenth more memory"
    yield "not counted: dense parameters, batches, torch, keys removed since an export (12 B each)"
