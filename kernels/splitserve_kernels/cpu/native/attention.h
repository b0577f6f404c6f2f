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

#include "attention_plan.h"
#include "attention_state.h"

namespace splitserve {

// One thread's work on one task, or on one join. Query rows are those of the first head, part after
// part, then those of the next.
template <class T>
class AttentionWorker {
 public:
  // `slots`: room for those of the plan, slot_size() numbers each.
  AttentionWorker(const AttentionLayer<T>& layer, const AttentionRows& rows,
                  const AttentionPlan& plan, const AttentionTask& task, float* slots,
                  AttentionScratch<T>& scratch)
      : layer_(layer),
        rows_(rows),
        task_(task),
        parts_(plan.parts.data() + task.first_part),
        slots_(slots),
        scratch_(scratch),
        group_(layer.num_heads / layer.num_kv_heads),
        width_(padded(layer.value_dim, kPanel)),
        has_codes_(layer.blocks().has_codes()),
        reader_(layer.blocks(), layer.keys, layer.values, layer.key_stride, layer.value_stride,
                scratch.tiles) {
    for (int i = 0; i < task.num_parts; ++i) rows_of_head_ += parts_[i].num_tokens * group_;
    num_rows_ = rows_of_head_ * task.num_heads;
    scratch.reserve(num_rows_, layer.value_dim);
    int row = 0;
    for (int head = task.first_head; head < task.first_head + task.num_heads; ++head) {
      for (int i = 0; i < task.num_parts; ++i) {
        for (int j = 0; j < parts_[i].num_tokens * group_; ++j, ++row) add_row(row, i, j, head);
      }
    }
  }

  void attend() {
    begin();
    Visit visit = first_visit();
    if (!visit.is_there) return;
    reader_.find(tokens_of(visit), visit.start, visit.head, tiles_[0]);
    for (int index = 0; visit.is_there; index = 1 - index) {
      const Visit next = visit_after(visit);
      Tile &tile = tiles_[index], &next_tile = tiles_[1 - index];
      fetcher_.begin(next_tile.regions, 0);
      if (next.is_there) {
        reader_.find(tokens_of(next), next.start, next.head, next_tile);
        fetcher_.begin(next_tile.regions, next_tile.num_regions);
      }
      attend_tile(tile, visit);
      while (fetcher_.fetch()) {
      }
      visit = next;
    }
    if (task_.first_slot < 0) finish_all();
  }

  // Joins the slots of a row that was cut; the task is of that row and head.
  void join(const AttentionJoin& join) {
    const Span all{0, num_rows_};
    clear(whole(), all);
    for (int i = 0; i < join.num_slots; ++i) merge(slot(join.first_slot + i), all);
    finish_all();
  }

 private:
  // Query rows of the task.
  struct Span {
    int begin, end;
  };

  // A tile of one part, or of all parts (-1), with one head: from `start` on, up to `end` at most.
  struct Visit {
    bool is_there;
    int part, start, end, head;
  };

  void add_row(int row, int part_index, int index_in_part, int head_of_group) {
    const AttentionPart& part = parts_[part_index];
    const int token = part.first_token + index_in_part / group_;
    const int head = head_of_group * group_ + index_in_part % group_;
    scratch_.rows[row] = layer_.query + token * layer_.query_stride + head * layer_.head_dim;
    scratch_.weight_rows[row] = scratch_.weights.data() + row * kTile;
    scratch_.positions[row] = first_position(part) + index_in_part / group_;
    if (layer_.relative_bias) {
      scratch_.biases[row] = layer_.relative_bias + size_t(head) * layer_.num_distances;
    }
  }

  int first_position(const AttentionPart& part) const {
    return rows_.num_computed[part.row] + part.first_token - rows_.query_starts[part.row];
  }

  // -- the tiles of a task, one after the other --------------------------------------------------

  Visit first_visit() const {
    if (task_.num_shared) return {true, -1, 0, task_.num_shared, task_.first_head};
    return first_visit_of(0);
  }

  // Of one part: what is not shared of what its first token sees, up to its last token.
  Visit first_visit_of(int part_index) const {
    if (part_index == task_.num_parts) return {};
    const AttentionPart& part = parts_[part_index];
    const int first = first_in_sight(first_position(part), layer_.sliding_window);
    const int start = std::max({task_.num_shared, task_.begin, first / kTile * kTile});
    const int end = std::min(task_.end, first_position(part) + part.num_tokens);
    if (start >= end) return first_visit_of(part_index + 1);
    return {true, part_index, start, end, task_.first_head};
  }

  Visit visit_after(Visit visit) const {
    if (++visit.head < task_.first_head + task_.num_heads) return visit;
    visit.head = task_.first_head;
    visit.start += kTile;
    return visit.start < visit.end ? visit : first_visit_of(visit.part + 1);
  }

  RowTokens tokens_of(const Visit& visit) const {
    const int row = parts_[std::max(visit.part, 0)].row, computed = rows_.num_computed[row];
    return {rows_.table(row), first_in_sight(computed, layer_.sliding_window),
            computed + rows_.num_new(row)};
  }

  Span span_of(const Visit& visit) const {
    const int begin = (visit.head - task_.first_head) * rows_of_head_;
    return visit.part < 0 ? Span{begin, begin + rows_of_head_} : span_of(visit.part, begin);
  }

  Span span_of(int part, int begin) const {
    for (int i = 0; i < part; ++i) begin += parts_[i].num_tokens * group_;
    return {begin, begin + parts_[part].num_tokens * group_};
  }

  void attend_tile(Tile& tile, const Visit& visit) {
    const Span all = span_of(visit), span = seeing(all, visit);
    const int num_seen = std::min(kTile, scratch_.positions[span.end - 1] + 1 - visit.start);
    const bool is_cut = task_.first_slot >= 0;
    const SoftmaxState state =
        is_cut ? slot(task_.first_slot + (visit.start - task_.begin) / kPartition) : part();
    reader_.load(tile, &fetcher_);
    score(tile, span, num_seen);
    weigh(tile, state, span);
    add_values(tile, state, span, num_seen);
    const int end = visit.start + kTile;
    const bool is_last = visit.part >= 0 && end >= visit.end;
    if (is_cut || !(is_last || end % kPartition == 0)) return;
    merge(state, all);
    clear(state, all);
  }

  // Without the rows of a part that stand before the tile.
  Span seeing(Span span, const Visit& visit) const {
    if (visit.part < 0) return span;
    const int before = visit.start - first_position(parts_[visit.part]);
    return {span.begin + std::max(0, before) * group_, span.end};
  }

  // -- the softmax -------------------------------------------------------------------------------

  void begin() {
    const Span all{0, num_rows_};
    if (task_.first_slot < 0) {
      clear(whole(), all);
      clear(part(), all);
      return;
    }
    const int num_slots = (task_.end - task_.begin) / kPartition;
    for (int i = 0; i < num_slots; ++i) clear(slot(task_.first_slot + i), all);
  }

  // Joins a partition to the whole.
  void merge(const SoftmaxState& part, Span span) {
    const SoftmaxState whole = this->whole();
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
  }

  void finish_all() {
    for (int head = 0; head < task_.num_heads; ++head) {
      for (int i = 0; i < task_.num_parts; ++i) {
        finish(parts_[i], task_.first_head + head, span_of(i, head * rows_of_head_));
      }
    }
  }

  // Divides by the total weight and stores the output.
  void finish(const AttentionPart& part, int kv_head, Span span) {
    const SoftmaxState state = whole();
    for (int i = span.begin; i < span.end; ++i) {
      const int token = part.first_token + (i - span.begin) / group_;
      const int head = kv_head * group_ + (i - span.begin) % group_;
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

  // The slots of a plan; a task that has some has the query rows of one.
  SoftmaxState slot(int index) const {
    float* maximum = slots_ + index * slot_size(group_, layer_.value_dim);
    return {maximum, maximum + group_, maximum + group_ * (1 + kLanes)};
  }

  void clear(const SoftmaxState& state, Span span) const {
    const int count = span.end - span.begin;
    std::fill_n(state.maximum + span.begin, count, kNone);
    std::fill_n(state.total + span.begin * kLanes, count * kLanes, 0.0f);
    std::fill_n(state.values + size_t(span.begin) * width_, size_t(count) * width_, 0.0f);
  }

  // Scores of the first `num_seen` keys at least, and the largest of each lane.
  void score(const Tile& tile, Span span, int num_seen) {
    const int num_words = layer_.head_dim / kPerWord<T>;
    for (int group = 0; group < kGroups && group * kLanes < num_seen; group += kPanelVectors) {
      const KeyWords words{tile.groups + group, &fetcher_, num_words};
      float* const scores = scratch_.scores.data() + span.begin * kTile + group * kLanes;
      float* const most = scratch_.most.data() + span.begin * kLanes;
      const Floats scale = splat(layer_.scale);
      multiply(&words, 1, scratch_.rows.data() + span.begin, span.end - span.begin, nullptr,
               [&](int i, const Floats* sums) {
                 Floats largest = group ? load(most + i * kLanes) : splat(kNone);
                 for (int v = 0; v < kPanelVectors; ++v) {
                   const Floats unit =
                       has_codes_ ? scale * load(tile.key_scales + (group + v) * kLanes) : scale;
                   const Floats scaled = sums[v] * unit;
                   store(scores + i * kTile + v * kLanes, scaled);
                   largest = max(largest, scaled);
                 }
                 store(most + i * kLanes, largest);
               });
    }
    const bool is_done = layer_.softcap == 0 && !layer_.relative_bias && num_seen == kTile;
    for (int i = span.begin; i < span.end; ++i) {
      const int low = first_in_sight(scratch_.positions[i], layer_.sliding_window) - tile.start;
      const int high = scratch_.positions[i] + 1 - tile.start;
      if (!is_done || low > 0 || high < kTile) finish_scores(i, tile.start, low, high);
    }
  }

  // What else becomes of the scores of row `i`; keys before `low` and from `high` on are masked.
  void finish_scores(int i, int tile, int low, int high) {
    Floats most = splat(kNone);
    for (int key = 0; key < kTile; key += kLanes) {
      float* at = scratch_.scores.data() + i * kTile + key;
      Floats scores = splat(kNone);
      if (key < high) scores = masked(biased(capped(load(at)), i, tile + key), key, low, high);
      most = max(most, scores);
      store(at, scores);
    }
    store(scratch_.most.data() + i * kLanes, most);
  }

  // Scores to weights, for codes times their scales; what was summed before is to be multiplied by
  // `rescale`.
  void weigh(const Tile& tile, const SoftmaxState& state, Span span) {
    constexpr int kVectors = kTile / kLanes;
    for (int i = span.begin; i < span.end; i += kLanes) {
      raise_maxima(state.maximum, i, std::min(kLanes, span.end - i));
    }
    for (int i = span.begin; i < span.end; ++i) {
      float* row_total = state.total + i * kLanes;
      Floats total{};
      for (int v = 0; v < kVectors; ++v) {
        const int at = i * kTile + v * kLanes;
        const Floats x = load(scratch_.scores.data() + at) - scratch_.offsets[i];
        // Weights that will be rounded need not be exact.
        const Floats weight = kPerWord<T> == 1 ? exp(x) : exp_roughly(x);
        total += weight;
        store(scratch_.weights.data() + at,
              has_codes_ ? weight * load(tile.value_scales + v * kLanes) : weight);
      }
      store(row_total, load(row_total) * scratch_.rescale[i] + total);
    }
  }

  // Maxima of `count` rows from `first` on with the new scores, what is to be subtracted from
  // these, and what the old sums are to be multiplied by.
  void raise_maxima(float* maximum, int first, int count) {
    Floats most[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      most[i] = i < count ? load(scratch_.most.data() + (first + i) * kLanes) : splat(kNone);
    }
    const Floats before = load_some_of(maximum + first, count);
    const Floats raised = max(before, largest_of_each(most));
    const Floats offsets = raised == kNone ? Floats{} : raised;
    store(scratch_.offsets.data() + first, offsets);
    store(scratch_.rescale.data() + first, exp(before - offsets));
    memcpy(maximum + first, &raised, count * sizeof(float));
  }

  static Floats load_some_of(const float* from, int count) {
    return count == kLanes ? load(from) : load_some(from, count);
  }

  static float exp_one(float x) { return exp(splat(x))[0]; }

  Floats capped(Floats scores) const {
    if (layer_.softcap == 0) return scores;
    // tanh(x) = 1 - 2 / (e^2x + 1), which is 1 from x = 10 on.
    const Floats x = scores / layer_.softcap;
    const Floats bounded = x > 10.0f ? splat(10.0f) : x;
    return layer_.softcap * (1.0f - 2.0f / (exp(2.0f * bounded) + 1.0f));
  }

  // Adds the bias of each key's distance to the scores of row `i`; `key`: position of the first.
  Floats biased(Floats scores, int i, int key) const {
    if (!layer_.relative_bias) return scores;
    const int distance = scratch_.positions[i] - key;
    for (int lane = 0; lane < kLanes; ++lane) {
      scores[lane] +=
          scratch_.biases[i][std::clamp(distance - lane, 0, layer_.num_distances - 1)];
    }
    return scores;
  }

  static Floats masked(Floats scores, int first_lane, int low, int high) {
    if (low <= first_lane && first_lane + kLanes <= high) return scores;
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = first_lane + i;
    return (lane >= low) & (lane < high) ? scores : splat(kNone);
  }

  void add_values(const Tile& tile, const SoftmaxState& state, Span span, int num_seen) {
    ValueWords runs[kTile];
    int num_runs = 0;
    int num_left = padded(num_seen, kPerWord<T>) / kPerWord<T>;
    for (; num_left && num_runs < tile.num_runs; ++num_runs) {
      ValueWords& run = runs[num_runs] = tile.runs[num_runs];
      run.num_words = std::min(run.num_words, num_left);
      num_left -= run.num_words;
    }
    for (int column = 0; column < width_; column += kPanel) {
      multiply(runs, num_runs, scratch_.weight_rows.data() + span.begin,
               span.end - span.begin, nullptr, [&](int part_row, const Floats* sums) {
                 const int i = span.begin + part_row;
                 float* to = state.values + i * width_ + column;
                 for (int v = 0; v < kPanelVectors; ++v) {
                   store(to + v * kLanes,
                         load(to + v * kLanes) * scratch_.rescale[i] + sums[v]);
                 }
               });
      for (int i = 0; i < num_runs; ++i) runs[i].first += kPanel;
    }
  }

  const AttentionLayer<T>& layer_;
  const AttentionRows& rows_;
  const AttentionTask& task_;
  const AttentionPart* parts_;
  float* slots_;
  AttentionScratch<T>& scratch_;
  const int group_, width_;
  const bool has_codes_;
  TileReader<T> reader_;
  Tile tiles_[2];
  Fetcher fetcher_;
  int rows_of_head_ = 0, num_rows_ = 0;
};

// All of a plan: run_phase(count, run) calls run(0) .. run(count - 1) on any thread and returns
// when all are done; every thread of a region calls this.
template <class T, class RunPhase>
void attend(const AttentionLayer<T>& layer, const AttentionRows& rows, const AttentionPlan& plan,
            float* slots, RunPhase run_phase) {
  thread_local AttentionScratch<T> scratch;
  run_phase(int(plan.tasks.size()), [&](int i) {
    AttentionWorker<T>(layer, rows, plan, plan.tasks[i], slots, scratch).attend();
  });
  if (plan.joins.empty()) return;
  run_phase(int(plan.joins.size()), [&](int i) {
    const AttentionJoin& join = plan.joins[i];
    const AttentionTask task{join.part, 1, join.head, 1, 0};
    AttentionWorker<T>(layer, rows, plan, task, slots, scratch).join(join);
  });
}

}  // namespace splitserve
