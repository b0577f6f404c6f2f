// The keys and values of kTile consecutive positions of a row, ready to be multiplied with.
//
// Where blocks lie right for that they are read in place, else a tile is copied first. What a row
// has not written is never multiplied with: its keys are masked by whoever asked (attention.h), its
// values are replaced by zeros here, as 0 times NaN is NaN. Codes (kv_codes.h) are widened, and
// multiplied without scales: those of keys are for the scores, those of values for the weights.
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
// `regions`: what of the blocks will be read. `key_scales`, `value_scales`: of codes; 0 for a token
// that may not be read.
struct Tile {
  RowTokens row;
  int start, kv_head;
  const uint32_t* groups[kGroups];
  ValueWords runs[kTile];
  Region regions[4 * kTile];  // codes have four for each block, of which a tile has kTile at most
  float key_scales[kTile], value_scales[kTile];
  int num_runs, num_regions;
  bool has_values;
};

// Finds tiles in the blocks of a layer.
template <class T>
class TileReader {
 public:
  // `copies`: memory for what is copied.
  TileReader(const KVBlocks<T>& blocks, const void* keys, const void* values, int64_t key_stride,
             int64_t value_stride, std::vector<uint32_t>& copies)
      : blocks_(blocks), keys_(static_cast<const char*>(keys)),
        values_(static_cast<const char*>(values)),
        key_stride_(key_stride * int64_t(blocks.number_size())),
        value_stride_(value_stride * int64_t(blocks.number_size())),
        width_(padded(blocks.value_dim, kPanel)) {
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
    if (blocks_.has_codes()) return find_codes(tile);
    if (blocks_.has_full_groups()) find_keys(tile);
    tile.has_values = start >= row.first && start + kTile <= row.end && blocks_.has_pairs() &&
                      blocks_.value_dim % kPanel == 0;
    find_values(tile);
  }

  // Makes `tile` ready; valid until the next one is. `fetcher` is called for each of its words.
  void load(Tile& tile, Fetcher* fetcher) {
    if (blocks_.format == kInt8KV) {
      widen<Int8Codes>(tile, fetcher);
    } else if (blocks_.format == kFloat8KV) {
      widen<Float8Codes>(tile, fetcher);
    } else {
      if (!blocks_.has_full_groups()) copy_keys(tile);
      if (!tile.has_values) copy_values(tile);
    }
    for (int i = 0; i < tile.num_runs; ++i) tile.runs[i].fetcher = fetcher;
  }

 private:
  static constexpr int kPair = kPerWord<T>;
  // Vectors of codes that are widened for each call of a fetcher.
  static constexpr int kWordsPerFetch = 8;

  const T* key_block(const RowTokens& row, int index) const {
    return reinterpret_cast<const T*>(keys_ + row.table[index] * key_stride_);
  }

  const T* value_block(const RowTokens& row, int index) const {
    return reinterpret_cast<const T*>(values_ + row.table[index] * value_stride_);
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

  // -- codes -------------------------------------------------------------------------------------

  // Calls visit(key block, value block, first offset, first index in the tile, count) for the
  // tokens of each block that may be read.
  template <class Visit>
  void for_readable(const Tile& tile, Visit visit) const {
    const int end = std::min(tile.start + kTile, tile.row.end);
    for (int position = std::max(tile.start, tile.row.first); position < end;) {
      const int index = position / blocks_.block_size, offset = position % blocks_.block_size;
      const int count = std::min(blocks_.block_size - offset, end - position);
      const int64_t block = tile.row.table[index];
      visit(reinterpret_cast<const uint8_t*>(keys_ + block * key_stride_),
            reinterpret_cast<const uint8_t*>(values_ + block * value_stride_), offset,
            position - tile.start, count);
      position += count;
    }
  }

  void find_codes(Tile& tile) const {
    for_readable(tile, [&](const uint8_t* keys, const uint8_t* values, int offset, int, int count) {
      // Whole groups and words: what more is read belongs to the same head.
      const int first = offset - offset % blocks_.group();
      const size_t num_keys = padded(offset + count - first, blocks_.group());
      add_region(tile, keys + blocks_.key_at(tile.kv_head, first), num_keys * blocks_.key_dim);
      add_region(tile, values + blocks_.value_at(tile.kv_head, offset), count * blocks_.value_dim);
      const size_t size = count * sizeof(float);
      add_region(tile, keys + blocks_.scale_at(blocks_.key_dim, tile.kv_head, offset), size);
      add_region(tile, values + blocks_.scale_at(blocks_.value_dim, tile.kv_head, offset), size);
    });
  }

  template <class Codes>
  void widen(Tile& tile, Fetcher* fetcher) {
    uint32_t* keys = copies_;
    uint32_t* values = copies_ + size_t(blocks_.key_words()) * kTile;
    const int num_read = std::min(kTile, tile.row.end - tile.start);
    const int group_words = blocks_.key_words() * kLanes;
    for (int i = 0; i < kGroups; ++i) tile.groups[i] = keys + i * group_words;
    tile.num_runs = 1;
    tile.runs[0] = {values, nullptr, size_t(width_), (num_read + kPair - 1) / kPair};
    if (tile.start < tile.row.first || num_read < kTile) {
      std::fill_n(tile.key_scales, kTile, 0.0f);
      std::fill_n(tile.value_scales, kTile, 0.0f);
      std::fill_n(values, size_t(width_) * tile.runs[0].num_words, 0u);
    }
    for_readable(tile, [&](const uint8_t* key_block, const uint8_t* value_block, int offset,
                           int index, int count) {
      const int head = tile.kv_head;
      const size_t size = count * sizeof(float);
      memcpy(tile.key_scales + index,
             key_block + blocks_.scale_at(blocks_.key_dim, head, offset), size);
      memcpy(tile.value_scales + index,
             value_block + blocks_.scale_at(blocks_.value_dim, head, offset), size);
      widen_keys<Codes>(key_block, head, offset, count, keys, index, fetcher);
      widen_values<Codes>(value_block, head, offset, count, values, index, fetcher);
    });
    if (Codes::kUnit == 1) return;
    for (int i = 0; i < kTile; ++i) tile.key_scales[i] *= Codes::kUnit;
    for (int i = 0; i < kTile; ++i) tile.value_scales[i] *= Codes::kUnit;
  }

  // `index`: in the tile, of the token at `offset`; `to`: of the tile.
  template <class Codes>
  void widen_keys(const uint8_t* block, int head, int offset, int count, uint32_t* to,
                  int index, Fetcher* fetcher) const {
    const int num_words = blocks_.key_words(), end = offset + count;
    if (blocks_.has_full_groups()) {
      for (int first = offset - offset % kLanes; first < end; first += kLanes) {
        const uint8_t* from = block + blocks_.key_at(head, first);
        uint32_t* group = to + (index + first - offset) / kLanes * num_words * kLanes;
        for (int word = 0; word < num_words; ++word) {
          if (word % kWordsPerFetch == 0) fetcher->fetch();
          store_as(group + word * kLanes,
                   widen_codes<T, Codes>(from + size_t(word) * kLanes * kPair));
        }
      }
      return;
    }
    for (int i = offset; i < end; ++i, ++index) {
      const uint8_t* from = block + blocks_.key_at(head, i);
      T* lane = reinterpret_cast<T*>(to + index / kLanes * num_words * kLanes + index % kLanes);
      for (int j = 0; j < blocks_.key_dim; ++j) {
        lane[j / kPair * kLanes * kPair + j % kPair] =
            widen_code<T, Codes>(from[j / kPair * blocks_.group() * kPair + j % kPair]);
      }
    }
  }

  // Of a pair of which only one token may be read, the other one's codes are multiplied by 0.
  template <class Codes>
  void widen_values(const uint8_t* block, int head, int offset, int count, uint32_t* to,
                    int index, Fetcher* fetcher) const {
    const int dim = blocks_.value_dim, end = offset + count;
    if (blocks_.has_pairs()) {
      for (int first = offset - offset % kPair; first < end; first += kPair) {
        fetcher->fetch();
        const uint8_t* from = block + blocks_.value_at(head, first);
        uint32_t* word = to + size_t(index + first - offset) / kPair * width_;
        for_vectors(dim, [&](int i, int some) {
          store_as(word + i, some == kLanes
                                 ? widen_codes<T, Codes>(from + i * kPair)
                                 : widen_some_codes<T, Codes>(from + i * kPair, some));
        });
      }
      return;
    }
    for (int i = offset; i < end; ++i, ++index) {
      const uint8_t* from = block + blocks_.value_at(head, i);
      T* numbers = reinterpret_cast<T*>(to + size_t(index / kPair) * width_) + index % kPair;
      for (int j = 0; j < dim; ++j) numbers[j * kPair] = widen_code<T, Codes>(from[j]);
    }
  }

  const KVBlocks<T> blocks_;
  const char *keys_, *values_;
  const int64_t key_stride_, value_stride_;
  const int width_;
  uint32_t* copies_;
};

}  // namespace splitserve
