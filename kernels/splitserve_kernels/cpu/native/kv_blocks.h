// How keys and values lie in a block: so that attention can multiply with them as they are.
//
// Shape letters: G key/value heads, B block size, D size of a key head, E size of a value head.
//
// To attention a block is opaque memory of B * G * D and B * G * E numbers. Keys of a head lie like
// packed weights (gemm.h) whose outputs are tokens: groups of kLanes tokens, in a group one 32-bit
// word of all tokens after the other, [B / kLanes][D words][kLanes]. Values of a head lie like
// packed weights whose inputs are tokens: [B words][E], where a word has the numbers of two tokens
// if they are Bf16. Where B is no multiple of what that needs, a group is the block, or a word has
// no pair; then attention repacks.
#pragma once

#include "simd.h"
#include "transpose.h"

namespace splitserve {

inline int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

template <class T>
struct KVBlocks {
  int32_t block_size, num_kv_heads, key_dim, value_dim;

  static constexpr int kPair = kPerWord<T>;

  // Tokens of a key group.
  int group() const { return block_size % kLanes ? block_size : kLanes; }
  bool has_full_groups() const { return block_size % kLanes == 0; }
  // Whether values come in words of kPair tokens.
  bool has_pairs() const { return block_size % kPair == 0; }
  int key_words() const { return key_dim / kPair; }

  // The words of the token at `offset` of a block: the first is here, the next group() words on.
  const uint32_t* key(const T* block, int kv_head, int offset) const {
    const T* head = block + size_t(kv_head) * block_size * key_dim;
    const int in_group = offset % group();
    return reinterpret_cast<const uint32_t*>(head + size_t(offset - in_group) * key_dim) + in_group;
  }

  // The values of the token at `offset` of a block: consecutive with pairs every kPair-th number
  // (`offset` may be any token of the pair), else every number.
  const T* value(const T* block, int kv_head, int offset) const {
    const T* head = block + size_t(kv_head) * block_size * value_dim;
    if (!has_pairs()) return head + size_t(offset) * value_dim;
    const int in_pair = offset % kPair;
    return head + size_t(offset - in_pair) * value_dim + in_pair;
  }

  void store_key(T* block, int kv_head, int offset, const T* from) const {
    uint32_t* to = const_cast<uint32_t*>(key(block, kv_head, offset));
    for (int word = 0; word < key_words(); ++word) {
      memcpy(to + size_t(word) * group(), from + word * kPair, sizeof(uint32_t));
    }
  }

  void store_value(T* block, int kv_head, int offset, const T* from) const {
    T* to = const_cast<T*>(value(block, kv_head, offset));
    const int step = has_pairs() ? kPair : 1;
    for (int i = 0; i < value_dim; ++i) to[i * step] = from[i];
  }
};

}  // namespace splitserve
