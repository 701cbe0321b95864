// The kernels, written once over `Lanes`; included by one file an instruction set, inside a namespace of its own, after
// every other header (what is defined here is compiled for that instruction set only).
//
// `Lanes` has: `Reg`, `width`; load(const T*) and store(T*, Reg) for T in float, Bf16, F16; add, min, max, mul, div, set;
// stream_register, which writes a register's bytes past the caches to an aligned address, and end_stream after the last one.

template <class To>
inline void put(To* out, To* also, Lanes::Reg value) {
  Lanes::store(out, value);
  if (also != nullptr) Lanes::store(also, value);
}

template <Reduce reduce>
inline Lanes::Reg combine(Lanes::Reg a, Lanes::Reg b) {
  if constexpr (reduce == Reduce::sum) return Lanes::add(a, b);
  else if constexpr (reduce == Reduce::min) return Lanes::min(a, b);
  else return Lanes::max(a, b);
}

template <Reduce reduce, class From>
inline Lanes::Reg gather(const From* const* in, int num, size_t at) {
  Lanes::Reg sum = Lanes::load(in[0] + at);
  for (int source = 1; source < num; ++source) sum = combine<reduce>(sum, Lanes::load(in[source] + at));
  return sum;
}

template <Reduce reduce, class From, class To>
void reduce_floats(To* out, To* also, const From* const* in, int num, size_t count, float divisor) {
  constexpr size_t width = Lanes::width;
  int exponent;
  const bool exact = std::frexp(divisor, &exponent) == 0.5f;  // a power of two: multiplying by its inverse is exact
  const Lanes::Reg by = Lanes::set(exact ? 1.0f / divisor : divisor);
  const bool plain = divisor == 1.0f;
  auto scaled = [&](Lanes::Reg value) { return plain ? value : exact ? Lanes::mul(value, by) : Lanes::div(value, by); };
  size_t at = 0;
  for (; at + 4 * width <= count; at += 4 * width) {
    for (size_t lane = at; lane < at + 4 * width; lane += width) {
      put(out + lane, also ? also + lane : nullptr, scaled(gather<reduce>(in, num, lane)));
    }
  }
  for (; at + width <= count; at += width) {
    put(out + at, also ? also + at : nullptr, scaled(gather<reduce>(in, num, at)));
  }
  if (at == count) return;
  From rest[width] = {};
  const size_t bytes = (count - at) * sizeof(From);
  std::memcpy(rest, in[0] + at, bytes);
  Lanes::Reg sum = Lanes::load(rest);
  for (int source = 1; source < num; ++source) {
    std::memcpy(rest, in[source] + at, bytes);
    sum = combine<reduce>(sum, Lanes::load(rest));
  }
  To result[width];
  Lanes::store(result, scaled(sum));
  std::memcpy(out + at, result, (count - at) * sizeof(To));
  if (also != nullptr) std::memcpy(also + at, result, (count - at) * sizeof(To));
}

// Integers and doubles: blocks that stay in the first cache, in loops that compilers vectorise by themselves.
template <Reduce reduce, class T>
void reduce_plain(T* out, T* also, const T* const* in, int num, size_t count, double divisor) {
  constexpr size_t block = 512;
  T sum[block];
  for (size_t at = 0; at < count; at += block) {
    const size_t size = std::min(block, count - at);
    std::memcpy(sum, in[0] + at, size * sizeof(T));
    for (int source = 1; source < num; ++source) {
      const T* next = in[source] + at;
      for (size_t i = 0; i < size; ++i) {
        if constexpr (reduce == Reduce::sum) sum[i] += next[i];
        else if constexpr (reduce == Reduce::min) sum[i] = next[i] < sum[i] || next[i] != next[i] ? next[i] : sum[i];
        else sum[i] = next[i] > sum[i] || next[i] != next[i] ? next[i] : sum[i];
      }
    }
    if (divisor != 1.0) for (size_t i = 0; i < size; ++i) sum[i] = static_cast<T>(sum[i] / divisor);
    std::memcpy(out + at, sum, size * sizeof(T));
    if (also != nullptr) std::memcpy(also + at, sum, size * sizeof(T));
  }
}

template <Reduce reduce>
void reduce_as(void* out, void* also, const void* const* in, int num, size_t count, Dtype from, Dtype to, double divisor) {
  const auto floats = [&](auto source, auto target) {
    using From = decltype(source);
    using To = decltype(target);
    reduce_floats<reduce>(static_cast<To*>(out), static_cast<To*>(also), reinterpret_cast<const From* const*>(in), num,
                          count, static_cast<float>(divisor));
  };
  const auto plain = [&](auto value) {
    using T = decltype(value);
    reduce_plain<reduce>(static_cast<T*>(out), static_cast<T*>(also), reinterpret_cast<const T* const*>(in), num, count,
                         divisor);
  };
  switch (from) {
    case Dtype::f32:
      if (to == Dtype::bf16) return floats(float(), Bf16());
      if (to == Dtype::f16) return floats(float(), F16());
      return floats(float(), float());
    case Dtype::bf16: return to == Dtype::f32 ? floats(Bf16(), float()) : floats(Bf16(), Bf16());
    case Dtype::f16: return to == Dtype::f32 ? floats(F16(), float()) : floats(F16(), F16());
    case Dtype::f64: return plain(double());
    // Sums wrap around as unsigned numbers do; smaller and larger need the sign.
    case Dtype::i8: return reduce == Reduce::sum ? plain(uint8_t()) : plain(int8_t());
    case Dtype::i32: return reduce == Reduce::sum ? plain(uint32_t()) : plain(int32_t());
    case Dtype::i64: return reduce == Reduce::sum ? plain(uint64_t()) : plain(int64_t());
    default: return plain(uint8_t());
  }
}

void reduce(void* out, void* also, const void* const* in, int num, size_t count, Dtype from, Dtype to, Reduce how,
            double divisor) {
  switch (how) {
    case Reduce::sum: return reduce_as<Reduce::sum>(out, also, in, num, count, from, to, divisor);
    case Reduce::min: return reduce_as<Reduce::min>(out, also, in, num, count, from, to, divisor);
    case Reduce::max: return reduce_as<Reduce::max>(out, also, in, num, count, from, to, divisor);
  }
}

void stream(void* target, const void* source, size_t bytes) {
  constexpr size_t size = sizeof(Lanes::Reg);
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  size_t at = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % size);
  std::memcpy(to, from, at);
  for (; at + size <= bytes; at += size) Lanes::stream_register(to + at, from + at);
  Lanes::end_stream();
  std::memcpy(to + at, from + at, bytes - at);
}
