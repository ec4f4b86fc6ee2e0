// SPDX-License-Identifier: Apache-2.0
// Reads "head_dim rows full kv_blocks sms" per line, writes "team q_blocks" of csrc/algo/rope_plan.h.
#include <cstdio>

#include "algo/rope_plan.h"

int main() {
    int head_dim, full, kv_blocks, sms;
    long long rows;
    while (std::scanf("%d %lld %d %d %d", &head_dim, &rows, &full, &kv_blocks, &sms) == 5) {
        std::printf("%d %d\n", fv::rope_team(head_dim), fv::rope_q_blocks(rows, full, kv_blocks, sms));
    }
}
