#include "table/count_sketch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/hash.h"

namespace trireme {
namespace {

static_assert(std::endian::native == std::endian::little, "cells are stored as they are in memory");

void store_cell(std::uint8_t* cells, std::uint32_t cell_bytes, std::size_t i,
                std::uint32_t value) noexcept {
  std::memcpy(cells + i * cell_bytes, &value, cell_bytes);
}

std::size_t cell_of(const SketchShape& shape, std::uint64_t key, std::uint32_t row) noexcept {
  const std::uint64_t bits = mix64(mix64(key) + (row + 1) * 0x9E3779B97F4A7C15ULL);
  return std::size_t{row} * shape.width + ((bits >> 32) * shape.width >> 32);
}

}  // namespace

std::uint32_t load_cell(const std::uint8_t* cells, std::uint32_t cell_bytes,
                        std::size_t i) noexcept {
  std::uint32_t value = 0;
  std::memcpy(&value, cells + i * cell_bytes, cell_bytes);
  return value;
}

SketchShape SketchShape::of(std::size_t bytes, std::uint32_t limit) {
  const std::uint32_t cell_bytes = limit <= 0xFF ? 1 : limit <= 0xFFFF ? 2 : 4;
  const std::size_t width = bytes / (std::size_t{kDepth} * cell_bytes);
  constexpr std::size_t kWidthMax = std::numeric_limits<std::uint32_t>::max();
  return {.limit = limit,
          .cell_bytes = cell_bytes,
          .width = static_cast<std::uint32_t>(std::min(width, kWidthMax))};
}

void CountSketch::allocate(const SketchShape& shape) {
  if (is_empty()) cells_ = std::make_unique<std::uint8_t[]>(shape.bytes());
}

std::uint32_t CountSketch::add(const SketchShape& shape, std::uint64_t key, std::uint32_t count,
                               std::uint32_t time) noexcept {
  if (total == 0) halved_at = time;
  std::array<std::size_t, SketchShape::kDepth> cells;
  std::uint32_t least = shape.limit;
  for (std::uint32_t row = 0; row < SketchShape::kDepth; ++row) {
    cells[row] = cell_of(shape, key, row);
    least = std::min(least, load_cell(cells_.get(), shape.cell_bytes, cells[row]));
  }
  total += count;
  const std::uint32_t estimate = least + std::min(count, shape.limit - least);
  for (const std::size_t cell : cells) {
    if (load_cell(cells_.get(), shape.cell_bytes, cell) < estimate) {
      store_cell(cells_.get(), shape.cell_bytes, cell, estimate);
    }
  }
  return estimate;
}

void CountSketch::halve(const SketchShape& shape, std::uint32_t now) noexcept {
  for (std::size_t cell = 0; cell < shape.num_cells(); ++cell) {
    store_cell(cells_.get(), shape.cell_bytes, cell,
               load_cell(cells_.get(), shape.cell_bytes, cell) / 2);
  }
  total /= 2;
  halved_at = now;
}

}  // namespace trireme
