// The C interface that library.py calls. Nothing here throws; memory is the caller's, except what a
// thread keeps between steps.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decoder_run.h"

using namespace splitserve;

namespace {

// Asks for large pages: weights are read from end to end, and each new small page costs a walk.
void use_large_pages(void* begin, size_t size) {
#if defined(__linux__)
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  const uintptr_t from = (uintptr_t(begin) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t to = (uintptr_t(begin) + size) / kLargePage * kLargePage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

template <class T>
void pack(const T* const* weights, int num_outputs, int num_inputs, T* packed, int num_threads) {
  const int count = num_panels(num_outputs);
  const size_t panel_size = size_t(num_inputs) * kPanel;
  use_large_pages(packed, count * panel_size * sizeof(T));
  Phases phases(1);
#pragma omp parallel num_threads(num_threads)
  phases.run(0, count, [&](int panel) {
    pack_panel(weights, num_outputs, num_inputs, panel,
               reinterpret_cast<uint32_t*>(packed + panel * panel_size));
  });
}

template <class T>
void pack_int8(const T* const* weights, int num_outputs, int num_inputs, int8_t* packed,
               float* scales, int num_threads) {
  const int count = num_panels(num_outputs);
  const size_t panel_size = size_t(num_inputs) * kPanel;
  use_large_pages(packed, count * panel_size);
  Phases phases(1);
#pragma omp parallel num_threads(num_threads)
  phases.run(0, count, [&](int panel) {
    pack_int8_panel(weights, num_outputs, num_inputs, panel, packed + panel * panel_size,
                    scales + panel * kPanel);
  });
}

// `adapted`: rows with updates, the first linears of their adapters; null for none.
template <class T>
void linear(const Linear& weights, const T* input, int num_rows, T* output,
            const AdaptedRows* adapted, int num_threads) {
  const int width = weights.num_outputs, num_inputs = weights.num_inputs;
  thread_local PreparedRows<T> of_caller;
  thread_local std::vector<T> shrunk_of_caller;
  PreparedRows<T>& prepared = of_caller;
  prepared.reserve(weights, num_rows);
  RowUpdates<T> updates;
  if (adapted) {
    size_t most_ranks = 0;
    for (int i = 0; i < adapted->num_adapters(); ++i) {
      most_ranks = std::max<size_t>(most_ranks, adapted->adapter(i).linears[0].num_ranks);
    }
    shrunk_of_caller.resize(std::max(shrunk_of_caller.size(), num_rows * most_ranks));
    updates = RowUpdates<T>(*adapted, 0, num_inputs, 0, shrunk_of_caller.data(), most_ranks);
  }
  Phases phases(3);
#pragma omp parallel num_threads(num_threads)
  {
    phases.run(0, weights.prepares_rows() ? num_rows : 0, [&](int row) {
      prepared.prepare(weights, row, input + size_t(row) * num_inputs);
    });
    phases.run(1, updates.num_tasks(),
               [&](int task) { updates.shrink(task, input, num_inputs); });
    phases.run(2, num_tasks(weights, num_rows), [&](int task) {
      multiply_task(weights, task, input, num_inputs, prepared, num_rows, updates,
                    [&](int row, int first, const Floats* sums) {
                      T* to = output + size_t(row) * width;
                      for (int v = 0; v < kPanelVectors; ++v, first += kLanes) {
                        const int count = std::min(kLanes, width - first);
                        if (count > 0) store_up_to(to + first, sums[v], count);
                      }
                    });
    });
  }
}

// `of_row`: [num_rows], index in `adapters` of each row, -1 for none.
template <class T>
void linear_adapted(const Linear& weights, const T* input, int num_rows, T* output,
                    const Adapter* const* adapters, int num_adapters, const int32_t* of_row,
                    int num_threads) {
  const AdaptedRows adapted(adapters, num_adapters, {of_row, of_row + num_rows});
  linear(weights, input, num_rows, output, &adapted, num_threads);
}

void pack_groups(const GroupRows& rows, const uint8_t* kinds, const int64_t* starts,
                 uint8_t* panels, int num_threads) {
  Phases phases(1);
#pragma omp parallel num_threads(num_threads)
  phases.run(0, rows.num_rows, [&](int row) {
    const int panel = rows.outputs[row] / kPanel;
    pack_group_row(rows, row, kinds[panel], panels + starts[panel], rows.outputs[row] % kPanel);
  });
}

// `outputs`: [num_rows]. `to`: [num_rows, K], written.
template <class T>
void unpack_outputs(const Linear& weights, const int64_t* outputs, int num_rows, T* to,
                    int num_threads) {
  Phases phases(1);
#pragma omp parallel num_threads(num_threads)
  phases.run(0, num_rows, [&](int row) {
    unpack_output(weights, int(outputs[row]), to + size_t(row) * weights.num_inputs);
  });
}

template <class T>
void attention(const AttentionLayer<T>& layer, const AttentionRows& rows, int num_threads) {
  const auto plan = AttentionPlanner(rows, layer.num_kv_heads, layer.num_heads / layer.num_kv_heads,
                                     layer.block_size, !layer.sliding_window, num_threads)
                        .plan();
  std::vector<float> slots(plan.num_slots *
                           slot_size(layer.num_heads / layer.num_kv_heads, layer.value_dim));
  Phases phases(2);
#pragma omp parallel num_threads(num_threads)
  {
    int phase = 0;
    attend(layer, rows, plan, slots.data(),
           [&](int count, auto run) { phases.run(phase++, count, run); });
  }
}

// `keys`: [T, G, D], `values`: [T, G, E]; `slots`: [T].
template <class T>
void store_kv(const KVBlocks<T>& blocks, const T* keys, const T* values, const int64_t* slots,
              int num_tokens, void* key_pool, void* value_pool, int64_t key_stride,
              int64_t value_stride, int num_threads) {
  Phases phases(1);
#pragma omp parallel num_threads(num_threads)
  phases.run(0, num_tokens, [&](int first) {
    const int end = end_of_run(slots, first, num_tokens, blocks.run_length());
    if (end == first) return;
    const int64_t block = slots[first] / blocks.block_size;
    const int offset = slots[first] % blocks.block_size;
    char* to_keys = blocks.block(key_pool, block, key_stride);
    char* to_values = blocks.block(value_pool, block, value_stride);
    const size_t key_size = size_t(blocks.num_kv_heads) * blocks.key_dim;
    const size_t value_size = size_t(blocks.num_kv_heads) * blocks.value_dim;
    for (int head = 0; head < blocks.num_kv_heads; ++head) {
      blocks.store_run(to_keys, to_values, head, offset, end - first,
                       {keys + first * key_size + head * blocks.key_dim, key_size},
                       {values + first * value_size + head * blocks.value_dim, value_size});
    }
  });
}

template <class T>
DecoderScratch<T>& scratch_of_caller() {
  thread_local DecoderScratch<T> of_caller;
  return of_caller;
}

// Of thread 0 of a region; others have none.
StepClock clock_of_thread(const StepClock& clock) {
  return omp_get_thread_num() == 0 ? clock : StepClock(nullptr);
}

template <class T>
void decode(const Decoder& decoder, const DecoderStep& step) {
  StepClock clock(step.part_ns);
  DecoderScratch<T>& scratch = scratch_of_caller<T>();
  const auto plan = AttentionPlanner(step.rows, decoder.num_kv_heads,
                                     decoder.num_heads / decoder.num_kv_heads, step.block_size,
                                     !decoder.has_windows(), step.num_threads)
                        .plan();
  const auto adapted = adapted_pass(decoder, step);
  scratch.reserve(decoder, step.num_tokens, step.num_logits, plan.num_slots, adapted.get());
  Phases phases(DecoderWorker<T>::num_phases(decoder, step, adapted.get()), clock.is_running());
  if (clock.is_running()) clock.lap(kPlan, now_ns());
#pragma omp parallel num_threads(step.num_threads)
  {
    StepClock of_thread = clock_of_thread(clock);
    DecoderWorker<T>(decoder, step, plan, adapted.get(), scratch, phases, of_thread).run();
  }
}

template <class T>
void decode_run(const Decoder& decoder, const DecoderStep& first, const DecoderRun& run) {
  StepClock clock(first.part_ns);
  DecoderRunner<T> runner(decoder, first, run, scratch_of_caller<T>());
  if (clock.is_running()) clock.lap(kPlan, now_ns());
#pragma omp parallel num_threads(first.num_threads)
  runner.run(clock_of_thread(clock));
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int32_t splitserve_panel() { return kPanel; }

EXPORT int32_t splitserve_lanes() { return kLanes; }

EXPORT void splitserve_pack_f32(const float* const* weights, int32_t n, int32_t k, float* packed,
                                int32_t num_threads) {
  pack(weights, n, k, packed, num_threads);
}

EXPORT void splitserve_pack_bf16(const Bf16* const* weights, int32_t n, int32_t k, Bf16* packed,
                                 int32_t num_threads) {
  pack(weights, n, k, packed, num_threads);
}

EXPORT void splitserve_pack_int8_f32(const float* const* weights, int32_t n, int32_t k,
                                     int8_t* packed, float* scales, int32_t num_threads) {
  pack_int8(weights, n, k, packed, scales, num_threads);
}

EXPORT void splitserve_pack_int8_bf16(const Bf16* const* weights, int32_t n, int32_t k,
                                      int8_t* packed, float* scales, int32_t num_threads) {
  pack_int8(weights, n, k, packed, scales, num_threads);
}

// The bytes of a panel of a kind (group_weights.h).
EXPORT int64_t splitserve_group_panel_bytes(int32_t kind, int32_t num_inputs) {
  const int last = num_inputs / kGroup - 1;
  return int64_t(group_offset(kind, last) + group_bytes(kind));
}

// Fills the memory of panels with zeros, before anything else is done with it.
EXPORT void splitserve_clear_panels(uint8_t* panels, int64_t size) {
  use_large_pages(panels, size);
  memset(panels, 0, size);
}

EXPORT void splitserve_pack_groups(const GroupRows* rows, const uint8_t* kinds,
                                   const int64_t* starts, uint8_t* panels, int32_t num_threads) {
  pack_groups(*rows, kinds, starts, panels, num_threads);
}

EXPORT void splitserve_unpack_outputs_f32(const Linear* weights, const int64_t* outputs,
                                          int32_t num_rows, float* to, int32_t num_threads) {
  unpack_outputs(*weights, outputs, num_rows, to, num_threads);
}

EXPORT void splitserve_unpack_outputs_bf16(const Linear* weights, const int64_t* outputs,
                                           int32_t num_rows, Bf16* to, int32_t num_threads) {
  unpack_outputs(*weights, outputs, num_rows, to, num_threads);
}

EXPORT void splitserve_linear_f32(const Linear* weights, const float* input, int32_t num_rows,
                           float* output, int32_t num_threads) {
  linear(*weights, input, num_rows, output, nullptr, num_threads);
}

EXPORT void splitserve_linear_bf16(const Linear* weights, const Bf16* input, int32_t num_rows,
                            Bf16* output, int32_t num_threads) {
  linear(*weights, input, num_rows, output, nullptr, num_threads);
}

EXPORT void splitserve_linear_adapted_f32(const Linear* weights, const float* input,
                                          int32_t num_rows, float* output,
                                          const Adapter* const* adapters, int32_t num_adapters,
                                          const int32_t* of_row, int32_t num_threads) {
  linear_adapted(*weights, input, num_rows, output, adapters, num_adapters, of_row, num_threads);
}

EXPORT void splitserve_linear_adapted_bf16(const Linear* weights, const Bf16* input,
                                           int32_t num_rows, Bf16* output,
                                           const Adapter* const* adapters, int32_t num_adapters,
                                           const int32_t* of_row, int32_t num_threads) {
  linear_adapted(*weights, input, num_rows, output, adapters, num_adapters, of_row, num_threads);
}

EXPORT void splitserve_attention_f32(const AttentionLayer<float>* layer, const AttentionRows* rows,
                              int32_t num_threads) {
  attention(*layer, *rows, num_threads);
}

EXPORT void splitserve_attention_bf16(const AttentionLayer<Bf16>* layer, const AttentionRows* rows,
                               int32_t num_threads) {
  attention(*layer, *rows, num_threads);
}

EXPORT void splitserve_store_kv_f32(const KVBlocks<float>* blocks, const float* keys,
                                    const float* values, const int64_t* slots, int32_t num_tokens,
                                    void* key_pool, void* value_pool, int64_t key_stride,
                                    int64_t value_stride, int32_t num_threads) {
  store_kv(*blocks, keys, values, slots, num_tokens, key_pool, value_pool, key_stride, value_stride,
           num_threads);
}

EXPORT void splitserve_store_kv_bf16(const KVBlocks<Bf16>* blocks, const Bf16* keys,
                                     const Bf16* values, const int64_t* slots, int32_t num_tokens,
                                     void* key_pool, void* value_pool, int64_t key_stride,
                                     int64_t value_stride, int32_t num_threads) {
  store_kv(*blocks, keys, values, slots, num_tokens, key_pool, value_pool, key_stride, value_stride,
           num_threads);
}

// `logits`: [S, V], rows `stride` numbers apart. `tokens`: [S], written; -1 for invalid logits.
EXPORT void splitserve_sample_f32(const float* logits, int64_t stride, int32_t num_rows,
                                  int32_t vocab_size, const SamplingRows* rows, int32_t* tokens,
                                  int32_t num_threads) {
  // Waking threads, and waiting for them to end, costs more than a few rows.
  const bool is_small = int64_t{num_rows} * vocab_size < (int64_t{1} << 19);
  Phases phases(1);
#pragma omp parallel num_threads(is_small ? 1 : std::min(num_threads, num_rows))
  {
    thread_local TokenSampler sampler;
    phases.run(0, num_rows, [&](int i) {
      tokens[i] = sampler.choose(logits + i * stride, vocab_size, *rows, i);
    });
  }
}

EXPORT void splitserve_decode_f32(const Decoder* decoder, const DecoderStep* step) {
  decode<float>(*decoder, *step);
}

EXPORT void splitserve_decode_bf16(const Decoder* decoder, const DecoderStep* step) {
  decode<Bf16>(*decoder, *step);
}

EXPORT void splitserve_decode_run_f32(const Decoder* decoder, const DecoderStep* first,
                                      const DecoderRun* run) {
  decode_run<float>(*decoder, *first, *run);
}

EXPORT void splitserve_decode_run_bf16(const Decoder* decoder, const DecoderStep* first,
                                       const DecoderRun* run) {
  decode_run<Bf16>(*decoder, *first, *run);
}

}  // extern "C"
