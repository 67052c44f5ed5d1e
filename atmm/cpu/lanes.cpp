// Deltas of a thin batch: each lane reads only the rows of its own adapter, once.
//
// A lane at one site is (first token, tokens, start of its rows, row stride, rank, offset of its hidden values): the
// start in bytes from a common base, the rest in elements. Hidden values stay in float, [tokens, rank] per lane, and
// are not rounded between the two products.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tiles.h"

namespace atmm {
namespace {

struct Lane {
  int64_t first_token, tokens, start, stride, rank, hidden;

  // With a null base, `start` is an address.
  template <typename T>
  const T* rows(const T* base) const {
    return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(base) + start);
  }
};

// Number of rows of A, and of tokens, with dot products computed together: their sums fill the registers.
#if defined(__AVX512F__)
constexpr int64_t kRows = 4;
#else
constexpr int64_t kRows = 2;
#endif
constexpr int64_t kDeep = 8;    // rows of Bt that are accumulated at once if they are in a cache
constexpr int64_t kBlock = 1024;       // minimum number of features of y per block
constexpr int64_t kSums = 256 * 1024;  // maximum tokens times features of a larger block: its sums fit the L2 cache
constexpr int64_t kAhead = 8192;  // prefetch distance in bytes

template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);  // values of a cache line

// Rows read for the first time are read from memory in sequential order, which is fastest. Rows kAhead bytes ahead are
// prefetched meanwhile, because hardware cannot predict the address of the next adapter's factors. The target is the L2
// cache, since few lines can be in flight to the L1 cache.
template <typename T>
struct Coming {
  const T* row;
  void fetch(int64_t i) const { __builtin_prefetch(row + i, 0, 2); }
};

// Rows that are already in a cache.
struct Here {
  void fetch(int64_t) const {}
};

// The row kAhead bytes after a row of a lane: in this lane, or in the next one.
template <typename T>
Coming<T> coming(const Lane* lanes, int64_t index, int64_t num_lanes, int64_t row, int64_t width, const T* base) {
  const Lane* lane = lanes + index;
  row += std::max<int64_t>(1, kAhead / (width * sizeof(T)));
  if (row >= lane->rank && index + 1 < num_lanes) row -= lane++->rank;
  return {lane->rows(base) + std::min(row, lane->rank - 1) * lane->stride};
}

// hidden[c * rank + r] = sign * a[r] . x[c], for R rows and C tokens.
template <int64_t R, int64_t C, typename T, typename Next>
void dots(float* hidden, int64_t rank, float sign, const T* a, int64_t a_stride, const float* x, int64_t d_in,
          Next next) {
  constexpr int64_t kChains = R * C == 1 ? 2 : 1;  // two chains hide the latency of a single sum
  Floats sums[R][C][kChains] = {};
  int64_t i = 0;
  for (; i + kLine<T> <= d_in; i += kLine<T>) {
    next.fetch(i);
    for (int64_t j = 0; j < kLine<T>; j += kWidth) {
      Floats values[C];
      UNROLLED for (int64_t c = 0; c < C; ++c) values[c] = load(x + c * d_in + i + j);
      UNROLLED for (int64_t r = 0; r < R; ++r) {
        const Floats row = load(a + r * a_stride + i + j);
        UNROLLED for (int64_t c = 0; c < C; ++c) sums[r][c][j / kWidth % kChains] += row * values[c];
      }
    }
  }
  UNROLLED for (int64_t r = 0; r < R; ++r)
    UNROLLED for (int64_t c = 0; c < C; ++c) {
      Floats total = sums[r][c][0];
      UNROLLED for (int64_t k = 1; k < kChains; ++k) total += sums[r][c][k];
      float sum = 0;
      for (int64_t j = 0; j < kWidth; ++j) sum += total[j];
      for (int64_t j = i; j < d_in; ++j) sum += load_one(a + r * a_stride + j) * x[c * d_in + j];
      hidden[c * rank + r] = sign * sum;
    }
}

// The same for any number of tokens.
template <int64_t R, typename T>
void dot_rows(float* hidden, int64_t tokens, int64_t rank, float sign, const T* a, int64_t a_stride, const float* x,
              int64_t d_in) {
  int64_t c = 0;
  for (; c + kRows <= tokens; c += kRows)
    dots<R, kRows>(hidden + c * rank, rank, sign, a, a_stride, x + c * d_in, d_in, Here());
  for (; c < tokens; ++c) dots<R, 1>(hidden + c * rank, rank, sign, a, a_stride, x + c * d_in, d_in, Here());
}

// x as floats, [tokens, d_in].
template <typename T>
std::unique_ptr<float[]> as_floats(const T* x, int64_t x_token, int64_t x_feature, int64_t num_tokens, int64_t d_in) {
  std::unique_ptr<float[]> floats(new float[num_tokens * d_in]);
  const int64_t squares = x_token == 1 ? d_in / kWidth * kWidth : 0;  // features in whole squares
  int64_t t = 0;
  for (; t + kWidth <= num_tokens && squares; t += kWidth)
    for (int64_t i = 0; i < squares; i += kWidth) {
      Floats square[kWidth];
      for (int64_t j = 0; j < kWidth; ++j) square[j] = load(x + t + (i + j) * x_feature);
      transpose(square);
      for (int64_t j = 0; j < kWidth; ++j) store(floats.get() + (t + j) * d_in + i, square[j]);
    }
  if (x_feature == 1) {
    for (int64_t from = 0; from < num_tokens; ++from) {
      const T* row = x + from * x_token;
      float* to = floats.get() + from * d_in;
      int64_t i = 0;
      for (; i + kWidth <= d_in; i += kWidth) store(to + i, load(row + i));
      for (; i < d_in; ++i) to[i] = load_one(row + i);
    }
    return floats;
  }
  for (int64_t i = 0; i < d_in; ++i)
    for (int64_t from = i < squares ? t : 0; from < num_tokens; ++from)
      floats[from * d_in + i] = load_one(x + from * x_token + i * x_feature);
  return floats;
}

// Units [first, stop) of a piece of work that consists of `count` units.
struct Part {
  int64_t first, stop;
};

// The calling thread's part of a piece of work. The threads share a total cost equally; `before` is the cost of the
// pieces before this one, `cost` its own. The bounds of a part are multiples of `unit`.
Part own_part(int64_t count, int64_t unit, int64_t before, int64_t cost, int64_t total) {
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const auto bound = [&](int64_t threads_before) {
    const int64_t done = std::clamp<int64_t>(total * threads_before / threads - before, 0, cost);
    return done == cost ? count : done * count / cost / unit * unit;
  };
  return {bound(thread), bound(thread + 1)};
}

// The calling thread's share of the hidden values of all lanes. x: [tokens, d_in], contiguous.
template <typename T>
void shrink_share(float* hidden, const float* x, const T* base, const Lane* lanes, const float* signs,
                  int64_t num_lanes, int64_t d_in) {
  int64_t total = 0, before = 0;
  for (int64_t index = 0; index < num_lanes; ++index) total += lanes[index].rank;
  for (int64_t index = 0; index < num_lanes; before += lanes[index++].rank) {
    const Lane& lane = lanes[index];
    const Part own = own_part(lane.rank, kRows, before, lane.rank, total);
    const float* first = x + lane.first_token * d_in;
    const T* a = lane.rows(base);
    float* to = hidden + lane.hidden;
    for (int64_t r = own.first; r < own.stop; r += kRows) {
      const int64_t stop = std::min(r + kRows, own.stop);
      for (int64_t row = r; row < stop; ++row)
        dots<1, 1>(to + row, lane.rank, signs[index], a + row * lane.stride, lane.stride, first, d_in,
                   coming(lanes, index, num_lanes, row, d_in, base));
      // The lane's other tokens.
      if (stop == r + kRows)
        dot_rows<kRows>(to + lane.rank + r, lane.tokens - 1, lane.rank, signs[index], a + r * lane.stride, lane.stride,
                        first + d_in, d_in);
      else
        for (int64_t row = r; row < stop; ++row)
          dot_rows<1>(to + lane.rank + row, lane.tokens - 1, lane.rank, signs[index], a + row * lane.stride, lane.stride,
                      first + d_in, d_in);
    }
  }
}

// sums[o] += sum over K rows of hidden[k] * bt[k][o], for `width` features.
template <int64_t K, typename T, typename Next>
void weigh_rows(float* sums, const float* hidden, const T* bt, int64_t bt_stride, int64_t width, Next next) {
  int64_t o = 0;
  for (; o + kLine<T> <= width; o += kLine<T>) {
    next.fetch(o);
    for (int64_t j = 0; j < kLine<T>; j += kWidth) {
      Floats sum = load(sums + o + j);
      for (int64_t k = 0; k < K; ++k) sum += load(bt + k * bt_stride + o + j) * hidden[k];
      store(sums + o + j, sum);
    }
  }
  for (; o < width; ++o)
    for (int64_t k = 0; k < K; ++k) sums[o] += hidden[k] * load_one(bt + k * bt_stride + o);
}

// y[t * y_token + o * y_feature] += sums[t * pitch + o].
template <typename T>
void add(T* y, int64_t y_token, int64_t y_feature, const float* sums, int64_t pitch, int64_t tokens, int64_t width) {
  if (y_token == 1)
    for (int64_t t = 0; t < tokens; t += kWidth) {
      const int64_t count = std::min(kWidth, tokens - t);
      for (int64_t o = 0; o < width; o += kWidth) {  // sums has room for whole squares
        Floats square[kWidth] = {};
        for (int64_t j = 0; j < count; ++j) square[j] = load(sums + (t + j) * pitch + o);
        transpose(square);
        for (int64_t j = 0; j < std::min(kWidth, width - o); ++j) {
          T* to = y + t + (o + j) * y_feature;
          store(to, load(to, count) + square[j], count);
        }
      }
    }
  else
    for (int64_t t = 0; t < tokens; ++t) {
      T* to = y + t * y_token;
      const float* from = sums + t * pitch;
      int64_t o = 0;
      if (y_feature == 1)
        for (; o + kWidth <= width; o += kWidth) store(to + o, load(to + o) + load(from + o));
      for (; o < width; ++o) store_one(to + o * y_feature, load_one(to + o * y_feature) + from[o]);
    }
}

// Lanes of one site with common tokens, computed together. y: of the first of the tokens and of the site's features.
// following: the number of the site's lanes in memory from `lanes` on.
template <typename T>
struct Target {
  T* y;
  const Lane* lanes;
  int64_t num_lanes, following, first_token, num_tokens, d_out;

  int64_t cost() const {
    int64_t rank = 0;
    for (int64_t index = 0; index < num_lanes; ++index) rank += lanes[index].rank;
    return rank * d_out;
  }
};

// Adds one target for each lane, or a single one for all lanes if some of them have tokens in common, or if one cache
// line of y has several tokens: such outputs are written in squares of tokens and features, by one thread each.
template <typename T>
void add_targets(std::vector<Target<T>>* targets, T* y, int64_t y_token, const Lane* lanes, int64_t num_lanes,
                 int64_t num_tokens, int64_t d_out) {
  bool apart = y_token != 1;
  for (int64_t index = 1; index < num_lanes; ++index)
    apart = apart && lanes[index - 1].first_token + lanes[index - 1].tokens <= lanes[index].first_token;
  if (!apart) return targets->push_back({y, lanes, num_lanes, num_lanes, 0, num_tokens, d_out});
  for (const Lane* lane = lanes; lane < lanes + num_lanes; ++lane)
    targets->push_back({y + lane->first_token * y_token, lane, 1, lanes + num_lanes - lane, lane->first_token,
                        lane->tokens, d_out});
}

// The calling thread's share of the deltas of all targets.
template <typename T>
void expand_share(const std::vector<Target<T>>& targets, int64_t y_token, int64_t y_feature, const float* hidden,
                  const T* base) {
  int64_t total = 0, before = 0, room = 0;
  for (const Target<T>& target : targets) total += target.cost();
  std::unique_ptr<float[]> sums;
  for (const Target<T>& target : targets) {
    const int64_t cost = target.cost();
    const Part own = own_part(target.d_out, kLine<T>, before, cost, total);
    before += cost;
    const int64_t block = whole<kLine<T>>(std::max(kBlock, kSums / target.num_tokens));
    for (int64_t first = own.first; first < own.stop; first += block) {
      const int64_t width = std::min(block, own.stop - first);
      const int64_t pitch = whole<kWidth>(width) + kWidth;  // no power of two: avoids cache conflicts
      if (target.num_tokens * pitch > room) sums.reset(new float[room = target.num_tokens * pitch]);
      std::fill(sums.get(), sums.get() + target.num_tokens * pitch, 0.0f);
      for (int64_t index = 0; index < target.num_lanes; ++index) {
        const Lane& lane = target.lanes[index];
        const T* rows = lane.rows(base) + first;
        for (int64_t t = 0; t < lane.tokens; ++t) {
          float* to = sums.get() + (lane.first_token - target.first_token + t) * pitch;
          const float* weights = hidden + lane.hidden + t * lane.rank;
          int64_t k = 0;
          if (t == 0)
            for (; k < lane.rank; ++k)
              weigh_rows<1>(to, weights + k, rows + k * lane.stride, lane.stride, width,
                            coming(target.lanes, index, target.following, k, width, base + first));
          for (; k + kDeep <= lane.rank; k += kDeep)
            weigh_rows<kDeep>(to, weights + k, rows + k * lane.stride, lane.stride, width, Here());
          for (; k < lane.rank; ++k)
            weigh_rows<1>(to, weights + k, rows + k * lane.stride, lane.stride, width, Here());
        }
      }
      add(target.y + first * y_feature, y_token, y_feature, sums.get(), pitch, target.num_tokens, width);
    }
  }
}

// One adapter's factors at one site: addresses, row strides in elements, rank.
struct Factors {
  uintptr_t a;
  int64_t a_stride;
  uintptr_t bt;
  int64_t bt_stride, rank;
};

// Tokens of one lane, relative to the kernel's first token; sign: add (+1) or subtract (-1).
struct Span {
  int64_t first_token, tokens, sign;
};

// A site of a group: its features begin at `first_feature` of y. factors: one pointer per span, null without factors.
struct Site {
  int64_t first_feature, d_out;
  const Factors* const* factors;
};

// Whether the deltas of one lane, the spans' `index`, were added by matrix tiles.
template <typename T>
bool add_by_tiles(T*, int64_t, const T*, int64_t, const Site*, int64_t, const Span&, int64_t, int64_t) {
  return false;
}

#if defined(ATMM_TILES)

constexpr int64_t kLong = 9;                 // tokens of lanes for which tiles are used
constexpr int64_t kPanelBytes = 512 * 1024;  // of rows of Bt: they stay in the second-level cache beside y

// The sums of 32 tokens and as many features, of tiles 0 to 3.
inline void store_tiles(float* sums) {
  constexpr int64_t kRow = kStripe * sizeof(float);
  _tile_stored(0, sums, kRow);
  _tile_stored(1, sums + kWidth, kRow);
  _tile_stored(2, sums + kTileRows * kStripe, kRow);
  _tile_stored(3, sums + kTileRows * kStripe + kWidth, kRow);
}

// Rows of Bt as right-hand sides of tiles: for each 16 features, tiles of 32 rows, with pairs of rows side by side.
// Absent rows and features are zero.
void pair_rows(uint8_t* panels, const BFloat16* bt, int64_t stride, int64_t rank, int64_t depth, int64_t width) {
  for (int64_t o = 0; o < whole<kStripe>(width); o += kWidth) {
    const __mmask16 present = __mmask16((1u << std::clamp<int64_t>(width - o, 0, kWidth)) - 1);
    const auto row = [&](int64_t k) {
      return k < rank ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, bt + k * stride + o)) : _mm512_setzero_si512();
    };
    for (int64_t k = 0; k < depth; k += 2, panels += kRowBytes)
      _mm512_store_si512(panels, _mm512_or_si512(row(k), _mm512_slli_epi32(row(k + 1), 16)));
  }
  asm volatile("" : : : "memory");  // which the instructions for tiles read
}

// y[t][o] += the products of hidden values [tokens, depth] with panels of Bt, for `width` features.
void expand_by_tiles(BFloat16* y, int64_t y_token, const BFloat16* hidden, int64_t tokens, int64_t depth,
                     const uint8_t* panels, int64_t width) {
  const Tiles tiles;
  const int64_t row = depth * sizeof *hidden, panel = row * kWidth;
  alignas(64) float sums[kStripe * kStripe];
  for (int64_t t = 0; t < tokens; t += kStripe)
    for (int64_t o = 0; o < width; o += kStripe) {
      const uint8_t* from = panels + o / kWidth * panel;
      const BFloat16* values = hidden + t * depth;
      const int64_t num_rows = std::min(kStripe, tokens - t), rest = std::min(kStripe, width - o);
      BFloat16* to = y + t * y_token + o;
      for (int64_t r = 0; r < num_rows; ++r) __builtin_prefetch(to + r * y_token + 8 * kStripe, 0, 2);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < panel; k += kTileBytes, values += kStripe) {
        _tile_loadd(4, values, row);
        _tile_loadd(5, values + kTileRows * depth, row);
        _tile_loadd(6, from + k, kRowBytes);
        _tile_loadd(7, from + panel + k, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      store_tiles(sums);
      const float* sum = sums;
      if (rest == kStripe)
        for (int64_t r = 0; r < num_rows; ++r, to += y_token, sum += kStripe) {
          store(to, load(to) + load(sum));
          store(to + kWidth, load(to + kWidth) + load(sum + kWidth));
        }
      else
        for (int64_t r = 0; r < num_rows; ++r, to += y_token, sum += kStripe)
          for (int64_t i = 0; i < rest; i += kWidth) {
            const int64_t count = std::min(kWidth, rest - i);
            store(to + i, load(to + i, count) + load(sum + i), count);
          }
    }
}

// The products of tokens with rows of A, as panels, times a sign: hidden[t * depth + r], zero for absent rows.
void shrink_by_tiles(BFloat16* hidden, int64_t depth, float sign, const BFloat16* x, int64_t x_token, int64_t tokens,
                     const Panels& rows) {
  const Tiles tiles;
  const int64_t width = rows.num_bytes, whole_width = rows.size / kTileRows;  // of a row in bytes
  alignas(64) float sums[kStripe * kStripe] = {};
  Bytes copy(nullptr, &std::free);
  for (int64_t t = 0; t < tokens; t += kStripe) {
    const int64_t count = std::min(kStripe, tokens - t);
    const auto* from = reinterpret_cast<const uint8_t*>(x + t * x_token);
    int64_t stride = x_token * sizeof *x;
    if (count < kStripe || width < whole_width) {  // what follows in memory is not part of these tokens
      if (!copy) copy = allocate_bytes(kStripe * whole_width);
      std::memset(copy.get(), 0, kStripe * whole_width);
      for (int64_t r = 0; r < count; ++r) std::memcpy(copy.get() + r * whole_width, from + r * stride, width);
      asm volatile("" : : : "memory");  // which the instructions for tiles read
      from = copy.get();
      stride = whole_width;
    }
    for (int64_t r = 0; r < rows.num_tokens; r += kStripe) {
      const uint8_t* panel = rows.values.get() + r / kTileRows * rows.size;
      const bool both = r + kTileRows < rows.num_tokens;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < whole_width; k += kRowBytes, panel += kTileBytes) {
        _tile_loadd(4, from + k, stride);
        _tile_loadd(5, from + kTileRows * stride + k, stride);
        _tile_loadd(6, panel, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (!both) continue;
        _tile_loadd(7, panel + rows.size, kRowBytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      store_tiles(sums);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < kStripe; j += kWidth)
          store(hidden + (t + i) * depth + r + j, load(sums + i * kStripe + j) * sign);
    }
  }
}

template <>
bool add_by_tiles(BFloat16* y, int64_t y_token, const BFloat16* x, int64_t x_token, const Site* sites,
                  int64_t num_sites, const Span& span, int64_t index, int64_t d_in) {
  if (span.tokens < kLong || !has_tiles()) return false;
  x += span.first_token * x_token;
  y += span.first_token * y_token;
  const int64_t num_blocks = (span.tokens + kStripe - 1) / kStripe;
  for (const Site* site = sites; site < sites + num_sites; ++site) {
    const Factors* factors = site->factors[index];
    if (!factors) continue;
    const int64_t rank = factors->rank, depth = whole<kStripe>(rank);
    Panels rows(rank, d_in * sizeof *x);
    for (int64_t r = 0; r < rank; r += kTileRows)
      rows.fill(r, reinterpret_cast<const void*>(factors->a), factors->a_stride * sizeof *x);
    const Bytes values = allocate_bytes(num_blocks * kStripe * depth * sizeof *x);
    auto* hidden = reinterpret_cast<BFloat16*>(values.get());
    const int64_t chunk = std::max(kStripe, kPanelBytes / int64_t(depth * sizeof *x) / kStripe * kStripe);
#pragma omp parallel
    {
#pragma omp for
      for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t t = block * kStripe;
        shrink_by_tiles(hidden + t * depth, depth, span.sign, x + t * x_token, x_token,
                        std::min(kStripe, span.tokens - t), rows);
      }
      const Bytes bt = allocate_bytes(std::min(chunk, whole<kStripe>(site->d_out)) * depth * sizeof *x);
      const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t share = whole<kStripe>((site->d_out + num_threads - 1) / num_threads);
      const int64_t stop = std::min(site->d_out, (thread + 1) * share);
      for (int64_t o = thread * share; o < stop; o += chunk) {
        const int64_t width = std::min(chunk, stop - o);
        pair_rows(bt.get(), reinterpret_cast<const BFloat16*>(factors->bt) + o, factors->bt_stride, rank, depth, width);
        expand_by_tiles(y + site->first_feature + o, y_token, hidden, span.tokens, depth, bt.get(), width);
      }
    }
  }
  return true;
}

#endif

// Both products of all sites, from factors in place.
template <typename T>
void deltas(T* y, int64_t y_token, int64_t y_feature, const T* x, int64_t x_token, int64_t x_feature, const Site* sites,
            int64_t num_sites, const Span* spans, int64_t num_spans, int64_t num_tokens, int64_t d_in) {
  std::vector<const Span*> left;
  int64_t first = num_tokens, stop = 0;
  for (int64_t index = 0; index < num_spans; ++index) {
    const Span& span = spans[index];
    const bool by_tiles = y_feature == 1 && x_feature == 1 &&
                          add_by_tiles(y, y_token, x, x_token, sites, num_sites, span, index, d_in);
    left.push_back(by_tiles ? nullptr : &span);
    if (by_tiles) continue;
    first = std::min(first, span.first_token);
    stop = std::max(stop, span.first_token + span.tokens);
  }
  if (first >= stop) return;
  x += first * x_token;
  y += first * y_token;
  num_tokens = stop - first;
  const auto floats = as_floats(x, x_token, x_feature, num_tokens, d_in);
  std::vector<Lane> shrunk, expanded;
  std::vector<float> signs;
  shrunk.reserve(num_sites * num_spans);
  expanded.reserve(num_sites * num_spans);  // targets point to these
  std::vector<Target<T>> targets;
  int64_t room = 0;
  for (const Site* site = sites; site < sites + num_sites; ++site) {
    const int64_t before = expanded.size();
    for (int64_t index = 0; index < num_spans; ++index) {
      const Factors* factors = site->factors[index];
      if (!factors || !left[index]) continue;
      const Span& span = *left[index];
      const int64_t rank = factors->rank, start = span.first_token - first;
      shrunk.push_back({start, span.tokens, int64_t(factors->a), factors->a_stride, rank, room});
      expanded.push_back({start, span.tokens, int64_t(factors->bt), factors->bt_stride, rank, room});
      signs.push_back(span.sign);
      room += span.tokens * rank;
    }
    add_targets(&targets, y + site->first_feature * y_feature, y_token, expanded.data() + before,
                expanded.size() - before, num_tokens, site->d_out);
  }
  const std::unique_ptr<float[]> hidden(new float[room]);
#pragma omp parallel
  {
    shrink_share<T>(hidden.get(), floats.get(), nullptr, shrunk.data(), signs.data(), shrunk.size(), d_in);
#pragma omp barrier
    expand_share<T>(targets, y_token, y_feature, hidden.get(), nullptr);
  }
}

}  // namespace
}  // namespace atmm

#define ATMM_LANES(TYPE, T)                                                                                            \
  extern "C" void atmm_shrink_##TYPE(float* hidden, const T* x, int64_t x_token, int64_t x_feature, const T* base,     \
                                     const atmm::Lane* lanes, const float* signs, int64_t num_lanes,                   \
                                     int64_t num_tokens, int64_t d_in) {                                               \
    const auto floats = atmm::as_floats(x, x_token, x_feature, num_tokens, d_in);                                      \
    _Pragma("omp parallel") atmm::shrink_share(hidden, floats.get(), base, lanes, signs, num_lanes, d_in);             \
  }                                                                                                                    \
  extern "C" void atmm_expand_##TYPE(T* y, int64_t y_token, int64_t y_feature, const float* hidden, const T* base,     \
                                     const atmm::Lane* lanes, int64_t num_lanes, int64_t num_tokens, int64_t d_out) {  \
    std::vector<atmm::Target<T>> targets;                                                                              \
    atmm::add_targets(&targets, y, y_token, lanes, num_lanes, num_tokens, d_out);                                      \
    _Pragma("omp parallel") atmm::expand_share(targets, y_token, y_feature, hidden, base);                             \
  }                                                                                                                    \
  extern "C" void atmm_deltas_##TYPE(T* y, int64_t y_token, int64_t y_feature, const T* x, int64_t x_token,            \
                                     int64_t x_feature, const atmm::Site* sites, int64_t num_sites,                    \
                                     const atmm::Span* spans, int64_t num_spans, int64_t num_tokens, int64_t d_in) {   \
    atmm::deltas(y, y_token, y_feature, x, x_token, x_feature, sites, num_sites, spans, num_spans, num_tokens, d_in);  \
  }

ATMM_LANES(bfloat16, atmm::BFloat16)
ATMM_LANES(float32, float)
