// Vectors of the widest kind the target has, and the two number formats of weights and KV.
//
// One source is compiled once per instruction set (see build.py); nothing here is chosen at run
// time. GCC's vector extensions give arithmetic on every target, intrinsics are used only where
// there is no other way.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// For what keeps its state in registers: a call would store and load it each time.
#define SPLITSERVE_INLINE inline __attribute__((always_inline))

namespace splitserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// A bfloat16; arithmetic is done in float.
struct Bf16 {
  uint16_t bits;
};

template <class V>
inline V load_as(const void* from) {
  V value;
  memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store_as(void* to, V value) {
  memcpy(to, &value, sizeof(V));
}

inline Floats splat(float value) { return Floats{} + value; }
inline Words splat_word(uint32_t value) { return Words{} + value; }

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  return load_as<float>(&bits);
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline Floats load(const Bf16* from) {
  // GCC splits the conversion of a whole vector in two.
#if defined(__AVX512F__)
  const Words words = (Words)_mm512_cvtepu16_epi32(load_as<__m256i>(from));
#elif defined(__AVX2__)
  const Words words = (Words)_mm256_cvtepu16_epi32(load_as<__m128i>(from));
#else
  const Words words = __builtin_convertvector(load_as<Halves>(from), Words);
#endif
  return (Floats)(words << 16);
}

inline void store(float* to, Floats value) { store_as(to, value); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(Bf16* to, Floats value) {
#if defined(__AVX512BF16__)
  store_as(to, _mm512_cvtneps_pbh((__m512)value));
#else
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = splat_word(0x7fc0);
  store_as(to, __builtin_convertvector(value == value ? rounded : nan, Halves));
#endif
}

// The first `count` < kLanes elements; the rest reads as 0, and is not written.
template <class T>
inline Floats load_some(const T* from, int count) {
  T buffer[kLanes] = {};
  memcpy(buffer, from, count * sizeof(T));
  return load(buffer);
}

template <class T>
inline void store_some(T* to, Floats value, int count) {
  T buffer[kLanes];
  store(buffer, value);
  memcpy(to, buffer, count * sizeof(T));
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Lane i of the result is lane i + distance of `value`, around the end.
template <int distance>
inline Floats rotate(Floats value) {
  struct Table {
    alignas(64) int32_t from[kLanes];
    constexpr Table() : from() {
      for (int i = 0; i < kLanes; ++i) from[i] = (i + distance) % kLanes;
    }
  };
  static constexpr Table table;
  return __builtin_shuffle(value, load_as<Ints>(table.from));
}

// The lanes joined by `join`, in a fixed order.
template <int distance = kLanes / 2, class Join>
inline float reduce(Floats value, Join join) {
  if constexpr (distance == 0) {
    return value[0];
  } else {
    return reduce<distance / 2>(join(value, rotate<distance>(value)), join);
  }
}

inline float sum(Floats value) {
  return reduce(value, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats value) {
  return reduce(value, [](Floats a, Floats b) { return max(a, b); });
}

// Lane i of the result is the largest lane of rows[i].
inline Floats largest_of_each(Floats (&rows)[kLanes]) {
  Ints even, odd;
  for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  // Each round joins neighbouring lanes, and the rows by twos.
#pragma GCC unroll 4
  for (int count = kLanes; count > 1; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) {
      const Floats a = rows[2 * i], b = rows[2 * i + 1];
      rows[i] = max(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd));
    }
  }
  return rows[0];
}

// e^x for x <= 88 with a relative error below 2e-7; exactly 1 at 0, exactly 0 below -104; NaN for
// NaN. Source: Cody and Waite's reduction to |r| <= ln(2) / 2, and the Taylor polynomial.
inline Floats exp(Floats x) {
#if defined(__AVX512F__)
  // Of two operands of which one is NaN, this one returns the second.
  x = (Floats)_mm512_max_ps((__m512)splat(-104.5f), (__m512)x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f),
                                                _MM_FROUND_TO_NEAREST_INT);
#else
  const Floats clamped = x < -87.0f ? splat(-87.0f) : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = clamped * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
#endif
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // The integer n stands in the low bits of `shifted`.
  const Words exponent = ((Words)shifted - (Words)magic) << 23;
  const Floats result = (Floats)((Words)p + exponent);
  return x < -87.0f ? Floats{} : (x == x ? result : x);
#endif
}

// The same with a relative error below 3e-6, for x <= 0 and where that is enough.
inline Floats exp_roughly(Floats x) {
#if defined(__AVX512F__)
  x = (Floats)_mm512_max_ps((__m512)splat(-151.0f), (__m512)(x * 1.44269504088896341f));
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Floats r = x - n;
  // The polynomial of this degree that is nearest to 2^r, and exact at 0.
  Floats p = splat(0.00958285294f);
  p = p * r + 0.0559064262f;
  p = p * r + 0.240240991f;
  p = p * r + 0.693124175f;
  p = p * r + 1.0f;
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return exp(x);
#endif
}

}  // namespace splitserve
