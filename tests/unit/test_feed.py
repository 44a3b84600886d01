"""Batch operations of the core, called from Python, against NumPy and torch.

The C++ tests compare every result with a plain model; here are the bindings and other oracles.
"""

import numpy as np
import pytest
import torch

from trireme import _core
from trireme.errors import BadRequest

MASK = (1 << 64) - 1


@pytest.fixture(params=[1, 3])
def pool(request):
    return _core.Pool(request.param)


def random_values(rng, n):
    """Zipf-like, with the extreme keys among them."""
    values = rng.zipf(1.3, n).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values[rng.integers(0, n, n // 10)] = 0
    values[rng.integers(0, n, n // 10)] = MASK
    return values


def bucket(keys):
    out = np.empty(len(keys), np.uint16)
    _core.buckets(keys, out)
    return out


def test_distinct_agrees_with_numpy(pool):
    values = random_values(np.random.default_rng(1), 40_000)
    keys = _core.distinct(np.array_split(values, 7), pool)
    np.testing.assert_array_equal(np.sort(keys), np.unique(values))
    assert (np.diff(bucket(keys).astype(int)) >= 0).all()
    assert not len(_core.distinct([], pool))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("padding_key", [None, 0, MASK])
def test_unique_agrees_with_numpy(pool, seed, padding_key):
    rng = np.random.default_rng(seed)
    values = random_values(rng, int(rng.integers(1, 40_000)))
    keys, index, order, starts = _core.unique(values, pool, padding_key)
    is_key = np.ones(len(values), bool) if padding_key is None else values != padding_key

    expected, first = np.unique(values[is_key], return_index=True)
    by_bucket = np.lexsort((first, bucket(expected)))
    np.testing.assert_array_equal(keys, expected[by_bucket])
    np.testing.assert_array_equal(keys[index[is_key]], values[is_key])
    assert (index[~is_key] == -1).all()
    np.testing.assert_array_equal(order, np.argsort(index, kind="stable")[(~is_key).sum() :])
    np.testing.assert_array_equal(np.diff(starts), np.bincount(index[is_key], minlength=len(keys)))

    again = _core.occurrences(index, len(keys), pool)
    np.testing.assert_array_equal(again[0], order)
    np.testing.assert_array_equal(again[1], starts)


def test_unique_of_nothing(pool):
    keys, index, order, starts = _core.unique(np.empty(0, np.uint64), pool)
    assert (len(keys), len(index), len(order), starts.tolist()) == (0, 0, 0, [0])


def random_lookup(rng, features, batch, num_rows):
    sizes = rng.integers(0, 4, features * batch)
    offsets = np.concatenate([[0], np.cumsum(sizes)]) + 3
    index = rng.integers(-1, num_rows, offsets[-1] + 2, dtype=np.int32)
    weights = rng.standard_normal(len(index)).astype(np.float32)
    return index, offsets, weights


@pytest.mark.parametrize("dim", [1, 4, 9, 64])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gather_and_scatter_agree_with_embedding_bag(pool, dim, is_weighted):
    rng = np.random.default_rng(dim)
    features, batch, num_rows = 3, 50, 40
    index, offsets, weights = random_lookup(rng, features, batch, num_rows)
    rows = rng.standard_normal((num_rows, dim)).astype(np.float32)
    grad = rng.standard_normal((batch, features, dim)).astype(np.float32)

    out = np.empty_like(grad)
    _core.gather(rows, index, offsets, weights if is_weighted else None, features, out, pool)
    bags = np.empty(len(index), np.int32)
    _core.bag_of(offsets, len(index), bags)
    order, starts = _core.occurrences(index, num_rows, pool)
    row_grad = np.empty_like(rows)
    _core.scatter(grad, order, starts, bags, weights if is_weighted else None, row_grad, pool)

    # torch's padding row is one more row; its bags begin at 0 and end with the ids.
    leaf = torch.from_numpy(np.vstack([rows, np.zeros((1, dim), np.float32)])).requires_grad_()
    ids = torch.from_numpy(index[offsets[0] : offsets[-1]].astype(np.int64))
    expected = torch.nn.functional.embedding_bag(
        torch.where(ids < 0, num_rows, ids),
        leaf,
        torch.from_numpy(offsets[:-1] - offsets[0]),
        mode="sum",
        per_sample_weights=(
            torch.from_numpy(weights[offsets[0] : offsets[-1]]) if is_weighted else None
        ),
        padding_idx=num_rows,
    )
    expected = expected.view(features, batch, dim).transpose(0, 1)
    expected.backward(torch.from_numpy(grad))
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(row_grad, leaf.grad.numpy()[:-1], rtol=1e-5, atol=1e-5)


def test_one_position_per_bag_needs_no_offsets(pool):
    rng = np.random.default_rng(0)
    features, batch, num_rows, dim = 5, 700, 300, 9
    index = rng.integers(-1, num_rows, features * batch, dtype=np.int32)
    rows = rng.standard_normal((num_rows, dim)).astype(np.float32)
    without, with_offsets = np.empty((2, batch, features, dim), np.float32)
    _core.gather(rows, index, None, None, features, without, pool)
    _core.gather(rows, index, np.arange(features * batch + 1), None, features, with_offsets, pool)
    np.testing.assert_array_equal(without, with_offsets)
    expected = np.where((index >= 0)[:, None], rows[index], 0).reshape(features, batch, dim)
    np.testing.assert_array_equal(without, expected.transpose(1, 0, 2))


def test_scatter_reads_a_slice_of_a_wider_gradient_in_place(pool):
    rng = np.random.default_rng(0)
    index = rng.integers(0, 9, 3 * 40, dtype=np.int32)
    order, starts = _core.occurrences(index, 9, pool)
    wide = rng.standard_normal((40, 3 * 5 + 4)).astype(np.float32)
    part = wide[:, 2:17].reshape(40, 3, 5)
    assert np.shares_memory(part, wide)
    actual, expected = np.empty((2, 9, 5), np.float32)
    _core.scatter(part, order, starts, None, None, actual, pool)
    _core.scatter(part.copy(), order, starts, None, None, expected, pool)
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(BadRequest, match=r"found \(15, 1, 3\)"):
        _core.scatter(
            part.copy().reshape(40, 5, 3).swapaxes(1, 2), order, starts, None, None, actual, pool
        )


def test_split_groups_positions_by_owner(pool):
    rng = np.random.default_rng(0)
    keys = random_values(rng, 30_000)
    owners = rng.integers(0, 5, 4096).astype(np.uint16)
    order, counts = _core.split(keys, owners, 5, pool)
    owner = owners[bucket(keys)]
    np.testing.assert_array_equal(order, np.argsort(owner, kind="stable"))
    np.testing.assert_array_equal(counts, np.bincount(owner, minlength=5))


def test_merge_sums_in_order_of_the_parts(pool):
    rng = np.random.default_rng(0)
    parts = []
    for scale in (1.0, 0.5, 1.0):
        keys = np.unique(random_values(rng, 2000))
        parts.append((keys, rng.standard_normal((len(keys), 7)).astype(np.float32), scale))
    keys, grads, index = _core.merge(parts, pool)
    everything = np.concatenate([part[0] for part in parts])
    np.testing.assert_array_equal(keys, _core.unique(everything, pool)[0])
    np.testing.assert_array_equal(keys[index], everything)
    row = {int(key): i for i, key in enumerate(keys)}
    expected = np.zeros_like(grads)
    for part_keys, part_grads, scale in parts:
        expected[[row[int(key)] for key in part_keys]] += np.float32(scale) * part_grads
    np.testing.assert_array_equal(grads, expected)


def shows_of(ids, num_keys, examples, features, pool):
    """sum_shows for rows `ids` of one bag per position, feature-major."""
    order, starts = _core.occurrences(ids.reshape(-1), num_keys, pool)
    show_click, feature = np.empty((num_keys, 2), np.float32), np.empty(num_keys, np.uint32)
    _core.sum_shows(
        examples, order, starts, None, ids.shape[1], features, show_click, feature, pool
    )
    return show_click, feature


def test_shows_are_summed_over_the_occurrences_of_each_row(pool):
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, 5000, (40, 700)).astype(np.int32)
    examples = rng.integers(0, 9, (700, 2)).astype(np.float32)
    features = rng.integers(0, 2**32, 40).astype(np.uint32)
    show_click, feature = shows_of(ids, 5000, examples, features, pool)
    expected = np.zeros((5000, 2))
    firsts = np.zeros(5000, np.uint32)
    for f, b in zip(*np.nonzero(ids >= 0), strict=True):
        if not expected[ids[f, b]].any() and firsts[ids[f, b]] == 0:
            firsts[ids[f, b]] = features[f]
        expected[ids[f, b]] += examples[b]
    np.testing.assert_array_equal(show_click, expected)
    np.testing.assert_array_equal(feature, firsts)


def test_without_columns_each_occurrence_is_a_show(pool):
    ids = np.array([[0, 2, 0], [2, -1, 2]], np.int32)
    show_click, feature = shows_of(ids, 4, None, np.array([7, 9], np.uint32), pool)
    assert show_click.tolist() == [[2, 0], [0, 0], [3, 0], [0, 0]]
    assert feature.tolist() == [7, 0, 7, 0]


def test_shows_of_positions_outside_of_all_bags_do_not_count(pool):
    order, starts, bags = i32(0, 1, 2), i32(0, 2, 3), i32(-1, 1, -1)
    show_click, feature = np.empty((2, 2), np.float32), np.empty(2, np.uint32)
    arguments = np.array([7], np.uint32), show_click, feature, pool
    _core.sum_shows(None, order, starts, bags, 2, *arguments)
    assert (show_click.tolist(), feature.tolist()) == ([[1, 0], [0, 0]], [7, 0])
    for wrong in (
        {"order": i32(0, 1, 3)},
        {"starts": i32(0, 4, 3)},
        {"starts": i32(2, 1, 3)},
        {"bags": i32(-1, 2, -1)},
        {"bags": i32(-2, 1, -1)},
    ):
        values = {"order": order, "starts": starts, "bags": bags, **wrong}
        with pytest.raises(BadRequest, match="sum_shows: expected starts that rise to at most 3"):
            _core.sum_shows(None, values["order"], values["starts"], values["bags"], 2, *arguments)


def test_merge_returns_a_single_part_as_it_is(pool):
    keys, grads = np.array([9, 4], np.uint64), np.ones((2, 3), np.float32)
    actual = _core.merge([(keys, grads, 1.0)], pool)
    assert actual[0] is keys
    assert actual[1] is grads
    assert actual[2].tolist() == [0, 1]
    np.testing.assert_array_equal(_core.merge([(keys, grads, 2.0)], pool)[1], grads * 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: _core.merge([], p), "merge: expected at least 1 part, found 0"),
        (
            lambda p: _core.merge([(np.zeros(2, np.uint64), np.zeros((3, 1), np.float32), 1.0)], p),
            "is 3, expected 2",
        ),
        (
            lambda p: _core.gather(
                np.zeros((2, 3), np.float32),
                np.zeros(4, np.int32),
                None,
                None,
                2,
                np.zeros((3, 2, 3), np.float32),
                p,
            ),
            "gather: the size of index without offsets is 4, expected 6",
        ),
        (
            lambda p: _core.gather(
                np.zeros((2, 3), np.float32),
                np.zeros(6, np.int32),
                None,
                np.zeros(5, np.float32),
                2,
                np.zeros((3, 2, 3), np.float32),
                p,
            ),
            "gather: the size of weights is 5, expected 6",
        ),
        (
            lambda p: _core.gather(
                np.zeros((2, 3), np.float32),
                np.array([0, 1, 2, 0], np.int32),
                None,
                None,
                2,
                np.zeros((2, 2, 3), np.float32),
                p,
            ),
            "found 2 at 2",
        ),
        (lambda p: _core.occurrences(np.array([0, 5], np.int32), 5, p), "found 5 at 1"),
        (lambda p: _core.occurrences(np.array([0], np.int32), -1, p), "-1, expected >= 0"),
        (
            lambda p: _core.split(np.zeros(1, np.uint64), np.zeros(4096, np.uint16), 0, p),
            "expected owners below 0, found 0 for bucket 0",
        ),
        (
            lambda p: _core.bag_of(np.array([0, 2, 1]), 2, np.zeros(2, np.int32)),
            "expected offsets\\[2\\] from 2 to 2, found 1",
        ),
    ],
)
def test_a_wrong_call_is_refused_with_its_values(pool, call, message):
    with pytest.raises(BadRequest, match=message):
        call(pool)


def read_only(array):
    array.flags.writeable = False
    return array


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def i64(*values):
    return np.array(values, np.int64)


def u64(*values):
    return np.array(values, np.uint64)


# Per function: good arguments by name, and which of them are written. POOL stands for the pool.
POOL = object()
CALLS = {
    "unique": ({"values": u64(3, 4), "pool": POOL}, ()),
    "occurrences": ({"index": i32(0, 1), "num_rows": 2, "pool": POOL}, ()),
    "gather": (
        {
            "rows": f32(4, 3),
            "index": i32(0, 1, 2, 3, 0, 1),
            "offsets": np.arange(7),
            "weights": f32(6),
            "num_features": 2,
            "out": f32(3, 2, 3),
            "pool": POOL,
        },
        ("out",),
    ),
    "scatter": (
        {
            "grad": f32(3, 2, 3),
            "order": i32(0, 1, 2, 3, 4, 5),
            "starts": i32(0, 2, 6),
            "bags": i32(0, 1, 2, 3, 4, 5),
            "weights": f32(6),
            "out": f32(2, 3),
            "pool": POOL,
        },
        ("out",),
    ),
    "sum_shows": (
        {
            "examples": f32(2, 2),
            "order": i32(0, 1),
            "starts": i32(0, 1, 2),
            "bags": i32(0, 1),
            "num_examples": 2,
            "features": np.zeros(2, np.uint32),
            "show_click": f32(2, 2),
            "feature": np.zeros(2, np.uint32),
            "pool": POOL,
        },
        ("show_click", "feature"),
    ),
    "bag_of": ({"offsets": i64(0, 1, 2), "n": 2, "out": i32(0, 0)}, ("out",)),
    "is_one_per_bag": ({"offsets": i64(0, 1, 2)}, ()),
    "mean_weights": ({"index": i32(0, 1), "offsets": i64(0, 1, 2), "out": f32(2)}, ("out",)),
    "salt": (
        {"values": u64(3, 4), "offsets": i64(0, 1, 2), "salts": u64(5, 6), "out": u64(0, 0)},
        ("out",),
    ),
    "split": (
        {
            "keys": u64(3, 4),
            "owners": np.zeros(4096, np.uint16),
            "num_owners": 1,
            "pool": POOL,
        },
        (),
    ),
}


WIDTHS = {2: 4, 4: 8, 8: 4}  # another size in bytes for each


def bad_arrays(array, is_written):
    """The same array with another dtype, rank, layout, or not writable."""
    yield "dtype", array.astype(np.float64 if array.dtype != np.float64 else np.float32)
    yield "width", array.astype(np.dtype(f"{array.dtype.kind}{WIDTHS[array.dtype.itemsize]}"))
    yield "rank", array[None]
    if array.ndim < 3:  # of the gradient, slices may be read in place
        yield "layout", np.repeat(array, 2, axis=-1)[..., ::2]
    if is_written:
        yield "writable", read_only(array.copy())
    yield "type", array.tolist()


@pytest.mark.parametrize("function", CALLS)
def test_arrays_are_never_converted(function, pool):
    arguments, written = CALLS[function]
    good = {name: pool if value is POOL else value for name, value in arguments.items()}
    call = getattr(_core, function)
    call(**good)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for name, array in arrays.items():
        for what, bad in bad_arrays(array, name in written):
            print(f"{function}: {name} with another {what}")
            with pytest.raises(TypeError):
                call(**(good | {name: bad}))


def test_merge_never_converts_an_array(pool):
    keys, grads = np.zeros(2, np.uint64), np.zeros((2, 1), np.float32)
    for part in [(keys.astype(np.int64), grads, 1.0), (keys, grads.astype(float), 1.0), (keys, 1)]:
        with pytest.raises(TypeError, match="merge: expected parts"):
            _core.merge([part], pool)


def test_distinct_never_converts_an_array(pool):
    values = u64(3, 4)
    _core.distinct([read_only(values.copy()), values], pool)
    for what, bad in bad_arrays(values, is_written=False):
        print(f"distinct: parts with another {what}")
        with pytest.raises(TypeError):
            _core.distinct([values, bad], pool)


def test_inputs_may_be_read_only(pool):
    for function, (good, written) in CALLS.items():
        arguments = {
            key: read_only(value.copy())
            if isinstance(value, np.ndarray) and key not in written
            else (pool if value is POOL else value)
            for key, value in good.items()
        }
        getattr(_core, function)(**arguments)


@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_threads_computes_the_same_bits(seed):
    rng = np.random.default_rng(seed)
    values = random_values(rng, 5 * 9000)
    weights = rng.standard_normal(len(values)).astype(np.float32)
    grad = rng.standard_normal((9000, 5, 9)).astype(np.float32)
    results = []
    for threads in (1, 2, 7):
        pool = _core.Pool(threads)
        keys, index, order, starts = _core.unique(values, pool, 0)
        row_grad = np.empty((len(keys), 9), np.float32)
        _core.scatter(grad, order, starts, None, weights, row_grad, pool)
        out = np.empty_like(grad)
        _core.gather(row_grad, index, None, weights, 5, out, pool)
        split = _core.split(keys, np.arange(4096, dtype=np.uint16) % 3, 3, pool)
        merged = _core.merge([(keys, row_grad, 0.3), (keys[::-1].copy(), row_grad, 1.0)], pool)
        results.append([keys, index, order, starts, row_grad, out, *split, *merged])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()
