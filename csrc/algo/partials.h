// SPDX-License-Identifier: Apache-2.0
// Protocol of vocab-parallel verification. Every rank holds a vocabulary shard of each row; only these words travel.
//
//   num_rounds = 1   no filters, no logprobs:  [final]             8 bytes a row
//   num_rounds = 2   logprobs, no filters:     [max] [final]
//   num_rounds = 10  any filter:               [max] [top-k digit]x4 [top-p digit]x4 [final]
//
// Digits are the four bytes of ordered_bits(z), highest first (a radix select over the union of shards); counts and
// masses are integers, so the folded result is exactly that of the whole row.
#pragma once
#include "algo/sampling.h"

namespace fv {

constexpr int kFilterRounds = 10;
constexpr int kDigits = 256;       // words of a digit round
constexpr int kFinalWords = 3;     // key, raw mass, raw logit of the key
constexpr int kStateWords = 8;

enum class Round { kMax, kTopK, kTopP, kFinal };
struct RoundKind {
    Round kind;
    int shift;  // of the digit
};
FV_HD RoundKind round_kind(int round, int num_rounds) {
    if (round == num_rounds - 1) return RoundKind{Round::kFinal, 0};
    if (round == 0) return RoundKind{Round::kMax, 0};
    return round <= 4 ? RoundKind{Round::kTopK, 32 - 8 * round} : RoundKind{Round::kTopP, 32 - 8 * (round - 4)};
}
FV_HD int words_needed(int num_rounds) { return num_rounds == 1 ? 1 : num_rounds == 2 ? kFinalWords : kDigits; }

// state words of a row
enum StateWord {
    kStateMax,        // ordered_bits of the largest z, 0 = none
    kStateRawMax,     // ordered_bits of the largest finite raw logit
    kStateTopKLeft,   // entries still to find; 0 = off
    kStateTopKCut,    // digits found so far; in the end the cut
    kStateTopPLeft,   // mass still to cover; 0 = off
    kStateTopPCut,
};

// Walks the digits from high to low until `left` is covered. Returns the digit and lowers *left by what lies above it.
FV_HD int select_digit(const int64_t* sums, int64_t* left) {
    for (int d = kDigits - 1; d > 0; --d) {
        if (sums[d] >= *left) return d;
        *left -= sums[d];
    }
    return 0;
}

// Does an entry with ordered bits o belong to the interval whose upper digits are `prefix`, digits above `shift` + 8 known?
FV_HD bool in_prefix(uint32_t o, uint32_t prefix, int shift) {
    return shift >= 24 || (o >> (shift + 8)) == (prefix >> (shift + 8));
}

}  // namespace fv
