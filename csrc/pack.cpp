#include "pack.hpp"

#include <cmath>
#include <cstring>

namespace headway {
namespace {

/// The weight's row that stands in a panel's column; -1 where none does.
int source(const Linear& layer, int rows, int panel, int column) {
  if (!layer.gated) {
    const int row = panel * PANEL + column;
    return row < rows ? row : -1;
  }
  const int half = rows / 2, row = panel * 16 + column % 16;
  return row < half ? row + (column < 16 ? 0 : half) : -1;
}

void pack_row(Linear& layer, uint32_t* words, const float* weight, float scale) {
  const int k = layer.k;
  for (int i = 0; i < layer.k_words; ++i) {
    uint32_t word = 0;
    if (layer.type == Type::f32) {
      std::memcpy(&word, weight + i, 4);
    } else if (layer.type == Type::bf16) {
      word = to_bf16(weight[2 * i]);
      if (2 * i + 1 < k) word |= static_cast<uint32_t>(to_bf16(weight[2 * i + 1])) << 16;
    } else {
      for (int j = 0; j < 4 && 4 * i + j < k; ++j) {
        const auto q = static_cast<int8_t>(std::lrintf(weight[4 * i + j] * scale));
        word |= static_cast<uint32_t>(static_cast<uint8_t>(q)) << (8 * j);
      }
    }
    words[static_cast<size_t>(i) * PANEL] = word;
  }
}

}  // namespace

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Linear pack(Arena& arena, const float* weight, const float* bias, int rows, int k, Type type, bool gated) {
  Linear layer;
  layer.type = type;
  layer.gated = gated;
  layer.n = gated ? rows / 2 : rows;
  layer.k = k;
  const int pack = type == Type::f32 ? 1 : type == Type::bf16 ? 2 : 4;
  layer.k_words = (k + pack - 1) / pack;
  const int columns = gated ? 16 : PANEL;
  layer.panels = (layer.n + columns - 1) / columns;
  const size_t channels = static_cast<size_t>(layer.panels) * PANEL;
  auto* words = static_cast<uint32_t*>(arena.take(channels * layer.k_words * 4));
  float* biases = bias ? static_cast<float*>(arena.take(channels * 4)) : nullptr;
  float* scales = type == Type::i8 ? static_cast<float*>(arena.take(channels * 4)) : nullptr;
  int32_t* sums = type == Type::i8 ? static_cast<int32_t*>(arena.take(channels * 4)) : nullptr;
  for (int panel = 0; panel < layer.panels; ++panel) {
    for (int column = 0; column < PANEL; ++column) {
      const size_t channel = static_cast<size_t>(panel) * PANEL + column;
      uint32_t* at = words + static_cast<size_t>(panel) * layer.k_words * PANEL + column;
      const int row = source(layer, rows, panel, column);
      const float* from = row < 0 ? nullptr : weight + static_cast<size_t>(row) * k;
      if (biases) biases[channel] = row < 0 ? 0 : bias[row];
      float most = 0;
      if (type == Type::i8 && from)
        for (int i = 0; i < k; ++i) most = std::fmax(most, std::fabs(from[i]));
      if (scales) scales[channel] = most / 127;
      if (from) pack_row(layer, at, from, most > 0 ? 127 / most : 0);
      else
        for (int i = 0; i < layer.k_words; ++i) at[static_cast<size_t>(i) * PANEL] = 0;
      if (!sums) continue;
      int32_t sum = 0;
      for (int i = 0; i < layer.k_words; ++i)
        for (int j = 0; j < 4; ++j) sum += static_cast<int8_t>(at[static_cast<size_t>(i) * PANEL] >> (8 * j));
      sums[channel] = 128 * sum;
    }
  }
  layer.words = words;
  layer.bias = biases;
  layer.scale = scales;
  layer.sums = sums;
  return layer;
}

}  // namespace headway
