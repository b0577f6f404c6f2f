// Weights as codes of 4 or 8 bits, with a scale and an offset for each group of inputs.
//
//     weight[n][k] = scale[n][g] * (code[n][k] - kZero) - offset[n][g],   g = k / kGroup
//
// Rows are rounded to 8-bit integers, too, with one scale for each kGroup inputs; products are sums
// of integers, which are exact, and so are the same in any order. The sums of groups are added in
// the order of the groups: a row has the same bits in any batch.
//
// A panel (see gemm.h) is a sequence of groups: [kPanel] scales, [kPanel] offsets if the matrix has
// them, both float16, then for each vector of outputs its codes. Codes of 8 bits:
// [kGroup / 4][kLanes][4 inputs]. Codes of 4 bits have two such words in one byte each: the word of
// inputs 4i .. 4i + 3 in the lower halves, that of inputs kGroup / 2 + 4i in the upper ones.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace splitserve {

constexpr int kGroup = 32, kGroupWords = kGroup / 4;

// A matrix in this form. `bits`: 4 or 8.
struct GroupWeights {
  const uint8_t* panels;
  int32_t num_outputs, num_inputs, bits;
  bool has_offsets;
};

constexpr int zero_of(int bits) { return bits == 4 ? 8 : 128; }

constexpr size_t codes_bytes(int bits) { return size_t{kGroup} * kLanes * bits / 8; }

inline size_t group_bytes(const GroupWeights& weights) {
  const int num_numbers = weights.has_offsets ? 2 : 1;
  return kPanelVectors * (num_numbers * kLanes * sizeof(uint16_t) + codes_bytes(weights.bits));
}

// A row in 8-bit integers. `codes`: [K], `scales`: [K / kGroup]; `code_sums`: of each group;
// `sums`: of each group's numbers as they are after rounding.
struct RoundedRow {
  const int8_t* codes;
  const float* scales;
  const int32_t* code_sums;
  const float* sums;
};

inline Floats load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  Floats result;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = from[i], magnitude = (bits & 0x7fff) << 13;
    const float value = load_as<float>(&magnitude) * 0x1p112f;
    result[i] = bits & 0x8000 ? -value : value;
  }
  return result;
#endif
}

// Rounds a row of `num_inputs` numbers.
template <class T>
inline void round_row(const T* row, int num_inputs, int8_t* codes, float* scales,
                      int32_t* code_sums, float* sums) {
  for (int group = 0; group < num_inputs / kGroup; ++group) {
    const T* from = row + group * kGroup;
    Floats most{};
    for (int i = 0; i < kGroup; i += kLanes) {
      const Floats x = load(from + i);
      most = max(most, x < 0.0f ? -x : x);
    }
    const float largest_number = largest(most);
    const float scale = largest_number / 127.0f;
    const float factor = largest_number > 0.0f ? 127.0f / largest_number : 0.0f;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    int32_t code_sum = 0;
    for (int i = 0; i < kGroup; i += kLanes) {
      const Ints rounded = (Ints)(load(from + i) * factor + magic) - (Ints)magic;
      for (int lane = 0; lane < kLanes; ++lane) {
        codes[group * kGroup + i + lane] = int8_t(rounded[lane]);
        code_sum += rounded[lane];
      }
    }
    scales[group] = scale;
    code_sums[group] = code_sum;
    sums[group] = scale * code_sum;
  }
}

// sum[lane] += the product of 4 codes (unsigned) and 4 integers of a row.
SPLITSERVE_INLINE Ints add_products(Ints sum, Words codes, Words row) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)row);
#elif defined(__AVX512F__)
  // Products of 8-bit codes would not fit 16 bits: even and odd inputs are multiplied apart.
  const __m512i low = _mm512_set1_epi16(0xff);
  const __m512i even = _mm512_madd_epi16(
      _mm512_and_si512((__m512i)codes, low),
      _mm512_srai_epi16(_mm512_slli_epi16((__m512i)row, 8), 8));
  const __m512i odd =
      _mm512_madd_epi16(_mm512_srli_epi16((__m512i)codes, 8), _mm512_srai_epi16((__m512i)row, 8));
  return sum + (Ints)even + (Ints)odd;
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(
      _mm256_and_si256((__m256i)codes, low),
      _mm256_srai_epi16(_mm256_slli_epi16((__m256i)row, 8), 8));
  const __m256i odd =
      _mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), _mm256_srai_epi16((__m256i)row, 8));
  return sum + (Ints)even + (Ints)odd;
#else
  for (int byte = 0; byte < 32; byte += 8) {
    sum += (Ints)(codes >> byte & 0xff) * ((Ints)(row << (24 - byte)) >> 24);
  }
  return sum;
#endif
}

// sums[i][v] += the products of a group with R rows.
template <int R, int bits, bool has_offsets>
SPLITSERVE_INLINE void multiply_group(const uint8_t* group, const RoundedRow* rows, int index,
                                      Floats (&sums)[R][kPanelVectors]) {
  const auto* scales = reinterpret_cast<const uint16_t*>(group);
  const uint16_t* offsets = scales + kPanel;
  const uint8_t* codes = group + (has_offsets ? 2 : 1) * kPanel * sizeof(uint16_t);
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v, codes += codes_bytes(bits)) {
    Ints products[R] = {};
    const auto add = [&](Words words, int word) {
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) {
        const Words row = repeat_word(rows[i].codes + index * kGroup + word * 4);
        products[i] = add_products(products[i], words, row);
      }
    };
    if constexpr (bits == 8) {
#pragma GCC unroll 8
      for (int word = 0; word < kGroupWords; ++word) {
        __builtin_prefetch(codes + word * sizeof(Words) + 4096);
        add(load_as<Words>(codes + word * sizeof(Words)), word);
      }
    } else {
#pragma GCC unroll 4
      for (int word = 0; word < kGroupWords / 2; ++word) {
        __builtin_prefetch(codes + word * sizeof(Words) + 4096);
        const Words both = load_as<Words>(codes + word * sizeof(Words));
        add(both & 0x0f0f0f0fu, word);
        add(both >> 4 & 0x0f0f0f0fu, word + kGroupWords / 2);
      }
    }
    const Floats scale = load_float16(scales + v * kLanes);
    const Floats offset = has_offsets ? load_float16(offsets + v * kLanes) : Floats{};
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      const Ints centred = products[i] - zero_of(bits) * rows[i].code_sums[index];
      const Floats scaled = __builtin_convertvector(centred, Floats) * rows[i].scales[index];
      sums[i][v] += scaled * scale;
      if constexpr (has_offsets) sums[i][v] -= offset * rows[i].sums[index];
    }
  }
}

template <int R, int bits, bool has_offsets>
inline void multiply_groups(const GroupWeights& weights, int panel_index, const RoundedRow* rows,
                            float* out) {
  const size_t size = group_bytes(weights);
  const int num_groups = weights.num_inputs / kGroup;
  const uint8_t* panel = weights.panels + size_t(panel_index) * num_groups * size;
  Floats sums[R][kPanelVectors] = {};
  for (int index = 0; index < num_groups; ++index) {
    multiply_group<R, bits, has_offsets>(panel + index * size, rows, index, sums);
  }
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < kPanelVectors; ++v) store(out + i * kPanel + v * kLanes, sums[i][v]);
  }
}

}  // namespace splitserve
