// What is done to one tile of scores besides the products. A tile is `keys` by `queries` of at most kTile each, rounded up to
// kStep; a key's scores lie one after another, so that what is known of each query (its largest score, its sum) lies beside
// as a row of floats.
#pragma once

#include <cstdint>

namespace deepytorch {

constexpr int64_t kTile = 64;
constexpr int64_t kStep = 16;  // floats of the widest register

struct Tile {
  int64_t keys, queries;
};

// largest[query] = the largest of itself and the query's scores. NaN is passed over: it shows in the sums.
void raise_to_largest(Tile tile, const float* scores, float* largest);

// scores[key][query] = exp(scores[key][query] - from[query]), within two roundings, 0 for a difference under -87. It is
// about 0 at most.
void exponentials(Tile tile, float* scores, const float* from);

// sums[query] += the query's probabilities
void add_sums(Tile tile, const float* probabilities, float* sums);

// gradients[key][query] = probabilities[key][query] * (gradients[key][query] - delta[query])
void through_softmax(Tile tile, const float* probabilities, const float* delta, float* gradients);

// products[row] = the sum over columns of a[row][column] * b[row][column]
void products_of_rows(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t rows, int64_t columns,
                      float* products);

// to[column][row] = factor * from[row][column], `width` floats a column, zeros in those behind the last of `rows`.
// Rows of `from` are `stride` floats apart.
void transpose_in(const float* from, int64_t stride, int64_t rows, int64_t columns, float factor, float* to, int64_t width);

// to[row][column] = factors[row] * from[column][row]: the way back.
void transpose_out(const float* from, int64_t width, const float* factors, int64_t rows, int64_t columns, float* to,
                   int64_t stride);

}  // namespace deepytorch
