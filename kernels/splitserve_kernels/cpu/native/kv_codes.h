// Keys and values as 8-bit codes: those of one token and head are its scale times the codes.
//
// A code stands for an integer -127 .. 127 (Int8Codes), or for a float of 4 exponent and 3 mantissa
// bits without infinities, "e4m3fn" (Float8Codes; Micikevicius 2022). float and Bf16 hold both
// exactly. Every code stands for a finite number, and what is not finite gets a scale of NaN.
#pragma once

#include "elementwise.h"
#include "int8_weights.h"
#include "transpose.h"

namespace splitserve {

// What the numbers of a pool are: those of the activations, or codes.
enum KVFormat : int32_t { kPlainKV = 0, kInt8KV = 1, kFloat8KV = 2 };

typedef uint8_t CodeBytes __attribute__((vector_size(kLanes)));

// Below this, numbers count as 0: their scale might be too small to be divided by.
constexpr float kLeastScaled = 1e-30f;

inline Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// Of numbers up to 2^22: to nearest, ties to even. Not joined to a product before: a tie is one of
// the rounded product.
inline Ints round_to_integers(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23
  return (Ints)(x + magic) - (Ints)magic;
#endif
}

// Decoded numbers are to be multiplied by kUnit.
struct Int8Codes {
  static constexpr float kLargest = 127.0f, kUnit = 1.0f;

  static Words encode(Floats x) { return (Words)round_to_integers(x) & 0xffu; }

  // kLanes consecutive codes.
  SPLITSERVE_INLINE static Floats decode(const uint8_t* from) {
    return (Floats)integers_as_floats(reinterpret_cast<const int8_t*>(from));
  }
};

struct Float8Codes {
  static constexpr float kLargest = 448.0f, kUnit = 256.0f;

  static Words encode(Floats x) {
    const Words bits = (Words)magnitude(x), sign = (Words)x >> 24 & 0x80u;
    const Words rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    const Words subnormal = (Words)round_to_integers(magnitude(x) * 512.0f);
    const Words code = magnitude(x) < 0.015625f ? subnormal : rounded - kBias * 8;
    return (code < kLargestCode ? code : splat_word(kLargestCode)) | sign;
  }

  // As float16, which has one bit more of exponent and the other bias, and the same subnormals.
  SPLITSERVE_INLINE static Floats decode(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m256i codes = _mm256_cvtepi8_epi16(load_as<__m128i>(from));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(kHalf));
    return (Floats)_mm512_cvtph_ps(halves);
#elif defined(__AVX2__)
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(kHalf));
    return (Floats)_mm256_cvtph_ps(halves);
#else
    const Words codes = __builtin_convertvector(load_as<CodeBytes>(from), Words);
    const Words code = codes & 0x7fu, sign = (codes & 0x80u) << 24;
    const Floats subnormal = __builtin_convertvector((Ints)code, Floats) * (1.0f / 512 / kUnit);
    const Words normal = (code << 20) + ((kBias - 8) << 23);
    return (Floats)((code < 8u ? (Words)subnormal : normal) | sign);
#endif
  }

 private:
  static constexpr uint32_t kBias = 120, kLargestCode = 0x7e;
  static constexpr int16_t kHalf = int16_t(0xbfff);  // all but the top bit of the exponent
};

// One vector of words of T (transpose.h) from codes: those of the first number of each word, then,
// if a word has two, those of the second.
template <class T, class Codes>
SPLITSERVE_INLINE Words widen_codes(const uint8_t* from) {
  const Words first = (Words)Codes::decode(from);
  if constexpr (kPerWord<T> == 1) {
    return first;
  } else {
    return first >> 16 | ((Words)Codes::decode(from + kLanes) & 0xffff0000u);
  }
}

// The first `count` < kLanes words, whose codes stand word by word.
template <class T, class Codes>
inline Words widen_some_codes(const uint8_t* from, int count) {
  uint8_t codes[kLanes * kPerWord<T>] = {};
  for (int i = 0; i < count * kPerWord<T>; ++i) {
    codes[i % kPerWord<T> * kLanes + i / kPerWord<T>] = from[i];
  }
  return widen_codes<T, Codes>(codes);
}

// The number of one code, in T.
template <class T, class Codes>
inline T widen_code(uint8_t code) {
  const uint8_t codes[kLanes] = {code};
  T number[kLanes];
  store(number, Codes::decode(codes));
  return number[0];
}

// Writes the codes of `size` numbers, where place(i) is the address of the i-th; returns the scale.
template <class Codes, class T, class Place>
inline float store_codes(const T* from, int size, Place place) {
  Floats most{}, poison{};
  for_vectors(size, [&](int i, int count) {
    const Floats x = load_up_to(from + i, count);
    most = max(most, magnitude(x));
    poison += x * 0.0f;
  });
  const float largest_one = largest(most), nothing = sum(poison);
  const bool is_usable = largest_one >= kLeastScaled && nothing == 0;
  const float factor = is_usable ? Codes::kLargest / largest_one : 0.0f;
  for_vectors(size, [&](int i, int count) {
    const Words codes = Codes::encode(is_usable ? load_up_to(from + i, count) * factor : Floats{});
    for (int j = 0; j < count; ++j) *place(i + j) = uint8_t(codes[j]);
  });
  return (is_usable ? largest_one / Codes::kLargest : 0.0f) + nothing;
}

}  // namespace splitserve
