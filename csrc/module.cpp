// The Python face: numbers come in as arrays without a copy, the interpreter's lock is free while anything computes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>

#include "decoder.hpp"
#include "pack.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace headway {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::c_contig, nb::device::cpu>;

void expect(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

std::vector<const Kernels*> available() {  // the best one first
  std::vector<const Kernels*> found;
#if defined(HEADWAY_X86)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  // Intel's bfloat16 dot products run at half the speed of its float32 products: 98 GFLOP/s of a core against 200.
  const bool slow_bf16 = __builtin_cpu_is("intel");
  const bool vnni = wide && __builtin_cpu_supports("avx512vnni"), bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (bf16 && !slow_bf16) found.push_back(kernels_avx512_bf16());
  if (vnni) found.push_back(kernels_avx512_vnni());
  if (bf16 && slow_bf16) found.push_back(kernels_avx512_bf16());
  if (wide) found.push_back(kernels_avx512());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(kernels_avx2());
#endif
  found.push_back(kernels_plain());
  return found;
}

const Kernels& named(const std::string& name) {
  for (const Kernels* kernels : available())
    if (name.empty() || name == kernels->name) return *kernels;
  throw std::invalid_argument("this processor has no kernels named " + name);
}

Type type_of(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "bfloat16") return Type::bf16;
  if (name == "int8") return Type::i8;
  throw std::invalid_argument("weights are float32, bfloat16 or int8, not " + name);
}

/// One linear layer by itself, for tests and measurements.
class PackedLinear {
 public:
  PackedLinear(Floats weight, std::optional<Floats> bias, const std::string& type, bool gated, const std::string& isa)
      : kernels_(named(isa)) {
    expect(weight.ndim() == 2, "a weight has two dimensions");
    layer_ = pack(arena_, weight.data(), bias ? bias->data() : nullptr, static_cast<int>(weight.shape(0)),
                  static_cast<int>(weight.shape(1)), type_of(type), gated);
  }
  /// out = x @ weight.T + bias (or + out); x float32 is first brought into the form that the layer reads. `others`, of the
  /// same shape, are then computed likewise: to measure a layer whose weight is not in the cache.
  void operator()(Pool& pool, Floats x, nb::ndarray<float, nb::c_contig, nb::device::cpu> out, bool add,
                  const std::vector<PackedLinear*>& others) {
    expect(x.ndim() == 2 && static_cast<int>(x.shape(1)) == layer_.k, "x is [rows, inputs]");
    expect(out.ndim() == 2 && static_cast<int>(out.shape(1)) == layer_.n && out.shape(0) == x.shape(0), "out is [rows, outputs]");
    const int rows = static_cast<int>(x.shape(0));
    const size_t stride = row_stride(kernels_, layer_.type, layer_.k);
    if (read_.size() < stride * rows + 64) read_.assign(stride * rows + 64, 0), scale_.resize(rows);
    char* read = read_.data() + (64 - reinterpret_cast<uintptr_t>(read_.data()) % 64) % 64;
    nb::gil_scoped_release free;
    run_norm(pool, kernels_, {x.data(), x.shape(1), nullptr, nullptr, 0, layer_.k, layer_.type, read, stride, scale_.data()}, rows, false);
    const Then then = layer_.gated ? Then::silu_mul : add ? Then::add : Then::store;
    run_linear(pool, kernels_, {&layer_, read, stride, scale_.data(), then, out.data(), out.shape(1), false}, rows, false);
    for (const PackedLinear* other : others)
      run_linear(pool, kernels_, {&other->layer_, read, stride, scale_.data(), then, out.data(), out.shape(1), false}, rows, false);
  }

 private:
  const Kernels& kernels_;
  Arena arena_;
  Linear layer_;
  std::vector<char> read_;
  std::vector<float> scale_;
};

/// Keeps what arrays point to alive, and gives floats a place in the decoder's memory.
class Model {
 public:
  Model(Pool& pool, int hidden, int inner, int heads, int kv_heads, int head_dim, int vocab, float eps, const std::string& type,
        const std::string& isa)
      : pool_(pool), kernels_(named(isa)),
        decoder_({hidden, inner, heads, kv_heads, head_dim, vocab, eps, type_of(type)}, kernels_, pool) {
    expect(head_dim % 16 == 0 && head_dim <= 256, "head_dim is a multiple of 16 up to 256");
    expect(hidden > 0 && inner > 0 && kv_heads > 0 && heads % kv_heads == 0, "heads are a multiple of kv_heads");
  }

  void add_layer(Floats input_norm, Floats qkv, std::optional<Floats> qkv_bias, Floats output, std::optional<Floats> output_bias,
                 Floats post_norm, Floats gate_up, std::optional<Floats> gate_up_bias, Floats down, std::optional<Floats> down_bias) {
    const Shape& s = decoder_.shape();
    const int query = s.heads * s.head_dim, key = s.kv_heads * s.head_dim;
    Layer layer;
    layer.input_norm = keep(input_norm, s.hidden);
    layer.post_norm = keep(post_norm, s.hidden);
    layer.qkv = packed(qkv, qkv_bias, query + 2 * key, s.hidden, false);
    layer.output = packed(output, output_bias, s.hidden, query, false);
    layer.gate_up = packed(gate_up, gate_up_bias, 2 * s.inner, s.hidden, true);
    layer.down = packed(down, down_bias, s.hidden, s.inner, false);
    decoder_.layers.push_back(layer);
  }

  void add_ends(Floats embedding, Floats norm, Floats head, Floats rope) {
    const Shape& s = decoder_.shape();
    expect(embedding.size() == static_cast<size_t>(s.vocab) * s.hidden, "the embedding is [vocab, hidden]");
    expect(rope.ndim() == 3 && static_cast<int>(rope.shape(2)) * 2 == s.head_dim, "the angles are [positions, 2, head_dim / 2]");
    if (s.type == Type::f32) {
      decoder_.embedding = keep(embedding, embedding.size());
    } else {
      auto* rounded = static_cast<uint16_t*>(decoder_.arena.take(embedding.size() * 2));
      for (size_t i = 0; i < embedding.size(); ++i) rounded[i] = to_bf16(embedding.data()[i]);
      decoder_.embedding = rounded;
    }
    decoder_.norm = keep(norm, s.hidden);
    decoder_.rope = keep(rope, rope.size());
    positions_ = static_cast<int64_t>(rope.shape(0));
    decoder_.head = packed(head, std::nullopt, s.vocab, s.hidden, false);
  }

  /// keys [layers, blocks, kv_heads, head_dim, block_size] and values, float32 or bfloat16: their memory, in an order of our own.
  void bind(Any keys, Any values) {
    const Shape& s = decoder_.shape();
    const size_t item = s.type == Type::f32 ? 4 : 2;
    expect(keys.ndim() == 5 && keys.size() == values.size() && keys.itemsize() == item && values.itemsize() == item,
           "keys and values are float32 for a float32 model and bfloat16 for others");
    const int block_size = static_cast<int>(keys.shape(4));
    expect(keys.shape(0) == decoder_.layers.size() && static_cast<int>(keys.shape(2)) == s.kv_heads, "the pool is not this model's");
    expect(block_size % 16 == 0 && (TILE % block_size == 0 || block_size % TILE == 0), "block_size is 16, 32 or a multiple of 64");
    keys_ = keys, values_ = values;
    blocks_ = static_cast<int64_t>(keys.shape(1));
    block_size_ = block_size;
    decoder_.bind(static_cast<uint32_t*>(keys.data()), static_cast<uint32_t*>(values.data()), keys.size() / keys.shape(0) * item / 4, block_size);
  }

  /// The attention of all layers by itself, on whatever queries there are: to measure it.
  void attend(Longs starts, Longs counts, Longs tables) {
    Step step;
    step.tokens = static_cast<int>(check(step, starts, counts, tables));
    nb::gil_scoped_release free;
    decoder_.attend_only(step);
  }

  void step(Longs token_ids, Longs starts, Longs counts, Longs tables, Longs sampling, nb::ndarray<float, nb::c_contig, nb::device::cpu> logits) {
    const Shape& s = decoder_.shape();
    Step step;
    step.tokens = static_cast<int>(token_ids.size());
    step.token_ids = token_ids.data();
    step.samples = static_cast<int>(sampling.size());
    step.sampling = sampling.data();
    step.logits = logits.data();
    expect(logits.size() == sampling.size() * static_cast<size_t>(s.vocab), "logits are [samples, vocab]");
    const int64_t total = check(step, starts, counts, tables);
    expect(total == step.tokens, "counts do not add up to the tokens");
    for (int i = 0; i < step.tokens; ++i) expect(step.token_ids[i] >= 0 && step.token_ids[i] < s.vocab, "a token id is beyond the vocabulary");
    for (int i = 0; i < step.samples; ++i) expect(step.sampling[i] >= 0 && step.sampling[i] < total, "a sampling row is not in the step");
    if (!step.tokens) return;
    nb::gil_scoped_release free;
    decoder_.step(step);
  }

  size_t nbytes() const { return decoder_.arena.taken(); }
  std::string isa() const { return kernels_.name; }
  int alone_up_to() const { return decoder_.alone_up_to; }
  void set_alone_up_to(int tokens) { decoder_.alone_up_to = tokens; }

 private:
  /// Puts the rows into `step` and returns how many tokens they have.
  int64_t check(Step& step, const Longs& starts, const Longs& counts, const Longs& tables) {
    expect(block_size_ > 0, "the model has no pool yet");
    expect(starts.size() == counts.size() && tables.ndim() == 2 && tables.shape(0) == starts.size(), "one start, count and table a row");
    first_.clear();
    int64_t total = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t end = starts.data()[i] + counts.data()[i];
      expect(starts.data()[i] >= 0 && counts.data()[i] > 0 && end <= positions_, "a row reaches beyond the positions that the model knows");
      expect(end <= static_cast<int64_t>(tables.shape(1)) * block_size_, "a row reaches beyond its block table");
      for (int64_t b = 0; b * block_size_ < end; ++b) {
        const int64_t block = tables.data()[i * tables.shape(1) + b];
        expect(block >= 0 && block < blocks_, "a block table names a block that is not there");
      }
      first_.push_back(total);
      total += counts.data()[i];
    }
    step.rows = {static_cast<int>(starts.size()), starts.data(), counts.data(), first_.data(), tables.data(), tables.shape(1)};
    return total;
  }
  const float* keep(const Floats& array, size_t size) {
    expect(array.size() == size, "a vector has the wrong length");
    auto* copy = static_cast<float*>(decoder_.arena.take(size * 4));
    std::memcpy(copy, array.data(), size * 4);
    return copy;
  }
  Linear packed(const Floats& weight, const std::optional<Floats>& bias, int rows, int k, bool gated) {
    expect(weight.ndim() == 2 && static_cast<int>(weight.shape(0)) == rows && static_cast<int>(weight.shape(1)) == k, "a weight has the wrong shape");
    nb::gil_scoped_release free;
    return pack(decoder_.arena, weight.data(), bias ? bias->data() : nullptr, rows, k, decoder_.shape().type, gated);
  }

  Pool& pool_;
  const Kernels& kernels_;
  Decoder decoder_;
  Any keys_, values_;
  int64_t positions_ = 0, blocks_ = 0;
  int block_size_ = 0;
  std::vector<int64_t> first_;
};

void argmax(Pool& pool, const std::string& isa, Floats logits, nb::ndarray<float, nb::c_contig, nb::device::cpu> best,
            nb::ndarray<int64_t, nb::c_contig, nb::device::cpu> index) {
  const Kernels& kernels = named(isa);
  const int rows = static_cast<int>(logits.shape(0)), width = static_cast<int>(logits.shape(1));
  expect(best.size() == logits.shape(0) && index.size() == logits.shape(0), "one result a row");
  nb::gil_scoped_release free;
  pool.run(rows, [&](int row, int) { kernels.argmax(logits.data() + static_cast<size_t>(row) * width, width, best.data() + row, index.data() + row); });
}

/// Seconds that each of `repeat` readings of `bytes` of memory by all threads takes: how fast weights can come at most.
std::vector<double> read_memory(Pool& pool, size_t bytes, int repeat) {
  nb::gil_scoped_release free;
  Arena arena;
  const Kernels& kernels = *available().front();
  const int pieces = 8 * pool.threads();
  const size_t size = bytes / pieces / 256 * 256;
  auto* memory = static_cast<char*>(arena.take(size * pieces));
  std::memset(memory, 1, size * pieces);
  std::vector<int> sums(pieces);
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(pieces, [&](int piece, int) { sums[piece] = kernels.read(memory + piece * size, size); });
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

/// Multiplications per second, all threads together, of numbers of `type` in registers.
double products_per_second(Pool& pool, const std::string& type, const std::string& isa) {
  const Kernels& kernels = named(isa);
  const Type kind = type_of(type);
  nb::gil_scoped_release free;
  std::vector<double> made(pool.threads());
  double best = 0;
  for (int i = 0; i < 7; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(pool.threads(), [&](int piece, int) { made[piece] = kernels.products(kind, 300000); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double all = 0;
    for (double one : made) all += one;
    best = std::max(best, all / seconds);
  }
  return best;
}

}  // namespace
}  // namespace headway

NB_MODULE(_native, m) {
  using namespace headway;
  m.def("available", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available()) names.push_back(kernels->name);
    return names;
  });
  nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::threads);
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def(nb::init<Floats, std::optional<Floats>, const std::string&, bool, const std::string&>(), "weight"_a, "bias"_a.none(), "type"_a,
           "gated"_a = false, "isa"_a = "")
      .def("__call__", &PackedLinear::operator(), "pool"_a, "x"_a, "out"_a, "add"_a = false,
           "others"_a = std::vector<PackedLinear*>());
  nb::class_<Model>(m, "Model")
      .def(nb::init<Pool&, int, int, int, int, int, int, float, const std::string&, const std::string&>(), nb::keep_alive<1, 2>(), "pool"_a,
           "hidden"_a, "inner"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a, "eps"_a, "type"_a, "isa"_a = "")
      .def("add_layer", &Model::add_layer, "input_norm"_a, "qkv"_a, "qkv_bias"_a.none(), "output"_a, "output_bias"_a.none(), "post_norm"_a,
           "gate_up"_a, "gate_up_bias"_a.none(), "down"_a, "down_bias"_a.none())
      .def("add_ends", &Model::add_ends, "embedding"_a, "norm"_a, "head"_a, "rope"_a)
      .def("bind", &Model::bind, "keys"_a, "values"_a)
      .def("attend", &Model::attend, "starts"_a, "counts"_a, "tables"_a)
      .def("step", &Model::step, "token_ids"_a, "starts"_a, "counts"_a, "tables"_a, "sampling"_a, "logits"_a)
      .def_prop_ro("nbytes", &Model::nbytes)
      .def_prop_ro("isa", &Model::isa)
      .def_prop_rw("alone_up_to", &Model::alone_up_to, &Model::set_alone_up_to);
  m.def("read_memory", &read_memory, "pool"_a, "bytes"_a, "repeat"_a = 5);
  m.def("products_per_second", &products_per_second, "pool"_a, "type"_a, "isa"_a = "");
  m.def("argmax", &argmax, "pool"_a, "isa"_a, "logits"_a, "best"_a, "index"_a);
}
