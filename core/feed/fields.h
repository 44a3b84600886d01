// The fields of a schema, for the parsers that follow one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "feed/rows.h"
#include "feed/text.h"

namespace trireme {

enum class FieldKind {
  kNumber,  // one finite float
  kAmount,  // one finite float that is not negative
  kDense,   // dim finite floats
  kKeys,    // a bag of 64-bit keys
  kHashes,  // a bag of strings, whose hashes are the keys
  kString,  // a string
};

struct Field {
  FieldKind kind;
  std::string name;
  std::size_t dim = 1;     // of kDense
  std::uint64_t seed = 0;  // of kHashes: the hash of the name

  Field(FieldKind kind, std::string name, std::size_t dim);

  bool is_sparse() const noexcept { return kind == FieldKind::kKeys || kind == FieldKind::kHashes; }
  bool is_text() const noexcept { return kind == FieldKind::kString || kind == FieldKind::kHashes; }
};

Layout layout_of(std::span<const Field> fields, bool has_weights = false);

// Appends one value of a field to the row and moves `p` past it. A text is everything up to `end`;
// a number is parsed as numbers.h describes. False: there is no such value.
bool parse_value(const Field& field, const char*& p, const char* end, const char* text_end,
                 Row& row) noexcept;

// "a finite number"
const char* expected_value(const Field& field) noexcept;

}  // namespace trireme
