// What the attention of a layer works on: the layer, softmax states, and the memory of a thread.
//
// Shape letters as in attention.h.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "gemm.h"
#include "kv_blocks.h"
#include "kv_tile.h"

namespace splitserve {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// What all rows of a layer share. `keys`, `values`: pools, blocks `key_stride` and `value_stride`
// numbers apart, in `kv_format`. `query`: [T, H, D] with tokens `query_stride` numbers apart;
// `output`: [T, H, E], contiguous. `sinks`: [H] or null. `relative_bias`: [H, num_distances] or
// null, added to the scores of keys so many tokens back; the last one is for all that are further.
// `sliding_window`: 0 for none; `softcap`: 0 for none.
template <class T>
struct AttentionLayer {
  const T* query;
  const void* keys;
  const void* values;
  T* output;
  const float* sinks;
  const float* relative_bias;
  int64_t query_stride, key_stride, value_stride;
  int32_t num_heads, num_kv_heads, head_dim, value_dim, block_size, sliding_window;
  int32_t num_distances, kv_format;
  float scale, softcap;

  KVBlocks<T> blocks() const { return {block_size, num_kv_heads, head_dim, value_dim, kv_format}; }
};

// The softmax of query rows over some keys: maximum, sum of weights, weighted sum of values.
struct SoftmaxState {
  float* maximum;  // [M]
  float* total;    // [M, kLanes], to be added up
  float* values;   // [M, padded E]
};

inline int first_in_sight(int position, int sliding_window) {
  return sliding_window ? std::max(0, position - sliding_window + 1) : 0;
}

// Memory of one thread, kept from step to step.
template <class T>
class AttentionScratch {
 public:
  void reserve(int num_rows, int value_dim) {
    const size_t width = padded(value_dim, kPanel);
    grow(scores, size_t(num_rows) * kTile);
    grow(weights, size_t(num_rows) * kTile);
    grow(statistics, size_t(num_rows) * 2 * (1 + kLanes));
    grow(sums, size_t(num_rows) * width * 2);
    grow(most, size_t(num_rows) * kLanes);
    grow(rescale, size_t(num_rows) + kLanes);
    grow(offsets, size_t(num_rows) + kLanes);
    grow(rows, size_t(num_rows));
    grow(weight_rows, size_t(num_rows));
    grow(positions, size_t(num_rows));
    grow(biases, size_t(num_rows));
  }

  std::vector<uint32_t> tiles;
  std::vector<float> scores, statistics, sums, most, rescale, offsets;
  std::vector<T> weights;
  std::vector<const T*> rows, weight_rows;
  std::vector<int> positions;
  std::vector<const float*> biases;

 private:
  template <class V>
  static void grow(std::vector<V>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }
};

// Numbers of a slot that holds the softmax of `group` query rows over a partition.
inline size_t slot_size(int group, int value_dim) {
  return size_t(group) * (1 + kLanes + padded(value_dim, kPanel));
}

}  // namespace splitserve
