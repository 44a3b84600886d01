#include "feed/gather_rows.h"

#include <algorithm>
#include <cstring>

namespace trireme {
namespace {

// Copies `size` elements; the common sizes without a call to memcpy.
template <std::size_t kBytes>
void copy(std::byte* to, const std::byte* from, std::size_t size) noexcept {
  if (size == 1) {
    std::memcpy(to, from, kBytes);
  } else {
    std::memcpy(to, from, size * kBytes);
  }
}

}  // namespace

ChunkOfRow::ChunkOfRow(std::span<const std::size_t> starts) : starts_(starts) {
  first_.reserve(starts.back() / kStep + 1);
  std::uint32_t chunk = 0;
  for (std::size_t row = 0; row < starts.back(); row += kStep) {
    while (starts[chunk + 1] <= row) ++chunk;
    first_.push_back(chunk);
  }
}

GatheredColumn::GatheredColumn(const ColumnType& type, std::span<const ColumnChunk> chunks,
                               const ChunkOfRow& chunk_of, Pool* pool)
    : type_(type), chunks_(chunks), chunk_of_(chunk_of) {
  if (std::all_of(chunks.begin(), chunks.end(),
                  [](const ColumnChunk& chunk) { return chunk.shape().width == 0; })) {
    return;
  }
  value_starts_ = Array<std::uint32_t>(chunk_of.starts().back() + chunks.size());
  auto find_starts = [&](std::size_t i) {
    std::uint32_t* out = value_starts_.data() + chunk_of.starts()[i] + i;
    chunks[i].for_starts(0, chunks[i].num_rows(),
                         [&](std::size_t start) { *out++ = static_cast<std::uint32_t>(start); });
  };
  if (pool != nullptr) {
    pool->run(chunks.size(), find_starts);
  } else {
    for (std::size_t i = 0; i < chunks.size(); ++i) find_starts(i);
  }
}

std::uint32_t GatheredColumn::find(std::size_t row, Place& place) const noexcept {
  const std::size_t chunk = chunk_of_(row);
  place.chunk = static_cast<std::uint32_t>(chunk);
  if (value_starts_.size() == 0) {
    const std::uint32_t count = chunks_[chunk].shape().constant;
    place.start = static_cast<std::uint32_t>(row - chunk_of_.starts()[chunk]) * count;
    return count;
  }
  const std::uint32_t* start = value_starts_.data() + row + chunk;
  place.start = start[0];
  return start[1] - start[0];
}

ColumnChunk GatheredColumn::gather(std::span<const std::uint32_t> rows) const {
  Array<Place> places(rows.size());
  Array<std::uint32_t> counts(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) counts[i] = find(rows[i], places[i]);
  ColumnChunk chunk = type_.dim != 0 ? ColumnChunk(type_, rows.size(), type_.dim)
                                     : ColumnChunk(type_, counts.span());
  const auto copy_all = [&](std::byte* to, auto bytes, const auto& source) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      copy<bytes>(to, source(chunks_[places[i].chunk]) + places[i].start * std::size_t{bytes},
                  counts[i]);
      to += counts[i] * std::size_t{bytes};
    }
  };
  const auto values_of = [](const ColumnChunk& from) { return from.values(); };
  if (type_.element_bytes == 8) {
    copy_all(chunk.values(), std::integral_constant<std::size_t, 8>(), values_of);
  } else if (type_.element_bytes == 4) {
    copy_all(chunk.values(), std::integral_constant<std::size_t, 4>(), values_of);
  } else {
    copy_all(chunk.values(), std::integral_constant<std::size_t, 1>(), values_of);
  }
  if (type_.has_weights) {
    copy_all(chunk.weights(type_), std::integral_constant<std::size_t, 4>(),
             [this](const ColumnChunk& from) { return from.weights(type_); });
  }
  return chunk;
}

}  // namespace trireme
