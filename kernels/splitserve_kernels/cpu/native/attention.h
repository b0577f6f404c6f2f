// Paged attention: every input token over the tokens of its row, itself included.
//
// Shape letters: T tokens of the batch, H query heads, G key/value heads, D size of a query or key
// head, E size of a value head, B block size, M query rows of a task: tokens times the H / G heads
// that share a key/value head.
//
// Keys are taken in tiles of kTile consecutive positions, beginning at multiples of kTile, whatever
// the query. Blocks hold keys and values like packed weights (kv_blocks.h), so scores and weighted
// sums are matrix products (gemm.h), for one query row as for hundreds. Tiles are joined by the online softmax (Milakov and Gimelshein 2018; Dao
// 2022, algorithm 1), partitions of kPartition positions by the same rule (Dao 2023, Flash-Decoding).
// Both lie at fixed positions, and masked keys change nothing, not even the last bit: a token's
// result does not depend on its batch, on how its prompt was cut, or on the number of threads.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "gemm.h"
#include "kv_tile.h"
#include "simd.h"

namespace splitserve {

constexpr int kPartition = 1024;
// Query rows of a task that is not split any more.
constexpr int kQueryRows = 96;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What all rows of a layer share. `keys`, `values`: pools, blocks `key_stride` and `value_stride`
// numbers apart. `query`: [T, H, D] with tokens `query_stride` numbers apart; `output`: [T, H, E],
// contiguous. `sinks`: [H] or null. `sliding_window`: 0 for none; `softcap`: 0 for none.
template <class T>
struct AttentionLayer {
  const T* query;
  const T* keys;
  const T* values;
  T* output;
  const float* sinks;
  int64_t query_stride, key_stride, value_stride;
  int32_t num_heads, num_kv_heads, head_dim, value_dim, block_size, sliding_window;
  float scale, softcap;

  KVBlocks<T> blocks() const { return {block_size, num_kv_heads, head_dim, value_dim}; }
};

// The rows of a step. `block_tables`: [R, table_stride]; `query_starts`: [R + 1];
// `num_computed`: [R].
struct AttentionRows {
  const int32_t* block_tables;
  const int32_t* num_computed;
  const int32_t* query_starts;
  int64_t table_stride;
  int32_t num_rows;
};

// `num_tokens` input tokens of `row` from `first_token` (of the batch) on attend with the heads of
// one key/value head. `partial`: -1, or where the result of one partition goes, to be merged.
struct AttentionTask {
  int32_t row, kv_head, first_token, num_tokens, partition, partial;
};

// The softmax of some query rows over some keys: maximum, sum of weights, weighted sum of values.
struct SoftmaxState {
  float* maximum;  // [M]
  float* total;    // [M, kLanes], to be added up
  float* values;   // [M, padded E]
};

inline int first_in_sight(int position, int sliding_window) {
  return sliding_window ? std::max(0, position - sliding_window + 1) : 0;
}

// Memory of one thread, kept from step to step.
template <class T>
class AttentionScratch {
 public:
  void reserve(int num_rows, int value_dim) {
    const size_t width = padded(value_dim, kPanel);
    grow(scores, size_t(num_rows) * kTile);
    grow(weights, size_t(num_rows) * kTile);
    grow(statistics, size_t(num_rows) * 2 * (1 + kLanes));
    grow(sums, size_t(num_rows) * width * 2);
    grow(rescale, size_t(padded(num_rows, kLanes)));
    grow(totals, size_t(num_rows) * kLanes);
    grow(rows, size_t(num_rows));
    grow(weight_rows, size_t(num_rows));
  }

  std::vector<uint32_t> tiles;
  std::vector<float> scores, statistics, sums, rescale, totals;
  std::vector<T> weights;
  std::vector<const T*> rows, weight_rows;

 private:
  template <class V>
  static void grow(std::vector<V>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }
};

// One thread's work on one task.
template <class T>
class AttentionWorker {
 public:
  AttentionWorker(const AttentionLayer<T>& layer, const AttentionRows& rows,
                  const AttentionTask& task, AttentionScratch<T>& scratch)
      : layer_(layer),
        task_(task),
        scratch_(scratch),
        reader_(layer.blocks(), layer.keys, layer.values, layer.key_stride, layer.value_stride,
                rows.block_tables + task.row * rows.table_stride, task.kv_head,
                first_in_sight(rows.num_computed[task.row], layer.sliding_window),
                row_end(rows, task.row), scratch.tiles) {
    group_ = layer.num_heads / layer.num_kv_heads;
    width_ = padded(layer.value_dim, kPanel);
    num_rows_ = task.num_tokens * group_;
    first_position_ =
        rows.num_computed[task.row] + task.first_token - rows.query_starts[task.row];
    scratch.reserve(num_rows_, layer.value_dim);
    for (int i = 0; i < num_rows_; ++i) {
      const int token = task.first_token + i / group_, head = task.kv_head * group_ + i % group_;
      scratch.rows[i] = layer.query + token * layer.query_stride + head * layer.head_dim;
      scratch.weight_rows[i] = scratch.weights.data() + i * kTile;
    }
  }

  // All partitions, and the output.
  void attend() {
    SoftmaxState whole = state(0), part = state(1);
    clear(whole);
    for (int partition = first_partition(); partition <= last_partition(); ++partition) {
      attend_partition(partition, part);
      merge(part, whole);
    }
    finish(whole);
  }

  void attend_partition(int partition, SoftmaxState state) {
    clear(state);
    const int begin = partition * kPartition, end = begin + kPartition;
    const int first = first_in_sight(first_position_, layer_.sliding_window);
    const int last = first_position_ + task_.num_tokens;
    const int first_tile = std::max(begin, first / kTile * kTile), stop = std::min(end, last);
    if (first_tile >= stop) return;
    const Tile* tile = &reader_.find(first_tile);
    for (int start = first_tile; start < stop; start += kTile) {
      const Tile* next = start + kTile < stop ? &reader_.find(start + kTile) : tile;
      score(*tile, *next);
      weigh(start, state);
      add_values(*tile, *next, state);
      tile = next;
    }
  }

  // Joins `part` to `whole`.
  void merge(const SoftmaxState& part, SoftmaxState& whole) const {
    for (int i = 0; i < num_rows_; ++i) {
      if (part.maximum[i] == kNone) continue;
      // What was empty is multiplied by 0, and what comes to it by 1.
      const float maximum = std::max(part.maximum[i], whole.maximum[i]);
      const float of_part = exp_one(part.maximum[i] - maximum);
      const float of_whole = exp_one(whole.maximum[i] - maximum);
      whole.maximum[i] = maximum;
      float* total = whole.total + i * kLanes;
      store(total, load(total) * of_whole + load(part.total + i * kLanes) * of_part);
      for (int column = 0; column < width_; column += kLanes) {
        float* to = whole.values + i * width_ + column;
        store(to, load(to) * of_whole + load(part.values + i * width_ + column) * of_part);
      }
    }
  }

  // Divides by the total weight and stores the output.
  void finish(const SoftmaxState& state) const {
    for (int i = 0; i < num_rows_; ++i) {
      const int token = task_.first_token + i / group_, head = task_.kv_head * group_ + i % group_;
      float total = sum(load(state.total + i * kLanes)), factor = 1;
      if (layer_.sinks) {
        // A sink is one more key without a value.
        const float sink = layer_.sinks[head], maximum = std::max(sink, state.maximum[i]);
        factor = exp_one(state.maximum[i] - maximum);
        total = total * factor + exp_one(sink - maximum);
      }
      T* to = layer_.output + (size_t(token) * layer_.num_heads + head) * layer_.value_dim;
      const float* from = state.values + i * width_;
      for (int column = 0; column < layer_.value_dim; column += kLanes) {
        const Floats value = load(from + column) * factor / total;
        const int count = std::min(kLanes, layer_.value_dim - column);
        if (count == kLanes) {
          store(to + column, value);
        } else {
          store_some(to + column, value, count);
        }
      }
    }
  }

  int first_partition() const {
    return first_in_sight(first_position_, layer_.sliding_window) / kPartition;
  }

  int last_partition() const { return (first_position_ + task_.num_tokens - 1) / kPartition; }

  int num_rows() const { return num_rows_; }
  int width() const { return width_; }

 private:
  SoftmaxState state(int index) {
    float* statistics = scratch_.statistics.data() + index * (1 + kLanes) * num_rows_;
    return {statistics, statistics + num_rows_,
            scratch_.sums.data() + size_t(index) * num_rows_ * width_};
  }

  void clear(SoftmaxState& state) const {
    std::fill_n(state.maximum, num_rows_, kNone);
    std::fill_n(state.total, num_rows_ * kLanes, 0.0f);
    std::fill_n(state.values, size_t(num_rows_) * width_, 0.0f);
  }

  static int row_end(const AttentionRows& rows, int row) {
    return rows.num_computed[row] + rows.query_starts[row + 1] - rows.query_starts[row];
  }

  void score(const Tile& tile, const Tile& next) {
    const int num_words = layer_.head_dim / kPerWord<T>;
    for (int group = 0; group < kGroups; group += kPanelVectors) {
      const KeyWords words{tile.groups + group, next.groups + group, num_words};
      multiply(&words, 1, scratch_.rows.data(), num_rows_, nullptr,
               [&](int i, const Floats* sums) {
                 float* to = scratch_.scores.data() + i * kTile + group * kLanes;
                 for (int v = 0; v < kPanelVectors; ++v) store(to + v * kLanes, sums[v]);
               });
    }
  }

  // Scores to weights; what was summed before is to be multiplied by `rescale`.
  void weigh(int tile, SoftmaxState& state) {
    constexpr int kVectors = kTile / kLanes;
    for (int i = 0; i < num_rows_; ++i) {
      const int position = first_position_ + i / group_;
      const int low = first_in_sight(position, layer_.sliding_window) - tile;
      const int high = position + 1 - tile;
      Floats scores[kVectors];
      Floats most = splat(kNone);
      for (int v = 0; v < kVectors; ++v) {
        scores[v] = masked(capped(load(scratch_.scores.data() + i * kTile + v * kLanes)), v * kLanes,
                           low, high);
        most = max(most, scores[v]);
      }
      const float maximum = std::max(state.maximum[i], largest(most));
      const float offset = maximum == kNone ? 0.0f : maximum;
      Floats total{};
      for (int v = 0; v < kVectors; ++v) {
        const Floats weight = exp(scores[v] - offset);
        total += weight;
        store(scratch_.weights.data() + i * kTile + v * kLanes, weight);
      }
      scratch_.rescale[i] = state.maximum[i] - offset;
      store(scratch_.totals.data() + i * kLanes, total);
      state.maximum[i] = maximum;
    }
    for (int i = 0; i < num_rows_; i += kLanes) {
      float* rescale = scratch_.rescale.data() + i;
      store(rescale, exp(load(rescale)));
    }
    for (int i = 0; i < num_rows_; ++i) {
      float* total = state.total + i * kLanes;
      store(total, load(total) * scratch_.rescale[i] + load(scratch_.totals.data() + i * kLanes));
    }
  }

  static float exp_one(float x) { return exp(splat(x))[0]; }

  Floats capped(Floats dots) const {
    const Floats scores = dots * layer_.scale;
    if (layer_.softcap == 0) return scores;
    // tanh(x) = 1 - 2 / (e^2x + 1), which is 1 from x = 10 on.
    const Floats x = scores / layer_.softcap;
    const Floats bounded = x > 10.0f ? splat(10.0f) : x;
    return layer_.softcap * (1.0f - 2.0f / (exp(2.0f * bounded) + 1.0f));
  }

  static Floats masked(Floats scores, int first_lane, int low, int high) {
    if (low <= first_lane && first_lane + kLanes <= high) return scores;
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = first_lane + i;
    return (lane >= low) & (lane < high) ? scores : splat(kNone);
  }

  void add_values(const Tile& tile, const Tile& next, SoftmaxState& state) {
    for (int column = 0; column < width_; column += kPanel) {
      ValueWords runs[kTile];
      for (int i = 0; i < tile.num_runs; ++i) {
        runs[i] = tile.runs[i];
        if (next.is_in_place && i < next.num_runs) runs[i].next = next.runs[i].first;
        runs[i].first += column;
        runs[i].next += column;
      }
      multiply(runs, tile.num_runs, scratch_.weight_rows.data(), num_rows_, nullptr,
               [&](int i, const Floats* sums) {
                 float* to = state.values + i * width_ + column;
                 for (int v = 0; v < kPanelVectors; ++v) {
                   store(to + v * kLanes,
                         load(to + v * kLanes) * scratch_.rescale[i] + sums[v]);
                 }
               });
    }
  }

  const AttentionLayer<T>& layer_;
  const AttentionTask& task_;
  AttentionScratch<T>& scratch_;
  TileReader<T> reader_;
  int group_, width_, num_rows_, first_position_;
};

}  // namespace splitserve
