#include "feed/merge.h"

#include <algorithm>
#include <vector>

#include "feed/chunks.h"
#include "feed/unique.h"

namespace trireme {
namespace {

constexpr std::size_t kChunkFloatsMin = std::size_t{1}
                                        << 16;  // less is not worth waking a thread for

struct Source {
  const float* grad;  // (D,)
  float scale;
};

}  // namespace

Merged merge(std::span<const GradPart> parts, std::size_t dim, Pool& pool) {
  std::vector<std::uint64_t> keys;
  std::vector<Source> sources;
  for (const GradPart& part : parts) {
    keys.insert(keys.end(), part.keys.begin(), part.keys.end());
    for (std::size_t i = 0; i < part.keys.size(); ++i)
      sources.push_back({part.grads.data() + i * dim, part.scale});
  }
  Unique distinct = unique(keys, std::nullopt, pool);
  const Occurrences& from = distinct.occurrences;
  const std::size_t num_rows = distinct.keys.size();
  Array<float> grads(num_rows * dim);
  const std::size_t chunks = num_chunks(keys.size() * dim, kChunkFloatsMin, pool, 4);
  pool.run(chunks, [&](std::size_t c) {
    const std::size_t end = chunk_begin(num_rows, c + 1, chunks);
    for (std::size_t k = chunk_begin(num_rows, c, chunks); k < end; ++k) {
      float* const to = grads.data() + k * dim;
      const std::int32_t* const order = from.order.data();
      const Source first = sources[static_cast<std::size_t>(order[from.starts[k]])];
      std::transform(first.grad, first.grad + dim, to, [&](float g) { return first.scale * g; });
      for (std::int32_t o = from.starts[k] + 1; o < from.starts[k + 1]; ++o) {
        const Source source = sources[static_cast<std::size_t>(order[o])];
        for (std::size_t d = 0; d < dim; ++d) to[d] += source.scale * source.grad[d];
      }
    }
  });
  return {std::move(distinct.keys), std::move(grads), std::move(distinct.index)};
}

}  // namespace trireme
