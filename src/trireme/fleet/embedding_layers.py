"""fleet.sparse_embedding: Fleet's layer as a factory of modules; one table for each name."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trireme.errors import BadRequest, SchemaMismatch
from trireme.fleet.program import Variable
from trireme.initializer import Initializer, TailUniform
from trireme.nn import Embedding, EmbeddingBag
from trireme.optim import FleetAdagrad, FleetRule, Rule
from trireme.policy import (
    UNSET_ACCESSOR,
    Admission,
    CountFilter,
    Policy,
    Probability,
    ScorePolicy,
    ShowClick,
    SparseAccessor,
)
from trireme.table import Table

POOLS = {"sum": "sum", "average": "mean", "sqrt": "sqrt"}
# table_class -> why it is refused; "": accepted.
TABLE_CLASSES = {
    "MemorySparseTable": "",
    "CommonSparseTable": "",
    "SSDSparseTable": "",
    "MemorySparseGeoTable": "mode geo is the strategy's, of a MemorySparseTable",
}


@dataclass(frozen=True)
class ParamAttr:
    """The name of a table, and the initializer of its rows; None: that of the update rule."""

    name: str
    initializer: Initializer | None = None


@dataclass(frozen=True)
class ShowClickEntry:
    """Columns of the batch with the shows and clicks of each example, which rows sum up. show_name:
    None: each is one show, as of a variable of ones.
    """

    show_name: str | None
    click_name: str


@dataclass(frozen=True)
class CountFilterEntry:
    """A key gets a row with its `count_filter`-th occurrence, >= 0. Fleet has ignored it since 2.3;
    here it is an exact `trireme.policy.CountFilter`.
    """

    count_filter: int

    def admission(self) -> Admission | None:
        return None if self.count_filter == 0 else CountFilter(self.count_filter)


@dataclass(frozen=True)
class ProbabilityEntry:
    """A push of a key without a row makes one with this probability, in (0, 1). Fleet has ignored
    it since 2.3; here it is `trireme.policy.Probability`.
    """

    probability: float

    def admission(self) -> Admission | None:
        return Probability(self.probability)


Entry = ShowClickEntry | CountFilterEntry | ProbabilityEntry


class NamedTables:
    """The tables of a job by name: layers that name the same table share its rows."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Table, tuple[object, ...]]] = {}

    def sparse_embedding(
        self,
        input: str | Variable | Sequence[str | Variable],
        size: Sequence[int],
        padding_idx: int | None = None,
        is_test: bool = False,
        entry: Entry | None = None,
        table_class: str = "MemorySparseTable",
        param_attr: ParamAttr | str | None = None,
        dtype: str = "float32",
        slot: int | None = None,
        *,
        pool: str | None = None,
        optimizer: Rule | None = None,
        policy: Policy | None = None,
    ) -> Embedding | EmbeddingBag:
        """A module that looks up a feature in the table that `param_attr` names.

        Fleet's layer maps a variable to a variable. A torch model makes this module once, in
        `__init__`, and calls it with the batch in `forward`:

            self.emb = fleet.sparse_embedding("1", [0, 9], padding_idx=0, param_attr="embedding")
            ...
            rows = self.emb(batch)                                   # (N, 9), a row per id
            x = nn.sequence_pool(rows, batch["1"].offsets, "sum")    # (B, 9)

        With `pool` lookup and pooling are one operation, for several features: (B, F, D).

        Args:
            input: name of the feature, or names of several; or what `static.data` made of them.
            size: [ignored, D]: a table has no number of rows.
            padding_idx: the id, >= 0, that looks up zeros and has no row and no gradient.
            is_test: False; `model.eval()` keeps lookups from making rows.
            entry: ShowClickEntry: rows count shows and clicks, by SparseAccessor with Fleet's
                Python defaults, or by `policy`. CountFilterEntry, ProbabilityEntry: which keys get
                a row. The same in all layers of a table.
            table_class: "MemorySparseTable" or, the same, "CommonSparseTable"; "SSDSparseTable":
                rows may lie on SSD, as with `Table(ssd=True)`.
            param_attr: the name of the table, with the initializer of its rows.
            dtype: "float32".
            slot: number of this feature in rows that count shows; None: its name is the number.
            pool: None: a row per id. "sum", "average" (without padding) or "sqrt".
            optimizer: the table's update rule; default `optim.FleetAdagrad()`. With one of Fleet's
                rules keys without a row look up zeros, and rows begin as Fleet's do.
            policy: of `trireme.policy`: how long rows live and what is exported. `entry` names the
                columns of a ScorePolicy. With CtrCommonAccessor or CtrDoubleAccessor D counts show
                and click, which come first, as in Fleet.

        Raises:
            BadRequest: an argument that has no meaning here.
            SchemaMismatch: an earlier layer declared the table with other values.
        """
        _check_arguments(padding_idx, is_test, table_class, dtype)
        if isinstance(size, int) or len(size) != 2:
            raise _refused(f"size=[ignored, D], found {size!r}")
        if pool is not None and pool not in POOLS:
            raise _refused(f"pool to be one of {tuple(POOLS)}, found {pool!r}")
        names = _name_of(input) if isinstance(input, (str, Variable)) else [*map(_name_of, input)]
        rule = FleetAdagrad() if optimizer is None else optimizer
        policy, admit = _policy_and_admission(entry, policy)
        if slot is not None:
            _check_slot(slot, names, policy)
        ssd = table_class == "SSDSparseTable"
        table = self._table(param_attr, size[1], rule, policy, admit, ssd=ssd)
        if slot is not None:
            before = table.feature_numbers.setdefault(str(names), slot)
            if before != slot:
                raise _refused(f"slot {before} of {names!r} as before, found {slot}")
        if pool is None:
            return Embedding(table, features=names, padding_key=padding_idx)
        return EmbeddingBag(table, features=names, mode=POOLS[pool], padding_key=padding_idx)

    def _table(
        self,
        param_attr: ParamAttr | str | None,
        width: int,
        rule: Rule,
        policy: Policy,
        admit: Admission | None,
        *,
        ssd: bool,
    ) -> Table:
        if param_attr is None:
            raise _refused(
                "param_attr, the name of the table, found None: checkpoints and other layers find"
                " it by its name"
            )
        attr = ParamAttr(param_attr) if isinstance(param_attr, str) else param_attr
        is_fleet = isinstance(rule, FleetRule)
        initializer = TailUniform() if attr.initializer is None and is_fleet else attr.initializer
        pulls = isinstance(policy, ScorePolicy) and policy.pulls_statistics
        declared = (width - 2 * pulls, rule, initializer, policy, admit, ssd)
        if attr.name not in self._by_name:
            table = Table(
                attr.name,
                dim=declared[0],
                optimizer=rule,
                initializer=initializer,
                absent="zeros" if is_fleet else "initial",
                policy=policy,
                admit=admit,
                ssd=ssd,
            )
            self._by_name[attr.name] = table, declared
        table, before = self._by_name[attr.name]
        if declared != before:
            raise SchemaMismatch(
                f"fleet.sparse_embedding: expected table {attr.name!r} as declared before, (dim,"
                f" rule, initializer, policy, entry, SSD) = {before}, found {declared}"
            )
        return table

    def clear(self) -> None:
        """Forget all tables: another job begins."""
        self._by_name.clear()


def _name_of(feature: str | Variable) -> str:
    return feature.name if isinstance(feature, Variable) else feature


def _policy_and_admission(
    entry: Entry | None, policy: Policy | None
) -> tuple[Policy, Admission | None]:
    if entry is not None and not isinstance(entry, Entry):
        raise _refused(f"entry of trireme.fleet, found {type(entry).__name__}")
    if isinstance(entry, ShowClickEntry):
        columns = ShowClick(entry.show_name, entry.click_name)
        if policy is None:
            return SparseAccessor(show_click=columns, **UNSET_ACCESSOR), None
        if not isinstance(policy, ScorePolicy) or policy.show_click is not None:
            raise _refused(
                "a ScorePolicy without columns beside ShowClickEntry, which names them, found"
                f" {policy}"
            )
        return dataclasses.replace(policy, show_click=columns), None
    admit = None if entry is None else entry.admission()
    return Policy() if policy is None else policy, admit


def _check_slot(slot: int, input: str | Sequence[str], policy: Policy) -> None:
    if not isinstance(policy, ScorePolicy) or not isinstance(input, str):
        raise _refused(
            f"slot of one feature of a table whose rows count shows, found {slot!r} of {input!r}:"
            " others do not record it"
        )
    if type(slot) is not int or not 0 <= slot < 2**32:
        raise _refused(f"0 <= slot < 2**32, found {slot!r}")


def _check_arguments(padding_idx: int | None, is_test: bool, table_class: str, dtype: str) -> None:
    if padding_idx is not None and padding_idx < 0:
        raise _refused(
            f"padding_idx >= 0, found {padding_idx}: a table has no number of rows to count back"
            " from"
        )
    if is_test:
        raise _refused("is_test=False; call model.eval() for evaluation")
    if TABLE_CLASSES.get(table_class) != "":
        why = TABLE_CLASSES.get(table_class, f"known are {', '.join(TABLE_CLASSES)}")
        raise _refused(f"table_class 'MemorySparseTable', found {table_class!r}: {why}")
    if dtype != "float32":
        raise _refused(f"dtype 'float32', found {dtype!r}")


def _refused(expected: str) -> BadRequest:
    return BadRequest(f"fleet.sparse_embedding: expected {expected}")
