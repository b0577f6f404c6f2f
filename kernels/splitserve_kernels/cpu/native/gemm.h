// Matrix products with weights that were packed once.
//
// Shape letters: M rows of the input, N outputs, K inputs; T is float or Bf16.
//
// Packed weights are panels of kPanel outputs. In a panel the inputs come one after the other, each
// with the weights of all outputs: [K][kPanel] floats, or, so that a 32-bit word holds two
// consecutive inputs, [K / 2][kPanel][2] Bf16. A panel is read from front to end, so one row is
// bound by the memory's bandwidth and many rows by the arithmetic.
//
// An output is summed over the inputs in one order, whatever M is and wherever in a block its row
// stands: a sequence gets the same bits whatever shares its batch.
#pragma once

#include <algorithm>
#include <omp.h>
#include <type_traits>
#include <vector>

#include "group_weights.h"
#include "int8_weights.h"
#include "simd.h"
#include "transpose.h"

namespace splitserve {

// Rows that are computed together. Their sums fill the registers.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 5;
#endif
// Rows, and inputs of a panel, that stay in a core's cache while they are multiplied.
constexpr int kRowBlock = 192;
constexpr int kInputBlock = 1024;
// Rows are divided into smaller blocks, of this size at least, where threads have too few tasks.
constexpr int kSmallRowBlock = 48;
constexpr int kPanelsPerThread = 4;
// Words of a panel of integers that are widened before many rows are multiplied with them.
constexpr int kWidenedWords = 256;

// Words are multiplied part by part, or whole where there is an instruction for it.
#if defined(__AVX512BF16__)
template <class T>
constexpr int kNumParts = 1;
#else
template <class T>
constexpr int kNumParts = kPerWord<T>;
#endif

// `x` and `weights`: as `factors_of` has them.
template <class T>
SPLITSERVE_INLINE Floats multiply_add(Floats x, Floats weights, Floats sum) {
#if defined(__AVX512BF16__)
  if constexpr (kPerWord<T> == 2) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
  }
#endif
  return sum + x * weights;
}

template <class T>
SPLITSERVE_INLINE Floats factors_of(Words words, int part) {
  return kNumParts<T> == 1 ? (Floats)words : part_of<T>(words, part);
}

// With 16 registers there is room for the sums and for one part of the words: what is in memory is
// loaded again for the other part, which costs less than to store sums and load them.
SPLITSERVE_INLINE void forget_words() {
#if !defined(__AVX512F__)
  asm volatile("" ::: "memory");
#endif
}

// How far ahead of their use words are fetched. One or two rows are multiplied at the memory's
// pace, more take longer for a word.
template <int R>
constexpr size_t kBytesAhead = R <= 2 ? 4096 : 2048;

// Where words are that rows are multiplied with. A source has `num_words` words of kVectors
// vectors: `load(v, k)` is word k of vector v. `fetch`, called beside it, brings near what comes
// later. `kIsLoadedTwice`: for each part, as loading costs less than a register (`forget_words`).
struct PanelWords {
  static constexpr int kVectors = kPanelVectors;
  static constexpr bool kIsLoadedTwice = true;
  const uint32_t* panel;
  int num_words;

  const uint32_t* at(int v, size_t k) const { return panel + k * kPanel + v * kLanes; }
  Words load(int v, size_t k) const { return load_as<Words>(at(v, k)); }

  template <int R>
  SPLITSERVE_INLINE void fetch(int v, size_t k) const {
    __builtin_prefetch(at(v, k) + kBytesAhead<R> / sizeof(uint32_t));
  }
};

// The same for several passes over them, each with other rows. A pass fetches its part of as many
// words that come next, one at a time: so the memory is read while words are multiplied with that
// are in the cache, and not only in the first pass.
struct PassWords : PanelWords {
  const uint32_t* next;
  // This pass fetches every (mask + 1)-th word from `first` on.
  size_t mask, first;

  PassWords(const PanelWords& words, const uint32_t* next_words)
      : PanelWords(words), next(next_words), mask(0), first(0) {}

  PassWords of_pass(int pass, int num_passes) const {
    PassWords words = *this;
    size_t step = 1;
    while (2 * step <= size_t(num_passes)) step *= 2;
    words.mask = step - 1;
    words.first = std::min(size_t(pass), step);
    return words;
  }

  template <int R>
  SPLITSERVE_INLINE void fetch(int v, size_t k) const {
    PanelWords::fetch<R>(v, k);
    if (v || (k & mask) != first) return;
    const char* line = reinterpret_cast<const char*>(next + k * kPanel);
    for (size_t i = 0; i < kPanel * sizeof(uint32_t); i += 64) __builtin_prefetch(line + i, 0, 2);
  }
};

// Words that are widened when they are used.
template <class T>
struct Int8Words {
  static constexpr int kVectors = kPanelVectors;
  static constexpr bool kIsLoadedTwice = false;
  const int8_t* panel;
  int num_words;

  const int8_t* at(int v, size_t k) const {
    return panel + (k * kPanelVectors + v) * kVectorBytes<T>;
  }
  Words load(int v, size_t k) const { return widen<T>(at(v, k)); }

  template <int R>
  SPLITSERVE_INLINE void fetch(int v, size_t k) const {
    if (v * kVectorBytes<T> % 64 == 0) __builtin_prefetch(at(v, k) + kBytesAhead<R>);
  }
};

// Words that were widened before; `next` are the integers that will be widened after them.
template <class T>
struct WidenedWords {
  static constexpr int kVectors = kPanelVectors;
  static constexpr bool kIsLoadedTwice = true;
  const uint32_t* words;
  const int8_t* next;
  int num_words;

  Words load(int v, size_t k) const { return load_as<Words>(words + k * kPanel + v * kLanes); }

  template <int R>
  SPLITSERVE_INLINE void fetch(int v, size_t k) const {
    __builtin_prefetch(next + (k * kPanelVectors + v) * kVectorBytes<T>);
  }
};

// sums[i][v] += the products of rows[i], from its word `first` on, with the words of `source`.
template <class T, int R, class Source>
SPLITSERVE_INLINE void multiply_rows(const Source& source, const T* const* rows, int first,
                                     Floats (&sums)[R][Source::kVectors]) {
  constexpr int kVectors = Source::kVectors;
  for (int k = 0; k < source.num_words; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) source.template fetch<R>(v, k);
    Words words[kVectors];
    if constexpr (!Source::kIsLoadedTwice) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) words[v] = source.load(v, k);
    }
#pragma GCC unroll 2
    for (int part = 0; part < kNumParts<T>; ++part) {
      forget_words();
      Floats weights[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Words again = Source::kIsLoadedTwice ? source.load(v, k) : words[v];
        weights[v] = factors_of<T>(again, part);
      }
#pragma GCC unroll 6
      for (int i = 0; i < R; ++i) {
        const Words word = repeat_word(rows[i] + (first + k) * kPerWord<T>);
        const Floats x = factors_of<T>(word, part);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[i][v] = multiply_add<T>(x, weights[v], sums[i][v]);
        }
      }
    }
  }
}

template <class T, int R, class Source, class Finish>
SPLITSERVE_INLINE void multiply_block(const Source* sources, int num_sources, const T* const* rows,
                                      const float* start, Finish finish) {
  constexpr int kVectors = Source::kVectors;
  Floats sums[R][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = start ? load(start + (i * kVectors + v) * kLanes) : Floats{};
    }
  }
  for (int i = 0, first = 0; i < num_sources; first += sources[i++].num_words) {
    multiply_rows<T, R>(sources[i], rows, first, sums);
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) finish(i, sums[i]);
}

// Memory that is needed soon, brought near little by little while rows are multiplied: many lines
// at once would keep the processor waiting.
class LinesAhead {
 public:
  // Of more ranges than there is room for, the last ones are left out.
  void add(const void* from, size_t size) {
    if (num_ranges_ == kMostRanges || !size) return;
    const size_t num_lines = (size + kLineBytes - 1) / kLineBytes;
    ranges_[num_ranges_++] = {static_cast<const char*>(from), num_lines};
    num_lines_ += num_lines;
  }

  // `fetch` will be called `count` times.
  void spread_over(int count) { num_lines_ = num_lines_ / count + 1; }

  void fetch() {
    size_t left = num_lines_;
    for (; left && next_ < num_ranges_; next_ += ranges_[next_].num_lines == 0) {
      Range& range = ranges_[next_];
      const size_t count = std::min(left, range.num_lines);
      const char* from = range.begin;
      for (size_t i = 0; i < count; ++i) __builtin_prefetch(from + i * kLineBytes, 0, 2);
      range = {from + count * kLineBytes, range.num_lines - count};
      left -= count;
    }
  }

 private:
  static constexpr int kMostRanges = 64, kLineBytes = 64;
  struct Range {
    const char* begin;
    size_t num_lines;
  };
  Range ranges_[kMostRanges];
  size_t num_lines_ = 0;
  int num_ranges_ = 0, next_ = 0;
};

// Multiplies `num_rows` rows with the words of the sources, one after the other, and calls
// finish(row, sums of kVectors vectors) for each. `start`: [num_rows, kVectors * kLanes] sums to
// begin with, or null. `ahead`: fetched from before each block of rows, or null.
template <class T, class Source, class Finish>
inline void multiply(const Source* sources, int num_sources, const T* const* rows, int num_rows,
                     const float* start, Finish finish, LinesAhead* ahead = nullptr) {
  const int num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int block = 0, done = 0; block < num_blocks; ++block) {
    if (ahead) ahead->fetch();
    // Blocks of nearly equal size: 4 + 4 rows are faster than 6 + 2.
    const int count = (num_rows - done + num_blocks - block - 1) / (num_blocks - block);
    const float* from = start ? start + done * Source::kVectors * kLanes : nullptr;
    const T* const* first = rows + done;
    const auto finish_row = [&](int i, const Floats* sums) { finish(done + i, sums); };
    const auto multiply_with = [&](const Source* of_pass) {
      switch (count) {
        case 1: multiply_block<T, 1>(of_pass, num_sources, first, from, finish_row); break;
        case 2: multiply_block<T, 2>(of_pass, num_sources, first, from, finish_row); break;
        case 3: multiply_block<T, 3>(of_pass, num_sources, first, from, finish_row); break;
        case 4: multiply_block<T, 4>(of_pass, num_sources, first, from, finish_row); break;
        case 5: multiply_block<T, 5>(of_pass, num_sources, first, from, finish_row); break;
        default: multiply_block<T, kMaxRows>(of_pass, num_sources, first, from, finish_row); break;
      }
    };
    if constexpr (std::is_same_v<Source, PassWords>) {
      const PassWords words = sources->of_pass(block, num_blocks);
      multiply_with(&words);
    } else {
      multiply_with(sources);
    }
    done += count;
  }
}

// A weight matrix. `panels`: see above; with `scales`, integers (int8_weights.h); with `kinds`, groups
// (group_weights.h), each panel of its kind, at its start. `bias`, `scales`: for each output, padded
// to whole panels, or null. `order`: [K], the input that each column of groups belongs to; null if
// they are in order. `is_exact`: groups are multiplied with rows that are not rounded.
struct Linear {
  const void* panels;
  const float* bias;
  const float* scales;
  const uint8_t* kinds;
  const int64_t* starts;
  const int32_t* order;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t is_exact;

  bool rounds_rows() const { return kinds && !is_exact; }
  bool prepares_rows() const { return rounds_rows() || order; }
};

// The weights of one output of a matrix of groups, [K], rounded to T.
template <class T>
inline void unpack_output(const Linear& linear, int output, T* to) {
  const int panel = output / kPanel, kind = linear.kinds[panel];
  const uint8_t* from = static_cast<const uint8_t*>(linear.panels) + linear.starts[panel];
  const Floats factor = splat(linear.scales[output]);
  for (int index = 0; index < linear.num_inputs / kGroup; ++index) {
    float weights[kGroup];
    unpack_lane(kind, from + group_offset(kind, index), from + head_offset(kind, index),
                output % kPanel, weights);
    T rounded[kGroup];
    for (int at = 0; at < kGroup; at += kLanes) {
      store(rounded + at, load(weights + at) * factor);
    }
    for (int i = 0; i < kGroup; ++i) {
      const int input = index * kGroup + i;
      to[linear.order ? linear.order[input] : input] = rounded[i];
    }
  }
}

// Rows as a matrix needs them: in its order, and rounded. Memory is kept and grows.
template <class T>
class PreparedRows {
 public:
  void reserve(const Linear& linear, int num_rows) {
    const size_t size = size_t(num_rows) * linear.num_inputs;
    if (linear.order && ordered_.size() < size) ordered_.resize(size);
    if (linear.rounds_rows()) rounded_.reserve(num_rows, linear.num_inputs);
  }

  void prepare(const Linear& linear, int i, const T* row) {
    const int num_inputs = linear.num_inputs;
    if (linear.order) {
      T* to = ordered_.data() + size_t(i) * num_inputs;
      for (int k = 0; k < num_inputs; ++k) to[k] = row[linear.order[k]];
      row = to;
    }
    if (linear.rounds_rows()) rounded_.round(i, num_inputs, row);
  }

  const T* ordered(int i, int num_inputs) const { return ordered_.data() + size_t(i) * num_inputs; }
  const RoundedRows& rounded() const { return rounded_; }

 private:
  std::vector<T> ordered_;
  RoundedRows rounded_;
};

inline int num_panels(int num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// How many blocks of rows the threads of this region share.
inline int num_row_blocks(const Linear& linear, int num_rows) {
  const int least = (num_rows + kRowBlock - 1) / kRowBlock;
  const int most = (num_rows + kSmallRowBlock - 1) / kSmallRowBlock;
  const int panels = std::max(1, num_panels(linear.num_outputs));
  return std::clamp(kPanelsPerThread * omp_get_num_threads() / panels, least, most);
}

inline int num_tasks(const Linear& linear, int num_rows) {
  return num_row_blocks(linear, num_rows) * num_panels(linear.num_outputs);
}

// The panel that this thread probably multiplies with after panel `index`.
inline int expected_panel(const Linear& linear, int index) {
  return (index + omp_get_num_threads()) % num_panels(linear.num_outputs);
}

// Brings near the integers of the panel that is expected after panel `index`.
inline void expect_integers(const Linear& linear, int index, LinesAhead& ahead) {
  const size_t panel_bytes = size_t(linear.num_inputs) * kPanel;
  const size_t first = expected_panel(linear, index) * panel_bytes;
  ahead.add(static_cast<const char*>(linear.panels) + first, panel_bytes);
}

// sums[i] += row i times the words of `source`, [num_rows][kVectors * kLanes]; = if it is the first
// one.
template <class T, class Source>
inline void accumulate(const Source& source, const T* const* rows, int num_rows, bool is_first,
                       float* sums, LinesAhead* ahead = nullptr) {
  constexpr int kVectors = Source::kVectors;
  multiply(&source, 1, rows, num_rows, is_first ? nullptr : sums, [&](int i, const Floats* of_row) {
    for (int v = 0; v < kVectors; ++v) store(sums + (i * kVectors + v) * kLanes, of_row[v]);
  }, ahead);
}

// The same for a panel of groups, whose weights become words a few groups at a time.
template <class T>
inline void multiply_unpacked(const Linear& linear, int panel_index, const T** rows, int num_rows,
                              float* sums, LinesAhead& ahead) {
  constexpr int kWords = kGroup / kPerWord<T>, kGroups = kWidenedWords / kWords;
  const int kind = linear.kinds[panel_index], num_groups = linear.num_inputs / kGroup;
  const auto* panel = static_cast<const uint8_t*>(linear.panels) + linear.starts[panel_index];
  alignas(64) uint32_t words[kWidenedWords * kPanel];
  for (int first = 0; first < num_groups; first += kGroups) {
    const int count = std::min(kGroups, num_groups - first);
    for (int i = 0; i < count; ++i) {
      unpack_group<T>(kind, panel + group_offset(kind, first + i),
                      panel + head_offset(kind, first + i), words + size_t(i) * kWords * kPanel);
    }
    const auto* next = reinterpret_cast<const int8_t*>(panel + group_offset(kind, first + count));
    const WidenedWords<T> part{words, next, count * kWords};
    accumulate(part, rows, num_rows, first == 0, sums, &ahead);
    for (int i = 0; i < num_rows; ++i) rows[i] += count * kGroup;
  }
}

template <int kind = 0>
inline void multiply_groups_of(int of_panel, const uint8_t* panel, int first, int count,
                               const RoundedRow* rows, int num_rows, float* sums) {
  if constexpr (kind < kNumRoundedKinds) {
    if (is_used(kind) && of_panel == kind) {
      multiply_groups_of<is_used(kind) ? kind : 0>(panel, first, count, rows, num_rows, sums);
    } else {
      multiply_groups_of<kind + 1>(of_panel, panel, first, count, rows, num_rows, sums);
    }
  }
}

// Rounded rows `first_row` .. times a panel of groups.
inline void multiply_rounded(const Linear& linear, int panel_index, const RoundedRows& rounded,
                             int first_row, int num_rows, float* sums, LinesAhead& ahead) {
  const auto* panel = static_cast<const uint8_t*>(linear.panels) + linear.starts[panel_index];
  const int num_groups = linear.num_inputs / kGroup;
  const int num_blocks = (num_rows + kMaxGroupRows - 1) / kMaxGroupRows;
  // A part of a panel stays in the cache while rows pass.
  const int part = num_blocks == 1 ? num_groups : kInputBlock / kGroup;
  RoundedRow rows[kRowBlock];
  for (int i = 0; i < num_rows; ++i) rows[i] = rounded.row(first_row + i, linear.num_inputs);
  for (int first = 0; first < num_groups; first += part) {
    const int count = std::min(part, num_groups - first);
    for (int block = 0; block < num_blocks; ++block) {
      ahead.fetch();
      const int begin = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
      multiply_groups_of(linear.kinds[panel_index], panel, first, count, rows + begin, end - begin,
                         sums + begin * kPanel);
    }
  }
}

// `num_rows` rows times one panel, without scales and bias: `sums` [num_rows][kPanel]. Advances
// `rows`, and fetches from `ahead`. One function for all that is done with the sums: it is large.
template <class T>
__attribute__((noinline)) void multiply_panel(const Linear& linear, int panel_index, const T** rows,
                                              int num_rows, float* sums, LinesAhead& ahead) {
  const int num_words = linear.num_inputs / kPerWord<T>;
  const size_t first = size_t(panel_index) * num_words * kPanel;
  const auto advance = [&](int count) {
    for (int i = 0; i < num_rows; ++i) rows[i] += count * kPerWord<T>;
  };
  if (linear.kinds) return multiply_unpacked(linear, panel_index, rows, num_rows, sums, ahead);
  if (!linear.scales) {
    const auto* panels = static_cast<const uint32_t*>(linear.panels);
    const uint32_t* panel = panels + first;
    const uint32_t* first_of_next =
        panels + size_t(expected_panel(linear, panel_index)) * num_words * kPanel;
    constexpr int kWords = kInputBlock / kPerWord<T>;
    for (int word = 0; word < num_words; word += kWords) {
      const PanelWords part{panel + size_t(word) * kPanel, std::min(kWords, num_words - word)};
      const bool is_first = word == 0, is_last = word + part.num_words == num_words;
      if (num_rows <= kMaxRows) {
        accumulate(part, rows, num_rows, is_first, sums, &ahead);
      } else {
        const uint32_t* next = is_last ? first_of_next : part.panel + part.num_words * kPanel;
        accumulate(PassWords(part, next), rows, num_rows, is_first, sums, &ahead);
      }
      advance(part.num_words);
    }
    return;
  }
  const int8_t* panel = static_cast<const int8_t*>(linear.panels) + first * kPerWord<T>;
  if (num_rows <= kMaxRows) {
    accumulate(Int8Words<T>{panel, num_words}, rows, num_rows, true, sums, &ahead);
    return;
  }
  alignas(64) uint32_t widened[kWidenedWords * kPanel];
  for (int word = 0; word < num_words; word += kWidenedWords) {
    const int count = std::min(kWidenedWords, num_words - word);
    widen_vectors<T>(panel, count * kPanelVectors, widened);
    panel += size_t(count) * kPanelVectors * kVectorBytes<T>;
    accumulate(WidenedWords<T>{widened, panel, count}, rows, num_rows, word == 0, sums, &ahead);
    advance(count);
  }
}

// One task of input [M, K] times weights: a panel for a block of rows. `input`: row i begins at
// input + i * stride. `prepared`: these rows, if the matrix needs them. `updates`: what adapters add
// to rows, see RowUpdates in low_rank.h. Calls finish(row, first output, sums) with the bias added.
template <class T, class Updates, class Finish>
inline void multiply_task(const Linear& linear, int task, const T* input, size_t stride,
                          const PreparedRows<T>& prepared, int num_rows, const Updates& updates,
                          Finish finish) {
  const int panel_index = task % num_panels(linear.num_outputs);
  const int block = task / num_panels(linear.num_outputs);
  const int num_blocks = num_row_blocks(linear, num_rows);
  const int first = int(int64_t{num_rows} * block / num_blocks);
  const int count = int(int64_t{num_rows} * (block + 1) / num_blocks) - first;
  alignas(64) float sums[kRowBlock * kPanel];
  LinesAhead ahead;
  if (updates.is_any()) updates.expect(panel_index, num_panels(linear.num_outputs), ahead);
  if (linear.scales && !linear.kinds && count >= kSmallRowBlock) {
    expect_integers(linear, panel_index, ahead);
  }
  ahead.spread_over((count + kMaxRows - 1) / kMaxRows * (1 + linear.num_inputs / kInputBlock));
  if (linear.rounds_rows()) {
    multiply_rounded(linear, panel_index, prepared.rounded(), first, count, sums, ahead);
  } else {
    const T* rows[kRowBlock];
    for (int i = 0; i < count; ++i) {
      rows[i] = linear.order ? prepared.ordered(first + i, linear.num_inputs)
                             : input + (first + i) * stride;
    }
    multiply_panel(linear, panel_index, rows, count, sums, ahead);
  }
  const int output = panel_index * kPanel;
  Floats bias[kPanelVectors] = {}, scales[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) {
    if (linear.bias) bias[v] = load(linear.bias + output + v * kLanes);
    scales[v] = linear.scales ? load(linear.scales + output + v * kLanes) : splat(1.0f);
  }
  bool is_scaled[kRowBlock] = {};
  if (updates.is_any()) updates.apply(panel_index, first, count, scales, sums, is_scaled);
  for (int i = 0; i < count; ++i) {
    Floats finished[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) {
      const Floats sum = load(sums + i * kPanel + v * kLanes);
      finished[v] = is_scaled[i] ? sum + bias[v] : sum * scales[v] + bias[v];
    }
    finish(first + i, output, finished);
  }
}

// Packs one panel of a matrix whose `num_outputs` rows of `num_inputs` weights lie anywhere; null
// is a row of zeros.
template <class T>
inline void pack_panel(const T* const* weights, int num_outputs, int num_inputs, int index,
                       uint32_t* panel) {
  for (int column = 0; column < kPanel; column += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int output = index * kPanel + column + i;
      rows[i] = output < num_outputs ? weights[output] : nullptr;
    }
    transpose(rows, num_inputs / kPerWord<T>, panel + column, kPanel);
  }
}

// The same as integers; `scales`: [kPanel], written.
template <class T>
inline void pack_int8_panel(const T* const* weights, int num_outputs, int num_inputs, int index,
                            int8_t* panel, float* scales) {
  const int num_words = num_inputs / kPerWord<T>;
  std::vector<uint32_t> words(size_t(num_words) * kPanel);
  pack_panel(weights, num_outputs, num_inputs, index, words.data());
  for (int v = 0; v < kPanelVectors; ++v) {
    quantize_columns<T>(words.data() + v * kLanes, num_words, kPanel, panel + v * kVectorBytes<T>,
                        kPanelVectors * kVectorBytes<T>, scales + v * kLanes);
  }
}

}  // namespace splitserve
