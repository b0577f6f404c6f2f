// Which thread attends to what: the rows of a step, cut into tasks of about the same work.
//
// Decodes whose block tables begin alike attend to the blocks they share together: one read of a long
// common prompt serves them all. That changes no bit of any result (attention.h).
#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "kv_tile.h"

namespace splitserve {

// Query rows, that is tokens times heads of a group, of a task that is not cut any more.
constexpr int kQueryRows = 96;
// From how many shared tokens on decodes are computed together.
constexpr int kMinShared = 2 * kTile;

// The rows of a step. `block_tables`: [R, table_stride]; `query_starts`: [R + 1];
// `num_computed`: [R].
struct AttentionRows {
  const int32_t* block_tables;
  const int32_t* num_computed;
  const int32_t* query_starts;
  int64_t table_stride;
  int32_t num_rows;

  const int32_t* table(int row) const { return block_tables + row * table_stride; }
  int num_new(int row) const { return query_starts[row + 1] - query_starts[row]; }
};

// Consecutive input tokens of one row; `first_token` counts in the batch.
struct AttentionPart {
  int32_t row, first_token, num_tokens;
};

// Some parts attend with the heads of one key/value head. They share the blocks of the first
// `num_shared` tokens, a multiple of kTile.
struct AttentionTask {
  int32_t first_part, num_parts, kv_head, num_shared;
};

struct AttentionPlan {
  std::vector<AttentionPart> parts;
  std::vector<AttentionTask> tasks;
};

// `group`: query heads of a key/value head. `shares`: whether shared blocks may be read together.
class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionRows& rows, int num_kv_heads, int group, int block_size,
                   bool shares, int num_threads)
      : rows_(rows), num_kv_heads_(num_kv_heads), group_(group), block_size_(block_size),
        shares_(shares), num_threads_(num_threads) {}

  AttentionPlan plan() {
    std::unordered_map<int, std::vector<int>> decodes;  // by the first block of their tables
    for (int row = 0; row < rows_.num_rows; ++row) {
      if (shares_ && rows_.num_new(row) == 1 && rows_.num_computed[row] >= kMinShared) {
        decodes[rows_.table(row)[0]].push_back(row);
      } else {
        add_row(row);
      }
    }
    for (const auto& [block, members] : decodes) add_decodes(members);
    const auto cost = [&](const AttentionTask& task) { return this->cost(task); };
    std::stable_sort(
        plan_.tasks.begin(), plan_.tasks.end(),
        [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
    return std::move(plan_);
  }

 private:
  void add_row(int row) {
    const int most = std::max(1, kQueryRows / group_), end = rows_.query_starts[row + 1];
    for (int first = rows_.query_starts[row]; first < end; first += most) {
      const int part = int(plan_.parts.size());
      plan_.parts.push_back({row, first, std::min(most, end - first)});
      add_tasks(part, 1, 0);
    }
  }

  void add_decodes(const std::vector<int>& members) {
    const int num_shared = num_shared_tokens(members), count = int(members.size());
    if (num_shared < kMinShared) {
      for (int row : members) add_row(row);
      return;
    }
    const int for_balance = count * num_kv_heads_ / (2 * num_threads_);
    const int most = std::max(2, std::min(kQueryRows / group_, for_balance));
    for (int first = 0; first < count; first += most) {
      const int part = int(plan_.parts.size()), end = std::min(count, first + most);
      for (int i = first; i < end; ++i) {
        plan_.parts.push_back({members[i], rows_.query_starts[members[i]], 1});
      }
      add_tasks(part, end - first, num_shared);
    }
  }

  void add_tasks(int first_part, int num_parts, int num_shared) {
    for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
      plan_.tasks.push_back({first_part, num_parts, kv_head, num_shared});
    }
  }

  // Tokens whose blocks all members have, in whole tiles.
  int num_shared_tokens(const std::vector<int>& members) const {
    if (members.size() < 2) return 0;
    int num_blocks = rows_.num_computed[members[0]] / block_size_;
    for (int row : members) {
      num_blocks = std::min(num_blocks, rows_.num_computed[row] / block_size_);
      const int32_t *a = rows_.table(members[0]), *b = rows_.table(row);
      num_blocks = int(std::mismatch(a, a + num_blocks, b).first - a);
    }
    return num_blocks * block_size_ / kTile * kTile;
  }

  int64_t cost(const AttentionTask& task) const {
    int64_t num_query_rows = 0, own = 0;
    for (int i = task.first_part; i < task.first_part + task.num_parts; ++i) {
      const AttentionPart& part = plan_.parts[i];
      const int64_t last =
          rows_.num_computed[part.row] + part.first_token - rows_.query_starts[part.row];
      num_query_rows += part.num_tokens * group_;
      own += (last + part.num_tokens - task.num_shared) * (part.num_tokens * group_ + 4);
    }
    return own + task.num_shared * (num_query_rows + 4);
  }

  const AttentionRows& rows_;
  const int num_kv_heads_, group_, block_size_;
  const bool shares_;
  const int num_threads_;
  AttentionPlan plan_;
};

}  // namespace splitserve
