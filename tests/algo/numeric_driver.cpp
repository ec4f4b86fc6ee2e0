// SPDX-License-Identifier: Apache-2.0
// What test_numeric.py runs: csrc/algo and the rows of the acceptance in a plain program, built at several x86 levels.
//   numeric_driver level                                 the highest x86 level (1, 3, 4) this machine runs; 0: not x86
//   numeric_driver philox ROUNDS C0 C1 C2 C3 K0 K1      four hex words
//   numeric_driver map NAME IN OUT                       NAME applied to every 4-byte (pair: 8-byte) element of IN
//   numeric_driver rows IN OUT                           choose_token and log-sum-exp parts of random rows (see Case)
#include "accept/rows.cpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace {

using namespace fv;

template <class T>
std::vector<T> read_file(const char* path) {
    std::ifstream f(path, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(f)), std::istreambuf_iterator<char>());
    std::vector<T> out(bytes.size() / sizeof(T));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
    return out;
}

template <class T>
void write_file(const char* path, const std::vector<T>& values) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

int level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    std::printf("%d\n", __builtin_cpu_supports("x86-64-v4") ? 4 : __builtin_cpu_supports("x86-64-v3") ? 3 : 1);
#else
    std::printf("0\n");
#endif
    return 0;
}

int philox(char** a) {
    uint32_t w[6];
    for (int i = 0; i < 6; ++i) w[i] = static_cast<uint32_t>(std::strtoul(a[1 + i], nullptr, 16));
    const int rounds = std::atoi(a[0]);
    const Philox4 r = rounds == 7 ? philox4x32<7>(w[0], w[1], w[2], w[3], w[4], w[5])
                                  : philox4x32<10>(w[0], w[1], w[2], w[3], w[4], w[5]);
    std::printf("%08x %08x %08x %08x\n", r.v[0], r.v[1], r.v[2], r.v[3]);
    return 0;
}

int map(const std::string& name, const char* in, const char* out) {
    std::vector<float> y;
    std::vector<uint64_t> wide;
    for (const uint32_t u : name == "log_mass" ? std::vector<uint32_t>{} : read_file<uint32_t>(in)) {
        if (name == "log") y.push_back(log_exact(bits_to_float(u)));
        if (name == "exp2") y.push_back(exp2_exact(bits_to_float(u)));
        if (name == "gumbel") y.push_back(gumbel_from_bits(u));
        if (name == "bound") y.push_back(noise_bound(u));
        if (name == "order") y.push_back(from_ordered_int(ordered_int(bits_to_float(u))) == bits_to_float(u) &&
                                         from_ordered_bits(ordered_bits(bits_to_float(u))) == bits_to_float(u));
        if (name == "mass") wide.push_back(mass_of(bits_to_float(u), 0.0f));
    }
    if (name == "log_mass") {
        for (const uint64_t m : read_file<uint64_t>(in)) y.push_back(log_mass(m));
    }
    if (name == "mass") write_file(out, wide);
    else write_file(out, y);
    return 0;
}

// One row: header, then n values of the type. Everything a row can ask for is derived from the header.
struct Case {
    int32_t type, n, top_k, rule;
    float temperature, top_p, min_p, penalties[3];
    int64_t seed;
    uint32_t position, extras;  // extras: bit 0 bias, 1 bitmask, 2 penalties with two ancestors
};

int rows(const char* in, const char* out) {
    const std::vector<char> bytes = read_file<char>(in);
    std::vector<uint64_t> results;
    for (size_t at = 0; at < bytes.size();) {
        Case c;
        std::memcpy(&c, bytes.data() + at, sizeof c);
        at += sizeof c;
        const LogitType type = static_cast<LogitType>(c.type);
        const size_t size = static_cast<size_t>(c.n) * (type == LogitType::kFloat ? 4 : 2);
        std::vector<char> row(bytes.begin() + at, bytes.begin() + at + size);
        at += size;
        std::vector<float> bias(c.n);
        std::vector<int32_t> counts(c.n), words((c.n + 31) / 32);
        for (int32_t i = 0; i < c.n; ++i) {
            const uint32_t r = philox4x32(i, c.position, 3, 0, 1, 2).v[0];
            bias[i] = static_cast<float>(static_cast<int32_t>(r) >> 24) / 64.0f;
            counts[i] = r % 7 < 5 ? 0 : r % 7 - 4;
            if (r & 4096) words[i / 32] |= static_cast<int32_t>(1u << (i % 32));
        }
        const int64_t ancestors[2] = {c.n / 2, c.n - 1};
        RowExtras x;
        if (c.extras & 1) x.bias = bias.data();
        if (c.extras & 2) x.bitmask = words.data();
        if (c.extras & 4) {
            x.counts = counts.data(), x.penalties = true;
            x.ancestors = ancestors, x.num_ancestors = 2;
        }
        const RowParams p = resolve_params(c.temperature, c.top_k, c.top_p, c.min_p, c.seed, c.extras & 4 ? c.penalties : nullptr, c.rule, c.n);
        const RowResult r = choose_token(row.data(), type, c.n, p, x, c.position);
        const float top = raw_max(row.data(), type, c.n);
        const uint64_t mass = top > -kInf ? raw_mass(row.data(), type, c.n, top) : 0;
        for (const uint64_t v : {r.key, static_cast<uint64_t>(r.bad), mass, static_cast<uint64_t>(float_to_bits(log_mass(mass)))}) results.push_back(v);
    }
    write_file(out, results);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "level") return level();
    if (what == "philox" && argc == 9) return philox(argv + 2);
    if (what == "map" && argc == 5) return map(argv[2], argv[3], argv[4]);
    if (what == "rows" && argc == 4) return rows(argv[2], argv[3]);
    std::fputs("usage: numeric_driver philox|map|rows ...\n", stderr);
    return 2;
}
