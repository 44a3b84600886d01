// Rows sent to other processes: which part each row belongs to, and its bytes.
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "feed/column_store.h"
#include "feed/column_store_check.h"
#include "feed/gather_rows.h"
#include "feed/strings.h"

namespace trireme {
namespace {

// Permanent, like ChunkShape: a piece is a header, the shape of each column, then the bytes of each
// column.
constexpr std::uint32_t kPieceMagic = 0x31435254;  // "TRC1"

struct PieceHead {
  std::uint32_t magic;
  std::uint32_t num_columns;
  std::uint64_t num_rows;
};

Array<std::byte> write_piece(std::span<const ColumnChunk> chunks, std::size_t num_rows) {
  const PieceHead head{kPieceMagic, static_cast<std::uint32_t>(chunks.size()), num_rows};
  std::size_t size = sizeof(head) + chunks.size() * sizeof(ChunkShape);
  for (const ColumnChunk& chunk : chunks) size += chunk.wire_bytes().size();
  Array<std::byte> piece(size);
  std::byte* out = piece.data();
  const auto write = [&out](const void* from, std::size_t bytes) {
    copy_bytes(out, from, bytes);
    out += bytes;
  };
  write(&head, sizeof(head));
  for (const ColumnChunk& chunk : chunks) write(&chunk.shape(), sizeof(ChunkShape));
  for (const ColumnChunk& chunk : chunks) {
    write(chunk.wire_bytes().data(), chunk.wire_bytes().size());
  }
  return piece;
}

[[noreturn]] void fail_piece(const std::string& expected, std::size_t found) {
  throw Error(ErrorCode::kCorruption, "ColumnStore.append_piece: expected " + expected +
                                          ", found " + std::to_string(found));
}

}  // namespace

Array<std::uint32_t> ColumnStore::random_parts(std::uint64_t seed, std::uint32_t num_parts) const {
  expect(num_parts >= 1, "at least 1 part", "0");
  Array<std::uint32_t> parts(num_rows());
  for (std::size_t row = 0; row < parts.size(); ++row) {
    parts[row] = static_cast<std::uint32_t>(next_random(seed) % num_parts);
  }
  return parts;
}

Array<std::uint32_t> ColumnStore::parts_by_string(std::size_t string,
                                                  std::uint32_t num_parts) const {
  expect(num_parts >= 1, "at least 1 part", "0");
  expect(string < layout_.num_strings,
         "a column of strings below " + std::to_string(layout_.num_strings),
         std::to_string(string));
  Array<std::uint32_t> parts(num_rows());
  std::uint32_t* out = parts.data();
  for (const ColumnChunk& chunk : columns_[first_string_ + string]) {
    const auto* bytes = reinterpret_cast<const char*>(chunk.values());
    std::size_t begin = 0;
    bool is_first = true;
    chunk.for_starts(0, chunk.num_rows(), [&](std::size_t end) {
      if (!is_first) {
        *out++ = static_cast<std::uint32_t>(xxh64(std::string_view(bytes + begin, end - begin), 0) %
                                            num_parts);
      }
      begin = end;
      is_first = false;
    });
  }
  return parts;
}

std::vector<Array<std::byte>> ColumnStore::split(std::span<const std::uint32_t> parts,
                                                 std::uint32_t num_parts, Pool& pool) const {
  expect_rows(num_rows());
  expect_size("parts of the rows", parts.size(), num_rows());
  std::vector<std::vector<std::uint32_t>> rows(num_parts);
  for (std::size_t row = 0; row < parts.size(); ++row) {
    if (parts[row] >= num_parts) {
      expect(false, "a part below " + std::to_string(num_parts), std::to_string(parts[row]));
    }
    rows[parts[row]].push_back(static_cast<std::uint32_t>(row));
  }
  const ChunkOfRow chunk_of(starts_);
  std::vector<Chunks> gathered(num_parts);
  for (Chunks& chunks : gathered) chunks.resize(types_.size());
  pool.run(types_.size(), [&](std::size_t c) {
    const GatheredColumn from(types_[c], columns_[c], chunk_of, nullptr);
    for (std::uint32_t part = 0; part < num_parts; ++part) {
      gathered[part][c] = from.gather(rows[part]);
    }
  });
  std::vector<Array<std::byte>> pieces;
  for (std::uint32_t part = 0; part < num_parts; ++part) {
    pieces.push_back(write_piece(gathered[part], rows[part].size()));
    gathered[part] = Chunks();
  }
  return pieces;
}

void ColumnStore::append_piece(std::span<const std::byte> piece) {
  PieceHead head;
  const std::size_t expected = types_.size();
  if (piece.size() < sizeof(head)) fail_piece("a piece of at least 16 bytes", piece.size());
  std::memcpy(&head, piece.data(), sizeof(head));
  if (head.magic != kPieceMagic) fail_piece("the mark of a piece", head.magic);
  if (head.num_columns != expected) {
    fail_piece(std::to_string(expected) + " columns", head.num_columns);
  }
  std::span<const std::byte> shapes = piece.subspan(sizeof(head));
  if (shapes.size() < expected * sizeof(ChunkShape)) fail_piece("the columns", piece.size());
  std::span<const std::byte> bytes = shapes.subspan(expected * sizeof(ChunkShape));
  Chunks chunk;
  chunk.reserve(expected);
  for (std::size_t c = 0; c < expected; ++c) {
    ChunkShape shape;
    std::memcpy(&shape, shapes.data() + c * sizeof(shape), sizeof(shape));
    if (shape.num_rows != head.num_rows) {
      fail_piece(std::to_string(head.num_rows) + " rows in every column", shape.num_rows);
    }
    chunk.emplace_back(types_[c], shape, bytes);
  }
  if (!bytes.empty()) fail_piece("no byte behind the columns", bytes.size());
  if (head.num_rows > 0) push_back(std::move(chunk));
}

}  // namespace trireme
