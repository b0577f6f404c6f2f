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
//
// Codes of 8 bits (kv_codes.h) lie in the same order, one byte each, except that in a vector of
// words the first numbers of all words come before the second ones. Behind those of all heads are
// their scales, [G][B] floats. So a block carries its scales wherever it is moved.
#pragma once

#include "kv_codes.h"

namespace splitserve {

inline int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// Numbers of tokens, of which the next one's are `stride` numbers on.
template <class T>
struct OfTokens {
  const T* first;
  size_t stride;

  const T* at(int token) const { return first + token * stride; }
};

template <class T>
struct KVBlocks {
  int32_t block_size, num_kv_heads, key_dim, value_dim, format;

  static constexpr int kPair = kPerWord<T>;

  // Tokens of a key group.
  int group() const { return block_size % kLanes ? block_size : kLanes; }
  bool has_full_groups() const { return block_size % kLanes == 0; }
  // Whether values come in words of kPair tokens.
  bool has_pairs() const { return block_size % kPair == 0; }
  int key_words() const { return key_dim / kPair; }

  bool has_codes() const { return format != kPlainKV; }
  // Bytes of a stored number.
  size_t number_size() const { return has_codes() ? 1 : sizeof(T); }

  // Which number of a block is the first of the key of the token at `offset`. The next numbers of
  // its word follow, and the next words are group() words on.
  size_t key_at(int kv_head, int offset) const {
    const int in_group = offset % group();
    return (size_t(kv_head) * block_size + offset - in_group) * key_dim + in_group * kPair;
  }

  // The same of its value: consecutive with pairs every kPair-th number (`offset` may be any token
  // of the pair), else every number.
  size_t value_at(int kv_head, int offset) const {
    const int in_pair = has_pairs() ? offset % kPair : 0;
    return (size_t(kv_head) * block_size + offset - in_pair) * value_dim + in_pair;
  }

  int value_step() const { return has_pairs() ? kPair : 1; }

  const uint32_t* key(const T* block, int kv_head, int offset) const {
    return reinterpret_cast<const uint32_t*>(block + key_at(kv_head, offset));
  }

  const T* value(const T* block, int kv_head, int offset) const {
    return block + value_at(kv_head, offset);
  }

  // Where the scale of a token's codes of `dim` numbers is in a block.
  size_t scale_at(int dim, int kv_head, int offset) const {
    return size_t(num_kv_heads) * block_size * dim +
           (size_t(kv_head) * block_size + offset) * sizeof(float);
  }

  // Block `index` of a pool, `stride` numbers after the one before.
  char* block(void* pool, int64_t index, int64_t stride) const {
    return static_cast<char*>(pool) + index * stride * int64_t(number_size());
  }

  // Most tokens that `store_run` takes.
  int run_length() const { return has_full_groups() && !has_codes() ? kLanes : 1; }

  // Stores `count` consecutive tokens of one group: a whole group a vector at a time. `key`: [D] of
  // each, `value`: [E].
  void store_run(void* key_block, void* value_block, int kv_head, int offset, int count,
                 OfTokens<T> key, OfTokens<T> value) const {
    if (count == kLanes && run_length() == kLanes) {
      const T* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = key.at(i);
      T* to = static_cast<T*>(key_block) + key_at(kv_head, offset);
      transpose<T>(rows, key_words(), reinterpret_cast<uint32_t*>(to), kLanes);
      return store_values(static_cast<T*>(value_block), kv_head, offset, value);
    }
    for (int i = 0; i < count; ++i) {
      store(key_block, value_block, kv_head, offset + i, key.at(i), value.at(i));
    }
  }

  void store(void* key_block, void* value_block, int kv_head, int offset, const T* key,
             const T* value) const {
    auto *keys = static_cast<uint8_t*>(key_block), *values = static_cast<uint8_t*>(value_block);
    switch (format) {
      case kInt8KV: return store_as_codes<Int8Codes>(keys, values, kv_head, offset, key, value);
      case kFloat8KV: return store_as_codes<Float8Codes>(keys, values, kv_head, offset, key, value);
      default:
        store_key(static_cast<T*>(key_block), kv_head, offset, key);
        store_value(static_cast<T*>(value_block), kv_head, offset, value);
    }
  }

 private:
  void store_key(T* block, int kv_head, int offset, const T* from) const {
    T* to = block + key_at(kv_head, offset);
    for (int word = 0; word < key_words(); ++word) {
      memcpy(to + size_t(word) * group() * kPair, from + word * kPair, sizeof(uint32_t));
    }
  }

  void store_value(T* block, int kv_head, int offset, const T* from) const {
    T* to = block + value_at(kv_head, offset);
    const int step = value_step();
    for (int i = 0; i < value_dim; ++i) to[i * step] = from[i];
  }

  // Of a whole group.
  void store_values(T* block, int kv_head, int offset, OfTokens<T> value) const {
    for (int token = 0; token < kLanes; token += kPair) {
      const T* from = value.at(token);
      T* to = block + value_at(kv_head, offset + token);
      for_vectors(value_dim, [&](int i, int count) {
        if constexpr (kPair == 1) {
          store_up_to(to + i, load_up_to(from + i, count), count);
        } else {
          const Words first = (Words)load_up_to(from + i, count);
          const Words words = first >> 16 | (Words)load_up_to(from + value.stride + i, count);
          memcpy(to + i * kPair, &words, count * sizeof(uint32_t));
        }
      });
    }
  }

  template <class Codes>
  void store_as_codes(uint8_t* keys, uint8_t* values, int kv_head, int offset, const T* key,
                      const T* value) const {
    const int step = has_pairs() ? kPair : 1, in_pair = offset % step;
    const int lane = offset % group(), in_word = has_full_groups() ? kLanes : 1;
    uint8_t* to_key = keys + key_at(kv_head, offset) - lane * kPair;
    uint8_t* to_value = values + value_at(kv_head, offset) - in_pair;
    const int lane_step = has_full_groups() ? 1 : kPair;
    const float scale_of_key = store_codes<Codes>(key, key_dim, [&](int i) {
      return to_key + size_t(i / kPair) * group() * kPair + i % kPair * in_word + lane * lane_step;
    });
    const int num_whole = value_dim / kLanes * kLanes;
    const float scale_of_value = store_codes<Codes>(value, value_dim, [&](int i) {
      const int in_vector = i < num_whole ? i % kLanes : 0, first = i - in_vector;
      return to_value + first * step + (i < num_whole ? in_pair * kLanes + in_vector : in_pair);
    });
    store_as(keys + scale_at(key_dim, kv_head, offset), scale_of_key);
    store_as(values + scale_at(value_dim, kv_head, offset), scale_of_value);
  }
};

// Where the run of tokens ends that begins with `token`; `token` if none begins there. A run has
// consecutive slots of one group of `length`; whoever asks for all tokens meets each run once.
inline int end_of_run(const int64_t* slots, int token, int num_tokens, int length) {
  const auto begins = [&](int i) {
    return i == 0 || slots[i] != slots[i - 1] + 1 || slots[i] % length == 0;
  };
  if (!begins(token)) return token;
  int end = token + 1;
  while (end < num_tokens && !begins(end)) ++end;
  return end;
}

}  // namespace splitserve
