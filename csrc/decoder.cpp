#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headway {
namespace {

constexpr int NORM_ROWS = 8;   // rows that one piece of work normalises
constexpr int ROPE_PIECES = 8;
constexpr int ROPE_TOKENS = 8;
constexpr int PIECES = 8;      // pieces of a layer's panels per thread: enough to even out, few enough not to count

int up(int n, int to) { return (n + to - 1) / to; }

float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

size_t scratch_bytes(int group, int head_dim) {
  const size_t rows = std::max(static_cast<size_t>(query_tile(group)) * group, size_t(48));
  const size_t attention = rows * (2 * TILE + head_dim + 2) * 4 + 256;
  return (std::max(attention, size_t(ROW_BLOCK) * PANEL * 4) + 8191) / 4096 * 4096;
}

size_t row_stride(const Kernels& kernels, Type type, int width) {
  const size_t item = type == Type::i8 ? 1 : type == Type::bf16 && kernels.bf16_dot ? 2 : 4;
  return ((width * item + 63) / 64 | 1) * 64;
}

void run_linear(Pool& pool, const Kernels& kernels, const LinearTask& task, int rows, bool alone) {
  const int blocks = up(rows, ROW_BLOCK), panels = task.layer->panels, threads = alone ? 1 : pool.threads();
  const int most = panels / (threads * kernels.panels_at_once(rows));
  const int pieces = std::min(panels, threads * std::clamp(most, 1, up(PIECES, blocks)));
  static thread_local std::vector<char> scratch;
  pool.run(
      blocks * pieces,
      [&](int piece, int) {
        if (scratch.empty()) scratch.resize(ROW_BLOCK * PANEL * 4 + 64);
        char* sums = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
        const int block = piece / pieces, p = piece % pieces;
        const int row = static_cast<int>(int64_t(rows) * block / blocks), end = static_cast<int>(int64_t(rows) * (block + 1) / blocks);
        const int first = static_cast<int>(int64_t(panels) * p / pieces), last = static_cast<int>(int64_t(panels) * (p + 1) / pieces);
        int until = last;  // the pieces that follow are the same thread's, up to the end of its share
        for (int t = 1; t <= threads; ++t)
          if (pool.share(blocks * pieces, t) > piece) {
            const int limit = std::min(pool.share(blocks * pieces, t) - block * pieces, pieces);
            until = static_cast<int>(int64_t(panels) * limit / pieces);
            break;
          }
        if (alone) until = panels;
        kernels.linear(task, row, end - row, first, last - first, until, sums);
      },
      alone);
}

void run_norm(Pool& pool, const Kernels& kernels, const NormTask& task, int rows, bool alone) {
  pool.run(
      up(rows, NORM_ROWS),
      [&](int piece, int) { kernels.norm(task, piece * NORM_ROWS, std::min(NORM_ROWS, rows - piece * NORM_ROWS)); }, alone);
}

Decoder::Decoder(const Shape& shape, const Kernels& kernels, Pool& pool)
    : shape_(shape), kernels_(kernels), pool_(pool) {
  wide_ = shape.type != Type::bf16 || !kernels.bf16_dot;
  const size_t bytes = scratch_bytes(shape.heads / shape.kv_heads, shape.head_dim);
  for (int i = 0; i < pool.threads(); ++i) scratch_.push_back(static_cast<char*>(arena.take(bytes)));
}

void Decoder::bind(uint32_t* keys, uint32_t* values, size_t layer_words, int block_size) {
  cache_ = {keys, values, shape_.type != Type::f32, block_size, shape_.kv_heads, shape_.head_dim, shape_.heads};
  layer_words_ = layer_words;
}

void Decoder::reserve(int tokens) {
  if (tokens <= reserved_) return;
  reserved_ = std::max(tokens, 2 * reserved_);
  const size_t n = reserved_, qkv = static_cast<size_t>(shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
  const int query = shape_.heads * shape_.head_dim;
  const Type wide = Type::f32;
  read_stride_ = row_stride(kernels_, shape_.type, std::max({shape_.hidden, query, shape_.inner}));
  attended_stride_ = row_stride(kernels_, wide_ ? wide : shape_.type, query);
  gated_stride_ = row_stride(kernels_, wide_ ? wide : shape_.type, shape_.inner);
  const size_t sizes[] = {n * shape_.hidden * 4, n * qkv * 4, n * 4, n * read_stride_, n * query * 4, n * attended_stride_, n * gated_stride_};
  size_t total = 64;
  for (size_t size : sizes) total += (size + 127) / 64 * 64;
  buffers_.assign(total, 0);
  char* at = buffers_.data() + (64 - reinterpret_cast<uintptr_t>(buffers_.data()) % 64);
  char* parts[7];
  for (int i = 0; i < 7; ++i) parts[i] = at, at += (sizes[i] + 127) / 64 * 64;
  x_ = reinterpret_cast<float*>(parts[0]);
  qkv_ = reinterpret_cast<float*>(parts[1]);
  x_scale_ = reinterpret_cast<float*>(parts[2]);
  read_ = parts[3], q_ = parts[4], attended_ = parts[5], gated_ = parts[6];
}

void Decoder::plan(const Step& step) {
  ropes_.clear(), attentions_.clear();
  const int tile = query_tile(shape_.heads / shape_.kv_heads);
  for (int row = 0; row < step.rows.count; ++row) {
    const int count = static_cast<int>(step.rows.counts[row]);
    for (int token = 0; token < count; token += ROPE_TOKENS) ropes_.push_back({row, token, std::min(ROPE_TOKENS, count - token), 0});
    for (int token = (count - 1) / tile * tile; token >= 0; token -= tile)
      for (int head = 0; head < shape_.kv_heads; ++head) attentions_.push_back({row, token, std::min(tile, count - token), head});
  }
}

void Decoder::embed(const Step& step) {
  for (int i = 0; i < step.tokens; ++i) {
    float* x = x_ + static_cast<size_t>(i) * shape_.hidden;
    const size_t at = static_cast<size_t>(step.token_ids[i]) * shape_.hidden;
    if (shape_.type == Type::f32) {
      std::memcpy(x, static_cast<const float*>(embedding) + at, 4 * static_cast<size_t>(shape_.hidden));
    } else {
      const auto* from = static_cast<const uint16_t*>(embedding) + at;
      for (int j = 0; j < shape_.hidden; ++j) x[j] = widen(from[j]);
    }
  }
}

void Decoder::attend(const Layer& layer, const Step& step, const Cache& cache) {
  const int query = shape_.heads * shape_.head_dim;
  const size_t qkv = query + 2 * static_cast<size_t>(shape_.kv_heads) * shape_.head_dim;
  run_norm(pool_, kernels_, {x_, size_t(shape_.hidden), nullptr, layer.input_norm, shape_.eps, shape_.hidden, shape_.type, read_, read_stride_, x_scale_}, step.tokens, alone_);
  run_linear(pool_, kernels_, {&layer.qkv, read_, read_stride_, x_scale_, Then::store, qkv_, qkv, false}, step.tokens, alone_);
  const RopeTask turn{qkv_, qkv, rope, 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), q_, step.tokens};
  pool_.run(
      up(static_cast<int>(ropes_.size()), ROPE_PIECES),
      [&](int piece, int) {
        const int end = std::min<int>(static_cast<int>(ropes_.size()), (piece + 1) * ROPE_PIECES);
        for (int i = piece * ROPE_PIECES; i < end; ++i) kernels_.rope(turn, cache, step.rows, ropes_[i].row, ropes_[i].token, ropes_[i].tokens);
      },
      alone_);
  look(step, cache);
  const void* x = attended_;
  size_t stride = attended_stride_;
  if (shape_.type == Type::i8) {
    run_norm(pool_, kernels_, {reinterpret_cast<float*>(attended_), attended_stride_ / 4, nullptr, nullptr, 0, query, Type::i8, read_, read_stride_, x_scale_}, step.tokens, alone_);
    x = read_, stride = read_stride_;
  }
  run_linear(pool_, kernels_, {&layer.output, x, stride, x_scale_, Then::add, x_, size_t(shape_.hidden), false}, step.tokens, alone_);
}

void Decoder::look(const Step& step, const Cache& cache) {
  const AttentionTask task{q_, step.tokens, attended_, attended_stride_ / (wide_ ? 4 : 2), !wide_};
  pool_.run(
      static_cast<int>(attentions_.size()),
      [&](int piece, int thread) {
        const Piece& p = attentions_[piece];
        kernels_.attention(task, cache, step.rows, p.row, p.token, p.tokens, p.head, scratch_[thread]);
      },
      alone_);
}

void Decoder::attend_only(const Step& step) {
  reserve(step.tokens);
  plan(step);
  Cache cache = cache_;
  for (size_t i = 0; i < layers.size(); ++i) {
    look(step, cache);
    cache.keys += layer_words_, cache.values += layer_words_;
  }
}

void Decoder::feed(const Layer& layer, int tokens) {
  run_norm(pool_, kernels_, {x_, size_t(shape_.hidden), nullptr, layer.post_norm, shape_.eps, shape_.hidden, shape_.type, read_, read_stride_, x_scale_}, tokens, alone_);
  run_linear(pool_, kernels_, {&layer.gate_up, read_, read_stride_, x_scale_, Then::silu_mul, gated_, gated_stride_ / (wide_ ? 4 : 2), !wide_}, tokens, alone_);
  const void* x = gated_;
  size_t stride = gated_stride_;
  if (shape_.type == Type::i8) {
    run_norm(pool_, kernels_, {reinterpret_cast<float*>(gated_), gated_stride_ / 4, nullptr, nullptr, 0, shape_.inner, Type::i8, read_, read_stride_, x_scale_}, tokens, alone_);
    x = read_, stride = read_stride_;
  }
  run_linear(pool_, kernels_, {&layer.down, x, stride, x_scale_, Then::add, x_, size_t(shape_.hidden), false}, tokens, alone_);
}

void Decoder::step(const Step& step) {
  reserve(std::max(step.tokens, step.samples));
  alone_ = step.tokens <= alone_up_to;
  plan(step);
  embed(step);
  Cache cache = cache_;
  for (const Layer& layer : layers) {
    attend(layer, step, cache);
    feed(layer, step.tokens);
    cache.keys += layer_words_, cache.values += layer_words_;
  }
  if (!step.samples) return;
  run_norm(pool_, kernels_, {x_, size_t(shape_.hidden), step.sampling, norm, shape_.eps, shape_.hidden, shape_.type, read_, read_stride_, x_scale_}, step.samples, alone_);
  run_linear(pool_, kernels_, {&head, read_, read_stride_, x_scale_, Then::store, step.logits, size_t(shape_.vocab), false}, step.samples, alone_);
}

}  // namespace headway
