// Weights from rows to panels.
#pragma once

#include "arena.hpp"
#include "kernels.hpp"

namespace headway {

uint16_t to_bf16(float x);

/// The layer of weight float32 [rows, k] and bias float32 [rows] or null. gated: the first half of the rows gates the second.
Linear pack(Arena& arena, const float* weight, const float* bias, int rows, int k, Type type, bool gated);

}  // namespace headway
