// Paged attention: every input token over the tokens of its row, itself included.
//
// Shape letters: T tokens of the batch, H query heads, G key/value heads, D size of a query or key
// head, E size of a value head, B block size, M query rows of a task: tokens times the H / G heads
// that share a key/value head.
//
// Keys are taken in tiles of kTile consecutive positions, beginning at multiples of kTile, whatever
// the query. Blocks hold keys and values like packed weights (kv_blocks.h), so scores and weighted
// sums are matrix products (gemm.h), for one query row as for hundreds. Tiles are joined by the
// online softmax (Milakov and Gimelshein 2018; Dao 2022, algorithm 1), partitions of kPartition
// positions by the same rule (Dao 2023, Flash-Decoding). Both lie at fixed positions, and masked
// keys change nothing, not even the last bit: a token's result does not depend on its batch, on how
// its prompt was cut, or on the number of threads.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "attention_plan.h"
#include "gemm.h"
#include "simd.h"

namespace splitserve {

constexpr int kPartition = 1024;
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

// The softmax of query rows over some keys: maximum, sum of weights, weighted sum of values.
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
    grow(rescale, size_t(num_rows) + kLanes);
    grow(totals, size_t(num_rows) * kLanes);
    grow(rows, size_t(num_rows));
    grow(weight_rows, size_t(num_rows));
    grow(positions, size_t(num_rows));
  }

  std::vector<uint32_t> tiles;
  std::vector<float> scores, statistics, sums, rescale, totals;
  std::vector<T> weights;
  std::vector<const T*> rows, weight_rows;
  std::vector<int> positions;

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
                  const AttentionPlan& plan, const AttentionTask& task, AttentionScratch<T>& scratch)
      : layer_(layer),
        rows_(rows),
        task_(task),
        parts_(plan.parts.data() + task.first_part),
        scratch_(scratch),
        group_(layer.num_heads / layer.num_kv_heads),
        width_(padded(layer.value_dim, kPanel)) {
    for (int i = 0; i < task.num_parts; ++i) num_rows_ += parts_[i].num_tokens * group_;
    scratch.reserve(num_rows_, layer.value_dim);
    for (int i = 0, row = 0; i < task.num_parts; ++i) {
      const AttentionPart& part = parts_[i];
      for (int j = 0; j < part.num_tokens * group_; ++j, ++row) {
        const int token = part.first_token + j / group_, head = task.kv_head * group_ + j % group_;
        scratch.rows[row] = layer.query + token * layer.query_stride + head * layer.head_dim;
        scratch.weight_rows[row] = scratch.weights.data() + row * kTile;
        scratch.positions[row] = first_position(part) + j / group_;
      }
    }
  }

  void attend() {
    const Span all{0, num_rows_};
    clear(whole(), all);
    clear(part(), all);
    attend_shared(all);
    for (int i = 0, row = 0; i < task_.num_parts; ++i) {
      const Span span{row, row + parts_[i].num_tokens * group_};
      attend_own(parts_[i], span);
      finish(parts_[i], span);
      row = span.end;
    }
  }

 private:
  // Query rows of the task.
  struct Span {
    int begin, end;
  };

  int first_position(const AttentionPart& part) const {
    return rows_.num_computed[part.row] + part.first_token - rows_.query_starts[part.row];
  }

  TileReader<T> reader(int row) {
    const int computed = rows_.num_computed[row];
    return {layer_.blocks(), layer_.keys, layer_.values, layer_.key_stride, layer_.value_stride,
            rows_.table(row), task_.kv_head, first_in_sight(computed, layer_.sliding_window),
            computed + rows_.num_new(row), scratch_.tiles};
  }

  // Whole tiles that all parts see from end to end.
  void attend_shared(Span all) {
    if (!task_.num_shared) return;
    TileReader<T> tiles = reader(parts_[0].row);
    for (int begin = 0; begin < task_.num_shared; begin += kPartition) {
      const int end = begin + kPartition;
      attend_tiles(tiles, begin, std::min(end, task_.num_shared), all);
      if (end <= task_.num_shared) merge(all);
    }
  }

  // The rest of one part, from its first tile or from the partition on that the shared tiles began.
  void attend_own(const AttentionPart& part, Span span) {
    TileReader<T> tiles = reader(part.row);
    const int first = first_in_sight(first_position(part), layer_.sliding_window);
    const int last = first_position(part) + part.num_tokens;
    int begin = std::max(task_.num_shared, first / kTile * kTile);
    while (begin < last) {
      const int end = (begin / kPartition + 1) * kPartition;
      attend_tiles(tiles, begin, std::min(end, last), span);
      merge(span);
      begin = end;
    }
  }

  void attend_tiles(TileReader<T>& tiles, int begin, int end, Span span) {
    const Tile* tile = &tiles.find(begin);
    for (int start = begin; start < end; start += kTile) {
      const Tile* next = start + kTile < end ? &tiles.find(start + kTile) : tile;
      score(*tile, *next, span);
      weigh(start, span);
      add_values(*tile, *next, span);
      tile = next;
    }
  }

  // Joins the partition to the whole, and begins another.
  void merge(Span span) {
    const SoftmaxState part = this->part(), whole = this->whole();
    for (int i = span.begin; i < span.end; ++i) {
      const float* total_of_part = part.total + i * kLanes;
      // Nothing in sight; the total of NaN scores is NaN.
      if (part.maximum[i] == kNone && sum(load(total_of_part)) == 0) continue;
      // What was empty is multiplied by 0, and what comes to it by 1.
      const float maximum = std::max(part.maximum[i], whole.maximum[i]);
      const float of_part = exp_one(part.maximum[i] - maximum);
      const float of_whole = exp_one(whole.maximum[i] - maximum);
      whole.maximum[i] = maximum;
      float* total = whole.total + i * kLanes;
      store(total, load(total) * of_whole + load(total_of_part) * of_part);
      for (int column = 0; column < width_; column += kLanes) {
        float* to = whole.values + i * width_ + column;
        store(to, load(to) * of_whole + load(part.values + i * width_ + column) * of_part);
      }
    }
    clear(part, span);
  }

  // Divides by the total weight and stores the output.
  void finish(const AttentionPart& part, Span span) {
    const SoftmaxState state = whole();
    for (int i = span.begin; i < span.end; ++i) {
      const int token = part.first_token + (i - span.begin) / group_;
      const int head = task_.kv_head * group_ + (i - span.begin) % group_;
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

  SoftmaxState whole() { return state(0); }
  SoftmaxState part() { return state(1); }

  SoftmaxState state(int index) {
    float* statistics = scratch_.statistics.data() + size_t(index) * (1 + kLanes) * num_rows_;
    return {statistics, statistics + num_rows_,
            scratch_.sums.data() + size_t(index) * num_rows_ * width_};
  }

  void clear(const SoftmaxState& state, Span span) const {
    const int count = span.end - span.begin;
    std::fill_n(state.maximum + span.begin, count, kNone);
    std::fill_n(state.total + span.begin * kLanes, count * kLanes, 0.0f);
    std::fill_n(state.values + size_t(span.begin) * width_, size_t(count) * width_, 0.0f);
  }

  void score(const Tile& tile, const Tile& next, Span span) {
    const int num_words = layer_.head_dim / kPerWord<T>;
    for (int group = 0; group < kGroups; group += kPanelVectors) {
      const KeyWords words{tile.groups + group, next.groups + group, num_words};
      multiply(&words, 1, scratch_.rows.data() + span.begin, span.end - span.begin, nullptr,
               [&](int i, const Floats* sums) {
                 float* to = scratch_.scores.data() + (span.begin + i) * kTile + group * kLanes;
                 for (int v = 0; v < kPanelVectors; ++v) store(to + v * kLanes, sums[v]);
               });
    }
  }

  // Scores to weights; what was summed before is to be multiplied by `rescale`.
  void weigh(int tile, Span span) {
    constexpr int kVectors = kTile / kLanes;
    const SoftmaxState state = part();
    for (int i = span.begin; i < span.end; ++i) {
      const int low = first_in_sight(scratch_.positions[i], layer_.sliding_window) - tile;
      const int high = scratch_.positions[i] + 1 - tile;
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
    for (int i = span.begin; i < span.end; i += kLanes) {
      float* rescale = scratch_.rescale.data() + i;
      store(rescale, exp(load(rescale)));
    }
    for (int i = span.begin; i < span.end; ++i) {
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

  void add_values(const Tile& tile, const Tile& next, Span span) {
    const SoftmaxState state = part();
    for (int column = 0; column < width_; column += kPanel) {
      ValueWords runs[kTile];
      for (int i = 0; i < tile.num_runs; ++i) {
        runs[i] = tile.runs[i];
        if (next.is_in_place && i < next.num_runs) runs[i].next = next.runs[i].first;
        runs[i].first += column;
        runs[i].next += column;
      }
      multiply(runs, tile.num_runs, scratch_.weight_rows.data() + span.begin,
               span.end - span.begin, nullptr, [&](int part_row, const Floats* sums) {
                 const int i = span.begin + part_row;
                 float* to = state.values + i * width_ + column;
                 for (int v = 0; v < kPanelVectors; ++v) {
                   store(to + v * kLanes,
                         load(to + v * kLanes) * scratch_.rescale[i] + sums[v]);
                 }
               });
    }
  }

  const AttentionLayer<T>& layer_;
  const AttentionRows& rows_;
  const AttentionTask& task_;
  const AttentionPart* parts_;
  AttentionScratch<T>& scratch_;
  const int group_, width_;
  int num_rows_ = 0;
};

}  // namespace splitserve
