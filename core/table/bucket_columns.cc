#include "table/bucket_columns.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

void expect(const char* what, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  throw Error(ErrorCode::kBadRequest, std::string("Table.columns: expected ") + what + " " +
                                          std::to_string(expected) + ", found " +
                                          std::to_string(found));
}

// Copies n cells of `width` bytes from rows of `stride` bytes, or to them. With a width known at
// compile time each copy is a few instructions.
template <std::size_t kWidth>
void copy_cells(std::byte* to, std::size_t to_stride, const std::byte* from,
                std::size_t from_stride, std::size_t n, std::size_t width) noexcept {
  const std::size_t bytes = kWidth != 0 ? kWidth : width;
  for (std::size_t i = 0; i < n; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
  }
}

void copy_column(void* to, std::size_t to_stride, const void* from, std::size_t from_stride,
                 std::size_t n, std::size_t width) noexcept {
  auto* const target = static_cast<std::byte*>(to);
  const auto* const source = static_cast<const std::byte*>(from);
  switch (width) {
    case 4:
      return copy_cells<4>(target, to_stride, source, from_stride, n, width);
    case 8:
      return copy_cells<8>(target, to_stride, source, from_stride, n, width);
    case 32:
      return copy_cells<32>(target, to_stride, source, from_stride, n, width);
    case 64:
      return copy_cells<64>(target, to_stride, source, from_stride, n, width);
    default:
      return copy_cells<0>(target, to_stride, source, from_stride, n, width);
  }
}

template <class T, class U>
void append(std::vector<T>& to, const Array<U>& from) {
  to.insert(to.end(), from.data(), from.data() + from.size());
}

// List m of the values.
template <class T>
std::span<const T> part_of(std::span<const T> values, std::span<const std::int64_t> offsets,
                           std::size_t m) {
  const auto low = static_cast<std::size_t>(offsets[m]);
  return values.subspan(low, static_cast<std::size_t>(offsets[m + 1]) - low);
}

// Checks that offsets stay within their values.
template <class T>
void check_offsets(std::span<const T> offsets, std::size_t num_lists, std::size_t num_values) {
  expect("offsets:", offsets.size(), num_lists + 1);
  const bool is_within = offsets.front() >= 0 && std::is_sorted(offsets.begin(), offsets.end());
  const auto last = static_cast<std::size_t>(offsets.back());
  if (!is_within || last > num_values) expect("ascending offsets up to", last, num_values);
}

void append_lists(BucketColumns& into, const BucketContent& content) {
  into.num_rows.push_back(static_cast<std::uint32_t>(content.keys.size()));
  for (const auto& [stream, sequence] : content.marks) {
    into.streams.push_back(stream);
    into.sequences.push_back(sequence);
  }
  into.mark_offsets.push_back(static_cast<std::int32_t>(into.streams.size()));
  append(into.pending, content.pending);
  into.pending_offsets.push_back(static_cast<std::int64_t>(into.pending.size()));
  append(into.removed, content.removed);
  into.removed_offsets.push_back(static_cast<std::int64_t>(into.removed.size()));
  into.places.insert(into.places.end(), content.places.begin(), content.places.end());
  into.place_offsets.push_back(static_cast<std::int64_t>(into.places.size()));
}

}  // namespace

BucketColumns snapshot_columns(const Table& table, std::uint32_t first, std::uint32_t count,
                               std::uint32_t since, std::uint32_t removed_since,
                               std::span<const std::size_t> widths, bool stay) {
  expect("widths that add up to", std::accumulate(widths.begin(), widths.end(), std::size_t{0}),
         table.row_bytes());
  BucketColumns found;
  found.mark_offsets.push_back(0);
  found.pending_offsets.push_back(0);
  found.removed_offsets.push_back(0);
  found.place_offsets.push_back(0);
  std::vector<BucketContent> contents;
  std::size_t n = 0;
  for (std::uint32_t bucket = first; bucket < first + count; ++bucket) {
    contents.push_back(stay ? table.snapshot_in_memory(bucket, removed_since)
                            : table.snapshot(bucket, since, removed_since));
    append_lists(found, contents.back());
    found.removed_since = std::max(found.removed_since, contents.back().removed_since);
    n += contents.back().keys.size();
  }
  found.keys = Array<std::uint64_t>(n);
  found.classes = Array<std::uint8_t>(n);
  for (const std::size_t width : widths) found.columns.emplace_back(n * width);
  std::size_t at = 0;
  for (const BucketContent& content : contents) {
    const std::size_t size = content.keys.size();
    std::copy_n(content.keys.data(), size, found.keys.data() + at);
    std::copy_n(content.classes.data(), size, found.classes.data() + at);
    const std::uint8_t* cells = content.rows.data();
    for (std::size_t i = 0; i < widths.size(); ++i) {
      copy_column(found.columns[i].data() + at * widths[i], widths[i], cells, table.row_bytes(),
                  size, widths[i]);
      cells += widths[i];
    }
    at += size;
  }
  return found;
}

void restore_columns(Table& table, const ColumnsView& view, bool apply, Tier::Claims claims) {
  const std::size_t n = view.keys.size();
  const std::size_t row_bytes = table.row_bytes();
  expect("widths that add up to",
         std::accumulate(view.widths.begin(), view.widths.end(), std::size_t{0}), row_bytes);
  expect("numbers of rows that add up to",
         std::accumulate(view.num_rows.begin(), view.num_rows.end(), std::size_t{0}), n);
  expect("a number of rows per bucket:", view.num_rows.size(), view.buckets.size());
  expect("a choice per bucket:", view.wanted.size(), view.buckets.size());
  expect("classes:", view.classes.size(), n);
  expect("columns:", view.columns.size(), view.widths.size());
  for (std::size_t i = 0; i < view.widths.size(); ++i) {
    expect("bytes of a column:", view.columns[i].size(), n * view.widths[i]);
  }
  expect("streams:", view.streams.size(), view.sequences.size());
  check_offsets(view.removed_offsets, view.buckets.size(), view.removed.size());
  check_offsets(view.pending_offsets, view.buckets.size(), view.pending.size());
  if (!view.place_offsets.empty()) {
    check_offsets(view.place_offsets, view.buckets.size(), view.places.size());
  }
  if (!view.mark_offsets.empty()) {
    check_offsets(view.mark_offsets, view.buckets.size(), view.streams.size());
  }
  std::vector<std::pair<std::int64_t, std::uint64_t>> marks;
  std::size_t at = 0;
  for (std::size_t m = 0; m < view.buckets.size(); ++m) {
    const std::size_t size = view.num_rows[m];
    const std::size_t begin = std::exchange(at, at + size);
    if (!view.wanted[m]) continue;
    Array<std::uint8_t> rows(size * row_bytes);
    std::size_t offset = 0;
    for (std::size_t i = 0; i < view.widths.size(); ++i) {
      const std::size_t width = view.widths[i];
      copy_column(rows.data() + offset, row_bytes, view.columns[i].data() + begin * width, width,
                  size, width);
      offset += width;
    }
    marks.clear();
    if (!view.mark_offsets.empty()) {
      for (std::int32_t j = view.mark_offsets[m]; j < view.mark_offsets[m + 1]; ++j) {
        marks.emplace_back(view.streams[static_cast<std::size_t>(j)],
                           view.sequences[static_cast<std::size_t>(j)]);
      }
    }
    const auto removed = part_of(view.removed, view.removed_offsets, m);
    Table::BucketView content{.keys = view.keys.subspan(begin, size),
                              .classes = view.classes.subspan(begin, size),
                              .rows = {rows.data(), rows.size()},
                              .marks = marks,
                              .pending = part_of(view.pending, view.pending_offsets, m)};
    if (apply) {
      table.apply(view.buckets[m], content, removed, claims);
    } else {
      content.removed = removed;
      content.removed_at = view.removed_at;
      content.removed_since = view.removed_since;
      if (!view.place_offsets.empty()) {
        content.places = part_of(view.places, view.place_offsets, m);
      }
      table.restore(view.buckets[m], content, claims);
    }
  }
}

}  // namespace trireme
