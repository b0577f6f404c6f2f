// The keys and values of kTile consecutive positions of a row, ready to be multiplied with.
//
// Where blocks lie right for that they are read in place, else a tile is copied first. What a row has
// not written is never multiplied with: its keys are masked by whoever asked (attention.h), its values
// are replaced by zeros here, as 0 times NaN is NaN.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "kv_blocks.h"

namespace splitserve {

constexpr int kTile = 64;
constexpr int kGroups = kTile / kLanes;

// How many tiles ahead of the multiplication memory is asked for the next ones.
// Into the second level of the cache: the first is too small for tiles in waiting.
inline void fetch_later(const void* at) { __builtin_prefetch(at, 0, 2); }

// Keys of a panel: a group of kLanes tokens for each vector. `next`: those of the tile
// after it.
struct KeyWords {
  const uint32_t* const* groups;
  const uint32_t* const* next;
  int num_words;

  Words load(int v, size_t k) const { return load_as<Words>(groups[v] + k * kLanes); }
  template <int>
  void fetch(int v, size_t k) const {
    fetch_later(next[v] + k * kLanes);
  }
};

// Values of consecutive tokens, words `stride` apart, from one column on. `next`: as above.
struct ValueWords {
  const uint32_t* first;
  const uint32_t* next;
  size_t stride;
  int num_words;

  Words load(int v, size_t k) const { return load_as<Words>(first + k * stride + v * kLanes); }
  template <int>
  void fetch(int v, size_t k) const {
    fetch_later(next + k * stride + v * kLanes);
  }
};

// Where a tile is. Values are `num_runs` runs of words; all words together are those of the tile, or
// as many as somebody may look at.
struct Tile {
  const uint32_t* groups[kGroups];
  ValueWords runs[kTile];
  int num_runs;
  bool is_in_place;
};

// Reads the tiles of one key/value head of one row.
template <class T>
class TileReader {
 public:
  // The positions that may be read are `first` to `end` - 1. `copies`: memory for tiles.
  TileReader(const KVBlocks<T>& blocks, const T* keys, const T* values, int64_t key_stride,
             int64_t value_stride, const int32_t* table, int kv_head, int first, int end,
             std::vector<uint32_t>& copies)
      : blocks_(blocks), keys_(keys), values_(values), key_stride_(key_stride),
        value_stride_(value_stride), table_(table), kv_head_(kv_head), first_(first), end_(end),
        width_(padded(blocks.value_dim, kPanel)) {
    const size_t size = size_t(blocks.key_words()) * kTile + size_t(width_) * kTile / kPair;
    if (copies.size() < kNumTiles * size) copies.resize(kNumTiles * size);
    for (int i = 0; i < kNumTiles; ++i) copies_[i] = copies.data() + i * size;
  }

  // The tile that begins at `start`, some of which may be read. Valid until the call after the next.
  const Tile& find(int start) {
    current_ = (current_ + 1) % kNumTiles;
    Tile& tile = tiles_[current_];
    if (blocks_.has_full_groups()) {
      find_keys(start, tile);
    } else {
      copy_keys(start, tile);
    }
    const bool is_full = start >= first_ && start + kTile <= end_;
    tile.is_in_place = is_full && blocks_.has_pairs() && blocks_.value_dim % kPanel == 0;
    if (tile.is_in_place) {
      find_values(start, tile);
    } else {
      copy_values(start, tile);
    }
    return tile;
  }

 private:
  static constexpr int kPair = kPerWord<T>;
  static constexpr int kNumTiles = 2;

  bool may_read(int position) const { return position >= first_ && position < end_; }

  const T* key_block(int position) const {
    return keys_ + table_[position / blocks_.block_size] * key_stride_;
  }

  const T* value_block(int position) const {
    return values_ + table_[position / blocks_.block_size] * value_stride_;
  }

  void find_keys(int start, Tile& tile) const {
    const uint32_t* some = nullptr;
    for (int i = 0; i < kGroups; ++i) {
      const int position = start + i * kLanes;
      const bool is_readable = position < end_ && position + kLanes > first_;
      const int offset = position % blocks_.block_size;
      tile.groups[i] =
          is_readable ? blocks_.key(key_block(position), kv_head_, offset) : nullptr;
      if (is_readable) some = tile.groups[i];
    }
    // Nobody looks at the scores of a group that is not there.
    for (const uint32_t*& group : tile.groups) group = group ? group : some;
  }

  void copy_keys(int start, Tile& tile) const {
    const int num_words = blocks_.key_words(), step = blocks_.group();
    for (int i = 0; i < kGroups; ++i) tile.groups[i] = copies_[current_] + i * num_words * kLanes;
    for (int i = std::max(0, first_ - start); i < std::min(kTile, end_ - start); ++i) {
      const int offset = (start + i) % blocks_.block_size;
      const uint32_t* from = blocks_.key(key_block(start + i), kv_head_, offset);
      uint32_t* to = copies_[current_] + i / kLanes * num_words * kLanes + i % kLanes;
      for (int word = 0; word < num_words; ++word) to[word * kLanes] = from[word * step];
    }
  }

  void find_values(int start, Tile& tile) const {
    tile.num_runs = 0;
    for (int position = start; position < start + kTile;) {
      const int offset = position % blocks_.block_size;
      const int count = std::min(blocks_.block_size - offset, start + kTile - position);
      const T* first = blocks_.value(value_block(position), kv_head_, offset);
      const auto* words = reinterpret_cast<const uint32_t*>(first);
      tile.runs[tile.num_runs++] = {words, words, size_t(blocks_.value_dim), count / kPair};
      position += count;
    }
  }

  void copy_values(int start, Tile& tile) const {
    uint32_t* to = copies_[current_] + size_t(blocks_.key_words()) * kTile;
    const int end = std::min(kTile, end_ - start), num_words = (end + kPair - 1) / kPair;
    tile.num_runs = 1;
    tile.runs[0] = {to, to, size_t(width_), num_words};
    for (int word = 0; word < num_words; ++word, to += width_) {
      if (blocks_.has_pairs()) {
        copy_words(start + word * kPair, to);
      } else {
        copy_numbers(start + word * kPair, to);
      }
    }
  }

  // The values of kPair tokens, of which one block has all.
  void copy_words(int position, uint32_t* to) const {
    uint32_t mask = 0;
    int readable = position;
    for (int i = 0; i < kPair; ++i) {
      if (!may_read(position + i)) continue;
      mask |= (~0u >> (32 - 32 / kPair)) << (i * (32 / kPair));
      readable = position + i;
    }
    // Columns beyond the values are multiplied, too, but nobody looks at what becomes of them.
    const int dim = mask ? blocks_.value_dim : 0, offset = position % blocks_.block_size;
    const T* from = mask ? blocks_.value(value_block(readable), kv_head_, offset) : nullptr;
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      store_as(to + i, load_as<Words>(from + i * kPair) & mask);
    }
    for (; i < dim; ++i) to[i] = load_as<uint32_t>(from + i * kPair) & mask;
    for (; i < width_; ++i) to[i] = 0;
  }

  // The same where each token's values lie by themselves.
  void copy_numbers(int position, uint32_t* to) const {
    std::fill_n(to, width_, 0u);
    for (int i = 0; i < kPair; ++i) {
      if (!may_read(position + i)) continue;
      const int offset = (position + i) % blocks_.block_size;
      const T* from = blocks_.value(value_block(position + i), kv_head_, offset);
      T* numbers = reinterpret_cast<T*>(to) + i;
      for (int j = 0; j < blocks_.value_dim; ++j) numbers[j * kPair] = from[j];
    }
  }

  const KVBlocks<T> blocks_;
  const T *keys_, *values_;
  const int64_t key_stride_, value_stride_;
  const int32_t* table_;
  const int kv_head_, first_, end_, width_;
  Tile tiles_[kNumTiles];
  uint32_t* copies_[kNumTiles];
  int current_ = 0;
};

}  // namespace splitserve
