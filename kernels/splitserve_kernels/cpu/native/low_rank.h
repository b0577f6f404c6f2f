// What adapters (LoRA) add to products: rows of one pass may each have an adapter of their own.
//
//     output = gain * (weights x + up (scale * down x)) + bias of the matrix + bias of the adapter
//
// Shape letters: K inputs of a matrix, N outputs, H half panels of outputs, r ranks, R rows; T is
// float or Bf16. Ranks of matrices that are multiplied as one stand one after the other.
//
// Rows are first multiplied with `down`, rounded to T and kept; then, panel by panel, these few
// numbers with `up`, where the sums of the panel are. The order of each sum is fixed, so a row has
// the same bits whatever shares its pass.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"

namespace splitserve {

// Vectors whose words lie one after the other, vector by vector, `stride` words apart.
template <int V>
struct VectorWords {
  static constexpr int kVectors = V;
  static constexpr bool kIsLoadedTwice = true;
  const uint32_t* words;
  int num_words;
  size_t stride;

  const uint32_t* at(int v, size_t k) const { return words + v * stride + k * kLanes; }
  Words load(int v, size_t k) const { return load_as<Words>(at(v, k)); }

  // The processor itself brings near what comes later.
  template <int R>
  SPLITSERVE_INLINE void fetch(int, size_t) const {}
};

// See `accumulate`. One function for both directions: it is large.
template <class T, int V>
__attribute__((noinline)) void accumulate_vectors(const VectorWords<V>& source,
                                                  const T* const* rows, int num_rows,
                                                  bool is_first, float* sums) {
  accumulate(source, rows, num_rows, is_first, sums);
}

constexpr int kHalfVectors = kPanelVectors / 2, kHalfPanel = kHalfVectors * kLanes;
// Ranks that are computed together.
constexpr int kRankVectors = 2;

// What an adapter changes in a matrix. `down`: [r / kLanes][K / kPerWord][kLanes] words. `scales`:
// [r]. `up`: of each half panel `num_words[H]` words of ranks, from `first_words[H]` on, as vectors
// that begin at `starts[H]`. `bias`, `gain`: [N], padded to whole panels, or null. `num_ranks`: r,
// padded to whole vectors. Of an embedding, `down` is [V, r], already scaled, in T.
struct LowRank {
  const void* down;
  const float* scales;
  const uint32_t* up;
  const int64_t* starts;
  const int32_t *first_words, *num_words;
  const float *bias, *gain;
  int32_t num_ranks;

  bool is_any() const { return num_ranks || bias || gain; }
  int num_chunks() const { return (num_ranks / kLanes + kRankVectors - 1) / kRankVectors; }

  // Whether both half panels have the same ranks; they lie side by side then.
  bool is_whole(int panel) const {
    const int half = 2 * panel;
    return first_words[half] == first_words[half + 1] && num_words[half] == num_words[half + 1] &&
           starts[half + 1] - starts[half] == int64_t{num_words[half]} * kHalfPanel;
  }

  // Adds what `apply` reads for a panel.
  void expect(int panel, LinesAhead& ahead) const {
    if (!num_ranks) return;
    for (int half = 2 * panel; half < 2 * panel + 2; ++half) {
      ahead.add(up + starts[half], size_t(num_words[half]) * kHalfPanel * sizeof(uint32_t));
    }
  }

  // sums[i] = gain * (sums[i] * scales + up shrunk[i]) + bias for the outputs of a panel. `scales`:
  // [kPanelVectors], `sums[i]`: [kPanel]. At most kRowBlock rows.
  template <class T>
  void apply(int panel, const T* const* shrunk, int num_rows, const Floats* scales,
             float* const* sums) const {
    if (is_whole(panel)) {
      return apply_vectors<T, kPanelVectors>(2 * panel, shrunk, num_rows, scales, sums);
    }
    for (int half = 2 * panel; half < 2 * panel + 2; ++half) {
      apply_vectors<T, kHalfVectors>(half, shrunk, num_rows, scales, sums);
    }
  }

 private:
  // The same for V vectors, from half panel `half` on.
  template <class T, int V>
  void apply_vectors(int half, const T* const* shrunk, int num_rows, const Floats* scales,
                     float* const* sums) const {
    alignas(64) float products[kRowBlock * V * kLanes];
    const int count = num_ranks ? num_words[half] : 0;
    if (count) {
      const T* rows[kRowBlock];
      for (int i = 0; i < num_rows; ++i) rows[i] = shrunk[i] + first_words[half] * kPerWord<T>;
      const VectorWords<V> words{up + starts[half], count, size_t(count) * kLanes};
      accumulate_vectors(words, rows, num_rows, true, products);
    }
    const int first = half % 2 * kHalfVectors;
    for (int v = 0; v < V; ++v) {
      const int output = half * kHalfPanel + v * kLanes;
      const Floats factor = gain ? load(gain + output) : splat(1.0f);
      const Floats term = bias ? load(bias + output) : Floats{};
      for (int i = 0; i < num_rows; ++i) {
        float* at = sums[i] + (first + v) * kLanes;
        Floats sum = load(at) * scales[first + v];
        if (count) sum += load(products + (i * V + v) * kLanes);
        store(at, sum * factor + term);
      }
    }
  }
};

// An adapter. `linears`: query, key and value, attention output, gate and up, and down of each
// layer, then the head. `own_embedding`: [V, W], `own_head`: instead of those of the decoder, or
// null.
struct Adapter {
  const LowRank* linears;
  LowRank embedding;
  const void* own_embedding;
  const Linear* own_head;
};

// Rows of a pass, in the order of their adapters. `of_row`: [R], index of a row's adapter, -1 for
// none. `adapters` stay where they are.
class AdaptedRows {
 public:
  // A task: rows of one adapter, begin .. end - 1 of `rows`.
  struct Block {
    int adapter, begin, end;
  };

  AdaptedRows(const Adapter* const* adapters, int num_adapters, std::vector<int32_t> of_row)
      : adapters_(adapters), of_row_(std::move(of_row)), starts_(num_adapters + 1) {
    for (int adapter = 0; adapter < num_adapters; ++adapter) {
      for (size_t row = 0; row < of_row_.size(); ++row) {
        if (of_row_[row] == adapter) rows_.push_back(int32_t(row));
      }
      starts_[adapter + 1] = int(rows_.size());
      for (int begin = starts_[adapter]; begin < starts_[adapter + 1]; begin += kBlockRows) {
        blocks_.push_back({adapter, begin, std::min(begin + kBlockRows, starts_[adapter + 1])});
      }
    }
  }

  int num_adapters() const { return int(starts_.size()) - 1; }
  const Adapter& adapter(int index) const { return *adapters_[index]; }
  const Adapter* of_row(int row) const {
    return of_row_[row] < 0 ? nullptr : adapters_[of_row_[row]];
  }
  const std::vector<Block>& blocks() const { return blocks_; }
  int row(int index) const { return rows_[index]; }

  // The rows first .. last - 1 of an adapter are begin .. end - 1 of `row`.
  Block rows_between(int adapter, int first, int last) const {
    const auto from = rows_.begin() + starts_[adapter], to = rows_.begin() + starts_[adapter + 1];
    const auto begin = std::lower_bound(from, to, first), end = std::lower_bound(begin, to, last);
    return {adapter, int(begin - rows_.begin()), int(end - rows_.begin())};
  }

 private:
  // A block's words of `down` are read once for kMaxRows rows; more rows find them in the cache.
  static constexpr int kBlockRows = 4 * kMaxRows;

  const Adapter* const* adapters_;
  std::vector<int32_t> of_row_, rows_;
  std::vector<int> starts_;
  std::vector<Block> blocks_;
};

// The updates of matrix `linear` (an index of Adapter::linears) in the rows of a product. `shrunk`:
// [R, stride], written by `shrink`.
template <class T>
class RowUpdates {
 public:
  // No row has any.
  RowUpdates() = default;

  // `num_inputs`, `next_num_inputs`: of the matrix and the next one; 0 if there is none.
  RowUpdates(const AdaptedRows& rows, int linear, int num_inputs, int next_num_inputs, T* shrunk,
             size_t stride)
      : rows_(&rows),
        linear_(linear),
        num_inputs_(num_inputs),
        next_num_inputs_(next_num_inputs),
        shrunk_(shrunk),
        stride_(stride) {
    for (int i = 0; i < rows.num_adapters(); ++i) {
      num_chunks_ = std::max(num_chunks_, of(i).num_chunks());
      is_any_ |= of(i).is_any();
    }
  }

  bool is_any() const { return is_any_; }
  // Of `shrink`.
  int num_tasks() const { return num_chunks_ ? int(rows_->blocks().size()) * num_chunks_ : 0; }

  // `input`: row i begins at input + i * stride.
  __attribute__((noinline)) void shrink(int task, const T* input, size_t stride) const {
    const auto& block = rows_->blocks()[task / num_chunks_];
    const LowRank& update = of(block.adapter);
    const int vector = task % num_chunks_ * kRankVectors;
    const int num_vectors = std::min(kRankVectors, update.num_ranks / kLanes - vector);
    if (num_vectors == kRankVectors) shrink<kRankVectors>(update, block, vector, input, stride);
    if (num_vectors == 1) shrink<1>(update, block, vector, input, stride);
  }

  // Adds what `apply` reads for a panel, one of `num_panels`, and its share of what the next matrix
  // is shrunk with.
  void expect(int panel, int num_panels, LinesAhead& ahead) const {
    for (int i = 0; i < rows_->num_adapters(); ++i) of(i).expect(panel, ahead);
    for (int i = 0; next_num_inputs_ && i < rows_->num_adapters(); ++i) {
      const LowRank& next = rows_->adapter(i).linears[linear_ + 1];
      const size_t size = size_t(next.num_ranks) * next_num_inputs_ * sizeof(T);
      const size_t begin = size * panel / num_panels, end = size * (panel + 1) / num_panels;
      ahead.add(static_cast<const char*>(next.down) + begin, end - begin);
    }
  }

  // Scales and updates the sums of a panel, [count][kPanel], of rows first .. first + count - 1;
  // only of those that have an update, for which is_scaled[row - first] is set.
  __attribute__((noinline)) void apply(int panel, int first, int count, const Floats* scales,
                                       float* sums, bool* is_scaled) const {
    const T* shrunk[kRowBlock];
    float* sums_of[kRowBlock];
    for (int i = 0; i < rows_->num_adapters(); ++i) {
      if (!of(i).is_any()) continue;
      const auto block = rows_->rows_between(i, first, first + count);
      const int num_rows = block.end - block.begin;
      if (!num_rows) continue;
      for (int k = 0; k < num_rows; ++k) {
        const int row = rows_->row(block.begin + k);
        shrunk[k] = shrunk_ + row * stride_;
        sums_of[k] = sums + size_t(row - first) * kPanel;
        is_scaled[row - first] = true;
      }
      of(i).apply(panel, shrunk, num_rows, scales, sums_of);
    }
  }

 private:
  const LowRank& of(int adapter) const { return rows_->adapter(adapter).linears[linear_]; }

  // Ranks of V vectors from `vector` on.
  template <int V>
  void shrink(const LowRank& update, const AdaptedRows::Block& block, int vector, const T* input,
              size_t stride) const {
    constexpr int kWords = kInputBlock / kPerWord<T>;
    alignas(64) float sums[kRowBlock * V * kLanes];
    const T* rows[kRowBlock];
    const int num_rows = block.end - block.begin, num_words = num_inputs_ / kPerWord<T>;
    for (int i = 0; i < num_rows; ++i) rows[i] = input + rows_->row(block.begin + i) * stride;
    const size_t vector_words = size_t(num_words) * kLanes;
    const auto* down = static_cast<const uint32_t*>(update.down) + vector * vector_words;
    for (int word = 0; word < num_words; word += kWords) {
      const int count = std::min(kWords, num_words - word);
      const VectorWords<V> part{down + size_t(word) * kLanes, count, vector_words};
      accumulate_vectors(part, rows, num_rows, word == 0, sums);
      for (int i = 0; i < num_rows; ++i) rows[i] += count * kPerWord<T>;
    }
    for (int i = 0; i < num_rows; ++i) {
      T* to = shrunk_ + rows_->row(block.begin + i) * stride_ + vector * kLanes;
      for (int v = 0; v < V; ++v) {
        const Floats scale = load(update.scales + (vector + v) * kLanes);
        store(to + v * kLanes, load(sums + (i * V + v) * kLanes) * scale);
      }
    }
  }

  const AdaptedRows* rows_ = nullptr;
  int linear_ = 0, num_inputs_ = 0, next_num_inputs_ = 0;
  T* shrunk_ = nullptr;
  size_t stride_ = 0;
  int num_chunks_ = 0;
  bool is_any_ = false;
};

// A row of the embedding with the update of an adapter, in place. `row`: [size], `id`: the token.
template <class T>
inline void update_embedding(const LowRank& update, int64_t id, int size, float* row) {
  if (!update.is_any()) return;
  const T* shrunk = static_cast<const T*>(update.down) + id * update.num_ranks;
  Floats ones[kPanelVectors];
  std::fill_n(ones, kPanelVectors, splat(1.0f));
  alignas(64) float sums[kPanel];
  float* sums_of = sums;
  for (int panel = 0; panel < num_panels(size); ++panel) {
    const int count = std::min(kPanel, size - panel * kPanel);
    std::copy_n(row + panel * kPanel, count, sums);
    update.apply(panel, &shrunk, 1, ones, &sums_of);
    std::copy_n(sums, count, row + panel * kPanel);
  }
}

// Rows of logits that one head computes. `rows`: which of all; null `head`: the decoder's.
struct HeadRows {
  const Linear* head;
  std::vector<int32_t> rows;
  AdaptedRows adapted;
};

// All that a pass needs to know of its adapters. `tokens`: its input tokens. `heads`: its rows of
// logits.
struct AdaptedPass {
  AdaptedRows tokens;
  std::vector<HeadRows> heads;
  size_t most_ranks = 0;  // of a matrix

  // `of_token`: [T]. `logits_index`: [num_logits], see DecoderStep.
  AdaptedPass(const Adapter* const* adapters, int num_adapters, const int32_t* of_token,
              int num_tokens, const int64_t* logits_index, int num_logits, int num_linears)
      : tokens(adapters, num_adapters, {of_token, of_token + num_tokens}) {
    for (int i = 0; i < num_adapters; ++i) {
      for (int linear = 0; linear < num_linears; ++linear) {
        most_ranks = std::max<size_t>(most_ranks, adapters[i]->linears[linear].num_ranks);
      }
    }
    std::vector<const Linear*> used{nullptr};
    for (int i = 0; i < num_adapters; ++i) {
      if (adapters[i]->own_head) used.push_back(adapters[i]->own_head);
    }
    for (const Linear* head : used) {
      std::vector<int32_t> rows, of_row;
      for (int row = 0; row < num_logits; ++row) {
        const int index = of_token[logits_index[row]];
        if ((index < 0 ? nullptr : adapters[index]->own_head) != head) continue;
        rows.push_back(row);
        of_row.push_back(index);
      }
      heads.push_back({head, rows, AdaptedRows(adapters, num_adapters, of_row)});
    }
  }
};

}  // namespace splitserve
