// A whole decoder of the Llama kind in one call: RMS norms, fused QKV, rotary embedding, paged
// grouped-query attention, gated MLP.
//
// Shape letters: T input tokens, H query heads, G key/value heads, D head size, W width of the
// model, I width of the MLP, S rows of logits, V vocabulary. T as a template argument is the number
// format of weights, activations and KV; sums and the residual stream are float.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "low_rank.h"
#include "step_clock.h"
#include "tasks.h"
#include "weights_ahead.h"

namespace splitserve {

// `qkv`: query, key and value heads one after the other. `gate_up`: for each panel, half of its
// outputs are of the gate and half, the same ones, of the up projection. Norm weights: [W], and [D]
// for `query_norm` and `key_norm`, which may be null.
struct DecoderLayer {
  Linear qkv, attention_output, gate_up, down;
  const float *input_norm, *mlp_norm, *query_norm, *key_norm, *sinks;
  int32_t sliding_window;
  float softcap;
};

// `embedding`: [V, W]; null if the rows of `packed_embedding` are unpacked instead. `layers`:
// `num_layers` of them.
struct Decoder {
  const void* embedding;
  Linear packed_embedding;
  const DecoderLayer* layers;
  Linear head;
  const float* final_norm;
  int32_t num_layers, width, mlp_width, num_heads, num_kv_heads, head_dim, rotary_dim;
  float epsilon, scale;

  bool has_windows() const {
    return std::any_of(layers, layers + num_layers,
                       [](const DecoderLayer& layer) { return layer.sliding_window > 0; });
  }
};

// One step. `token_ids`, `positions`, `slots`: [T]. `cosines`, `sines`: [P, rotary_dim / 2], for
// all positions up to the last one of the step. `key_pools`, `value_pools`: the first block of
// each layer's pool, blocks `block_stride` numbers apart, in `kv_format`. `logits_index`: [S], tokens whose logits
// are wanted; `logits`: [S, V], written. `part_ns`: see StepClock. `revealed`: `num_revealed`
// indexes of layers, `num_layers` for what is behind the last; `states`: [num_revealed, T, W],
// written: the residual stream before each of these. `adapters`: `num_adapters` of them; `of_token`:
// [T], the index of each token's adapter, -1 for none.
struct DecoderStep {
  const int64_t *token_ids, *positions, *slots, *logits_index;
  const float *cosines, *sines;
  AttentionRows rows;
  void* const* key_pools;
  void* const* value_pools;
  int64_t block_stride;
  float* logits;
  int64_t* part_ns;
  const int32_t* revealed;
  float* states;
  const Adapter* const* adapters;
  const int32_t* of_token;
  int32_t num_tokens, num_logits, block_size, num_threads, num_revealed, num_adapters;
  int32_t kv_format;
};

constexpr int kLayerLinears = 4;

// The adapters of a step; null if it has none.
inline std::unique_ptr<AdaptedPass> adapted_pass(const Decoder& decoder, const DecoderStep& step) {
  if (!step.num_adapters) return nullptr;
  return std::make_unique<AdaptedPass>(step.adapters, step.num_adapters, step.of_token,
                                       step.num_tokens, step.logits_index, step.num_logits,
                                       decoder.num_layers * kLayerLinears + 1);
}

// Intermediate values of a step, kept from step to step.
template <class T>
struct DecoderScratch {
  std::vector<float> residual;                // [T, W]
  std::vector<float> slots;                   // of the attention plan
  std::vector<T> normed, qkv, attended, mlp;  // [T, W], [T, (H + 2G) D], [T, H D], [T, I]
  PreparedRows<T> prepared;                   // of the matrix that is multiplied with
  std::vector<T> shrunk;                      // [T, ranks], of its updates

  // `adapted`: see adapted_pass.
  void reserve(const Decoder& decoder, int num_tokens, int num_logits, int num_slots,
               const AdaptedPass* adapted) {
    const size_t tokens = num_tokens;
    grow(slots, num_slots * slot_size(decoder.num_heads / decoder.num_kv_heads, decoder.head_dim));
    grow(residual, tokens * decoder.width);
    grow(normed, std::max<size_t>(tokens, num_logits) * decoder.width);
    const int num_heads = decoder.num_heads + 2 * decoder.num_kv_heads;
    grow(qkv, tokens * num_heads * decoder.head_dim);
    grow(attended, tokens * decoder.num_heads * decoder.head_dim);
    grow(mlp, tokens * decoder.mlp_width);
    if (adapted) grow(shrunk, std::max<size_t>(tokens, num_logits) * adapted->most_ranks);
    prepared.reserve(decoder.head, num_logits);
    for (int i = 0; i < decoder.num_layers; ++i) {
      const DecoderLayer& layer = decoder.layers[i];
      prepared.reserve(layer.qkv, num_tokens);
      prepared.reserve(layer.attention_output, num_tokens);
      prepared.reserve(layer.gate_up, num_tokens);
      prepared.reserve(layer.down, num_tokens);
    }
  }

 private:
  template <class V>
  static void grow(std::vector<V>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  }
};

// One thread's part of a step; all threads of the region make the same calls. `adapted`: see
// adapted_pass.
template <class T>
class DecoderWorker {
 public:
  DecoderWorker(const Decoder& decoder, const DecoderStep& step, const AttentionPlan& plan,
                const AdaptedPass* adapted, DecoderScratch<T>& scratch, Phases& phases,
                StepClock& clock)
      : decoder_(decoder),
        step_(step),
        plan_(plan),
        adapted_(adapted),
        scratch_(scratch),
        phases_(phases),
        clock_(clock) {
    const int num_heads = decoder.num_heads + 2 * decoder.num_kv_heads;
    qkv_width_ = num_heads * decoder.head_dim;
  }

  static int num_phases(const Decoder& decoder, const DecoderStep& step,
                        const AdaptedPass* adapted) {
    const int num_phases = decoder.num_layers * 11 + 3 + step.num_revealed;
    if (!adapted) return num_phases;
    return num_phases + decoder.num_layers * kLayerLinears + int(adapted->heads.size()) * 3;
  }

  void run() {
    embed();
    lap(kNorms);
    for (int i = 0; i < decoder_.num_layers; ++i) {
      const DecoderLayer& layer = decoder_.layers[i];
      ahead_.expect(layer.attention_output);
      reveal(i);
      project_qkv(layer, i * kLayerLinears);
      lap(kQkv);
      store_keys_and_values(layer, i);
      lap(kKvWrite);
      attend(layer, i);
      lap(kAttention);
      ahead_.expect(layer.gate_up);
      add_projection(layer.attention_output, i * kLayerLinears + 1, scratch_.attended.data(),
                     decoder_.num_heads * decoder_.head_dim);
      lap(kAttentionOutput);
      ahead_.expect(layer.down);
      project_gate_up(layer, i * kLayerLinears + 2);
      lap(kGateUp);
      ahead_.expect(i + 1 < decoder_.num_layers ? decoder_.layers[i + 1].qkv : decoder_.head);
      add_projection(layer.down, i * kLayerLinears + 3, scratch_.mlp.data(), decoder_.mlp_width);
      lap(kDown);
    }
    ahead_.expect(decoder_.layers[0].qkv);
    reveal(decoder_.num_layers);
    read_out();
    lap(kHead);
  }

 private:
  static constexpr int kTokensPerTask = 8;

  template <class Task>
  void run_phase(int num_tasks, Task task) {
    phases_.run(phase_++, num_tasks, task, [&] { ahead_.fetch(); });
  }

  // The phases since the last lap were `part`.
  void lap(StepPart part) {
    if (clock_.is_running()) clock_.lap(part, phases_.end_ns(phase_ - 1));
  }

  template <class Each>
  void for_tokens(int num_tokens, Each each) {
    const int num_tasks = kTasksPerThread * omp_get_num_threads();
    const int per_task = std::clamp(num_tokens / num_tasks, 1, kTokensPerTask);
    run_phase((num_tokens + per_task - 1) / per_task, [&](int task) {
      const int end = std::min(num_tokens, (task + 1) * per_task);
      for (int token = task * per_task; token < end; ++token) each(token);
    });
  }

  float* residual(int token) { return scratch_.residual.data() + size_t(token) * decoder_.width; }

  void embed() {
    const T* table = static_cast<const T*>(decoder_.embedding);
    thread_local std::vector<T> of_thread;
    std::vector<T>& unpacked = of_thread;
    if (!table) unpacked.resize(decoder_.width);
    for_tokens(step_.num_tokens, [&](int token) {
      const int64_t id = step_.token_ids[token];
      const Adapter* adapter = adapted_ ? adapted_->tokens.of_row(token) : nullptr;
      const bool has_own = adapter && adapter->own_embedding;
      const T* from = has_own ? static_cast<const T*>(adapter->own_embedding) : table;
      const T* row = from ? from + size_t(id) * decoder_.width : unpacked.data();
      if (!from) unpack_output(decoder_.packed_embedding, int(id), unpacked.data());
      for_vectors(decoder_.width, [&](int i, int count) {
        store_up_to(residual(token) + i, load_up_to(row + i, count), count);
      });
      if (adapter) update_embedding<T>(adapter->embedding, id, decoder_.width, residual(token));
    });
  }

  // Copies the residual for whoever asked for it as layer `index` is given it.
  void reveal(int index) {
    for (int i = 0; i < step_.num_revealed; ++i) {
      if (step_.revealed[i] != index) continue;
      float* to = step_.states + size_t(i) * step_.num_tokens * decoder_.width;
      for_tokens(step_.num_tokens, [&](int token) {
        std::copy_n(residual(token), decoder_.width, to + size_t(token) * decoder_.width);
      });
    }
  }

  // What the adapters of `rows` (null for none) change in matrix `index` of Adapter::linears.
  RowUpdates<T> updates_of(const Linear& linear, int index, const AdaptedRows* rows) {
    if (!rows) return RowUpdates<T>();
    const int width = decoder_.width, heads = decoder_.num_heads * decoder_.head_dim;
    const int next[] = {heads, width, decoder_.mlp_width, width};
    const bool is_head = index == decoder_.num_layers * kLayerLinears;
    return RowUpdates<T>(*rows, index, linear.num_inputs, is_head ? 0 : next[index % kLayerLinears],
                         scratch_.shrunk.data(), adapted_->most_ranks);
  }

  const AdaptedRows* adapted_tokens() const { return adapted_ ? &adapted_->tokens : nullptr; }

  // Multiplies `num_rows` rows of the residual, the tokens token_of(0), token_of(1), .., with
  // `linear` when they are normalized, and updates the products. Of a few rows, each thread that
  // has a task makes its own: that takes no longer than to wait for another's.
  template <class TokenOf, class Finish>
  void multiply_normed(const Linear& linear, const RowUpdates<T>& updates, const float* norm,
                       int num_rows, TokenOf token_of, Finish finish) {
    thread_local std::vector<T> of_thread;
    thread_local PreparedRows<T> prepared_of_thread;
    std::vector<T>& own = of_thread;
    PreparedRows<T>& own_prepared = prepared_of_thread;
    const size_t width = decoder_.width;
    const T* input = nullptr;
    const PreparedRows<T>* prepared = &own_prepared;
    const auto prepare = [&](int i, T* to, PreparedRows<T>& prepared_to) {
      rms_norm(residual(token_of(i)), norm, decoder_.epsilon, decoder_.width, to + i * width);
      prepared_to.prepare(linear, i, to + i * width);
    };
    if (num_rows > kTokensPerTask) {
      T* shared = scratch_.normed.data();
      for_tokens(num_rows, [&](int i) { prepare(i, shared, scratch_.prepared); });
      lap(kNorms);
      input = shared;
      prepared = &scratch_.prepared;
    }
    const auto normed = [&] {
      if (input) return input;
      if (own.size() < num_rows * width) own.resize(num_rows * width);
      own_prepared.reserve(linear, num_rows);
      for (int i = 0; i < num_rows; ++i) prepare(i, own.data(), own_prepared);
      return input = own.data();
    };
    shrink(updates, normed, width);
    run_phase(num_tasks(linear, num_rows), [&](int task) {
      multiply_task(linear, task, normed(), width, *prepared, num_rows, updates, finish);
    });
  }

  // `input`: returns where rows begin, `stride` numbers apart.
  template <class Input>
  void shrink(const RowUpdates<T>& updates, Input input, size_t stride) {
    if (!updates.num_tasks()) return;
    run_phase(updates.num_tasks(), [&](int task) { updates.shrink(task, input(), stride); });
  }

  static int itself(int token) { return token; }

  void project_qkv(const DecoderLayer& layer, int index) {
    multiply_normed(layer.qkv, updates_of(layer.qkv, index, adapted_tokens()), layer.input_norm,
                    step_.num_tokens, itself,
                    [&](int token, int output, const Floats* sums) {
                      T* to = scratch_.qkv.data() + size_t(token) * qkv_width_;
                      for (int v = 0; v < kPanelVectors; ++v, output += kLanes) {
                        const int count = std::min(kLanes, qkv_width_ - output);
                        if (count > 0) store_up_to(to + output, sums[v], count);
                      }
                    });
  }

  void store_keys_and_values(const DecoderLayer& layer, int index) {
    const int dim = decoder_.head_dim, num_kv_heads = decoder_.num_kv_heads;
    const KVBlocks<T> blocks{step_.block_size, num_kv_heads, dim, dim, step_.kv_format};
    for_tokens(step_.num_tokens, [&](int first) {
      const int end = end_of_run(step_.slots, first, step_.num_tokens, blocks.run_length());
      for (int token = first; token < end; ++token) rotate(layer, token);
      if (end == first) return;
      const T* heads = scratch_.qkv.data() + size_t(first) * qkv_width_;
      const size_t stride = qkv_width_;
      const int64_t block = step_.slots[first] / step_.block_size;
      const int offset = step_.slots[first] % step_.block_size;
      char* keys = blocks.block(step_.key_pools[index], block, step_.block_stride);
      char* values = blocks.block(step_.value_pools[index], block, step_.block_stride);
      for (int head = 0; head < num_kv_heads; ++head) {
        const T* key = heads + (decoder_.num_heads + head) * dim;
        blocks.store_run(keys, values, head, offset, end - first, {key, stride},
                         {key + num_kv_heads * dim, stride});
      }
    });
  }

  // Queries and keys of a token, normalised where the layer does that.
  void rotate(const DecoderLayer& layer, int token) {
    const int dim = decoder_.head_dim;
    T* heads = scratch_.qkv.data() + size_t(token) * qkv_width_;
    const size_t angles = size_t(step_.positions[token]) * (decoder_.rotary_dim / 2);
    for (int head = 0; head < decoder_.num_heads + decoder_.num_kv_heads; ++head) {
      T* at = heads + head * dim;
      const float* norm = head < decoder_.num_heads ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(at, norm, decoder_.epsilon, dim, at);
      rotate_head(at, step_.cosines + angles, step_.sines + angles, decoder_.rotary_dim);
    }
  }

  void attend(const DecoderLayer& layer, int index) {
    AttentionLayer<T> attention{};
    attention.query = scratch_.qkv.data();
    attention.keys = step_.key_pools[index];
    attention.values = step_.value_pools[index];
    attention.kv_format = step_.kv_format;
    attention.output = scratch_.attended.data();
    attention.sinks = layer.sinks;
    attention.query_stride = qkv_width_;
    attention.key_stride = attention.value_stride = step_.block_stride;
    attention.num_heads = decoder_.num_heads;
    attention.num_kv_heads = decoder_.num_kv_heads;
    attention.head_dim = attention.value_dim = decoder_.head_dim;
    attention.block_size = step_.block_size;
    attention.sliding_window = layer.sliding_window;
    attention.scale = decoder_.scale;
    attention.softcap = layer.softcap;
    splitserve::attend(attention, step_.rows, plan_, scratch_.slots.data(),
                       [&](int count, auto run) { run_phase(count, run); });
  }

  void add_projection(const Linear& linear, int index, const T* input, int input_width) {
    thread_local PreparedRows<T> prepared_of_thread;
    PreparedRows<T>& own_prepared = prepared_of_thread;
    const int num_rows = step_.num_tokens;
    const PreparedRows<T>* prepared = &own_prepared;
    bool is_prepared = !linear.prepares_rows();
    const auto prepare = [&](int i, PreparedRows<T>& to) {
      to.prepare(linear, i, input + size_t(i) * input_width);
    };
    if (!is_prepared && num_rows > kTokensPerTask) {
      for_tokens(num_rows, [&](int i) { prepare(i, scratch_.prepared); });
      prepared = &scratch_.prepared;
      is_prepared = true;
    }
    const RowUpdates<T> updates = updates_of(linear, index, adapted_tokens());
    shrink(updates, [&] { return input; }, input_width);
    run_phase(num_tasks(linear, num_rows), [&](int task) {
      if (!is_prepared) {
        own_prepared.reserve(linear, num_rows);
        for (int i = 0; i < num_rows; ++i) prepare(i, own_prepared);
        is_prepared = true;
      }
      multiply_task(linear, task, input, input_width, *prepared, num_rows, updates,
                    [&](int token, int output, const Floats* sums) {
                      float* to = residual(token);
                      for (int v = 0; v < kPanelVectors; ++v, output += kLanes) {
                        const int count = std::min(kLanes, decoder_.width - output);
                        if (count > 0) {
                          const Floats before = load_up_to(to + output, count);
                          store_up_to(to + output, before + sums[v], count);
                        }
                      }
                    });
    });
  }

  void project_gate_up(const DecoderLayer& layer, int index) {
    multiply_normed(layer.gate_up, updates_of(layer.gate_up, index, adapted_tokens()),
                    layer.mlp_norm, step_.num_tokens, itself,
                    [&](int token, int output, const Floats* sums) {
                      constexpr int kHalf = kPanelVectors / 2;
                      T* to = scratch_.mlp.data() + size_t(token) * decoder_.mlp_width;
                      int at = output / 2;
                      for (int v = 0; v < kHalf; ++v, at += kLanes) {
                        const int count = std::min(kLanes, decoder_.mlp_width - at);
                        if (count > 0) store_up_to(to + at, silu(sums[v]) * sums[v + kHalf], count);
                      }
                    });
  }

  void read_out() {
    if (!adapted_) {
      return read_out(decoder_.head, nullptr, step_.num_logits, [](int i) { return i; });
    }
    for (const HeadRows& of_head : adapted_->heads) {
      read_out(of_head.head ? *of_head.head : decoder_.head, &of_head.adapted,
               int(of_head.rows.size()), [&](int i) { return of_head.rows[i]; });
    }
  }

  // Rows row_of(0), row_of(1), .. of the logits.
  template <class RowOf>
  void read_out(const Linear& head, const AdaptedRows* adapted, int num_rows, RowOf row_of) {
    const int vocab_size = decoder_.head.num_outputs;
    multiply_normed(head, updates_of(head, decoder_.num_layers * kLayerLinears, adapted),
                    decoder_.final_norm, num_rows,
                    [&](int i) { return int(step_.logits_index[row_of(i)]); },
                    [&](int i, int output, const Floats* sums) {
                      float* to = step_.logits + size_t(row_of(i)) * vocab_size;
                      for (int v = 0; v < kPanelVectors; ++v, output += kLanes) {
                        const int count = std::min(kLanes, vocab_size - output);
                        if (count > 0) store_up_to(to + output, sums[v], count);
                      }
                    });
  }

  const Decoder& decoder_;
  const DecoderStep& step_;
  const AttentionPlan& plan_;
  const AdaptedPass* adapted_;
  DecoderScratch<T>& scratch_;
  Phases& phases_;
  StepClock& clock_;
  WeightsAhead<T> ahead_;
  int qkv_width_, phase_ = 0;
};

}  // namespace splitserve
