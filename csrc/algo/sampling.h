// SPDX-License-Identifier: Apache-2.0
// What one row of logits means: processors in their pinned order, filter thresholds, and 64-bit keys.
// Scalar and host+device: the CPU rows (accept/rows.cpp) and the CUDA kernels call the same functions.
//
// Order: penalties -> bias -> bitmask -> temperature -> top-k -> top-p -> min-p. Values equal to a cut are kept.
// Excluded entries are -inf. NaN and +inf are excluded too and make the row "bad" (kFlagBadRow).
#pragma once
#include "algo/numeric.h"
#include "common/philox.h"

namespace fv {

constexpr float kInf = __builtin_huge_valf();
constexpr float kFloatMax = 3.402823466e+38f;

// Sampling parameters of one request after validation.
struct RowParams {
    float temperature = 0.0f;  // 0: greedy
    float top_p = 1.0f;        // 1: off
    float min_p = 0.0f;        // 0: off
    int32_t top_k = 0;         // 0: off
    float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
    uint32_t seed_lo = 0, seed_hi = 0;
    int32_t flags = 0;  // kFlagBadParam if something was replaced
    FV_HD bool greedy() const { return temperature == 0.0f; }
    FV_HD bool filtered() const { return !greedy() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }
};

// Out-of-range values are replaced (temperature -> 0, top_p -> 1, min_p -> 0, repetition -> 1, others -> 0) and flagged.
// top_k <= 0 and top_k >= vocab mean off. Greedy ignores the filters: they never remove the maximum.
FV_HD RowParams resolve_params(
    float temperature, int32_t top_k, float top_p, float min_p, int64_t seed, const float* penalties, int rule,
    int64_t vocab) {
    RowParams p;
    const bool bad_t = !(temperature >= 0.0f && temperature <= kFloatMax);
    const bool bad_p = !(top_p >= 0.0f && top_p <= 1.0f);
    const bool bad_m = !(min_p >= 0.0f && min_p <= 1.0f);
    p.temperature = (bad_t || rule == kRuleGreedy) ? 0.0f : temperature;
    p.top_p = bad_p ? 1.0f : top_p;
    p.min_p = bad_m ? 0.0f : min_p;
    p.top_k = (top_k <= 0 || top_k >= vocab) ? 0 : top_k;
    bool bad = bad_t || bad_p || bad_m;
    if (penalties) {
        const bool ok_r = penalties[0] > 0.0f && penalties[0] <= kFloatMax;
        const bool ok_f = penalties[1] >= -kFloatMax && penalties[1] <= kFloatMax;
        const bool ok_s = penalties[2] >= -kFloatMax && penalties[2] <= kFloatMax;
        p.repetition = ok_r ? penalties[0] : 1.0f;
        p.frequency = ok_f ? penalties[1] : 0.0f;
        p.presence = ok_s ? penalties[2] : 0.0f;
        bad = bad || !ok_r || !ok_f || !ok_s;
    }
    p.seed_lo = static_cast<uint32_t>(static_cast<uint64_t>(seed));
    p.seed_hi = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    p.flags = bad ? kFlagBadParam : 0;
    return p;
}

// Repetition (Keskar et al. 2019, CTRL: divide positive, multiply negative logits), frequency and presence penalties.
FV_HD float apply_penalties(float x, int32_t count, float repetition, float frequency, float presence) {
    const float repeated = x > 0.0f ? x / repetition : x * repetition;
    const float penalised = repeated - frequency * static_cast<float>(count) - presence;
    return count > 0 ? penalised : x;
}

FV_HD bool is_bad(float x) { return !(x <= kFloatMax); }  // NaN or +inf

// Logit -> scaled score; excluded stays -inf; a tiny temperature saturates instead of overflowing; -0 becomes +0.
FV_HD float scale_logit(float x, float temperature) {
    const float q = x / temperature;
    const float z = (q > kFloatMax ? kFloatMax : (q < -kFloatMax ? -kFloatMax : q)) + 0.0f;
    return x < -kFloatMax ? -kInf : z;
}

// Order-preserving int32 (vectorises as a plain integer maximum). -inf maps to its own low value, NaN must be gone.
FV_HD int32_t ordered_int(float f) {
    const int32_t u = static_cast<int32_t>(float_to_bits(f));
    return u ^ ((u >> 31) & 0x7fffffff);
}
FV_HD float from_ordered_int(int32_t o) { return bits_to_float(static_cast<uint32_t>(o ^ ((o >> 31) & 0x7fffffff))); }

// Largest noise value (r = 0): bounds what an entry can still reach.
FV_HD float max_gumbel() { return gumbel_from_bits(0); }

// Noise of vocabulary id v at absolute position t.
FV_HD float gumbel_noise(uint32_t v, uint32_t t, uint32_t seed_lo, uint32_t seed_hi) {
    const Philox4 r = philox4x32(v >> 2, t, kStreamTarget, 0, seed_lo, seed_hi);
    return gumbel_from_bits(r.v[v & 3]);
}

// A bound from above on gumbel_from_bits(r), at most 0.07 too high for x <= 2^-7 and 0.1 for x <= 1/2, without logarithms:
// E >= x exp(x/2 + x^2/5), and the bits of a float lie on chords below its log2. Rounding can take up to kBoundSlack of it.
FV_HD float noise_bound(uint32_t r) {
    const float f = static_cast<float>(r);
    const float steps = bits_to_float((float_to_bits(f) >> 9) + 0x4b000000u);     // 2^23 + (127 + log2 r) 2^14
    const float chord = fma_exact(steps, -4.2306350e-5f, 465.10176f);             // -ln2 2^-14, ln2 (512 + 127 + 32)
    return fma_exact(f, fma_exact(f, -1.0842022e-20f, -1.1641532e-10f), chord);   // -2^-64 / 5, -2^-33
}
constexpr float kBoundSlack = 1e-3f;
// What noise_bound plus an unexact z of relative error 2^-22 may still hide below a score s.
FV_HD float below(float s) {
    const float magnitude = s < 0.0f ? -s : s;
    return s - (kBoundSlack + magnitude * 9.5367432e-7f);
}

// Top-p: mass that must be covered before the cut, floor(p * total) on a 2^-24 grid, at least 1 so that the maximum
// always stays. An entry is kept iff the mass of strictly larger entries is below it.
FV_HD uint64_t top_p_need(uint64_t total, float top_p) {
    const uint64_t p24 = static_cast<uint64_t>(static_cast<int64_t>(top_p * 16777216.0f));
    const uint64_t need = (total >> 24) * p24 + (((total & 0xffffffu) * p24) >> 24);
    return need == 0 ? 1 : need;
}

// Min-p relative to the largest entry (Nguyen et al. 2024): kept iff exp(z - zmax) >= min_p.
FV_HD bool min_p_keeps(float z, float zmax, float min_p) { return exp2_exact((z - zmax) * kLog2E) >= min_p; }

// 64-bit key of a candidate: larger score first, then lower id; 12 spare bits carry the row's status.
// 0 = no finite entry.
constexpr uint64_t kKeyIdMask = (1u << 20) - 1;
constexpr uint64_t kKeyBad = 1u << 20;  // a NaN or +inf was seen
constexpr uint64_t kKeyBadParam = 1u << 21;  // shards: the request's parameters, penalties included, were out of range
constexpr uint64_t kKeyStatus = kKeyBad | kKeyBadParam;
FV_HD uint64_t make_key(float score, uint32_t id) {
    return (static_cast<uint64_t>(ordered_bits(score + 0.0f)) << 32) | (kKeyIdMask - id);
}
FV_HD uint32_t key_id(uint64_t key) { return static_cast<uint32_t>(kKeyIdMask - (key & kKeyIdMask)); }
FV_HD bool key_has_token(uint64_t key) { return (key >> 32) != 0; }

}  // namespace fv
