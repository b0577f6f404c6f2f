// Weights as 8-bit integers: those of one output are its scale times -127 .. 127.
//
// T is the number format they are multiplied in: float and Bf16 hold such integers exactly. A panel
// (see gemm.h) has the same order of words; the weights that make up the words of one vector stand
// together, those of the first inputs before those of the second: [K / kPerWord<T>][kPanelVectors]
// [kPerWord<T>][kLanes].
#pragma once

#include <limits>

#include "simd.h"
#include "transpose.h"

namespace splitserve {

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

constexpr float kLargestInt8 = 127.0f;

template <class T>
constexpr int kVectorBytes = kPerWord<T> * kLanes;

SPLITSERVE_INLINE Words integers_as_floats(const int8_t* from) {
  // GCC converts bytes to a wider vector one by one.
#if defined(__AVX512F__)
  const Ints integers = (Ints)_mm512_cvtepi8_epi32(load_as<__m128i>(from));
#elif defined(__AVX2__)
  const Ints integers = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  const Ints integers = __builtin_convertvector(load_as<Bytes>(from), Ints);
#endif
  return (Words)__builtin_convertvector(integers, Floats);
}

// The words of one vector, as integers.
template <class T>
SPLITSERVE_INLINE Words widen(const int8_t* from) {
  const Words first = integers_as_floats(from);
  if constexpr (kPerWord<T> == 1) {
    return first;
  } else {
    return first >> 16 | integers_as_floats(from + kLanes);
  }
}

// Words of `count` vectors.
template <class T>
inline void widen_vectors(const int8_t* from, int count, uint32_t* words) {
  for (int i = 0; i < count; ++i) {
    store_as(words + i * kLanes, widen<T>(from + i * kVectorBytes<T>));
  }
}

// Part `part` of the words as floats.
template <class T>
SPLITSERVE_INLINE Floats part_of(Words words, int part) {
  if constexpr (kPerWord<T> == 1) {
    return (Floats)words;
  } else {
    return (Floats)(part ? words & 0xffff0000u : words << 16);
  }
}

// Rounds the columns of `num_words` words, `stride` apart, to the integers of one vector's outputs,
// `out_stride` bytes apart, and writes the scales: [kLanes]. A column with a weight that is not
// finite gets a scale of NaN.
template <class T>
inline void quantize_columns(const uint32_t* words, int num_words, size_t stride, int8_t* out,
                             size_t out_stride, float* scales) {
  Floats most{}, poison{};
  for (int k = 0; k < num_words; ++k) {
    const Words column = load_as<Words>(words + k * stride);
    for (int part = 0; part < kPerWord<T>; ++part) {
      const Floats weights = part_of<T>(column, part);
      most = max(most, weights < 0.0f ? -weights : weights);
      poison += weights * 0.0f;
    }
  }
  store(scales, most / kLargestInt8 + poison);
  const Floats is_usable = most > 0.0f ? splat(1.0f) : Floats{};
  const Floats factor = is_usable * kLargestInt8 / (most > 0.0f ? most : splat(1.0f));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int k = 0; k < num_words; ++k) {
    const Words column = load_as<Words>(words + k * stride);
    for (int part = 0; part < kPerWord<T>; ++part) {
      const Floats shifted = part_of<T>(column, part) * factor + magic;
      const Ints rounded = (Ints)shifted - (Ints)magic;
      store_as(out + k * out_stride + part * kLanes, __builtin_convertvector(rounded, Bytes));
    }
  }
}

}  // namespace splitserve
