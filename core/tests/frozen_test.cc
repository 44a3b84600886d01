// Frozen rows: written rows are found, damaged bytes are refused or read within the file, and many
// threads look up at once.
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "frozen/rows.h"
#include "frozen/table.h"
#include "frozen/writer.h"

using namespace trireme;

namespace {

constexpr int kDim = 3;
constexpr int kStatistics = 2;
constexpr int kWidth = kStatistics + kDim;

using Row = std::array<float, kWidth>;
struct Value {
  bool is_removed;
  Row row;
};
using Rows = std::map<std::uint64_t, Value>;
using Bytes = std::vector<std::uint8_t>;

Rows random_rows(test::Random& random, std::size_t n, bool with_removed) {
  Rows rows;
  while (rows.size() < n) {
    Value value{.is_removed = with_removed && random.below(3) == 0, .row = {}};
    for (float& x : value.row) x = static_cast<float>(random.below(1000));
    rows[rows.empty() ? 0 : random.next()] = value;
  }
  return rows;
}

Bytes file_of(const Rows& rows, bool has_flags) {
  FrozenWriter writer(Encoding::kFloat32, kStatistics, kDim, has_flags, 0);
  std::vector<std::vector<std::uint64_t>> keys_of(kNumBuckets);
  for (const auto& [key, value] : rows) keys_of[bucket_of(key)].push_back(key);
  Bytes file;
  for (const std::vector<std::uint64_t>& keys : keys_of) {
    Bytes values(keys.size() * writer.value_bytes());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Value& value = rows.at(keys[i]);
      std::uint8_t* to = values.data() + i * writer.value_bytes();
      if (has_flags) to[0] = value.is_removed;
      std::memcpy(to + (has_flags ? 8 : 0), value.row.data(), sizeof(Row));
    }
    const Array<std::uint8_t> piece = writer.add(keys, values);
    file.insert(file.end(), piece.data(), piece.data() + piece.size());
  }
  const Array<std::uint8_t> end = writer.finish();
  file.insert(file.end(), end.data(), end.data() + end.size());
  return file;
}

std::shared_ptr<const FrozenRows> opened(const Bytes& bytes) {
  const std::vector<FrozenFile> files = {{"file", bytes}};
  return std::make_shared<const FrozenRows>(files);
}

FrozenTable table_of(FrozenTable::Layers layers) {
  return FrozenTable(std::move(layers),
                     {.init_a = -1.0F, .init_b = 1.0F, .seed = 3, .initial_weights = kDim});
}

std::vector<std::uint64_t> keys_of(const Rows& rows) {
  std::vector<std::uint64_t> keys;
  for (const auto& [key, value] : rows) keys.push_back(key);
  return keys;
}

void check_lookup(const FrozenTable& table, const Rows& rows, Pool& pool) {
  const std::vector<std::uint64_t> keys = keys_of(rows);
  std::vector<float> out(keys.size() * kWidth);
  std::size_t expected_missing = 0;
  const std::size_t missing = table.lookup(keys, out.data(), pool);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Value& value = rows.at(keys[i]);
    expected_missing += value.is_removed;
    for (int j = 0; j < kWidth; ++j) {
      const float found = out[i * kWidth + static_cast<std::size_t>(j)];
      if (!value.is_removed) {
        CHECK_EQUAL(found, value.row[static_cast<std::size_t>(j)]);
      } else if (j < kStatistics) {
        CHECK_EQUAL(found, 0.0F);
      } else {
        CHECK(found >= -1.0F && found < 1.0F);
      }
    }
  }
  CHECK_EQUAL(missing, expected_missing);
}

void test_layers(test::Random& random) {
  Pool pool(2);
  Rows rows = random_rows(random, 30000, false);
  const Bytes base = file_of(rows, false);
  std::vector<Bytes> deltas;
  FrozenTable::Layers layers = {opened(base)};
  for (int i = 0; i < 3; ++i) {
    Rows delta = random_rows(random, 2000, true);
    for (const std::uint64_t key : keys_of(rows)) {
      if (random.below(10) == 0) delta[key] = {random.below(2) == 0, {1, 2, 3, 4, 5}};
    }
    deltas.push_back(file_of(delta, true));
    layers.insert(layers.begin(), opened(deltas.back()));
    for (const auto& [key, value] : delta) rows[key] = value;
  }
  check_lookup(table_of(layers), rows, pool);
}

// Rows that are all on one line: searched one after the other, they take longer than a test may.
void test_chosen_keys() {
  constexpr std::uint64_t kRows = 600'000;
  Pool pool(1);
  Rows rows;
  for (std::uint64_t i = 0; i < kRows; ++i) rows[unmix64(2 * i)] = {false, {1, 2, 3, 4, 5}};
  const Bytes bytes = file_of(rows, true);
  for (std::uint64_t i = 0; i < kRows; ++i) rows[unmix64(2 * i + 1)].is_removed = true;  // absent
  check_lookup(table_of({opened(bytes)}), rows, pool);
}

// A damaged file is refused, or returns some rows; no read is outside the file.
void test_damage(test::Random& random) {
  Pool pool(1);
  const Rows rows = random_rows(random, 500, false);
  const Bytes whole = file_of(rows, false);
  const std::vector<std::uint64_t> keys = keys_of(rows);
  std::vector<float> out(keys.size() * kWidth);
  for (int i = 0; i < 2000; ++i) {
    // On the heap with the exact size, so that ASan detects reads past the end.
    Bytes damaged(whole.begin(), whole.end());
    const bool at_end = random.below(2) == 0;
    const std::uint64_t at =
        at_end ? damaged.size() - 1 - random.below(1000) : random.below(damaged.size());
    damaged[at] = static_cast<std::uint8_t>(random.next());
    if (random.below(10) == 0) damaged.resize(random.below(damaged.size()));
    damaged.shrink_to_fit();
    try {
      table_of({opened(damaged)}).lookup(keys, out.data(), pool);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kCorruption || error.code() == ErrorCode::kBadRequest);
    }
  }
}

void test_callers(test::Random& random) {
  Pool pool(2);
  const Rows rows = random_rows(random, 20000, false);
  const Bytes bytes = file_of(rows, false);
  const FrozenTable table = table_of({opened(bytes)});
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([&] { check_lookup(table, rows, pool); });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int argc, char** argv) {
  test::Random random(test::seed_of(argc, argv));
  test_layers(random);
  test_chosen_keys();
  test_damage(random);
  test_callers(random);
  return 0;
}
