// The whole of the kernels, compiled once for each instruction set. NAME is the namespace, VEC the vectors to compile with.
#include <cstring>
#include <utility>

#include "kernels.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway::NAME {
namespace {
constexpr int MAX_SEGMENTS = 4;  // blocks of 16 tokens in a tile
#include VEC
#include "matmul.inl"
#ifdef HEADWAY_BF16
using DotB = DotBf16;
constexpr bool BF16_DOT = true;
#else
using DotB = DotWide;
constexpr bool BF16_DOT = false;
#endif
#include "linear.inl"
#include "rows.inl"
#include "attention.inl"
#include "limits.inl"
}  // namespace
}  // namespace headway::NAME
