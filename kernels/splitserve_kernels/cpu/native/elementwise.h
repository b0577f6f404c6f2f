// What happens to one token at a time: norms, rotary embedding, storing keys and values.
#pragma once

#include "simd.h"

namespace splitserve {

// Calls visit(offset, count) for consecutive vectors that cover 0 .. size - 1.
template <class Visit>
inline void for_vectors(int size, Visit visit) {
  for (int i = 0; i < size; i += kLanes) visit(i, size - i < kLanes ? size - i : kLanes);
}

template <class T>
inline Floats load_up_to(const T* from, int count) {
  return count == kLanes ? load(from) : load_some(from, count);
}

template <class T>
inline void store_up_to(T* to, Floats value, int count) {
  if (count == kLanes) {
    store(to, value);
  } else {
    store_some(to, value, count);
  }
}

// out = input / sqrt(mean(input^2) + epsilon) * weight. Source: Zhang and Sennrich 2019.
template <class In, class Out>
inline void rms_norm(const In* input, const float* weight, float epsilon, int size, Out* out) {
  Floats squares{};
  for_vectors(size, [&](int i, int count) {
    const Floats x = load_up_to(input + i, count);
    squares += x * x;
  });
  const float factor = 1.0f / std::sqrt(sum(squares) / size + epsilon);
  for_vectors(size, [&](int i, int count) {
    const Floats x = load_up_to(input + i, count) * factor;
    store_up_to(out + i, x * load_up_to(weight + i, count), count);
  });
}

// Rotates the first `rotary_dim` numbers of a head, in place: pairs (i, i + rotary_dim / 2), the
// convention of Hugging Face checkpoints. `cosines`, `sines`: [rotary_dim / 2]. Source: Su 2021.
template <class T>
inline void rotate_head(T* head, const float* cosines, const float* sines, int rotary_dim) {
  const int half = rotary_dim / 2;
  for_vectors(half, [&](int i, int count) {
    const Floats a = load_up_to(head + i, count), b = load_up_to(head + half + i, count);
    const Floats c = load_up_to(cosines + i, count), s = load_up_to(sines + i, count);
    store_up_to(head + i, a * c - b * s, count);
    store_up_to(head + half + i, b * c + a * s, count);
  });
}

// x / (1 + e^-x); e^80 is as good as infinity here.
inline Floats silu(Floats x) {
  const Floats bounded = x < -80.0f ? splat(-80.0f) : x;
  return x / (1.0f + exp(-bounded));
}

}  // namespace splitserve
