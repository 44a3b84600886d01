// The column store against a plain list of rows, under random operations; and damaged pieces.
#include "feed/column_store.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "feed/strings.h"

using namespace trireme;
using test::Random;

namespace {

struct Row {
  std::vector<float> numbers;  // of all numbers columns, concatenated
  std::vector<std::string> strings;
  std::vector<std::vector<std::int64_t>> keys;  // of each feature
  std::vector<std::vector<float>> weights;
  bool operator==(const Row&) const = default;
};

struct Schema {
  Layout layout;
  std::size_t chunk_bytes = ColumnStore::kChunkBytes;

  ColumnStore make() const { return ColumnStore(layout, chunk_bytes); }
  std::size_t num_columns() const {
    return layout.dims.size() + layout.num_strings + layout.num_features;
  }
};

Schema random_schema(Random& random) {
  Schema schema{{{}, random.below(3), random.below(4), random.below(2) == 0},
                1 + random.below(4000)};
  for (std::size_t i = random.below(3); i > 0; --i) {
    schema.layout.dims.push_back(1 + random.below(3));
  }
  if (schema.num_columns() == 0) schema.layout.dims.push_back(1);
  return schema;
}

// Counts of all widths; often all the same.
std::size_t random_count(Random& random, std::uint64_t kind) {
  constexpr std::uint64_t kBounds[] = {1, 2, 3, 10, 200, 300, 70000};
  if (kind < 2) return kind;
  const std::uint64_t bound = kBounds[kind % 7];
  return random.below(40) == 0 ? random.below(bound)
                               : random.below(std::min<std::uint64_t>(bound, 5));
}

std::vector<Row> random_rows(Random& random, const Schema& schema, std::size_t n) {
  std::vector<Row> rows(n);
  for (std::size_t t = 0; t < schema.layout.num_strings; ++t) {
    const std::uint64_t kind = random.below(9);
    for (Row& row : rows) {
      row.strings.emplace_back(random_count(random, kind),
                               static_cast<char>('a' + random.below(26)));
    }
  }
  for (std::size_t f = 0; f < schema.layout.num_features; ++f) {
    const std::uint64_t kind = random.below(9);
    for (Row& row : rows) {
      auto& keys = row.keys.emplace_back(random_count(random, kind));
      auto& weights = row.weights.emplace_back(schema.layout.has_weights ? keys.size() : 0);
      for (auto& key : keys) key = static_cast<std::int64_t>(random.next());
      for (auto& weight : weights) weight = static_cast<float>(random.below(1000));
    }
  }
  const std::size_t width =
      std::accumulate(schema.layout.dims.begin(), schema.layout.dims.end(), std::size_t{0});
  for (Row& row : rows) {
    for (std::size_t i = 0; i < width; ++i) {
      row.numbers.push_back(static_cast<float>(random.below(1000)));
    }
  }
  return rows;
}

void append(ColumnStore& columns, const Schema& schema, const std::vector<Row>& rows, Pool& pool) {
  std::vector<std::vector<float>> numbers;
  std::size_t at = 0;
  for (const std::size_t dim : schema.layout.dims) {
    auto& column = numbers.emplace_back();
    for (const Row& row : rows) {
      column.insert(column.end(), row.numbers.begin() + static_cast<std::ptrdiff_t>(at),
                    row.numbers.begin() + static_cast<std::ptrdiff_t>(at + dim));
    }
    at += dim;
  }
  std::vector<std::string> strings(schema.layout.num_strings);
  std::vector<std::vector<std::int64_t>> text_offsets(schema.layout.num_strings, {0});
  for (std::size_t t = 0; t < schema.layout.num_strings; ++t) {
    for (const Row& row : rows) {
      strings[t] += row.strings[t];
      text_offsets[t].push_back(static_cast<std::int64_t>(strings[t].size()));
    }
  }
  std::vector<std::int64_t> keys;
  std::vector<float> weights;
  std::vector<std::int64_t> offsets = {0};
  for (std::size_t f = 0; f < schema.layout.num_features; ++f) {
    for (const Row& row : rows) {
      keys.insert(keys.end(), row.keys[f].begin(), row.keys[f].end());
      weights.insert(weights.end(), row.weights[f].begin(), row.weights[f].end());
      offsets.push_back(static_cast<std::int64_t>(keys.size()));
    }
  }
  ColumnSpans input{rows.size(), {}, {}, keys, offsets, weights};
  for (const auto& column : numbers) input.numbers.push_back(column);
  for (std::size_t t = 0; t < schema.layout.num_strings; ++t) {
    const auto* data = reinterpret_cast<const std::uint8_t*>(strings[t].data());
    input.strings.push_back({{data, strings[t].size()}, text_offsets[t]});
  }
  columns.append(input, pool);
}

std::vector<Row> rows_of(const ColumnStore& columns, const Schema& schema, std::size_t begin,
                         std::size_t end, Pool& pool) {
  const Columns batch = columns.batch(begin, end, pool);
  std::vector<Row> rows(end - begin);
  for (std::size_t b = 0; b < rows.size(); ++b) {
    for (std::size_t c = 0; c < schema.layout.dims.size(); ++c) {
      const float* first = batch.numbers[c].data() + b * schema.layout.dims[c];
      rows[b].numbers.insert(rows[b].numbers.end(), first, first + schema.layout.dims[c]);
    }
    for (const auto& [data, offsets] : batch.strings) {
      const auto* bytes = reinterpret_cast<const char*>(data.data());
      rows[b].strings.emplace_back(bytes + offsets[b], bytes + offsets[b + 1]);
    }
    for (std::size_t f = 0; f < schema.layout.num_features; ++f) {
      const auto from = batch.offsets[f * rows.size() + b];
      const auto to = batch.offsets[f * rows.size() + b + 1];
      rows[b].keys.emplace_back(batch.keys.data() + from, batch.keys.data() + to);
      rows[b].weights.emplace_back();
      if (schema.layout.has_weights) {
        rows[b].weights.back().assign(batch.weights.data() + from, batch.weights.data() + to);
      }
    }
  }
  return rows;
}

void check_equal(const ColumnStore& columns, const Schema& schema, const std::vector<Row>& model,
                 Random& random, Pool& pool) {
  CHECK_EQUAL(columns.num_rows(), model.size());
  CHECK(columns.num_bytes() >= columns.num_value_bytes());
  CHECK(rows_of(columns, schema, 0, model.size(), pool) == model);
  for (int i = 0; i < 5; ++i) {
    const std::size_t begin = random.below(model.size() + 1);
    const std::size_t end = begin + random.below(model.size() - begin + 1);
    const auto at = model.begin() + static_cast<std::ptrdiff_t>(begin);
    CHECK(rows_of(columns, schema, begin, end, pool) ==
          std::vector<Row>(at, at + static_cast<std::ptrdiff_t>(end - begin)));
  }
}

void shuffle(ColumnStore& columns, const Schema& schema, std::vector<Row>& model, Random& random,
             Pool& pool) {
  std::vector<std::size_t> chosen;
  const bool is_all = random.below(2) == 0;
  for (std::size_t c = 0; c < schema.num_columns(); ++c) {
    if (is_all || random.below(2) == 0) chosen.push_back(c);
  }
  const std::uint64_t seed = random.next();
  columns.shuffle(seed, chosen, pool);
  const Array<std::uint32_t> order = permutation(model.size(), seed);
  const std::vector<Row> before = model;
  for (std::size_t i = 0; i < model.size(); ++i) {
    const Row& from = before[order[i]];
    for (std::size_t c : chosen) {
      if (c < schema.layout.dims.size()) {
        const auto at =
            std::accumulate(schema.layout.dims.begin(),
                            schema.layout.dims.begin() + static_cast<std::ptrdiff_t>(c), 0);
        std::copy_n(from.numbers.begin() + at, schema.layout.dims[c],
                    model[i].numbers.begin() + at);
      } else if ((c -= schema.layout.dims.size()) < schema.layout.num_strings) {
        model[i].strings[c] = from.strings[c];
      } else {
        model[i].keys[c - schema.layout.num_strings] = from.keys[c - schema.layout.num_strings];
        model[i].weights[c - schema.layout.num_strings] =
            from.weights[c - schema.layout.num_strings];
      }
    }
  }
}

// Takes some chunks out, splits their rows into parts, and appends the pieces in another order.
void deal(ColumnStore& columns, const Schema& schema, std::vector<Row>& model, Random& random,
          Pool& pool) {
  const ColumnStore taken = columns.take_chunks(random.below(columns.num_chunks() + 2));
  const std::vector<Row> rows = rows_of(taken, schema, 0, taken.num_rows(), pool);
  model.erase(model.begin(), model.begin() + static_cast<std::ptrdiff_t>(rows.size()));
  const auto num_parts = static_cast<std::uint32_t>(1 + random.below(4));
  const bool is_by_text = schema.layout.num_strings > 0 && random.below(2) == 0;
  const Array<std::uint32_t> parts = is_by_text ? taken.parts_by_string(0, num_parts)
                                                : taken.random_parts(random.next(), num_parts);
  const auto pieces = taken.split(parts.span(), num_parts, pool);
  CHECK_EQUAL(pieces.size(), num_parts);
  for (std::uint32_t part = num_parts; part-- > 0;) {
    columns.append_piece(pieces[part].span());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (is_by_text) CHECK_EQUAL(parts[i], xxh64(rows[i].strings[0], 0) % num_parts);
      if (parts[i] == part) model.push_back(rows[i]);
    }
  }
}

void equals_a_list_of_rows(Random& random, int num_threads) {
  Pool pool(num_threads);
  const Schema schema = random_schema(random);
  ColumnStore columns = schema.make();
  std::vector<Row> model;
  for (int step = 0; step < 12; ++step) {
    switch (random.below(4)) {
      case 0:
        shuffle(columns, schema, model, random, pool);
        break;
      case 1:
        deal(columns, schema, model, random, pool);
        break;
      default:
        const std::vector<Row> rows = random_rows(random, schema, random.below(700));
        append(columns, schema, rows, pool);
        model.insert(model.end(), rows.begin(), rows.end());
    }
    check_equal(columns, schema, model, random, pool);
  }
}

template <class Function>
ErrorCode code_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

// Changes each byte of a piece, and cuts a piece at each length: refused or harmless, never an
// invalid read.
void refuses_damaged_pieces(Random& random) {
  Pool pool(1);
  const Schema schema{{{2}, 1, 2, true}};
  ColumnStore columns = schema.make();
  append(columns, schema, random_rows(random, schema, 20), pool);
  const auto pieces = columns.split(columns.random_parts(1, 1).span(), 1, pool);
  const std::span<const std::byte> piece = pieces[0].span();
  const std::size_t num_head_bytes = 16 + 4 * sizeof(ChunkShape);
  for (std::size_t size = 0; size < piece.size(); ++size) {
    const std::unique_ptr<std::byte[]> cut(new std::byte[size]);  // exact size, for the sanitizer
    std::memcpy(cut.get(), piece.data(), size);
    ColumnStore to = schema.make();
    CHECK(code_of([&] { to.append_piece({cut.get(), size}); }) == ErrorCode::kCorruption);
    CHECK_EQUAL(to.num_rows(), 0U);
  }
  for (std::size_t i = 0; i < num_head_bytes; ++i) {
    for (const unsigned flip : {1U, 0x80U, 0xFFU}) {
      std::vector<std::byte> damaged(piece.begin(), piece.end());
      damaged[i] ^= static_cast<std::byte>(flip);
      ColumnStore to = schema.make();
      try {
        to.append_piece(damaged);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kCorruption);
        continue;
      }
      to.batch(0, to.num_rows(), pool);
    }
  }
  const Schema other{{{3}, 1, 2, true}};
  ColumnStore to = other.make();
  CHECK(code_of([&] { to.append_piece(piece); }) == ErrorCode::kCorruption);
}

void refuses_wrong_calls() {
  Pool pool(1);
  const auto is_refused = [](const auto& call) { return code_of(call) == ErrorCode::kBadRequest; };
  CHECK(is_refused([] { ColumnStore({{0}, 0, 0, false}); }));
  CHECK(is_refused([] { ColumnStore({{}, 0, 0, false}); }));
  CHECK(is_refused([] { ColumnStore({{1}, 0, 0, false}, 0); }));
  ColumnStore columns({{1}, 0, 1, false});
  const std::vector<float> label = {1, 2};
  const std::vector<std::int64_t> keys = {5, 6, 7};
  const std::vector<std::int64_t> good = {0, 1, 3}, falling = {0, 2, 1}, beyond = {0, 1, 4};
  const std::vector<float> weights = {1, 2, 3};
  columns.append({2, {label}, {}, keys, good, {}}, pool);
  CHECK(is_refused([&] { columns.append({2, {label}, {}, keys, falling, {}}, pool); }));
  CHECK(is_refused([&] { columns.append({2, {label}, {}, keys, beyond, {}}, pool); }));
  CHECK(is_refused([&] { columns.append({1, {label}, {}, keys, good, {}}, pool); }));
  CHECK(is_refused([&] { columns.append({2, {}, {}, keys, good, {}}, pool); }));
  CHECK(is_refused([&] { columns.append({2, {label}, {}, keys, good, weights}, pool); }));
  CHECK(is_refused([&] { columns.batch(1, 3, pool); }));
  CHECK(is_refused([&] { columns.batch(2, 1, pool); }));
  const std::vector<std::size_t> unknown = {0, 2}, twice = {1, 1};
  CHECK(is_refused([&] { columns.shuffle(1, unknown, pool); }));
  CHECK(is_refused([&] { columns.shuffle(1, twice, pool); }));
  const std::vector<std::uint32_t> parts = {0, 2};
  CHECK(is_refused([&] { columns.split(parts, 2, pool); }));
  CHECK(is_refused([&] { columns.split({parts.data(), 1}, 3, pool); }));
  CHECK(is_refused([&] { columns.parts_by_string(0, 2); }));
  CHECK(is_refused([&] { columns.random_parts(0, 0); }));
  CHECK_EQUAL(columns.num_rows(), 2U);
}

void takes_little_memory_beyond_its_values(Random& random) {
  Pool pool(2);
  const Schema schema{{{1, 13}, 0, 30, false}};
  ColumnStore columns = schema.make();
  for (int i = 0; i < 4; ++i) append(columns, schema, random_rows(random, schema, 2000), pool);
  CHECK(columns.num_bytes() * 10 < columns.num_value_bytes() * 13);
}

void permutes_evenly() {
  std::vector<int> counts(24);
  for (std::uint64_t seed = 0; seed < 24000; ++seed) {
    const Array<std::uint32_t> order = permutation(4, seed);
    CHECK_EQUAL(std::set<std::uint32_t>(order.data(), order.data() + 4).size(), 4U);
    const std::size_t number =
        order[0] * 6 + (order[1] - (order[1] > order[0])) * 2 + (order[2] > order[3]);
    ++counts[number];
  }
  for (const int count : counts) CHECK(count > 850 && count < 1150);  // 1000 +- 5 deviations
}

}  // namespace

int main(int argc, char** argv) {
  Random random(test::seed_of(argc, argv));
  for (int i = 0; i < 30; ++i) equals_a_list_of_rows(random, 1 + i % 3);
  refuses_damaged_pieces(random);
  refuses_wrong_calls();
  takes_little_memory_beyond_its_values(random);
  permutes_evenly();
  return 0;
}
