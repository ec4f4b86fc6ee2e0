// SPDX-License-Identifier: Apache-2.0
#include "accept/rows.h"

#include <algorithm>

namespace fv {
namespace {

FV_CLONES void load_bf16(const uint16_t* in, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = bits_to_float(static_cast<uint32_t>(in[i]) << 16);
}

#if defined(__FLT16_MAX__)
using Half = _Float16;
FV_CLONES void load_f16(const Half* in, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
}
#else
#error "a compiler with _Float16 is needed (gcc >= 12 or clang >= 15)"
#endif

FV_CLONES void penalise(float* x, const int32_t* counts, int64_t n, float repetition, float frequency, float presence) {
    for (int64_t i = 0; i < n; ++i) x[i] = apply_penalties(x[i], counts[i], repetition, frequency, presence);
}

FV_CLONES void add_bias(float* x, const float* bias, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
}

// bit (first + i) of words decides entry i
FV_CLONES void mask_out(float* x, const int32_t* words, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t v = first + i;
        const bool allowed = (static_cast<uint32_t>(words[v >> 5]) >> (v & 31)) & 1u;
        x[i] = allowed ? x[i] : -kInf;
    }
}

// x -> z in place for one block; returns the block's ordered maximum, *bad |= NaN or +inf seen.
FV_CLONES void finish_blocks(float* x, int64_t n, float temperature, int32_t* block, int32_t* bad) {
    const bool greedy = temperature == 0.0f;
    const float t = greedy ? 1.0f : temperature;
    int32_t any = 0;
    for (int64_t lo = 0; lo < n; lo += kBlock) {
        const int m = static_cast<int>(n - lo < kBlock ? n - lo : kBlock);
        float* p = x + lo;
        int32_t best = INT32_MIN;
        for (int i = 0; i < m; ++i) {
            const float v = p[i];
            const bool b = is_bad(v);
            any |= b;
            const float z = scale_logit(b ? -kInf : v, t);
            p[i] = z;
            const int32_t o = ordered_int(z);
            best = o > best ? o : best;
        }
        block[lo / kBlock] = best;
    }
    *bad |= any;
}

FV_CLONES int32_t block_max(const float* z, int m) {
    int32_t best = INT32_MIN;
    for (int i = 0; i < m; ++i) {
        const int32_t o = ordered_int(z[i]);
        best = o > best ? o : best;
    }
    return best;
}

// Noise of ids 4*group .. 4*group+255 at position t, added to z.
FV_CLONES void score_256(const float* z, uint32_t group, uint32_t t, uint32_t seed_lo, uint32_t seed_hi, float* out) {
    alignas(64) uint32_t bits[4][64];
    for (uint32_t g = 0; g < 64; ++g) {
        const Philox4 r = philox4x32(group + g, t, kStreamTarget, 0, seed_lo, seed_hi);
        bits[0][g] = r.v[0];
        bits[1][g] = r.v[1];
        bits[2][g] = r.v[2];
        bits[3][g] = r.v[3];
    }
    alignas(64) float noise[4][64];
    const uint32_t* flat = &bits[0][0];
    float* flat_noise = &noise[0][0];
    for (int i = 0; i < 256; ++i) flat_noise[i] = gumbel_from_bits(flat[i]);
    for (int i = 0; i < 256; ++i) out[i] = z[i] + noise[i & 3][i >> 2];
}

FV_CLONES uint64_t mass_all(const float* z, int64_t n, float zmax, float cut) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint64_t m = mass_of(z[i], zmax);
        total += z[i] >= cut ? m : 0;
    }
    return total;
}

// Entries >= bound, in id order.
void gather_candidates(RowScratch& s, int64_t n, float bound) {
    s.ids.clear();
    s.values.clear();
    const int32_t ob = ordered_int(bound);
    for (int64_t lo = 0; lo < n; lo += kBlock) {
        if (s.block[lo / kBlock] < ob) continue;
        const int64_t hi = std::min<int64_t>(n, lo + kBlock);
        for (int64_t i = lo; i < hi; ++i) {
            if (s.z[i] >= bound && s.z[i] > -kInf) {
                s.ids.push_back(static_cast<int32_t>(i));
                s.values.push_back(s.z[i]);
            }
        }
    }
}

int32_t occurrences(const int64_t* tokens, int32_t n, int64_t token) {
    int32_t c = 0;
    for (int32_t i = 0; i < n; ++i) c += tokens[i] == token;
    return c;
}

}  // namespace

RowScratch& row_scratch() {
    static thread_local RowScratch scratch;
    return scratch;
}

LogitType logit_type(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::Half: return LogitType::kHalf;
        case ScalarType::BFloat16: return LogitType::kBFloat16;
        default: return LogitType::kFloat;
    }
}

const void* row_pointer(const Tensor& logits, int64_t row) {
    const int64_t size = logits.scalar_type() == ScalarType::Float ? 4 : 2;
    return static_cast<const char*>(logits.const_data_ptr()) + row * logits.stride(0) * size;
}

void load_row(const void* row, LogitType type, int64_t n, float* out) {
    switch (type) {
        case LogitType::kFloat: std::copy_n(static_cast<const float*>(row), n, out); break;
        case LogitType::kHalf: load_f16(static_cast<const Half*>(row), n, out); break;
        case LogitType::kBFloat16: load_bf16(static_cast<const uint16_t*>(row), n, out); break;
    }
}

float load_one(const void* row, LogitType type, int64_t i) {
    switch (type) {
        case LogitType::kHalf: return static_cast<float>(static_cast<const Half*>(row)[i]);
        case LogitType::kBFloat16:
            return bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(row)[i]) << 16);
        default: return static_cast<const float*>(row)[i];
    }
}

bool process_row(const void* row, LogitType type, int64_t n, int64_t offset, const RowParams& p, const RowExtras& x,
                 RowScratch& s) {
    s.z.resize(n);
    s.block.resize((n + kBlock - 1) / kBlock);
    load_row(row, type, n, s.z.data());
    if (x.penalties) {
        if (x.counts) penalise(s.z.data(), x.counts, n, p.repetition, p.frequency, p.presence);
        for (int32_t a = 0; a < x.num_ancestors; ++a) {  // ids on the path count as emitted; few, so one by one
            const int64_t i = x.ancestors[a] - offset;
            if (i < 0 || i >= n) continue;
            const int32_t c = (x.counts ? x.counts[i] : 0) + occurrences(x.ancestors, x.num_ancestors, x.ancestors[a]);
            s.z[i] = apply_penalties(load_one(row, type, i), c, p.repetition, p.frequency, p.presence);
        }
    }
    if (x.bias) add_bias(s.z.data(), x.bias, n);
    if (x.bitmask) mask_out(s.z.data(), x.bitmask, offset, n);
    int32_t bad = 0;
    finish_blocks(s.z.data(), n, p.temperature, s.block.data(), &bad);
    return bad != 0;
}

float row_max(const RowScratch& s) {
    int32_t best = ordered_int(-kInf);
    for (const int32_t o : s.block) best = o > best ? o : best;
    return from_ordered_int(best);
}

float top_k_cut(RowScratch& s, int64_t n, int32_t k) {
    // The k-th largest block maximum bounds the k-th largest entry from below.
    float bound = -kInf;
    if (static_cast<int64_t>(s.block.size()) >= k) {
        std::vector<int32_t> top(s.block);
        std::nth_element(top.begin(), top.begin() + (k - 1), top.end(), std::greater<int32_t>());
        bound = from_ordered_int(top[k - 1]);
    }
    gather_candidates(s, n, bound);
    if (static_cast<int64_t>(s.values.size()) <= k) return bound > -kInf && !s.values.empty()
        ? *std::min_element(s.values.begin(), s.values.end()) : -kInf;
    std::vector<float> values(s.values);
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
}

uint64_t row_mass(const RowScratch& s, int64_t n, float zmax, float cut) { return mass_all(s.z.data(), n, zmax, cut); }

float top_p_cut(RowScratch& s, int64_t n, float zmax, float cut, uint64_t need) {
    // Widen a window below the maximum until it holds the needed mass, then walk down equal values as groups.
    for (float width = 4.0f;; width *= 2.0f) {
        const float bound = std::max(cut, zmax - width);
        const bool all = bound <= cut || width > 100.0f;
        gather_candidates(s, n, all ? cut : bound);
        std::vector<float> sorted(s.values);
        std::sort(sorted.begin(), sorted.end(), std::greater<float>());
        uint64_t above = 0;
        float kept = zmax;
        size_t i = 0;
        while (i < sorted.size() && above < need) {
            kept = sorted[i];
            for (; i < sorted.size() && sorted[i] == kept; ++i) above += mass_of(kept, zmax);
        }
        if (above >= need || all) return above >= need ? kept : cut;
    }
}

uint64_t best_key(RowScratch& s, int64_t n, int64_t offset, const RowParams& p, float zmax, float cut, uint32_t t) {
    const auto id_of = [&](int64_t i) { return static_cast<uint32_t>(offset + i); };
    uint64_t best = 0;
    if (p.greedy()) {
        int64_t at = -1;
        int32_t top = ordered_int(-kInf);
        for (size_t b = 0; b < s.block.size(); ++b) {
            if (s.block[b] > top) top = s.block[b], at = static_cast<int64_t>(b);
        }
        if (at < 0) return 0;
        for (int64_t i = at * kBlock;; ++i) {
            if (ordered_int(s.z[i]) == top) return make_key(s.z[i], id_of(i));
        }
    }
    if (cut > -kInf || p.min_p > 0.0f) {  // few candidates: noise for those only
        gather_candidates(s, n, cut);
        for (size_t c = 0; c < s.ids.size(); ++c) {
            if (p.min_p > 0.0f && !min_p_keeps(s.values[c], zmax, p.min_p)) continue;
            const uint32_t id = id_of(s.ids[c]);
            const uint64_t key = make_key(s.values[c] + gumbel_noise(id, t, p.seed_lo, p.seed_hi), id);
            best = key > best ? key : best;
        }
        return best;
    }
    // Whole row, 256 ids at a time; a stretch whose largest entry cannot win even with the largest noise is skipped.
    alignas(64) float padded[256], score[256];
    const float reach = max_gumbel();
    float top = -kInf;
    const int64_t lead = offset & 3;  // a shard may begin inside a group of four ids
    for (int64_t lo = -lead; lo < n; lo += 256) {
        const int64_t first = std::max<int64_t>(lo, 0), last = std::min<int64_t>(lo + 256, n);
        const float high = from_ordered_int(block_max(s.z.data() + first, static_cast<int>(last - first)));
        if (!(high > -kInf) || high + reach <= top) continue;
        const float* z = s.z.data() + lo;
        if (first != lo || last != lo + 256) {
            std::fill_n(padded, 256, -kInf);
            std::copy(s.z.data() + first, s.z.data() + last, padded + (first - lo));
            z = padded;
        }
        score_256(z, static_cast<uint32_t>((offset + lo) >> 2), t, p.seed_lo, p.seed_hi, score);
        const float m = from_ordered_int(block_max(score, 256));
        if (!(m > top)) continue;
        top = m;
        int i = 0;
        while (score[i] != m) ++i;
        best = make_key(m, id_of(lo + i));
    }
    return best;
}

FV_CLONES static int32_t finite_max(const float* x, int64_t n) {
    int32_t best = ordered_int(-kInf);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t o = ordered_int(is_bad(x[i]) ? -kInf : x[i]);
        best = o > best ? o : best;
    }
    return best;
}

FV_CLONES static uint64_t finite_mass(const float* x, int64_t n, float max) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += mass_of(is_bad(x[i]) ? -kInf : x[i], max);
    return total;
}

float raw_max(const void* row, LogitType type, int64_t n) {
    std::vector<float>& buf = row_scratch().values;
    buf.resize(n);
    load_row(row, type, n, buf.data());
    return from_ordered_int(finite_max(buf.data(), n));
}

uint64_t raw_mass(const void* row, LogitType type, int64_t n, float max) {
    std::vector<float>& buf = row_scratch().values;
    buf.resize(n);
    load_row(row, type, n, buf.data());
    return finite_mass(buf.data(), n, max);
}

RowResult choose_token(const void* row, LogitType type, int64_t n, const RowParams& p, const RowExtras& x, uint32_t t) {
    RowScratch& s = row_scratch();
    const bool bad = process_row(row, type, n, 0, p, x, s);
    const float zmax = row_max(s);
    if (!(zmax > -kInf)) return RowResult{0, bad};
    float cut = -kInf;
    if (!p.greedy()) {
        if (p.top_k > 0) cut = top_k_cut(s, n, p.top_k);
        if (p.top_p < 1.0f) {
            const uint64_t total = row_mass(s, n, zmax, cut);
            cut = top_p_cut(s, n, zmax, cut, top_p_need(total, p.top_p));
        }
    }
    return RowResult{best_key(s, n, 0, p, zmax, cut, t), bad};
}

}  // namespace fv
