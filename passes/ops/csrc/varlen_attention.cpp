// Scores are computed transposed, keys by queries, so that no product needs a transposed operand: with S^T = K Q^T,
//
//   forward    O^T = V^T P^T
//   backward   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T
//
// The probabilities of a block of queries are computed for the whole row at once (forward), so that the softmax is exact,
// or again from the logsumexp (backward: FlashAttention-2, arXiv 2307.08691). Products are oneDNN's for tiles in cache, of
// few fixed shapes, since oneDNN makes machine code for each shape; rows are therefore copied into whole tiles first.
#include "varlen_attention.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "tiles.h"

namespace deepytorch {

namespace {

constexpr int64_t kTileSize = kTile * kTile;
constexpr int64_t kBlocksOfTask = 4;  // blocks of queries that share the keys copied by one thread of the forward

int64_t num_tiles(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// The number of `tokens` in the tile from `first` on, and the length of the tile including its filling.
int64_t in_tile(int64_t first, int64_t tokens) { return std::min(kTile, tokens - first); }
int64_t length_of_tile(int64_t first, int64_t tokens) { return (in_tile(first, tokens) + kStep - 1) / kStep * kStep; }

bool is_dense(const at::Tensor& x) { return x.stride(2) == 1 || x.size(2) == 1; }

// One head of a tensor (tokens, heads, dim), from some token on.
struct Head {
  float* data;
  int64_t stride;  // from token to token

  Head at(int64_t token) const { return {data + token * stride, stride}; }
};

struct Heads {
  float* data;
  int64_t token_stride, head_stride;

  explicit Heads(const at::Tensor& x) : data(x.data_ptr<float>()), token_stride(x.stride(0)), head_stride(x.stride(1)) {}
  Head operator()(int64_t head, int64_t token) const {
    return {data + head * head_stride + token * token_stride, token_stride};
  }
};

// C (m x n, dense) = A (m x k, dense) B (k x n, dense), or the product is added to C.
void multiply(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool adds) {
  at::native::cpublas::brgemm(m, n, k, k, n, n, adds, a, b, c);
}

// The tile from token `first` on, tokens x dim, dense, filled up with zeros.
void copy_tile(Head from, int64_t first, int64_t tokens, int64_t dim, float* to) {
  const int64_t here = in_tile(first, tokens);
  for (int64_t row = 0; row < here; ++row) std::memcpy(to + row * dim, from.at(first + row).data, dim * sizeof(float));
  std::memset(to + here * dim, 0, (length_of_tile(first, tokens) - here) * dim * sizeof(float));
}

// The same tile as dim x tokens, multiplied by `factor`.
void transpose_tile(Head from, int64_t first, int64_t tokens, int64_t dim, float factor, float* to) {
  transpose_in(from.at(first).data, from.stride, in_tile(first, tokens), dim, factor, to, length_of_tile(first, tokens));
}

// The keys of one row that are visible to a tile of queries from `first_query` on.
struct Keys {
  int64_t tokens, first_query, queries;
  bool causal;

  int64_t tiles() const { return num_tiles(causal ? std::min(tokens, first_query + queries) : tokens); }
  Tile tile(int64_t index) const { return {length_of_tile(index * kTile, tokens), queries}; }
  // Returns whether the tile has a pair that must not count.
  bool hides_in(int64_t index) const {
    const int64_t end = index * kTile + tile(index).keys;
    return end > tokens || (causal && end > first_query + 1);
  }
  // Writes `value` over the pairs of the tile that must not count.
  void hide(int64_t index, float value, float* scores) const {
    for (int64_t at = 0; at < tile(index).keys; ++at) {
      const int64_t key = index * kTile + at;
      const int64_t hidden = key >= tokens ? queries : causal ? std::clamp<int64_t>(key - first_query, 0, queries) : 0;
      std::fill_n(scores + at * queries, hidden, value);
    }
  }
};

// Memory of one thread, cut into pieces.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(new (std::align_val_t{64}) float[floats]), next_(memory_.get()) {}
  float* take(int64_t floats) {
    float* const piece = next_;
    next_ += floats;
    return piece;
  }

 private:
  struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> memory_;
  float* next_;
};

struct Task {
  int64_t row, head, first_block;
  double cost;
};

// Runs the tasks on torch's threads, the most expensive first; `make` creates the worker of each thread.
template <class Make>
void share_out(std::vector<Task>& tasks, const Make& make) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  std::atomic<size_t> next{0};
  const auto threads = std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(tasks.size()));
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto run = make();
    for (size_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) run(tasks[index]);
  });
}

// The places of the rows, and all sizes.
struct Shapes {
  const int32_t *starts_q, *starts_k;
  int64_t rows, tokens_q, heads_q, heads_k, dim, dim_v, group, longest = 0;
  bool causal;
  float scale;

  Shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& starts_q,
         const at::Tensor& starts_k, double scale, bool causal)
      : starts_q(starts_q.data_ptr<int32_t>()), starts_k(starts_k.data_ptr<int32_t>()), rows(starts_q.size(0) - 1),
        tokens_q(query.size(0)), heads_q(query.size(1)), heads_k(key.size(1)), dim(query.size(2)), dim_v(value.size(2)),
        group(heads_q / heads_k), causal(causal), scale(static_cast<float>(scale)) {
    TORCH_CHECK(is_dense(query) && is_dense(key) && is_dense(value) && starts_q.is_contiguous() && starts_k.is_contiguous(),
                "varlen_attention: the last dimension has to be dense");
    TORCH_CHECK(starts_k.size(0) == starts_q.size(0) && value.size(0) == key.size(0) && value.size(1) == heads_k,
                "varlen_attention: found keys and values, or rows of queries and keys, that do not belong together");
    int64_t end_q = 0, end_k = 0;
    for (int64_t row = 0; row < rows; ++row) {
      TORCH_CHECK(num_q(row) >= 0 && num_k(row) >= 0 && first_q(row) >= end_q && first_k(row) >= end_k,
                  "varlen_attention: found rows that begin before the last one ends");
      end_q = first_q(row) + num_q(row);
      end_k = first_k(row) + num_k(row);
      longest = std::max(longest, num_k(row));
    }
    TORCH_CHECK(end_q <= tokens_q && end_k <= key.size(0), "varlen_attention: found rows of more tokens than there are");
  }
  int64_t first_q(int64_t row) const { return starts_q[row]; }
  int64_t first_k(int64_t row) const { return starts_k[row]; }
  int64_t num_q(int64_t row) const { return starts_q[row + 1] - starts_q[row]; }
  int64_t num_k(int64_t row) const { return starts_k[row + 1] - starts_k[row]; }
  Keys keys(int64_t row, int64_t first_query) const {
    return {num_k(row), first_query, length_of_tile(first_query, num_q(row)), causal};
  }
};

struct ForwardThread {
  const Shapes& shapes;
  const Heads query, key, value, output;
  float* const logsumexp;  // (heads_q, tokens_q)
  Scratch scratch;
  float* const keys;             // tiles of kTile x dim
  float* const values;           // tiles of dim_v x kTile
  float* const probabilities;    // tiles of kTile x kTile, keys by queries
  float* const queries;          // dim x kTile
  float* const turned;           // dim_v x kTile, the output

  ForwardThread(const Shapes& shapes, Heads query, Heads key, Heads value, Heads output, float* logsumexp)
      : shapes(shapes), query(query), key(key), value(value), output(output), logsumexp(logsumexp),
        scratch(kTile * ((num_tiles(shapes.longest) + 1) * (shapes.dim + shapes.dim_v) + num_tiles(shapes.longest) * kTile)),
        keys(scratch.take(num_tiles(shapes.longest) * kTile * shapes.dim)),
        values(scratch.take(num_tiles(shapes.longest) * kTile * shapes.dim_v)),
        probabilities(scratch.take(num_tiles(shapes.longest) * kTileSize)), queries(scratch.take(shapes.dim * kTile)),
        turned(scratch.take(shapes.dim_v * kTile)) {}

  void operator()(const Task& task) {
    const int64_t head_k = task.head / shapes.group, num_q = shapes.num_q(task.row), num_k = shapes.num_k(task.row);
    const int64_t end_block = std::min(num_tiles(num_q), task.first_block + kBlocksOfTask);
    const Head k = key(head_k, shapes.first_k(task.row)), v = value(head_k, shapes.first_k(task.row));
    const int64_t tiles = shapes.keys(task.row, (end_block - 1) * kTile).tiles();
    for (int64_t tile = 0; tile < tiles; ++tile) {
      copy_tile(k, tile * kTile, num_k, shapes.dim, keys + tile * kTile * shapes.dim);
      transpose_tile(v, tile * kTile, num_k, shapes.dim_v, 1.0f, values + tile * kTile * shapes.dim_v);
    }
    for (int64_t block = task.first_block; block < end_block; ++block) attend(task, block * kTile);
  }

  // The output of a tile of queries of one head.
  void attend(const Task& task, int64_t first_query) {
    const int64_t num_q = shapes.num_q(task.row), first_token = shapes.first_q(task.row), dim = shapes.dim;
    const int64_t here = in_tile(first_query, num_q);
    const Keys seen = shapes.keys(task.row, first_query);
    transpose_tile(query(task.head, first_token), first_query, num_q, dim, shapes.scale, queries);
    float largest[kTile], sums[kTile] = {};
    std::fill_n(largest, kTile, -std::numeric_limits<float>::infinity());
    for (int64_t index = 0; index < seen.tiles(); ++index) {
      const Tile tile = seen.tile(index);
      float* const scores = probabilities + index * kTileSize;
      multiply(tile.keys, tile.queries, dim, keys + index * kTile * dim, queries, scores, false);
      if (seen.hides_in(index)) seen.hide(index, -std::numeric_limits<float>::infinity(), scores);
      raise_to_largest(tile, scores, largest);
    }
    for (int64_t index = 0; index < seen.tiles(); ++index) {
      const Tile tile = seen.tile(index);
      float* const scores = probabilities + index * kTileSize;
      exponentials(tile, scores, largest);
      if (seen.hides_in(index)) seen.hide(index, 0.0f, scores);
      add_sums(tile, scores, sums);
      multiply(shapes.dim_v, tile.queries, tile.keys, values + index * kTile * shapes.dim_v, scores, turned, index > 0);
    }
    float* const statistics = logsumexp + task.head * shapes.tokens_q + first_token + first_query;
    for (int64_t at = 0; at < here; ++at) statistics[at] = largest[at] + std::log(sums[at]);
    for (int64_t at = 0; at < kTile; ++at) sums[at] = 1.0f / sums[at];
    const Head out = output(task.head, first_token + first_query);
    transpose_out(turned, seen.queries, sums, here, shapes.dim_v, out.data, out.stride);
  }
};

struct BackwardThread {
  const Shapes& shapes;
  const Heads grad_output, query, key, value, output;
  const float* const logsumexp;  // (heads_q, tokens_q)
  const Heads grad_query, grad_key, grad_value;
  Scratch scratch;
  float *keys, *values;             // tiles of kTile x dim and kTile x dim_v
  float* turned_keys;               // tiles of dim x kTile
  float *key_sums, *value_sums;     // tiles of kTile x dim and kTile x dim_v: the gradients
  float *queries, *turned_queries;  // kTile x dim, and dim x kTile, scaled
  float *grads, *turned_grads;      // kTile x dim_v and dim_v x kTile, of the output
  float* turned_query_sums;         // dim x kTile
  float *probabilities, *scores;    // kTile x kTile, keys by queries

  static int64_t floats(const Shapes& shapes) {
    const int64_t tiles = num_tiles(shapes.longest);
    return kTile * (tiles * (3 * shapes.dim + 2 * shapes.dim_v) + 3 * shapes.dim + 2 * shapes.dim_v + 2 * kTile);
  }

  BackwardThread(const Shapes& shapes, Heads grad_output, Heads query, Heads key, Heads value, Heads output,
                 const float* logsumexp, Heads grad_query, Heads grad_key, Heads grad_value)
      : shapes(shapes), grad_output(grad_output), query(query), key(key), value(value), output(output),
        logsumexp(logsumexp), grad_query(grad_query), grad_key(grad_key), grad_value(grad_value), scratch(floats(shapes)) {
    const int64_t row = num_tiles(shapes.longest) * kTile;
    keys = scratch.take(row * shapes.dim);
    turned_keys = scratch.take(row * shapes.dim);
    key_sums = scratch.take(row * shapes.dim);
    values = scratch.take(row * shapes.dim_v);
    value_sums = scratch.take(row * shapes.dim_v);
    queries = scratch.take(kTile * shapes.dim);
    turned_queries = scratch.take(kTile * shapes.dim);
    turned_query_sums = scratch.take(kTile * shapes.dim);
    grads = scratch.take(kTile * shapes.dim_v);
    turned_grads = scratch.take(kTile * shapes.dim_v);
    probabilities = scratch.take(kTileSize);
    scores = scratch.take(kTileSize);
  }

  // One row and one head of keys, with all heads of queries that share that head.
  void operator()(const Task& task) {
    const int64_t num_k = shapes.num_k(task.row), first_k = shapes.first_k(task.row), tiles = num_tiles(num_k);
    const int64_t size = kTile * shapes.dim, size_v = kTile * shapes.dim_v;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * kTile;
      copy_tile(key(task.head, first_k), first, num_k, shapes.dim, keys + tile * size);
      transpose_tile(key(task.head, first_k), first, num_k, shapes.dim, 1.0f, turned_keys + tile * size);
      copy_tile(value(task.head, first_k), first, num_k, shapes.dim_v, values + tile * size_v);
    }
    std::memset(key_sums, 0, tiles * size * sizeof(float));
    std::memset(value_sums, 0, tiles * size_v * sizeof(float));
    for (int64_t head = task.head * shapes.group; head < (task.head + 1) * shapes.group; ++head) {
      for (int64_t first = 0; first < shapes.num_q(task.row); first += kTile) differentiate(task.row, head, first);
    }
    const Head to_key = grad_key(task.head, first_k), to_value = grad_value(task.head, first_k);
    for (int64_t token = 0; token < num_k; ++token) {
      const float* const sums = key_sums + token * shapes.dim;
      for (int64_t at = 0; at < shapes.dim; ++at) to_key.at(token).data[at] = shapes.scale * sums[at];
      std::memcpy(to_value.at(token).data, value_sums + token * shapes.dim_v, shapes.dim_v * sizeof(float));
    }
  }

  // Adds the contribution of a tile of queries of one head.
  void differentiate(int64_t row, int64_t head, int64_t first_query) {
    const int64_t first_token = shapes.first_q(row), num_q = shapes.num_q(row), dim = shapes.dim, dim_v = shapes.dim_v;
    const int64_t here = in_tile(first_query, num_q);
    const Keys seen = shapes.keys(row, first_query);
    transpose_tile(query(head, first_token), first_query, num_q, dim, shapes.scale, turned_queries);
    copy_tile(query(head, first_token), first_query, num_q, dim, queries);
    copy_tile(grad_output(head, first_token), first_query, num_q, dim_v, grads);
    transpose_tile(grad_output(head, first_token), first_query, num_q, dim_v, 1.0f, turned_grads);
    float statistics[kTile] = {}, delta[kTile] = {}, scales[kTile];
    std::memcpy(statistics, logsumexp + head * shapes.tokens_q + first_token + first_query, here * sizeof(float));
    const Head out = output(head, first_token + first_query);
    products_of_rows(grads, dim_v, out.data, out.stride, here, dim_v, delta);
    for (int64_t index = 0; index < seen.tiles(); ++index) {
      const Tile tile = seen.tile(index);
      const int64_t at = index * kTile * dim, at_v = index * kTile * dim_v;
      multiply(tile.keys, tile.queries, dim, keys + at, turned_queries, probabilities, false);
      exponentials(tile, probabilities, statistics);
      if (seen.hides_in(index)) seen.hide(index, 0.0f, probabilities);
      multiply(tile.keys, tile.queries, dim_v, values + at_v, turned_grads, scores, false);
      through_softmax(tile, probabilities, delta, scores);
      multiply(tile.keys, dim_v, tile.queries, probabilities, grads, value_sums + at_v, true);
      multiply(tile.keys, dim, tile.queries, scores, queries, key_sums + at, true);
      multiply(dim, tile.queries, tile.keys, turned_keys + at, scores, turned_query_sums, index > 0);
    }
    std::fill_n(scales, kTile, shapes.scale);
    const Head to = grad_query(head, first_token + first_query);
    transpose_out(turned_query_sums, seen.queries, scales, here, dim, to.data, to.stride);
  }
};

// Writes zeros to the tokens that no task writes: those of rows without a partner, and those in no row.
void clear_rest(const Shapes& shapes, const at::Tensor& x, const int32_t* starts, const int32_t* others) {
  const int64_t size = x.size(1) * x.size(2);
  float* const data = x.data_ptr<float>();
  int64_t written = 0;
  const auto clear_up_to = [&](int64_t token) {
    std::memset(data + written * size, 0, (token - written) * size * sizeof(float));
  };
  for (int64_t row = 0; row < shapes.rows; ++row) {
    if (starts[row] == starts[row + 1] || others[row] == others[row + 1]) continue;
    clear_up_to(starts[row]);
    written = starts[row + 1];
  }
  clear_up_to(x.size(0));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const at::Tensor& starts_q, const at::Tensor& starts_k, double scale,
                                           bool causal) {
  const Shapes shapes(query, key, value, starts_q, starts_k, scale, causal);
  const at::Tensor output = at::empty({shapes.tokens_q, shapes.heads_q, shapes.dim_v}, query.options());
  const at::Tensor logsumexp = at::empty({shapes.heads_q, shapes.tokens_q}, query.options());
  logsumexp.fill_(-std::numeric_limits<float>::infinity());
  clear_rest(shapes, output, shapes.starts_q, shapes.starts_k);
  std::vector<Task> tasks;
  for (int64_t row = 0; row < shapes.rows; ++row) {
    if (shapes.num_k(row) == 0) continue;
    for (int64_t block = 0; block < num_tiles(shapes.num_q(row)); block += kBlocksOfTask) {
      const int64_t last = std::min(num_tiles(shapes.num_q(row)), block + kBlocksOfTask) - 1;
      const auto cost = static_cast<double>(shapes.keys(row, last * kTile).tiles() * (last + 1 - block));
      for (int64_t head = 0; head < shapes.heads_q; ++head) tasks.push_back({row, head, block, cost});
    }
  }
  share_out(tasks, [&] {
    return ForwardThread(shapes, Heads(query), Heads(key), Heads(value), Heads(output), logsumexp.data_ptr<float>());
  });
  return {output, logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_output, const at::Tensor& query,
                                                        const at::Tensor& key, const at::Tensor& value,
                                                        const at::Tensor& output, const at::Tensor& logsumexp,
                                                        const at::Tensor& starts_q, const at::Tensor& starts_k,
                                                        double scale, bool causal) {
  const Shapes shapes(query, key, value, starts_q, starts_k, scale, causal);
  TORCH_CHECK(is_dense(grad_output) && is_dense(output) && logsumexp.is_contiguous(),
              "varlen_attention: the last dimension has to be dense");
  const at::Tensor grad_query = at::empty(query.sizes(), query.options());
  const at::Tensor grad_key = at::empty(key.sizes(), key.options()), grad_value = at::empty(value.sizes(), value.options());
  clear_rest(shapes, grad_query, shapes.starts_q, shapes.starts_k);
  for (const at::Tensor& x : {grad_key, grad_value}) clear_rest(shapes, x, shapes.starts_k, shapes.starts_q);
  std::vector<Task> tasks;
  for (int64_t row = 0; row < shapes.rows; ++row) {
    if (shapes.num_q(row) == 0 || shapes.num_k(row) == 0) continue;
    const auto cost = static_cast<double>(num_tiles(shapes.num_q(row)) * num_tiles(shapes.num_k(row)));
    for (int64_t head = 0; head < shapes.heads_k; ++head) tasks.push_back({row, head, 0, cost});
  }
  share_out(tasks, [&] {
    return BackwardThread(shapes, Heads(grad_output), Heads(query), Heads(key), Heads(value), Heads(output),
                          logsumexp.data_ptr<float>(), Heads(grad_query), Heads(grad_key), Heads(grad_value));
  });
  return {grad_query, grad_key, grad_value};
}

bool is_supported() {
  std::vector<float> one(3 * kTileSize, 1.0f);
  try {
    multiply(kTile, kTile, kTile, one.data(), one.data() + kTileSize, one.data() + 2 * kTileSize, false);
  } catch (const std::exception&) {
    return false;
  }
  return one.back() == static_cast<float>(kTile);
}

}  // namespace deepytorch
