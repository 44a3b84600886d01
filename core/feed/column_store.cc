#include "feed/column_store.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "feed/bags.h"
#include "feed/chunks.h"
#include "feed/column_store_check.h"
#include "feed/gather_rows.h"

namespace trireme {
namespace {

constexpr std::size_t kColumnsMax = std::size_t{1} << 20;
constexpr std::size_t kDimMax = std::size_t{1} << 24;
// A batch of fewer counts is faster on one thread.
constexpr std::size_t kCountsWorthThreads = 1 << 15;

// The part of a chunk that a range of rows covers.
struct Stretch {
  std::size_t chunk, begin, end;
};

std::vector<Stretch> stretches(std::span<const std::size_t> starts, std::size_t begin,
                               std::size_t end) {
  std::vector<Stretch> found;
  const auto after = std::upper_bound(starts.begin(), starts.end(), begin);
  for (auto chunk = static_cast<std::size_t>(after - starts.begin()) - 1; begin < end; ++chunk) {
    const std::size_t stop = std::min(end, starts[chunk + 1]);
    found.push_back({chunk, begin - starts[chunk], stop - starts[chunk]});
    begin = stop;
  }
  return found;
}

std::size_t count_values(std::span<const ColumnChunk> chunks, std::span<const Stretch> rows) {
  std::size_t sum = 0;
  for (const Stretch& part : rows) {
    sum += chunks[part.chunk].start(part.end) - chunks[part.chunk].start(part.begin);
  }
  return sum;
}

// Copies the values of a range of rows; returns how many there were.
template <class Begin>
std::size_t copy_values(std::span<const ColumnChunk> chunks, std::span<const Stretch> rows,
                        std::size_t element_bytes, const Begin& begin_of, void* to) {
  std::size_t sum = 0;
  for (const Stretch& part : rows) {
    const ColumnChunk& chunk = chunks[part.chunk];
    const std::size_t first = chunk.start(part.begin), size = chunk.start(part.end) - first;
    copy_bytes(static_cast<std::byte*>(to) + sum * element_bytes,
               begin_of(chunk) + first * element_bytes, size * element_bytes);
    sum += size;
  }
  return sum;
}

// Writes where each row begins, if the first begins at `at`. Does not write where the last one
// ends.
void copy_offsets(std::span<const ColumnChunk> chunks, std::span<const Stretch> rows,
                  std::size_t at, std::int64_t* out) {
  for (const Stretch& part : rows) {
    const ColumnChunk& chunk = chunks[part.chunk];
    const std::size_t first = chunk.start(part.begin);
    chunk.for_starts(part.begin, part.end - 1, [&](std::size_t start) {
      *out++ = static_cast<std::int64_t>(start - first + at);
    });
    at += chunk.start(part.end) - first;
  }
}

}  // namespace

Array<std::uint32_t> permutation(std::size_t n, std::uint64_t seed) {
  Array<std::uint32_t> order(n);
  std::iota(order.data(), order.data() + n, 0U);
  for (std::size_t i = n; i > 1; --i) {  // Fisher and Yates
    const std::size_t j = next_random(seed) % i;
    std::swap(order[i - 1], order[j]);
  }
  return order;
}

ColumnStore::ColumnStore(const Layout& layout, std::size_t chunk_bytes)
    : layout_(layout),
      first_string_(layout.dims.size()),
      first_feature_(layout.dims.size() + layout.num_strings),
      chunk_bytes_(chunk_bytes) {
  expect(chunk_bytes >= 1, "chunk_bytes of at least 1", "0");
  const std::size_t most = std::max({layout.dims.size(), layout.num_strings, layout.num_features});
  expect(most >= 1 && most <= kColumnsMax, "1 to 2^20 columns", std::to_string(most));
  for (const std::size_t dim : layout.dims) {
    expect(dim >= 1 && dim <= kDimMax, "a dim from 1 to 2^24", std::to_string(dim));
    types_.push_back({sizeof(float), static_cast<std::uint32_t>(dim), false});
  }
  types_.insert(types_.end(), layout.num_strings, {1, 0, false});
  types_.insert(types_.end(), layout.num_features, {sizeof(std::int64_t), 0, layout.has_weights});
  columns_.resize(types_.size());
}

std::size_t ColumnStore::num_value_bytes() const noexcept {
  std::size_t sum = 0;
  for (std::size_t c = 0; c < types_.size(); ++c) {
    for (const ColumnChunk& chunk : columns_[c]) {
      sum += chunk.shape().num_values * types_[c].value_bytes();
    }
  }
  return sum;
}

std::size_t ColumnStore::num_bytes() const noexcept {
  std::size_t sum = starts_.size() * sizeof(starts_[0]);
  for (const Chunks& chunks : columns_) {
    sum += chunks.capacity() * sizeof(ColumnChunk);
    for (const ColumnChunk& chunk : chunks) sum += chunk.num_bytes();
  }
  return sum;
}

void ColumnStore::push_back(std::vector<ColumnChunk>&& chunk) {
  for (Chunks& chunks : columns_) {  // first, so that nothing below fails
    if (chunks.size() == chunks.capacity()) chunks.reserve(2 * chunks.size() + 1);
  }
  starts_.push_back(starts_.back() + chunk.front().num_rows());
  for (std::size_t c = 0; c < columns_.size(); ++c) columns_[c].push_back(std::move(chunk[c]));
}

// A chunk of rows begin .. end - 1 of a column.
ColumnChunk ColumnStore::input_chunk(const ColumnSpans& rows, std::size_t column, std::size_t begin,
                                     std::size_t end) const {
  const ColumnType& type = types_[column];
  if (column < first_string_) {
    ColumnChunk chunk(type, end - begin, type.dim);
    const auto numbers = rows.numbers[column].subspan(begin * type.dim, (end - begin) * type.dim);
    copy_bytes(chunk.values(), numbers.data(), numbers.size_bytes());
    return chunk;
  }
  const bool is_string = column < first_feature_;
  const std::size_t first = is_string ? 0 : (column - first_feature_) * rows.num_rows;
  const auto offsets = (is_string ? rows.strings[column - first_string_].offsets : rows.offsets)
                           .subspan(first + begin, end - begin + 1);
  Array<std::uint32_t> counts(end - begin);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::int64_t count = offsets[i + 1] - offsets[i];
    if (count > std::int64_t{std::numeric_limits<std::uint32_t>::max()}) {
      expect(false, "fewer than 2^32 values in a row", std::to_string(count));
    }
    counts[i] = static_cast<std::uint32_t>(count);
  }
  ColumnChunk chunk(type, counts.span());
  const auto at = static_cast<std::size_t>(offsets.front());
  const std::size_t size = chunk.shape().num_values;
  if (is_string) {
    copy_bytes(chunk.values(), rows.strings[column - first_string_].bytes.data() + at, size);
  } else {
    copy_bytes(chunk.values(), rows.keys.data() + at, size * sizeof(std::int64_t));
    if (layout_.has_weights) {
      copy_bytes(chunk.weights(type), rows.weights.data() + at, size * sizeof(float));
    }
  }
  return chunk;
}

void ColumnStore::check(const ColumnSpans& rows) const {
  expect_rows(rows.num_rows);
  expect_size("columns of numbers", rows.numbers.size(), first_string_);
  expect_size("columns of strings", rows.strings.size(), layout_.num_strings);
  for (std::size_t c = 0; c < first_string_; ++c) {
    expect_size("numbers in column " + std::to_string(c), rows.numbers[c].size(),
                rows.num_rows * types_[c].dim);
  }
  for (const ColumnSpans::Strings& column : rows.strings) {
    expect_size("offsets of a column of strings", column.offsets.size(), rows.num_rows + 1);
    check_offsets("ColumnStore.append", column.offsets, column.bytes.size());
  }
  if (layout_.num_features > 0) {
    expect_size("offsets of the features", rows.offsets.size(),
                layout_.num_features * rows.num_rows + 1);
    check_offsets("ColumnStore.append", rows.offsets, rows.keys.size());
  }
  expect_size("weights of the keys", rows.weights.size(),
              layout_.has_weights ? rows.keys.size() : 0);
}

// The best number of chunks for rows of so many bytes in total.
std::size_t ColumnStore::num_chunks_for(std::size_t num_rows,
                                        std::size_t num_bytes) const noexcept {
  return std::clamp<std::size_t>((num_bytes + chunk_bytes_ / 2) / chunk_bytes_, 1, num_rows);
}

void ColumnStore::append(const ColumnSpans& rows, Pool& pool) {
  check(rows);
  if (rows.num_rows == 0) return;
  std::size_t num_bytes = rows.keys.size_bytes() + rows.weights.size_bytes();
  for (const auto& column : rows.numbers) num_bytes += column.size_bytes();
  for (const auto& column : rows.strings) num_bytes += column.bytes.size();
  const std::size_t num_parts = num_chunks_for(rows.num_rows, num_bytes);
  std::vector<Chunks> parts(num_parts);
  for (Chunks& part : parts) part.resize(types_.size());
  pool.run(num_parts * types_.size(), [&](std::size_t task) {
    const std::size_t part = task / types_.size(), c = task % types_.size();
    parts[part][c] = input_chunk(rows, c, chunk_begin(rows.num_rows, part, num_parts),
                                 chunk_begin(rows.num_rows, part + 1, num_parts));
  });
  for (std::size_t part = 0; part < num_parts; ++part) push_back(std::move(parts[part]));
}

Columns ColumnStore::batch(std::size_t begin, std::size_t end, Pool& pool) const {
  expect(begin <= end && end <= num_rows(), "rows begin <= end <= " + std::to_string(num_rows()),
         std::to_string(begin) + " and " + std::to_string(end));
  const std::size_t num = end - begin, num_ragged = layout_.num_strings + layout_.num_features;
  const std::vector<Stretch> rows = stretches(starts_, begin, end);
  std::vector<std::size_t> ends(num_ragged + 1);  // values of the strings and features, added up
  for (std::size_t r = 0; r < num_ragged; ++r) {
    ends[r + 1] = ends[r] + count_values(columns_[first_string_ + r], rows);
  }
  Columns out;
  out.num_examples = num;
  for (std::size_t c = 0; c < first_string_; ++c) out.numbers.emplace_back(num * types_[c].dim);
  for (std::size_t t = 0; t < layout_.num_strings; ++t) {
    out.strings.push_back(
        {Array<std::uint8_t>(ends[t + 1] - ends[t]), Array<std::int64_t>(num + 1)});
  }
  const std::size_t num_keys = ends[num_ragged] - ends[layout_.num_strings];
  out.keys = Array<std::int64_t>(num_keys);
  out.offsets = Array<std::int64_t>(layout_.num_features * num + 1);
  out.offsets[layout_.num_features * num] = static_cast<std::int64_t>(num_keys);
  if (layout_.has_weights) out.weights = Array<float>(num_keys);

  const auto values_of = [](const ColumnChunk& chunk) { return chunk.values(); };
  auto fill = [&](std::size_t c) {
    const Chunks& chunks = columns_[c];
    const ColumnType& type = types_[c];
    if (c < first_string_) {
      copy_values(chunks, rows, sizeof(float), values_of, out.numbers[c].data());
    } else if (c < first_feature_) {
      StringColumn& column = out.strings[c - first_string_];
      copy_values(chunks, rows, 1, values_of, column.bytes.data());
      copy_offsets(chunks, rows, 0, column.offsets.data());
      column.offsets[num] = static_cast<std::int64_t>(column.bytes.size());
    } else {
      const std::size_t feature = c - first_feature_;
      const std::size_t at = ends[c - first_string_] - ends[layout_.num_strings];
      copy_values(chunks, rows, sizeof(std::int64_t), values_of, out.keys.data() + at);
      copy_offsets(chunks, rows, at, out.offsets.data() + feature * num);
      if (layout_.has_weights) {
        copy_values(
            chunks, rows, sizeof(float),
            [&type](const ColumnChunk& chunk) { return chunk.weights(type); },
            out.weights.data() + at);
      }
    }
  };
  if (num * types_.size() < kCountsWorthThreads) {
    for (std::size_t c = 0; c < types_.size(); ++c) fill(c);
  } else {
    pool.run(types_.size(), fill);
  }
  return out;
}

void ColumnStore::shuffle(std::uint64_t seed, std::span<const std::size_t> chosen, Pool& pool) {
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    expect(chosen[i] < types_.size() && (i == 0 || chosen[i - 1] < chosen[i]),
           "ascending columns below " + std::to_string(types_.size()), std::to_string(chosen[i]));
  }
  expect_rows(num_rows());
  const Array<std::uint32_t> order = permutation(num_rows(), seed);
  const ChunkOfRow chunk_of(starts_);
  std::vector<std::size_t> to = starts_;
  if (chosen.size() == types_.size() && num_rows() > 0) {  // all rebuilt: chunks can be cut anew
    const std::size_t num_chunks = num_chunks_for(num_rows(), num_value_bytes());
    to.resize(num_chunks + 1);
    for (std::size_t i = 0; i <= num_chunks; ++i) to[i] = chunk_begin(num_rows(), i, num_chunks);
  }
  try {
    for (const std::size_t c : chosen) {
      Chunks gathered(to.size() - 1);
      {
        const GatheredColumn from(types_[c], columns_[c], chunk_of, &pool);
        pool.run(gathered.size(), [&](std::size_t i) {
          gathered[i] = from.gather(order.span().subspan(to[i], to[i + 1] - to[i]));
        });
      }
      columns_[c] = std::move(gathered);
    }
  } catch (...) {
    for (Chunks& chunks : columns_) chunks.clear();
    starts_.assign(1, 0);
    throw;
  }
  starts_ = std::move(to);
}

ColumnStore ColumnStore::take_chunks(std::size_t num_chunks) {
  num_chunks = std::min(num_chunks, this->num_chunks());
  ColumnStore taken(layout_, chunk_bytes_);
  const std::size_t num_rows = starts_[num_chunks];
  taken.starts_.assign(starts_.begin(),
                       starts_.begin() + static_cast<std::ptrdiff_t>(num_chunks) + 1);
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    const auto end = columns_[c].begin() + static_cast<std::ptrdiff_t>(num_chunks);
    taken.columns_[c].assign(std::move_iterator(columns_[c].begin()), std::move_iterator(end));
    columns_[c].erase(columns_[c].begin(), end);
  }
  starts_.erase(starts_.begin(), starts_.begin() + static_cast<std::ptrdiff_t>(num_chunks));
  for (std::size_t& start : starts_) start -= num_rows;
  return taken;
}

}  // namespace trireme
