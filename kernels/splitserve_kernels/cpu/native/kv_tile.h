// The keys and values of kTile consecutive positions of a row, ready to be multiplied with.
//
// Where blocks lie right for that they are read in place, else a tile is copied first. What a row
// has not written is never multiplied with: its keys are masked by whoever asked (attention.h), its
// values are replaced by zeros here, as 0 times NaN is NaN.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "kv_blocks.h"

namespace splitserve {

constexpr int kTile = 64;
constexpr int kGroups = kTile / kLanes;

// Memory that is read from `begin` to `end`.
struct Region {
  const char *begin, *end;
};

// Asks for the memory of a tile while another one is multiplied with, so that neither waits for the
// other: a little for each word of that one.
class Fetcher {
 public:
  // Goes on with `num_regions` regions; whoever gives them keeps them.
  void begin(const Region* regions, int num_regions) {
    next_ = regions;
    last_ = regions + num_regions;
    at_ = end_ = nullptr;
  }

  // As many bytes as a word of a panel has. Returns false once all was asked for.
  SPLITSERVE_INLINE bool fetch() {
    constexpr int kBytes = kPanel * sizeof(uint32_t), kLine = 64;
    if (at_ >= end_) {
      if (next_ == last_) return false;
      at_ = next_->begin;
      end_ = next_++->end;
    }
    // Into the second level of the cache: the first is too small for tiles in waiting.
    for (int i = 0; i < kBytes; i += kLine) __builtin_prefetch(at_ + i, 0, 2);
    at_ += kBytes;
    return true;
  }

 private:
  const Region *next_ = nullptr, *last_ = nullptr;
  const char *at_ = nullptr, *end_ = nullptr;
};

// Keys of a panel: a group of kLanes tokens for each vector.
struct KeyWords {
  static constexpr int kVectors = kPanelVectors;
  static constexpr bool kIsLoadedTwice = true;
  const uint32_t* const* groups;
  Fetcher* fetcher;
  int num_words;

  Words load(int v, size_t k) const { return load_as<Words>(groups[v] + k * kLanes); }
  template <int>
  void fetch(int v, size_t) const {
    if (v == 0) fetcher->fetch();
  }
};

// Values of consecutive tokens, words `stride` apart, from one column on.
struct ValueWords {
  static constexpr int kVectors = kPanelVectors;
  static constexpr bool kIsLoadedTwice = true;
  const uint32_t* first;
  Fetcher* fetcher;
  size_t stride;
  int num_words;

  Words load(int v, size_t k) const { return load_as<Words>(first + k * stride + v * kLanes); }
  template <int>
  void fetch(int v, size_t) const {
    if (v == 0) fetcher->fetch();
  }
};

// The positions of a row that may be read are `first` to `end` - 1; `table` are its blocks.
struct RowTokens {
  const int32_t* table;
  int first, end;

  bool has(int position) const { return position >= first && position < end; }
};

// Where a tile is. Values are `num_runs` runs of words; all words together are those of the tile,
// or as many as somebody may look at. `has_values`: they lie right, and all may be read.
// `regions`: what of the blocks will be read.
struct Tile {
  RowTokens row;
  int start, kv_head;
  const uint32_t* groups[kGroups];
  ValueWords runs[kTile];
  Region regions[kGroups + kTile];
  int num_runs, num_regions;
  bool has_values;
};

// Finds tiles in the blocks of a layer.
template <class T>
class TileReader {
 public:
  // `copies`: memory for what is copied.
  TileReader(const KVBlocks<T>& blocks, const T* keys, const T* values, int64_t key_stride,
             int64_t value_stride, std::vector<uint32_t>& copies)
      : blocks_(blocks), keys_(keys), values_(values), key_stride_(key_stride),
        value_stride_(value_stride), width_(padded(blocks.value_dim, kPanel)) {
    const size_t size = size_t(blocks.key_words()) * kTile + size_t(width_) * kTile / kPair;
    if (copies.size() < size) copies.resize(size);
    copies_ = copies.data();
  }

  // Where the tile is that begins at `start`, some of which may be read. Reads no block yet.
  void find(const RowTokens& row, int start, int kv_head, Tile& tile) const {
    tile.row = row;
    tile.start = start;
    tile.kv_head = kv_head;
    tile.num_regions = 0;
    if (blocks_.has_full_groups()) find_keys(tile);
    tile.has_values = start >= row.first && start + kTile <= row.end && blocks_.has_pairs() &&
                      blocks_.value_dim % kPanel == 0;
    find_values(tile);
  }

  // Makes `tile` ready; valid until the next one is. `fetcher` is called for each of its words.
  void load(Tile& tile, Fetcher* fetcher) {
    if (!blocks_.has_full_groups()) copy_keys(tile);
    if (!tile.has_values) copy_values(tile);
    for (int i = 0; i < tile.num_runs; ++i) tile.runs[i].fetcher = fetcher;
  }

 private:
  static constexpr int kPair = kPerWord<T>;

  const T* key_block(const RowTokens& row, int index) const {
    return keys_ + row.table[index] * key_stride_;
  }

  const T* value_block(const RowTokens& row, int index) const {
    return values_ + row.table[index] * value_stride_;
  }

  static void add_region(Tile& tile, const void* begin, size_t size) {
    const char* from = static_cast<const char*>(begin);
    tile.regions[tile.num_regions++] = {from, from + size};
  }

  void find_keys(Tile& tile) const {
    const uint32_t* some = nullptr;
    int index = tile.start / blocks_.block_size, offset = tile.start % blocks_.block_size;
    for (int i = 0; i < kGroups; ++i) {
      const int position = tile.start + i * kLanes;
      const bool is_readable = position < tile.row.end && position + kLanes > tile.row.first;
      tile.groups[i] = nullptr;
      if (is_readable) {
        some = tile.groups[i] = blocks_.key(key_block(tile.row, index), tile.kv_head, offset);
        add_region(tile, some, size_t(blocks_.key_words()) * kLanes * sizeof(uint32_t));
      }
      offset += kLanes;
      if (offset == blocks_.block_size) offset = 0, ++index;
    }
    // Nobody looks at the scores of a group that is not there.
    for (const uint32_t*& group : tile.groups) group = group ? group : some;
  }

  void copy_keys(Tile& tile) {
    const int num_words = blocks_.key_words(), step = blocks_.group();
    for (int i = 0; i < kGroups; ++i) tile.groups[i] = copies_ + i * num_words * kLanes;
    for (int i = 0; i < kTile; ++i) {
      const int position = tile.start + i, offset = position % blocks_.block_size;
      if (!tile.row.has(position)) continue;
      const T* block = key_block(tile.row, position / blocks_.block_size);
      const uint32_t* from = blocks_.key(block, tile.kv_head, offset);
      uint32_t* to = copies_ + i / kLanes * num_words * kLanes + i % kLanes;
      for (int word = 0; word < num_words; ++word) to[word * kLanes] = from[word * step];
    }
  }

  void find_values(Tile& tile) const {
    tile.num_runs = 0;
    int index = tile.start / blocks_.block_size, offset = tile.start % blocks_.block_size;
    for (int position = tile.start; position < tile.start + kTile; offset = 0, ++index) {
      const int count = std::min(blocks_.block_size - offset, tile.start + kTile - position);
      if (position < tile.row.end && position + count > tile.row.first) {
        const T* first = blocks_.value(value_block(tile.row, index), tile.kv_head, offset);
        add_region(tile, first, size_t(count) * blocks_.value_dim * sizeof(T));
        const auto* words = reinterpret_cast<const uint32_t*>(first);
        tile.runs[tile.num_runs++] = {words, nullptr, size_t(blocks_.value_dim), count / kPair};
      }
      position += count;
    }
  }

  void copy_values(Tile& tile) {
    uint32_t* to = copies_ + size_t(blocks_.key_words()) * kTile;
    const int end = std::min(kTile, tile.row.end - tile.start);
    const int num_words = (end + kPair - 1) / kPair;
    tile.num_runs = 1;
    tile.runs[0] = {to, nullptr, size_t(width_), num_words};
    for (int word = 0; word < num_words; ++word, to += width_) {
      if (blocks_.has_pairs()) {
        copy_words(tile, tile.start + word * kPair, to);
      } else {
        copy_numbers(tile, tile.start + word * kPair, to);
      }
    }
  }

  // The values of kPair tokens, of which one block has all.
  void copy_words(const Tile& tile, int position, uint32_t* to) const {
    uint32_t mask = 0;
    for (int i = 0; i < kPair; ++i) {
      if (!tile.row.has(position + i)) continue;
      mask |= (~0u >> (32 - 32 / kPair)) << (i * (32 / kPair));
    }
    // Columns beyond the values are multiplied, too, but nobody looks at what becomes of them.
    const int dim = mask ? blocks_.value_dim : 0;
    const T* from = mask ? value(tile, position) : nullptr;
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      store_as(to + i, load_as<Words>(from + i * kPair) & mask);
    }
    for (; i < dim; ++i) to[i] = load_as<uint32_t>(from + i * kPair) & mask;
    for (; i < width_; ++i) to[i] = 0;
  }

  // The same where each token's values lie by themselves.
  void copy_numbers(const Tile& tile, int position, uint32_t* to) const {
    std::fill_n(to, width_, 0u);
    for (int i = 0; i < kPair; ++i) {
      if (!tile.row.has(position + i)) continue;
      const T* from = value(tile, position + i);
      T* numbers = reinterpret_cast<T*>(to) + i;
      for (int j = 0; j < blocks_.value_dim; ++j) numbers[j * kPair] = from[j];
    }
  }

  // See KVBlocks::value.
  const T* value(const Tile& tile, int position) const {
    const int index = position / blocks_.block_size, offset = position % blocks_.block_size;
    return blocks_.value(value_block(tile.row, index), tile.kv_head, offset);
  }

  const KVBlocks<T> blocks_;
  const T *keys_, *values_;
  const int64_t key_stride_, value_stride_;
  const int width_;
  uint32_t* copies_;
};

}  // namespace splitserve
