// SPDX-License-Identifier: Apache-2.0
// How collectives are cut into blocks, printed for test_choices.py. One line in, one line out:
//   norm MAJOR SMS WORLD LOCAL_RANKS BLOCKS HOOKS FORCED FORM PREFETCH ROWS ROW_VECTORS -> blocks threads cluster prefetch_blocks registers
//   sum MOST_BLOCKS VECTORS -> blocks threads
#include <cstdio>
#include <cstring>

#include "comm/comm_choice.h"

int main() {
    char what[8];
    uint32_t word = 0;
    while (std::scanf("%7s", what) == 1) {
        if (std::strcmp(what, "sum") == 0) {
            int most;
            long vectors;
            if (std::scanf("%d %ld", &most, &vectors) != 2) return 1;
            const fv::CommChoice choice = fv::choose_all_reduce(vectors, most);
            std::printf("%d %d\n", choice.blocks, choice.threads);
            continue;
        }
        fv::fv_comm c = {};
        int major, sms, hooks, form, prefetch;
        long rows, vectors;
        if (std::scanf("%d %d %d %d %d %d %d %d %d %ld %ld", &major, &sms, &c.world, &c.local_ranks, &c.blocks, &hooks, &c.forced, &form, &prefetch,
                       &rows, &vectors) != 11) return 1;
        c.ranks[0].hooks = hooks ? &word : nullptr;
        const fv::CommChoice choice = fv::choose_rms_norm(rows, vectors, c, major, sms, static_cast<fv::CommForm>(form), prefetch != 0);
        std::printf("%d %d %d %d %d\n", choice.blocks, choice.threads, choice.cluster, choice.prefetch_blocks, choice.registers);
    }
    return 0;
}
