// Rows of 32-bit words become columns.
#pragma once

#include "simd.h"

namespace splitserve {

// How many numbers of type T one 32-bit word holds.
template <class T>
constexpr int kPerWord = 4 / sizeof(T);

// kLanes rows of kLanes words, in place.
inline void transpose_square(Words (&rows)[kLanes]) {
  Words low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = uint32_t(i / 2 + i % 2 * kLanes);
    high[i] = low[i] + kLanes / 2;
  }
  // With row and lane as one number of 2n bits, each round rotates it by one bit; n rounds swap
  // row and lane.
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Words next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// out[word * stride + i] = word `word` of rows[i], for kLanes rows of `num_words` words. A row that
// is null counts as zeros.
template <class T>
inline void transpose(const T* const* rows, int num_words, uint32_t* out, size_t stride) {
  int word = 0;
  for (; word + kLanes <= num_words; word += kLanes) {
    Words square[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      square[i] = rows[i] ? load_as<Words>(rows[i] + word * kPerWord<T>) : Words{};
    }
    transpose_square(square);
    for (int i = 0; i < kLanes; ++i) store_as(out + (word + i) * stride, square[i]);
  }
  for (; word < num_words; ++word) {
    for (int i = 0; i < kLanes; ++i) {
      out[word * stride + i] =
          rows[i] ? load_as<uint32_t>(rows[i] + word * kPerWord<T>) : uint32_t{0};
    }
  }
}

}  // namespace splitserve
