// Pass after pass of a decoder in one parallel region: the token that a row gets is its next input.
//
// Shape letters: R rows, m tokens that a row may get, S tokens that end rows.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "sampling.h"

namespace splitserve {

// Called after each pass of a run that is not the last, by one thread, with the number of passes so
// far; the run ends if it returns 0.
using GoesOn = int32_t (*)(int32_t num_passes);

// How rows run on. `draws.positions`: of the first tokens. `num_tokens`: [R], so many at most, 1 or
// more. `stop_offsets`: [R + 1], where the tokens that end a row are in `stop_token_ids` [S].
// `tokens`: [R, m], all -1; written. `vocab_size`: logits that are drawn from.
// `goes_on`: null for a run that nobody ends.
struct DecoderRun {
  SamplingRows draws;
  const int32_t *num_tokens, *stop_offsets, *stop_token_ids;
  int32_t* tokens;
  int32_t max_num_tokens, vocab_size;
  GoesOn goes_on;
};

// One pass: the rows that still run, and where each is. It is complete before anybody sees it and
// never changed: a thread that the system has put to sleep may look at it when others have long
// gone on.
struct RunPass {
  std::vector<int32_t> rows;  // which of the run these are
  std::vector<int64_t> token_ids, positions, slots, logits_index;
  std::vector<int32_t> num_computed, query_starts, block_tables, of_token;
  DecoderStep step{};
  AttentionPlan plan;
  std::unique_ptr<AdaptedPass> adapted;
  std::unique_ptr<Phases> phases;
};

template <class T>
class DecoderRunner {
 public:
  // `first`: the first pass. Of its rows `block_tables`, `num_computed` and `table_stride` are
  // read, and its `token_ids` and `of_token`; each row has one. `logits` has a line for each.
  DecoderRunner(const Decoder& decoder, const DecoderStep& first, const DecoderRun& run,
                DecoderScratch<T>& scratch)
      : decoder_(decoder),
        first_(first),
        run_(run),
        scratch_(scratch),
        shares_(!decoder.has_windows()),
        passes_(run.max_num_tokens + 1) {
    RunPass& pass = passes_[0];
    for (int row = 0; row < first.rows.num_rows; ++row) {
      add_row(pass, row, first.token_ids[row], first.rows.num_computed[row]);
    }
    complete(pass, first.rows);
    const int num_slots = AttentionPlanner::most_slots(first.rows, run.max_num_tokens,
                                                       decoder.num_kv_heads);
    scratch.reserve(decoder, first.rows.num_rows, first.rows.num_rows, num_slots,
                    pass.adapted.get());
  }

  // One thread's part of all passes; all threads of the region call it.
  void run(StepClock clock) {
    thread_local TokenSampler sampler;
    for (int index = 0; !passes_[index].rows.empty(); ++index) {
      const RunPass& pass = passes_[index];
      const AdaptedPass* adapted = pass.adapted.get();
      DecoderWorker<T>(decoder_, pass.step, pass.plan, adapted, scratch_, *pass.phases, clock).run();
      const int draw = DecoderWorker<T>::num_phases(decoder_, pass.step, adapted);
      const int advance = draw + 1;
      pass.phases->run(draw, int(pass.rows.size()),
                       [&](int i) { choose(sampler, pass, index, i); });
      if (clock.is_running()) clock.lap(kDraw, pass.phases->end_ns(draw));
      pass.phases->run(advance, 1, [&](int) { prepare_next(index); });
      if (clock.is_running()) clock.lap(kPlan, pass.phases->end_ns(advance));
    }
  }

 private:
  int32_t& token(int row, int index) { return run_.tokens[size_t(row) * run_.max_num_tokens + index]; }

  void choose(TokenSampler& sampler, const RunPass& pass, int index, int i) {
    const float* logits = first_.logits + size_t(i) * decoder_.head.num_outputs;
    const int row = pass.rows[i];
    token(row, index) = sampler.choose(logits, run_.vocab_size, run_.draws, row, index);
  }

  // Rows whose token is their last one are left out; all rows are if the run is to end.
  void prepare_next(int index) {
    const RunPass& pass = passes_[index];
    RunPass& next = passes_[index + 1];
    for (size_t i = 0; i < pass.rows.size(); ++i) {
      const int row = pass.rows[i], last = token(row, index);
      if (last < 0 || index + 1 == run_.num_tokens[row] || ends(row, last)) continue;
      add_row(next, row, last, pass.num_computed[i] + 1);
    }
    if (next.rows.empty()) return;
    if (run_.goes_on && !run_.goes_on(index + 1)) {
      next.rows.clear();
      return;
    }
    complete(next, pass.step.rows);
  }

  bool ends(int row, int token) const {
    const int32_t* stops = run_.stop_token_ids;
    const int32_t* end = stops + run_.stop_offsets[row + 1];
    return std::find(stops + run_.stop_offsets[row], end, token) != end;
  }

  void add_row(RunPass& pass, int row, int64_t token_id, int position) const {
    const int block = first_.rows.table(row)[position / first_.block_size];
    pass.rows.push_back(row);
    if (first_.num_adapters) pass.of_token.push_back(first_.of_token[row]);
    pass.token_ids.push_back(token_id);
    pass.positions.push_back(position);
    pass.num_computed.push_back(position);
    pass.slots.push_back(int64_t{block} * first_.block_size + position % first_.block_size);
  }

  // `before`: the rows of the pass before.
  void complete(RunPass& pass, const AttentionRows& before) const {
    const int num_rows = int(pass.rows.size());
    pass.logits_index.resize(num_rows);
    pass.query_starts.resize(num_rows + 1);
    std::iota(pass.logits_index.begin(), pass.logits_index.end(), int64_t{0});
    std::iota(pass.query_starts.begin(), pass.query_starts.end(), 0);
    pass.step = first_;
    pass.step.token_ids = pass.token_ids.data();
    pass.step.positions = pass.positions.data();
    pass.step.slots = pass.slots.data();
    pass.step.logits_index = pass.logits_index.data();
    pass.step.of_token = pass.of_token.data();
    pass.step.num_tokens = pass.step.num_logits = num_rows;
    AttentionRows& rows = pass.step.rows;
    rows.block_tables = before.num_rows == num_rows ? before.block_tables : own_tables(pass);
    rows.num_computed = pass.num_computed.data();
    rows.query_starts = pass.query_starts.data();
    rows.num_rows = num_rows;
    pass.plan = AttentionPlanner(rows, decoder_.num_kv_heads,
                                 decoder_.num_heads / decoder_.num_kv_heads, first_.block_size,
                                 shares_, first_.num_threads)
                    .plan();
    pass.adapted = adapted_pass(decoder_, pass.step);
    const int num_phases =
        DecoderWorker<T>::num_phases(decoder_, pass.step, pass.adapted.get()) + 2;
    pass.phases = std::make_unique<Phases>(num_phases, first_.part_ns);
  }

  const int32_t* own_tables(RunPass& pass) const {
    for (int row : pass.rows) {
      const int32_t* table = first_.rows.table(row);
      pass.block_tables.insert(pass.block_tables.end(), table, table + first_.rows.table_stride);
    }
    return pass.block_tables.data();
  }

  const Decoder& decoder_;
  const DecoderStep& first_;
  const DecoderRun& run_;
  DecoderScratch<T>& scratch_;
  const bool shares_;
  std::vector<RunPass> passes_;  // the last one has no rows
};

}  // namespace splitserve
