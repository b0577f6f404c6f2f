// Which thread attends to what: the rows of a step, cut into tasks of about the same work.
//
// Decodes whose block tables begin alike attend to the blocks they share together: one read of a
// long common prompt serves them all. That changes no bit of any result (attention.h).
#pragma once

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <vector>

#include "kv_tile.h"

namespace splitserve {

// Query rows, that is tokens times heads of a group, of a task that is not cut any more.
constexpr int kQueryRows = 96;
// From how many shared tokens on decodes are computed together.
constexpr int kMinShared = 2 * kTile;
// Positions whose softmax is computed by itself, and then joined to the rest.
constexpr int kPartition = 1024;
// What a token costs to be read, in query rows that it is multiplied with.
constexpr int kCostOfReading = 4;
// Tasks for each thread, so that all are done at about the same time.
constexpr int kTasksPerThread = 4;

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

// Some parts attend with the heads of `num_heads` key/value heads. They share the blocks of the
// first `num_shared` tokens, a multiple of kTile. A task of a row that is cut attends to the
// positions `begin` to `end` - 1, whole partitions, and leaves the results in slots from
// `first_slot` on; else `first_slot` is -1.
struct AttentionTask {
  int32_t first_part, num_parts, first_head, num_heads, num_shared;
  int32_t begin = 0, end = std::numeric_limits<int32_t>::max(), first_slot = -1;
};

// What remains to be done of a row that was cut: its slots, one for each partition, are joined.
struct AttentionJoin {
  int32_t part, head, first_slot, num_slots;
};

struct AttentionPlan {
  std::vector<AttentionPart> parts;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionJoin> joins;
  int num_slots = 0;
};

// `group`: query heads of a key/value head. `shares`: whether shared blocks may be read together.
class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionRows& rows, int num_kv_heads, int group, int block_size,
                   bool shares, int num_threads)
      : rows_(rows), num_kv_heads_(num_kv_heads), group_(group), block_size_(block_size),
        shares_(shares), num_threads_(num_threads) {}

  // Slots that a plan may have for decodes of these rows, each at most `num_more` tokens longer.
  static int most_slots(const AttentionRows& rows, int num_more, int num_kv_heads) {
    int64_t count = 0;
    for (int row = 0; row < rows.num_rows; ++row) {
      const int num_tokens = rows.num_computed[row] + num_more;
      if (num_tokens >= 2 * kPartition) count += (num_tokens + kPartition - 1) / kPartition;
    }
    return int(count * num_kv_heads);
  }

  AttentionPlan plan() {
    std::unordered_map<int, std::vector<int>> decodes;  // by the first block of their tables
    std::vector<int> others;
    for (int row = 0; row < rows_.num_rows; ++row) {
      if (shares_ && rows_.num_new(row) == 1 && rows_.num_computed[row] >= kMinShared) {
        decodes[rows_.table(row)[0]].push_back(row);
      } else {
        others.push_back(row);
      }
    }
    for (const auto& [block, members] : decodes) {
      const int num_shared = num_shared_tokens(members);
      if (num_shared >= kMinShared) {
        add_decodes(members, num_shared);
      } else {
        others.insert(others.end(), members.begin(), members.end());
      }
    }
    add_rows(others);
    const auto cost = [&](const AttentionTask& task) { return this->cost(task); };
    std::stable_sort(
        plan_.tasks.begin(), plan_.tasks.end(),
        [&](const AttentionTask& a, const AttentionTask& b) { return cost(a) > cost(b); });
    return std::move(plan_);
  }

 private:
  void add_rows(const std::vector<int>& rows) {
    int64_t total = 0;
    for (int row : rows) total += num_kv_heads_ * head_cost(row);
    const int num_tasks = kTasksPerThread * num_threads_;
    const int64_t most = num_threads_ > 1 ? total / (2 * num_threads_) : total;
    // One task for many heads reads longer runs of memory.
    const int num_heads = std::clamp<int64_t>(
        int64_t{num_kv_heads_} * rows.size() / num_tasks, 1, num_kv_heads_);
    for (int row : rows) {
      const int num_partitions = num_tokens(row) / kPartition;
      if (rows_.num_new(row) != 1) {
        add_prompt(row);
      } else if (head_cost(row) > most && num_partitions > 1) {
        const int64_t num_pieces = head_cost(row) * num_tasks / total;
        cut(row, int(std::min<int64_t>(num_pieces, num_partitions)));
      } else {
        add_tasks(add_part(row, 0, 1), 1, num_heads, 0);
      }
    }
  }

  void add_prompt(int row) {
    const int most = std::max(1, kQueryRows / group_), num_new = rows_.num_new(row);
    for (int first = 0; first < num_new; first += most) {
      add_tasks(add_part(row, first, std::min(most, num_new - first)), 1, 1, 0);
    }
  }

  // A decode, in so many pieces of its context.
  void cut(int row, int num_pieces) {
    const int num_partitions = (num_tokens(row) + kPartition - 1) / kPartition;
    const int part = add_part(row, 0, 1);
    for (int head = 0; head < num_kv_heads_; ++head) {
      plan_.joins.push_back({part, head, plan_.num_slots, num_partitions});
      for (int i = 0; i < num_pieces; ++i) {
        const int first = num_partitions * i / num_pieces;
        const int end = num_partitions * (i + 1) / num_pieces;
        plan_.tasks.push_back(
            {part, 1, head, 1, 0, first * kPartition, end * kPartition, plan_.num_slots + first});
      }
      plan_.num_slots += num_partitions;
    }
  }

  int add_part(int row, int first, int count) {
    plan_.parts.push_back({row, rows_.query_starts[row] + first, count});
    return int(plan_.parts.size()) - 1;
  }

  int num_tokens(int row) const { return rows_.num_computed[row] + rows_.num_new(row); }

  int64_t head_cost(int row) const {
    return int64_t{num_tokens(row)} * (rows_.num_new(row) * group_ + kCostOfReading);
  }

  void add_decodes(const std::vector<int>& members, int num_shared) {
    const int count = int(members.size());
    const int for_balance = count * num_kv_heads_ / (2 * num_threads_);
    const int most = std::max(2, std::min(kQueryRows / group_, for_balance));
    for (int first = 0; first < count; first += most) {
      const int part = int(plan_.parts.size()), end = std::min(count, first + most);
      for (int i = first; i < end; ++i) add_part(members[i], 0, 1);
      add_tasks(part, end - first, 1, num_shared);
    }
  }

  void add_tasks(int first_part, int num_parts, int num_heads, int num_shared) {
    for (int head = 0; head < num_kv_heads_; head += num_heads) {
      const int count = std::min(num_heads, num_kv_heads_ - head);
      plan_.tasks.push_back({first_part, num_parts, head, count, num_shared});
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
      const int last = rows_.num_computed[part.row] + part.first_token + part.num_tokens -
                       rows_.query_starts[part.row];
      const int64_t num_tokens = std::min(last, task.end) - std::max(task.num_shared, task.begin);
      num_query_rows += part.num_tokens * group_;
      own += num_tokens * (part.num_tokens * group_ + kCostOfReading);
    }
    return task.num_heads * (own + task.num_shared * (num_query_rows + kCostOfReading));
  }

  const AttentionRows& rows_;
  const int num_kv_heads_, group_, block_size_;
  const bool shares_;
  const int num_threads_;
  AttentionPlan plan_;
};

}  // namespace splitserve
