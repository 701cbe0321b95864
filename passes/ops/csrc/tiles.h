// The operations on one tile of scores other than the products. A tile is `keys` by `queries` of at most kTile each, rounded
// up to kStep. A key's scores are adjacent, so that a value per query (its largest score, its sum) is a row of floats, too.
#pragma once

#include <cstdint>

namespace deepytorch {

constexpr int64_t kTile = 64;
constexpr int64_t kStep = 16;  // floats in the widest register

struct Tile {
  int64_t keys, queries;
};

// largest[query] = the largest of itself and the query's scores. NaN is ignored here: it shows in the sums.
void raise_to_largest(Tile tile, const float* scores, float* largest);

// scores[key][query] = exp(scores[key][query] - from[query]), within two roundings, 0 for a difference below -87. The
// difference is about 0 at most.
void exponentials(Tile tile, float* scores, const float* from);

// sums[query] += the query's probabilities
void add_sums(Tile tile, const float* probabilities, float* sums);

// gradients[key][query] = probabilities[key][query] * (gradients[key][query] - delta[query])
void through_softmax(Tile tile, const float* probabilities, const float* delta, float* gradients);

// products[row] = the sum over columns of a[row][column] * b[row][column]
void products_of_rows(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t rows, int64_t columns,
                      float* products);

// to[column][row] = factor * from[row][column], `width` floats per column, zeros after the last of `rows`.
// Rows of `from` are `stride` floats apart.
void transpose_in(const float* from, int64_t stride, int64_t rows, int64_t columns, float factor, float* to, int64_t width);

// to[row][column] = factors[row] * from[column][row]: the reverse.
void transpose_out(const float* from, int64_t width, const float* factors, int64_t rows, int64_t columns, float* to,
                   int64_t stride);

}  // namespace deepytorch
