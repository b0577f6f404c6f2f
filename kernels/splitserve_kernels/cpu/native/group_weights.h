// Weights as codes of 4, 6 or 8 bits, with numbers for each group of kGroup inputs.
//
//     weight[n][k] = scale[n][g] * (code[n][k] - zero[n][g]) - offset[n][g],   g = k / kGroup
//
// Rows are rounded to 8-bit integers, too, with one scale for each kGroup inputs; products are sums
// of integers, which are exact, and so are the same in any order. The sums of groups are added in
// the order of the groups: a row has the same bits in any batch. Without rounding, codes become
// words that are multiplied as others are (see gemm.h).
//
// A panel (see gemm.h) is a sequence of groups, all of one kind. A group has its numbers, one after
// the other for all outputs of the panel, then for each vector of outputs its codes. Codes of 8
// bits: [kGroup / 4][kLanes][4 inputs]. Codes of 4 bits have two such words in one byte each: the
// word of inputs 4i .. 4i + 3 in the lower halves, that of inputs kGroup / 2 + 4i in the upper ones.
// Codes of 6 bits have their lower 4 bits so, and then two words with the upper 2 bits, one for each
// half of the inputs: those of its word i are bits 2i and 2i + 1 of the bytes.
// Some kinds have numbers for kBlockGroups groups before the first of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace splitserve {

#if defined(__AVX512F__)
constexpr int kPanelVectors = 4, kMaxGroupRows = 6;
#else
constexpr int kPanelVectors = 2, kMaxGroupRows = kLanes == 8 ? 4 : 1;
#endif
constexpr int kPanel = kPanelVectors * kLanes;

constexpr int kGroup = 32, kGroupWords = kGroup / 4, kHalf = kGroup / 2;
constexpr int kBlockGroups = 8;

// Numbers of a group. A half is of kGroup / 2 inputs. Without zeros and offsets, the zero is the
// middle of the codes; with offsets it is 0. group_weights.py has the same numbers.
enum Numbers {
  kScale,        // a float16 scale
  kZero,         // a float16 scale, an unsigned 8-bit zero
  kOffset,       // a float16 scale, a float16 offset
  kSub,          // unsigned 8-bit scale and offset, times float16 scale and offset of the block
  kHalves,       // signed 8-bit scales of both halves, times the float16 scale of the block
  kScaleHalves,  // float16 scales of both halves
  kFloat8,       // a float16 scale; codes are floats of 8 bits (e4m3), rows are never rounded
};
constexpr int kNumRoundedKinds = 3 * kFloat8;

constexpr int numbers_of(int kind) { return kind / 3; }
constexpr int bits_of(int kind) { return 4 + kind % 3 * 2; }
constexpr bool is_used(int kind) { return bits_of(kind) != 6 || numbers_of(kind) != kZero; }
constexpr bool has_offsets(int kind) { return numbers_of(kind) == kOffset || numbers_of(kind) == kSub; }
constexpr bool has_halves(int kind) {
  return numbers_of(kind) == kHalves || numbers_of(kind) == kScaleHalves;
}
constexpr int zero_of(int kind) {
  if (has_offsets(kind) || numbers_of(kind) == kFloat8) return 0;
  return 1 << (bits_of(kind) - 1);
}

constexpr int kNumbersBytes[] = {2, 3, 4, 2, 2, 4, 2}, kHeadBytes[] = {0, 0, 0, 4, 2, 0, 0};

constexpr size_t codes_bytes(int kind) { return size_t{kGroup} * kLanes * bits_of(kind) / 8; }
constexpr size_t head_bytes(int kind) { return size_t{kPanel} * kHeadBytes[numbers_of(kind)]; }
constexpr size_t group_bytes(int kind) {
  return size_t{kPanel} * kNumbersBytes[numbers_of(kind)] + kPanelVectors * codes_bytes(kind);
}

// Where group `index` of a panel begins; the numbers of its block are before the block.
constexpr size_t group_offset(int kind, int index) {
  return index * group_bytes(kind) + (index / kBlockGroups + 1) * head_bytes(kind);
}
constexpr size_t head_offset(int kind, int index) {
  const int first = index / kBlockGroups * kBlockGroups;
  return group_offset(kind, first) - head_bytes(kind);
}

// A row in 8-bit integers. `codes`: [K]; of each group: `scales`, and the sums of the codes of both
// halves, of all, and of the numbers as they are after rounding.
struct RoundedRow {
  const int8_t* codes;
  const float* scales;
  const int32_t* half_sums;
  const int32_t* code_sums;
  const float* sums;
};

typedef uint8_t UnsignedBytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

SPLITSERVE_INLINE Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  const Words bits = __builtin_convertvector(load_as<Halves>(from), Words);
  const Floats value = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Floats)((Words)value | (bits & 0x8000) << 16);
#endif
}

inline float to_float16(uint16_t bits) {
  const uint32_t magnitude = uint32_t{bits & 0x7fffu} << 13;
  const float value = load_as<float>(&magnitude) * 0x1p112f;
  return bits & 0x8000 ? -value : value;
}

SPLITSERVE_INLINE Ints load_unsigned(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(load_as<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load_as<UnsignedBytes>(from), Ints);
#endif
}

SPLITSERVE_INLINE Ints load_signed(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(load_as<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load_as<SignedBytes>(from), Ints);
#endif
}

SPLITSERVE_INLINE Floats as_floats(Ints value) { return __builtin_convertvector(value, Floats); }

// A word of a row in all lanes. Of what it knows to be a repetition, GCC would take the parts first
// and repeat each of them, which takes three instructions instead of one.
SPLITSERVE_INLINE Words repeat_word(const void* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_broadcastss_ps(_mm_load_ss(static_cast<const float*>(from)));
#elif defined(__AVX2__)
  return (Words)_mm256_broadcast_ss(static_cast<const float*>(from));
#else
  return splat_word(load_as<uint32_t>(from));
#endif
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
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)codes, 8),
                                        _mm512_srai_epi16((__m512i)row, 8));
  return sum + (Ints)even + (Ints)odd;
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(
      _mm256_and_si256((__m256i)codes, low),
      _mm256_srai_epi16(_mm256_slli_epi16((__m256i)row, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8),
                                        _mm256_srai_epi16((__m256i)row, 8));
  return sum + (Ints)even + (Ints)odd;
#else
  for (int byte = 0; byte < 32; byte += 8) {
    sum += (Ints)(codes >> byte & 0xff) * ((Ints)(row << (24 - byte)) >> 24);
  }
  return sum;
#endif
}

// Word `word` of a vector's codes.
SPLITSERVE_INLINE Words code_word(int bits, const uint8_t* codes, int word) {
  const auto load_word = [&](int i) { return load_as<Words>(codes + i * sizeof(Words)); };
  if (bits == 8) return load_word(word);
  const int i = word % (kGroupWords / 2), half = word / (kGroupWords / 2);
  const Words lower = (half ? load_word(i) >> 4 : load_word(i)) & 0x0f0f0f0fu;
  if (bits == 4) return lower;
  const Words upper = load_word(kGroupWords / 2 + half);
  return lower | ((i < 2 ? upper << (4 - 2 * i) : upper >> (2 * i - 4)) & 0x30303030u);
}

// How far ahead of their use codes of 8 bits are fetched for a single row: it takes little time for
// a code.
constexpr size_t kGroupBytesAhead = 8192;

// sums[i][v] += the products of vector v of a group with R rows. Codes are read in order: vectors side
// by side took up to twice as long.
template <int R, int kind>
SPLITSERVE_INLINE void multiply_vector(const uint8_t* group, const uint8_t* head,
                                       const RoundedRow* rows, int index, int v,
                                       Floats (&sums)[R][kPanelVectors]) {
  constexpr int numbers = numbers_of(kind), bits = bits_of(kind);
  constexpr int num_halves = has_halves(kind) ? 2 : 1;
  const uint8_t* codes = group + kPanel * kNumbersBytes[numbers] + v * codes_bytes(kind);
  Ints products[num_halves][R] = {};
  const auto add = [&](Words codes, int word) {
    const int half = num_halves == 2 ? word / (kGroupWords / 2) : 0;
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      const Words row = repeat_word(rows[i].codes + index * kGroup + word * 4);
      products[half][i] = add_products(products[half][i], codes, row);
    }
  };
#pragma GCC unroll 8
  for (int i = 0; i < kGroupWords; ++i) {
    if constexpr (R == 1 && bits == 8) {
      __builtin_prefetch(codes + i * sizeof(Words) + kGroupBytesAhead);
    }
    // Both halves of a word of codes of 4 bits, one after the other.
    const int word = bits == 8 ? i : i / 2 + i % 2 * (kGroupWords / 2);
    add(code_word(bits, codes, word), word);
  }
  const int at = v * kLanes;
  if constexpr (has_halves(kind)) {
    Floats scales[2];
    if constexpr (numbers == kHalves) {
      const Floats of_block = load_float16(head + 2 * at);
      scales[0] = as_floats(load_signed(group + at)) * of_block;
      scales[1] = as_floats(load_signed(group + kPanel + at)) * of_block;
    } else {
      scales[0] = load_float16(group + 2 * at);
      scales[1] = load_float16(group + 2 * (kPanel + at));
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      const int32_t* row_sums = rows[i].half_sums + 2 * index;
      const Floats first = as_floats(products[0][i] - zero_of(kind) * row_sums[0]);
      const Floats second = as_floats(products[1][i] - zero_of(kind) * row_sums[1]);
      sums[i][v] += (first * scales[0] + second * scales[1]) * rows[i].scales[index];
    }
  } else {
    Floats scale, offset{};
    Ints zero{};
    if constexpr (numbers == kSub) {
      scale = as_floats(load_unsigned(group + at)) * load_float16(head + 2 * at);
      offset = as_floats(load_unsigned(group + kPanel + at)) *
               load_float16(head + 2 * (kPanel + at));
    } else {
      scale = load_float16(group + 2 * at);
      if constexpr (numbers == kOffset) offset = load_float16(group + 2 * (kPanel + at));
      if constexpr (numbers == kZero) zero = load_unsigned(group + 2 * kPanel + at);
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      Ints centred = products[0][i];
      if constexpr (numbers == kZero) {
        centred -= zero * rows[i].code_sums[index];
      } else if constexpr (zero_of(kind) != 0) {
        centred -= zero_of(kind) * rows[i].code_sums[index];
      }
      sums[i][v] += as_floats(centred) * rows[i].scales[index] * scale;
      if constexpr (has_offsets(kind)) sums[i][v] -= offset * rows[i].sums[index];
    }
  }
}

// out[i] += the products of row i with groups first .. first + count - 1 of a panel, [R][kPanel]; =
// if first is 0.
template <int R, int kind>
inline void multiply_groups(const uint8_t* panel, int first, int count, const RoundedRow* rows,
                            float* out) {
  Floats sums[R][kPanelVectors] = {};
  if (first > 0) {
    for (int i = 0; i < R; ++i) {
      for (int v = 0; v < kPanelVectors; ++v) sums[i][v] = load(out + i * kPanel + v * kLanes);
    }
  }
  for (int index = first; index < first + count; ++index) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      multiply_vector<R, kind>(panel + group_offset(kind, index), panel + head_offset(kind, index),
                               rows, index, v, sums);
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < kPanelVectors; ++v) store(out + i * kPanel + v * kLanes, sums[i][v]);
  }
}

template <int kind>
__attribute__((noinline)) void multiply_groups_of(const uint8_t* panel, int first, int count,
                                                  const RoundedRow* rows, int num_rows,
                                                  float* out) {
  switch (num_rows) {
    case 1: return multiply_groups<std::min(1, kMaxGroupRows), kind>(panel, first, count, rows, out);
    case 2: return multiply_groups<std::min(2, kMaxGroupRows), kind>(panel, first, count, rows, out);
    case 3: return multiply_groups<std::min(3, kMaxGroupRows), kind>(panel, first, count, rows, out);
    case 4: return multiply_groups<std::min(4, kMaxGroupRows), kind>(panel, first, count, rows, out);
    case 5: return multiply_groups<std::min(5, kMaxGroupRows), kind>(panel, first, count, rows, out);
    default: return multiply_groups<std::min(6, kMaxGroupRows), kind>(panel, first, count, rows, out);
  }
}

// The numbers of one half of a group's vector.
struct VectorNumbers {
  Floats scale, zero, offset;
};

inline VectorNumbers vector_numbers(int kind, const uint8_t* group, const uint8_t* head, int v,
                                    int half) {
  const int at = v * kLanes;
  VectorNumbers result{{}, splat(float(zero_of(kind))), {}};
  switch (numbers_of(kind)) {
    case kSub:
      result.scale = as_floats(load_unsigned(group + at)) * load_float16(head + 2 * at);
      result.offset = as_floats(load_unsigned(group + kPanel + at)) *
                      load_float16(head + 2 * (kPanel + at));
      break;
    case kHalves:
      result.scale =
          as_floats(load_signed(group + half * kPanel + at)) * load_float16(head + 2 * at);
      break;
    case kScaleHalves: result.scale = load_float16(group + 2 * (half * kPanel + at)); break;
    default:
      result.scale = load_float16(group + 2 * at);
      if (numbers_of(kind) == kOffset) result.offset = load_float16(group + 2 * (kPanel + at));
      if (numbers_of(kind) == kZero) {
        result.zero = as_floats(load_unsigned(group + 2 * kPanel + at));
      }
  }
  return result;
}

// Floats with 4 bits of exponent, whose bias is 7, and 3 of mantissa.
SPLITSERVE_INLINE Floats from_e4m3(Words bits) {
  const Floats value = (Floats)((bits & 0x7f) << 20) * 0x1p120f;
  return (Floats)((Words)value | (bits & 0x80) << 24);
}

// Rounds to the upper 16 bits, to nearest and ties to even.
SPLITSERVE_INLINE Words rounded_to_bf16(Floats value) {
  const Words bits = (Words)value;
  return bits + 0x7fff + (bits >> 16 & 1);
}

// Words with the numbers of `low` in their lower halves and those of `high` in the upper ones.
SPLITSERVE_INLINE Words joined_as_bf16(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  struct Table {
    alignas(64) uint16_t from[2 * kLanes];
    constexpr Table() : from() {
      for (int i = 0; i < 2 * kLanes; ++i) from[i] = uint16_t(i / 2 + i % 2 * kLanes);
    }
  };
  static constexpr Table table;
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (Words)_mm512_permutexvar_epi16(load_as<__m512i>(table.from), both);
#else
  return rounded_to_bf16(low) >> 16 | (rounded_to_bf16(high) & 0xffff0000u);
#endif
}

// The weights of one group as words of T, [kGroup / kPerWord<T>][kPanel].
template <class T>
inline void unpack_group(int kind, const uint8_t* group, const uint8_t* head, uint32_t* words) {
  const uint8_t* codes = group + kPanel * kNumbersBytes[numbers_of(kind)];
  const bool is_float8 = numbers_of(kind) == kFloat8;
  for (int v = 0; v < kPanelVectors; ++v, codes += codes_bytes(kind)) {
    for (int half = 0; half < 2; ++half) {
      const VectorNumbers numbers = vector_numbers(kind, group, head, v, half);
      const Floats shift = -(numbers.zero * numbers.scale) - numbers.offset;
      for (int i = 0; i < kGroupWords / 2; ++i) {
        const int word = half * (kGroupWords / 2) + i;
        const Words four = code_word(bits_of(kind), codes, word);
        Floats weights[4];
        for (int input = 0; input < 4; ++input) {
          const Words byte = four >> (8 * input) & 0xff;
          const Floats code = is_float8 ? from_e4m3(byte) : as_floats((Ints)byte);
          weights[input] = code * numbers.scale + shift;
        }
        uint32_t* to = words + v * kLanes;
        if constexpr (sizeof(T) == 4) {
          for (int input = 0; input < 4; ++input) {
            store_as(to + size_t(word * 4 + input) * kPanel, weights[input]);
          }
        } else {
          for (int pair = 0; pair < 2; ++pair) {
            store_as(to + size_t(word * 2 + pair) * kPanel,
                     joined_as_bf16(weights[2 * pair], weights[2 * pair + 1]));
          }
        }
      }
    }
  }
}

// The weights of one output in a group, [kGroup]. `lane`: of the output in its panel.
inline void unpack_lane(int kind, const uint8_t* group, const uint8_t* head, int lane, float* out) {
  const int v = lane / kLanes, in_vector = lane % kLanes;
  const uint8_t* codes =
      group + kPanel * kNumbersBytes[numbers_of(kind)] + v * codes_bytes(kind) + 4 * in_vector;
  for (int half = 0; half < 2; ++half) {
    const VectorNumbers numbers = vector_numbers(kind, group, head, v, half);
    const float scale = numbers.scale[in_vector], zero = numbers.zero[in_vector];
    const float offset = numbers.offset[in_vector];
    for (int i = 0; i < kHalf; ++i) {
      const int word = bits_of(kind) == 8 ? half * (kGroupWords / 2) + i / 4 : i / 4;
      uint8_t byte = codes[word * sizeof(Words) + i % 4];
      if (bits_of(kind) != 8) byte = half ? byte >> 4 : byte & 15;
      if (bits_of(kind) == 6) {
        const uint8_t upper = codes[(kGroupWords / 2 + half) * sizeof(Words) + i % 4];
        byte |= (upper >> (2 * word) & 3) << 4;
      }
      const float code =
          numbers_of(kind) == kFloat8 ? from_e4m3(splat_word(byte))[0] : float(byte);
      out[half * kHalf + i] = (code - zero) * scale - offset;
    }
  }
}

// -- Rows in 8-bit integers -------------------------------------------------------------------------

// Rounded rows of any number of inputs; memory is kept and grows.
class RoundedRows {
 public:
  void reserve(int num_rows, int num_inputs) {
    const size_t groups = size_t(num_rows) * (num_inputs / kGroup);
    if (scales_.size() >= groups) return;
    codes_.resize(groups * kGroup);
    scales_.resize(groups);
    sums_.resize(groups);
    code_sums_.resize(groups);
    half_sums_.resize(2 * groups);
  }

  RoundedRow row(int i, int num_inputs) const {
    const size_t group = size_t(i) * (num_inputs / kGroup);
    return {codes_.data() + group * kGroup, scales_.data() + group, half_sums_.data() + 2 * group,
            code_sums_.data() + group, sums_.data() + group};
  }

  // Rounds row `i`. A group with a number that is not finite has a scale of NaN.
  template <class T>
  void round(int i, int num_inputs, const T* numbers) {
    const int num_groups = num_inputs / kGroup;
    const size_t first = size_t(i) * num_groups;
    int8_t* codes = codes_.data() + first * kGroup;
    for (int index = 0; index < num_groups; ++index, numbers += kGroup, codes += kGroup) {
      Floats most{}, poison{};
      for (int at = 0; at < kGroup; at += kLanes) {
        const Floats x = load(numbers + at);
        most = max(most, x < 0.0f ? -x : x);
        poison += x * 0.0f;
      }
      const float largest_number = largest(most), poisoned = sum(poison);
      const bool is_usable = largest_number > 0.0f && poisoned == 0.0f;
      const Floats factor = splat(is_usable ? 127.0f / largest_number : 0.0f);
      const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
      int32_t half_sums[2] = {};
      for (int at = 0; at < kGroup; at += kLanes) {
        const Floats x = is_usable ? load(numbers + at) : Floats{};
        const Ints rounded = (Ints)(x * factor + magic) - (Ints)magic;
        store_as(codes + at, __builtin_convertvector(rounded, SignedBytes));
        for (int lane = 0; lane < kLanes; ++lane) half_sums[(at + lane) / kHalf] += rounded[lane];
      }
      const size_t group = first + index;
      scales_[group] = largest_number / 127.0f + poisoned;
      half_sums_[2 * group] = half_sums[0];
      half_sums_[2 * group + 1] = half_sums[1];
      code_sums_[group] = half_sums[0] + half_sums[1];
      sums_[group] = scales_[group] * float(code_sums_[group]);
    }
  }

 private:
  std::vector<int8_t> codes_;
  std::vector<float> scales_, sums_;
  std::vector<int32_t> half_sums_, code_sums_;
};

// -- Packing ----------------------------------------------------------------------------------------

// Rows of a matrix that are packed, [num_rows] of each. `codes`: [num_inputs] bytes. The numbers of
// their kind: `first` and `second` of each group (for halves, `first` has two each), `block_first`
// and `block_second` of each block; null if the kind has none. `outputs`: where each row belongs.
struct GroupRows {
  const uint8_t* codes;
  const uint8_t *first, *second, *block_first, *block_second;
  const int32_t* outputs;
  int32_t num_rows, num_inputs;
};

inline void pack_group_row(const GroupRows& rows, int row, int kind, uint8_t* panel, int lane) {
  const int numbers = numbers_of(kind), num_groups = rows.num_inputs / kGroup;
  const auto put = [&](uint8_t* to, const uint8_t* from, size_t index, int size) {
    memcpy(to + size_t(lane) * size, from + index * size, size);
  };
  const int v = lane / kLanes, in_vector = lane % kLanes;
  for (int index = 0; index < num_groups; ++index) {
    uint8_t* group = panel + group_offset(kind, index);
    const size_t at = size_t(row) * num_groups + index;
    if (index % kBlockGroups == 0 && head_bytes(kind)) {
      uint8_t* head = panel + head_offset(kind, index);
      const size_t block = at / kBlockGroups;
      put(head, rows.block_first, block, 2);
      if (numbers == kSub) put(head + 2 * kPanel, rows.block_second, block, 2);
    }
    switch (numbers) {
      case kSub:
        put(group, rows.first, at, 1);
        put(group + kPanel, rows.second, at, 1);
        break;
      case kHalves:
        put(group, rows.first, 2 * at, 1);
        put(group + kPanel, rows.first, 2 * at + 1, 1);
        break;
      case kScaleHalves:
        put(group, rows.first, 2 * at, 2);
        put(group + 2 * kPanel, rows.first, 2 * at + 1, 2);
        break;
      default:
        put(group, rows.first, at, 2);
        if (numbers == kZero) put(group + 2 * kPanel, rows.second, at, 1);
        if (numbers == kOffset) put(group + 2 * kPanel, rows.second, at, 2);
    }
    const uint8_t* from = rows.codes + size_t(row) * rows.num_inputs + index * kGroup;
    uint8_t* codes = group + kPanel * kNumbersBytes[numbers] + v * codes_bytes(kind);
    const auto put_word = [&](int word, uint32_t bits) {
      memcpy(codes + size_t(word * kLanes + in_vector) * 4, &bits, 4);
    };
    uint32_t upper[2] = {};
    for (int word = 0; word < kGroupWords; ++word) {
      const uint32_t four = load_as<uint32_t>(from + 4 * word);
      if (bits_of(kind) == 8) {
        put_word(word, four);
        continue;
      }
      const int i = word % (kGroupWords / 2), half = word / (kGroupWords / 2);
      if (half == 0) {
        const uint32_t other = load_as<uint32_t>(from + kHalf + 4 * i);
        put_word(i, (four & 0x0f0f0f0fu) | (other & 0x0f0f0f0fu) << 4);
      }
      upper[half] |= (four >> 4 & 0x03030303u) << (2 * i);
    }
    if (bits_of(kind) == 6) {
      for (int half = 0; half < 2; ++half) put_word(kGroupWords / 2 + half, upper[half]);
    }
  }
}

}  // namespace splitserve
