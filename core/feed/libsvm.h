// libsvm's text: a label, then index:value pairs, separated by blanks (spaces and tabs).
//
// Blanks may begin and end the line; what follows a '#' is a comment. An index is a key, the value
// its weight. Indices may have any order; an index that occurs twice counts twice. With hashed
// indices, an index is all characters up to the last colon.
#pragma once

#include <cstddef>
#include <string>

#include "feed/fields.h"
#include "feed/text.h"

namespace trireme {

// The field of a broken line is 0 for the label, 1 for the pairs.
class LibsvmParser final : public TextParser {
 public:
  static constexpr std::size_t kMaxLineBytes = 1 << 20;

  // indices: of the kind kKeys or kHashes.
  LibsvmParser(const TextOptions& options, Field indices);

 private:
  bool parse_line(const Slice& line, Row& row, BrokenLine& broken) const override;
  bool parse_pair(const Slice& word, Row& row) const noexcept;

  Field indices_;
};

}  // namespace trireme
