"""Tables as users declare them, and their schemas, which servers, files and messages use."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from trireme.byte_size import parse_bytes
from trireme.errors import (
    BadRequest,
    check_choice,
    check_counts,
    check_flags,
    check_kind,
)
from trireme.feature_values import FeatureValues
from trireme.initializer import INITIALIZERS, Initializer, Uniform
from trireme.optim import SGD, Adagrad, Rule
from trireme.policy import (
    Admission,
    CountFilter,
    Policy,
    ScoreFilter,
    ScorePolicy,
    admission_of,
    policy_of,
)

DIM_MAX = 4096
CLASSES_MAX = 16
NAME_BYTES_MAX = 200
DTYPES = ("float32", "bfloat16", "float16")
RESERVED_CHARACTER = "\x1f"  # in names of tables


class RowClassId(NamedTuple):
    """One row class of a table: what keys are pulled and pushed by."""

    table: str
    row_class: int = 0


@dataclass(frozen=True)
class TableTier:
    """That rows of a table may lie on SSD. memory_bytes: what the table takes of a server's memory;
    None: a part of the server's --memory.
    """

    memory_bytes: int | None = None


@dataclass(frozen=True)
class TableSchema:
    """What may never change in the life of a table. Schemas are compared by value.

    Attributes:
        dims: weights per row of each row class; class 0 is the default. At most 16 classes,
            including that of the heads.
        dtype: of the weights in memory; wide rows, files and messages have float32.
        rule: name and fixed values of the update rule, `Rule.fixed()`.
        initializer: (kind, a, b), `Initializer.spec()`.
        absent: the result of a lookup of a key without a row: its "initial" weights, or "zeros".
        policy: how long rows live, `Policy.fixed()`.
        admission: which keys get a row, `Admission.fixed()`; None: all.
        salt: not compared: whether each feature has keys of its own; None: nobody has said.
        tier: not compared, nor in checkpoints: where rows may lie. None: as the servers say.
    """

    name: str
    dims: tuple[int, ...]
    dtype: str
    rule: Mapping[str, Any]
    initializer: tuple[str, float, float]
    seed: int
    absent: str = "initial"
    policy: Mapping[str, Any] = field(default_factory=lambda: Policy().fixed())
    admission: Mapping[str, Any] | None = None
    salt: bool | None = field(default=None, compare=False)
    tier: TableTier | None = field(default=None, compare=False)

    @property
    def dim(self) -> int:
        return self.dims[0]

    @property
    def wide_dim(self) -> int:
        """The largest dim: that of wide rows."""
        return max(self.dims)

    @property
    def head_class(self) -> int | None:
        """The class of rows that have only weight 0 so far; None: rows are whole from the start."""
        has_heads = self.policy.get("embedx_threshold") is not None and self.wide_dim > 1
        return len(self.dims) if has_heads else None

    def dim_of(self, row_class: int) -> int:
        """Raises BadRequest for a class that the table does not have."""
        if not 0 <= row_class < len(self.dims):
            raise BadRequest(
                f"table {self.name!r}: expected a row class below {len(self.dims)},"
                f" found {row_class}"
            )
        return self.dims[row_class]

    def width_of(self, row_class: int) -> int:
        """Floats per key in a lookup of a class: the weights, and before them show and click if the
        policy pulls statistics.
        """
        return self.dim_of(row_class) + (2 if self.pulls_statistics else 0)

    @property
    def is_scored(self) -> bool:
        """Whether rows count shows and clicks."""
        return bool(self.policy["name"] == ScorePolicy.name)

    @property
    def pulls_statistics(self) -> bool:
        """Whether lookups return show and click before the weights."""
        return bool(self.policy.get("pulls_statistics", False))

    @property
    def columns(self) -> tuple[str, ...]:
        """The per-key columns that pushes carry besides gradients (trireme.protocol.columns)."""
        counts = self.admission is not None and self.admission["name"] == CountFilter.name
        return (("show_click", "feature") if self.is_scored else ()) + (
            ("count",) if counts else ()
        )

    def agrees_with(self, other: TableSchema) -> bool:
        """Whether they are equal, with the same salt where both know it."""
        salts = {self.salt, other.salt} - {None}
        return self == other and len(salts) < 2

    def to_wire(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dims": list(self.dims),
            "dtype": self.dtype,
            "rule": dict(self.rule),
            "initializer": list(self.initializer),
            "seed": self.seed,
            "columns": list(self.columns),
            "absent": self.absent,
            "policy": dict(self.policy),
            "admission": None if self.admission is None else dict(self.admission),
            **({} if self.salt is None else {"salt": self.salt}),
        }

    def differing_fields(self, other: TableSchema) -> str:
        """What differs, as "expected NAME VALUE, found VALUE", by the names of `to_wire`."""
        return differing_fields(self.to_wire(), other.to_wire())

    def declaration(self) -> dict[str, Any]:
        """`to_wire`, and where rows may lie."""
        tier = {} if self.tier is None else {"tier": {"memory_bytes": self.tier.memory_bytes}}
        return {**self.to_wire(), **tier}

    @staticmethod
    def from_wire(body: Mapping[str, Any]) -> TableSchema:
        """Raises BadRequest if a field is missing or has the wrong type."""
        try:
            kind, a, b = body["initializer"]
            columns = list(body["columns"])
            schema = TableSchema(
                name=str(body["name"]),
                dims=tuple(int(dim) for dim in body["dims"]),
                dtype=str(body["dtype"]),
                rule=dict(body["rule"]),
                initializer=(str(kind), float(a), float(b)),
                seed=int(body["seed"]),
                # checkpoints of 0.1.0 lack these
                absent=str(body.get("absent", "initial")),
                policy=dict(body.get("policy", Policy().fixed())),
                admission=None if (admission := body.get("admission")) is None else dict(admission),
                salt=None if (salt := body.get("salt")) is None else bool(salt),
                tier=None if (tier := body.get("tier")) is None else TableTier(**tier),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"TableSchema: expected a complete schema, found {body!r}") from error
        _check_schema(schema)
        if columns != list(schema.columns):
            raise BadRequest(
                f"Table {schema.name!r}: expected columns {list(schema.columns)}, as its policy and"
                f" admission have them, found {columns}"
            )
        return schema


def differing_fields(wanted: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The fields of two mappings that differ, as "expected {...}, found {...}"."""
    names = [name for name in {**wanted, **other} if wanted.get(name) != other.get(name)]
    left, right = ({name: one.get(name) for name in names} for one in (wanted, other))
    return f"expected {left}, found {right}"


def _check_schema(schema: TableSchema) -> None:
    try:
        name_bytes = len(schema.name.encode())
    except UnicodeEncodeError as error:  # a half of a surrogate pair
        raise BadRequest(
            f"Table: expected a name that UTF-8 can write, found {schema.name!r}"
        ) from error
    if not 0 < name_bytes <= NAME_BYTES_MAX:
        raise BadRequest(
            f"Table: expected a name of 1 to {NAME_BYTES_MAX} bytes, found {name_bytes}"
        )
    memory = None if schema.tier is None else schema.tier.memory_bytes
    if memory is not None:
        check_counts(f"Table {schema.name!r}", memory=memory)
    if RESERVED_CHARACTER in schema.name:
        raise BadRequest(
            f"Table: expected a name without {RESERVED_CHARACTER!r}, found {schema.name!r}"
        )
    is_right = len(schema.dims) >= 1 and all(1 <= dim <= DIM_MAX for dim in schema.dims)
    if not is_right or len(schema.dims) + (schema.head_class is not None) > CLASSES_MAX:
        raise BadRequest(
            f"Table {schema.name!r}: expected 1 to {CLASSES_MAX} row classes of dim 1 to {DIM_MAX},"
            f" one of them for rows below an embedx_threshold, found {schema.dims}"
        )
    check_choice(f"Table {schema.name!r}", DTYPES, dtype=schema.dtype)
    check_choice(f"Table {schema.name!r}", ("initial", "zeros"), absent=schema.absent)
    policy_of(schema.policy)  # raises BadRequest if it is none
    if schema.admission is not None:
        admission = admission_of(schema.admission)
        if isinstance(admission, ScoreFilter) and not schema.is_scored:
            raise BadRequest(
                f"Table {schema.name!r}: ScoreFilter needs a ScorePolicy, found {schema.policy}"
            )
    if not 0 <= schema.seed < 2**64:
        raise BadRequest(f"Table {schema.name!r}: expected 0 <= seed < 2**64, found {schema.seed}")


class Table:
    """A named set of rows, one per key. Declaring it costs nothing: servers create it on first use.

    Attributes:
        feature_numbers: feature -> the number that scored rows store as their feature. Default: the
            feature's name if it is a number, else its index in the table.
        features: those that read the table, and the kind of their values.

    Args:
        name: in servers and checkpoints.
        dim: weights per row, D.
        dims: instead of `dim`, the dim of each feature that reads the table; rows take the memory
            of their feature's dim. Different dims need `salt`: otherwise an id of two features
            would be one row of two dims.
        optimizer: the update rule, `trireme.optim.*`.
        initializer: the weights of a row that has not been pushed yet, `trireme.initializer.*`.
        dtype: of the weights in the servers' memory: "float32", or 16 bits, "bfloat16" or "float16"
            (up to 65504, with a relative precision of 2**-11; larger numbers are clipped). Weights
            of 16 bits are rounded stochastically, so that the mean is right and small updates are
            not lost; the draw depends on seed, key, stream, sequence and element alone, so a run
            can be repeated. State, gradients and the results of modules are float32.
        salt: give every feature a key space of its own, so that equal ids of two features are two
            rows.
        seed: of the initial weights.
        absent: what a key without a row looks like: its "initial" weights, or "zeros".
        admit: which keys get a row, one of `trireme.policy`; None: every key that is pushed.
        policy: how long rows live and what they remember, one of `trireme.policy`.
        ssd: rarely used rows may lie on SSD, in the servers' --ssd_dir (docs/tiers.md),
            which they must have. Otherwise the servers decide.
        memory: with `ssd`, what the table may take of each server's memory, as "2GiB" or in bytes;
            None: a part of the servers' --memory.

    Raises:
        BadRequest: a value is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        dim: int | None = None,
        dims: Mapping[str, int] | None = None,
        optimizer: Rule | None = None,
        initializer: Initializer | None = None,
        dtype: str = "float32",
        salt: bool = False,
        seed: int = 0,
        absent: str = "initial",
        admit: Admission | None = None,
        policy: Policy | None = None,
        ssd: bool = False,
        memory: str | int | None = None,
    ) -> None:
        check_kind("Table", "name", name, str, "a string")
        check_kind(f"Table {name!r}", "seed", seed, int, "a whole number")
        check_flags(f"Table {name!r}", salt=salt, ssd=ssd)
        if initializer is not None:
            example = "one of trireme.initializer, such as tr.initializer.Normal(0.01)"
            check_kind(f"Table {name!r}", "initializer", initializer, INITIALIZERS, example)
        self.optimizer = Adagrad() if optimizer is None else optimizer
        example = "one of trireme.optim, such as tr.optim.Adagrad(lr=0.05)"
        check_kind(f"Table {name!r}", "optimizer", self.optimizer, Rule, example)
        self.policy = Policy() if policy is None else policy
        example = "one of trireme.policy, such as tr.policy.Policy(ttl_s=86400)"
        check_kind(f"Table {name!r}", "policy", self.policy, Policy, example)
        if admit is not None:
            example = "one of trireme.policy, such as tr.policy.CountFilter(2)"
            check_kind(f"Table {name!r}", "admit", admit, Admission, example)
        self.salt = bool(salt)
        self.feature_numbers: dict[str, int] = {}
        self.features = FeatureValues()
        self._dim_of = _checked_dims(name, dim, dims, self.salt)
        self.schema = TableSchema(
            name=name,
            dims=tuple(dict.fromkeys(self._dim_of.values())) or (dim or 0,),
            dtype=dtype,
            rule=self.optimizer.fixed(),
            initializer=(Uniform() if initializer is None else initializer).spec(),
            seed=seed,
            absent=absent,
            policy=self.policy.fixed(),
            admission=None if admit is None else admit.fixed(),
            salt=self.salt,
            tier=_checked_tier(name, ssd, memory),
        )
        _check_schema(self.schema)
        self.row_class = 0
        self.parts: tuple[Table, ...] = (self,)
        if len(self.schema.dims) > 1:
            others = [copy.copy(self) for _ in self.schema.dims[1:]]
            self.parts += tuple(others)
            for row_class, other in enumerate(others, 1):
                other.row_class, other.parts = row_class, self.parts

    def of_feature(self, feature: str) -> Table:
        """This table as a feature reads it: rows of the feature's dim. One of `parts`.

        Raises:
            BadRequest: the table's dims do not name the feature.
        """
        if not self._dim_of:
            return self
        if feature not in self._dim_of:
            raise BadRequest(
                f"Table {self.name!r}: expected a feature of its dims, {sorted(self._dim_of)},"
                f" found {feature!r}"
            )
        return self.parts[self.schema.dims.index(self._dim_of[feature])]

    @property
    def class_id(self) -> RowClassId:
        """By what rows of this table and row class are pulled and pushed."""
        return RowClassId(self.name, self.row_class)

    @classmethod
    def of_schema(cls, schema: TableSchema) -> Table:
        """The table that a checkpoint describes, to read it; it has no rates to train with."""
        table = cls(schema.name, dim=schema.dim, optimizer=SGD(lr=0.0))
        table.schema = schema
        return table

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def dim(self) -> int:
        return self.schema.dim_of(self.row_class)

    @property
    def width(self) -> int:
        """Floats that lookups answer per key: dim, two more if the policy pulls statistics."""
        return self.schema.width_of(self.row_class)

    @property
    def seed(self) -> int:
        return self.schema.seed

    def __getitem__(self, values: object) -> NoReturn:
        """Raises BadRequest: a table is a declaration; its rows are looked at through a view."""
        raise BadRequest(
            f"table {self.name!r} is a declaration and has no rows here: to look at those on the"
            f" servers write trireme.TableView(table, feature)[values]"
        )

    def __repr__(self) -> str:
        dim = f"dims={dict(self._dim_of)}" if self._dim_of else f"dim={self.dim}"
        return f"Table({self.name!r}, {dim}, optimizer={self.optimizer})"


def _checked_tier(name: str, ssd: object, memory: str | int | None) -> TableTier | None:
    if type(ssd) is not bool or (memory is not None and not ssd):
        raise BadRequest(
            f"Table {name!r}: expected memory= only with ssd=True, found memory={memory!r},"
            f" ssd={ssd!r}"
        )
    if not ssd:
        return None
    if memory is None:
        return TableTier()
    return TableTier(parse_bytes(f"Table {name!r}: memory", str(memory)))


_A_DIM = f"as a whole number from 1 to {DIM_MAX}"


def _is_dim(dim: object) -> bool:
    return type(dim) is int and 1 <= dim <= DIM_MAX


def _checked_dims(
    name: str, dim: int | None, dims: Mapping[str, int] | None, salt: bool
) -> dict[str, int]:
    if (dim is None) == (dims is None):
        raise BadRequest(f"Table {name!r}: expected dim or dims, found {dim} and {dims}")
    if dims is None:
        if not _is_dim(dim):
            raise BadRequest(f"Table {name!r}: expected dim {_A_DIM}, found {dim!r}")
        return {}
    if not dims or not all(map(_is_dim, dims.values())):
        raise BadRequest(
            f"Table {name!r}: expected dims {{feature: dim}}, each {_A_DIM}, found {dims!r}"
        )
    if len(set(dims.values())) > 1 and not salt:
        raise BadRequest(
            f"Table {name!r}: expected salt=True with different dims, as an id of two features"
            f" would be one row of two dims, found False and {dict(dims)}"
        )
    return dict(dims)
