// From logits to a token, one row at a time. What is computed is defined by `SamplingParams` in
// executor.proto: temperature, then top-k, top-p and min-p, then a draw with a counter-based
// number.
//
// Shape letter: V vocabulary.
#pragma once

#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "kv_blocks.h"
#include "simd.h"

namespace splitserve {

// The rows that sample, [S] each. `top_k`: V or more for all; `top_p`, `min_p`: 1 and 0 for all.
// `temperatures`: 0 for the largest logit.
struct SamplingRows {
  const float* temperatures;
  const int32_t* top_k;
  const double* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
};

// A number in [0, 1) with 53 random bits, a function of seed and position. Source: Philox4x32-10,
// Salmon, Moraes, Dror and Shaw, SC 2011.
inline double uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b),
                              uint32_t(a >> 32) ^ counter[3] ^ key[1], uint32_t(a)};
    std::copy_n(next, 4, counter);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return double((uint64_t{counter[0]} << 21) + (counter[1] >> 11)) * 0x1p-53;
}

// Chooses tokens; one thread's memory, kept from step to step.
class TokenSampler {
 public:
  // The token of row `i` with `logits` [V], or -1 if they hold NaN or +inf, or -inf alone. It is
  // the one `num_later` positions behind that of `rows`.
  int choose(const float* logits, int vocab_size, const SamplingRows& rows, int i,
             int num_later = 0) {
    const float most = find_largest(logits, vocab_size);
    if (!std::isfinite(most)) return -1;
    if (rows.temperatures[i] <= 0) {
      return int(std::find(logits, logits + vocab_size, most) - logits);
    }
    compute_weights(logits, vocab_size, most, rows.temperatures[i]);
    if (rows.top_k[i] < vocab_size || rows.min_p[i] > 0 || rows.top_p[i] < 1) {
      drop(vocab_size, find_cut(vocab_size, rows.top_k[i], rows.min_p[i], rows.top_p[i]));
    }
    return draw(vocab_size, uniform(rows.seeds[i], rows.positions[i] + num_later));
  }

 private:
  // Kept are weights above `weight`, and those equal to it up to token `last_token`.
  struct Cut {
    float weight;
    int last_token;
  };

  // Weights are at most 1; this many of the leading bits order them roughly.
  static constexpr int kDroppedBits = 19;
  static constexpr int kNumBuckets = (0x3F800000 >> kDroppedBits) + 1;

  // Weights are summed in blocks of this size before a token is looked for inside one block.
  static constexpr int kBlock = 512;
  static constexpr int kLastToken = std::numeric_limits<int>::max();

  static int bucket(float weight) { return int(load_as<uint32_t>(&weight) >> kDroppedBits); }

  // The largest logit; NaN if there is any.
  static float find_largest(const float* logits, int size) {
    Floats most = splat(-std::numeric_limits<float>::infinity()), sums{};
    for_vectors(size, [&](int i, int count) {
      if (count < kLanes) return;
      const Floats x = load(logits + i);
      most = max(x, most);
      sums += x - x;  // NaN for NaN and for infinities
    });
    float largest_logit = largest(most);
    bool is_finite = sum(sums) == 0;
    for (int i = size / kLanes * kLanes; i < size; ++i) {
      largest_logit = std::max(largest_logit, logits[i]);
      is_finite = is_finite && std::isfinite(logits[i]);
    }
    if (is_finite) return largest_logit;
    // -inf is a token that must not be chosen; NaN and +inf make the row invalid.
    for (int i = 0; i < size; ++i) {
      if (std::isnan(logits[i])) return logits[i];
    }
    return largest_logit;
  }

  void compute_weights(const float* logits, int size, float most, float temperature) {
    const size_t padded_size = padded(size, kBlock);
    if (weights_.size() < padded_size) weights_.resize(padded_size);
    for_vectors(size, [&](int i, int count) {
      // Softmax does not see a shift, and shifting first cannot overflow at a tiny temperature.
      const Floats x = (load_up_to(logits + i, count) - most) / temperature;
      store_up_to(weights_.data() + i, exp(x), count);
    });
  }

  // Limits by count, by the share of what that leaves, and by weight, largest weights first.
  Cut find_cut(int size, int top_k, float min_p, double top_p) {
    counts_.assign(kNumBuckets, 0);
    sums_.assign(kNumBuckets, 0.0);
    for (int i = 0; i < size; ++i) {
      const int b = bucket(weights_[i]);
      ++counts_[b];
      sums_[b] += weights_[i];
    }
    const float kth = kth_weight(size, top_k);
    const Cut by_weight{std::min(std::max(kth, min_p), 1.0f), kLastToken};
    if (top_p >= 1) return by_weight;
    double total = 0;
    for (int b = bucket(kth) + 1; b < kNumBuckets; ++b) total += sums_[b];
    gather(size, bucket(kth), kth);
    for (const Candidate& candidate : candidates_) total += candidate.weight;
    const Cut by_share = share_cut(size, kth, top_p * total);
    return by_share.weight < by_weight.weight ? by_weight : by_share;
  }

  // The `k`-th largest weight.
  float kth_weight(int size, int k) {
    if (k >= size) return 0.0f;
    int b = kNumBuckets - 1, num_above = 0;
    while (num_above + counts_[b] < k) num_above += counts_[b--];
    gather(size, b, 0.0f);
    const auto at = candidates_.begin() + (k - num_above - 1);
    std::nth_element(candidates_.begin(), at, candidates_.end(), is_before);
    return at->weight;
  }

  // Where the weights before, largest first, reach `target`; not below `least`.
  Cut share_cut(int size, float least, double target) {
    double before = 0;
    int b = kNumBuckets - 1;
    while (b > bucket(least) && before + sums_[b] < target) before += sums_[b--];
    gather(size, b, least);
    std::sort(candidates_.begin(), candidates_.end(), is_before);
    // All of the buckets above, if this one has none.
    Cut cut{bucket_start(b + 1), kLastToken};
    for (const Candidate& candidate : candidates_) {
      if (before >= target) break;
      before += candidate.weight;
      cut = {candidate.weight, candidate.token};
    }
    return cut;
  }

  struct Candidate {
    float weight;
    int token;
  };

  static bool is_before(const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  }

  static float bucket_start(int b) {
    const uint32_t bits = uint32_t(b) << kDroppedBits;
    return load_as<float>(&bits);
  }

  // The tokens of a bucket whose weight is at least `least`.
  void gather(int size, int b, float least) {
    candidates_.clear();
    for (int i = 0; i < size; ++i) {
      if (bucket(weights_[i]) == b && weights_[i] >= least) candidates_.push_back({weights_[i], i});
    }
  }

  // Sets to 0 what is not kept.
  void drop(int size, const Cut& cut) {
    for (int i = 0; i < size; ++i) {
      const float weight = weights_[i];
      const bool is_kept = weight > cut.weight || (weight == cut.weight && i <= cut.last_token);
      weights_[i] = is_kept ? weight : 0.0f;
    }
  }

  // The first token at which the running sum of the weights exceeds u times their total.
  int draw(int size, double u) {
    const int num_blocks = (size + kBlock - 1) / kBlock;
    std::fill(weights_.begin() + size, weights_.end(), 0.0f);
    sums_.resize(std::max<size_t>(sums_.size(), num_blocks));
    double total = 0;
    for (int b = 0; b < num_blocks; ++b) total += sums_[b] = block_sum(b);
    const double target = u * total;
    double before = 0;
    int b = 0;
    while (b < num_blocks - 1 && before + sums_[b] <= target) before += sums_[b++];
    int last = 0;
    for (int i = b * kBlock; i < std::min(size, (b + 1) * kBlock); ++i) {
      before += weights_[i];
      if (before > target) return i;
      if (weights_[i] > 0) last = i;
    }
    return last;  // u was so near to 1 that rounding decided
  }

  double block_sum(int b) const {
    constexpr int kParts = 8;
    double parts[kParts] = {};
    const float* block = weights_.data() + size_t(b) * kBlock;
    for (int i = 0; i < kBlock; i += kParts) {
      for (int j = 0; j < kParts; ++j) parts[j] += block[i + j];
    }
    double total = 0;
    for (double part : parts) total += part;
    return total;
  }

  std::vector<float> weights_;
  std::vector<int> counts_;
  std::vector<double> sums_;
  std::vector<Candidate> candidates_;
};

}  // namespace splitserve
