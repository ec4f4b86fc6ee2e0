// SPDX-License-Identifier: Apache-2.0
// csrc/algo/tree_plan.h on the host, for tests/algo/test_tree_plan.py. Reads numbers, writes numbers.
#include "algo/tree_plan.h"

#include <cstdio>
#include <cstring>

using namespace fv;

int main(int, char** argv) {
    long long a[5];
    if (std::strcmp(argv[1], "build") == 0) {  // pool max_smem
        while (std::scanf("%lld %lld", a, a + 1) == 2) {
            const BuildTreeShape s = build_tree_shape(a[0], a[1]);
            std::printf("%d %d %lld %d\n", s.threads, s.count_warps, static_cast<long long>(s.smem), static_cast<int>(s.stored));
        }
        return 0;
    }
    while (std::scanf("%lld %lld %lld %lld %lld", a, a + 1, a + 2, a + 3, a + 4) == 5) {  // items size k major sms
        const int major = static_cast<int>(a[3]), sms = static_cast<int>(a[4]);
        std::printf("%d %d\n", topk_cluster(a[0], a[1], a[2], major, sms), grow_cluster(a[0], a[2], a[1], major, sms));
    }
}
