#include "store/dtype.h"

#include <string>

#include "base/error.h"

namespace trireme {

Dtype dtype_of(std::string_view name) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw Error(ErrorCode::kBadRequest,
              "dtype: expected float32, bfloat16 or float16, found " + std::string(name));
}

std::string_view dtype_name(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

}  // namespace trireme
