"""The lookups that embedding modules declare."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from trireme.errors import BadRequest
from trireme.table import RowClassId, Table


@dataclass(frozen=True, slots=True)
class LookupSpec:
    """One lookup of a module: the features whose bags it reads, and how it sums them.

    name: the key of the lookup in `Batch.lookups`; equal specs have equal names.
    mode: "sum", "mean" or "sqrt" of a bag (EmbeddingBag), or "none": each id separately.
    padding_key: ids equal to it (as uint64) have no row; None: every id has one.
    """

    table: Table
    features: tuple[str, ...]
    mode: str
    padding_key: int | None

    @property
    def name(self) -> str:
        return f"{self.table.name}:{self.mode}:{','.join(self.features)}"


def specs_of(modules: Iterable[nn.Module]) -> Iterator[LookupSpec]:
    """The lookups of all embedding modules within these modules."""
    for module in modules:
        for part in module.modules():
            yield from getattr(part, "lookup_specs", ())


def specs_by_class(specs: Iterable[LookupSpec]) -> dict[RowClassId, list[LookupSpec]]:
    """The distinct lookups of each row class.

    Raises:
        BadRequest: two tables share a name, or modules disagree about the padding key of a table.
    """
    by_class: dict[RowClassId, list[LookupSpec]] = {}
    tables: dict[str, Table] = {}
    for spec in specs:
        name, table = spec.table.name, spec.table.parts[0]
        if tables.setdefault(name, table) is not table:
            raise BadRequest(
                f"Planner: expected one Table named {name!r}, found two; share the object"
            )
        of_class = by_class.setdefault(spec.table.class_id, [])
        if of_class and spec.padding_key != of_class[0].padding_key:
            raise BadRequest(
                f"Planner: expected one padding_key for all modules on table {name!r}, "
                f"found {of_class[0].padding_key} and {spec.padding_key}"
            )
        if all(spec.name != other.name for other in of_class):
            of_class.append(spec)
    return by_class
