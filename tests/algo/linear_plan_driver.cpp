// SPDX-License-Identifier: Apache-2.0
// What test_linear_plan.py runs: reads lines "outer inner", prints whether the kernel of long K takes them, and its split.
#include "algo/linear_plan.h"

#include <cstdio>

int main() {
    long long outer, inner;
    while (std::scanf("%lld %lld", &outer, &inner) == 2) std::printf("%d %d\n", fv::wide_fits(outer, inner), fv::wide_split(outer));
}
