#include "feed/fields.h"

#include <utility>

#include "feed/numbers.h"
#include "feed/strings.h"

namespace trireme {

Field::Field(FieldKind kind_, std::string name_, std::size_t dim_)
    : kind(kind_), name(std::move(name_)), dim(dim_), seed(xxh64(name, 0)) {}

Layout layout_of(std::span<const Field> fields, bool has_weights) {
  Layout layout;
  layout.has_weights = has_weights;
  for (const Field& field : fields) {
    if (field.kind == FieldKind::kString) {
      ++layout.num_strings;
    } else if (field.is_sparse()) {
      ++layout.num_features;
    } else {
      layout.dims.push_back(field.dim);
    }
  }
  return layout;
}

bool parse_value(const Field& field, const char*& p, const char* end, const char* text_end,
                 Row& row) noexcept {
  const std::string_view text(p, static_cast<std::size_t>(end - p));
  switch (field.kind) {
    case FieldKind::kKeys:
      if (!parse_key(p, text_end, *row.keys)) return false;
      ++row.keys;
      return true;
    case FieldKind::kHashes:
      *row.keys++ = xxh64(text, field.seed);
      p = end;
      return true;
    case FieldKind::kString:
      *row.strings++ = text;
      p = end;
      return true;
    case FieldKind::kNumber:
    case FieldKind::kDense:
      return parse_float(p, text_end, *row.numbers++);
    case FieldKind::kAmount:
      return parse_float(p, text_end, *row.numbers) && *row.numbers++ >= 0;
  }
  return false;
}

const char* expected_value(const Field& field) noexcept {
  switch (field.kind) {
    case FieldKind::kKeys:
      return "an integer from -2^63 to 2^64 - 1 (hashed=True reads strings)";
    case FieldKind::kHashes:
    case FieldKind::kString:
      return "a string";
    case FieldKind::kAmount:
      return "a finite number >= 0";
    case FieldKind::kNumber:
    case FieldKind::kDense:
      return "a finite number";
  }
  return "";
}

}  // namespace trireme
