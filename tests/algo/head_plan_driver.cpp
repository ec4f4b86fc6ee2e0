// SPDX-License-Identifier: Apache-2.0
// What test_head_plan.py runs: reads lines "rows vocab hidden tensor_cores sms max_smem", prints the plan, the workspace,
// and how many blocks each tile is shared by, checked against a count step by step.
#include "algo/head_plan.h"

#include <cstdio>
#include <set>
#include <vector>

int main() {
    using namespace fv;
    long long rows, vocab, hidden, cores, sms, smem;
    while (std::scanf("%lld %lld %lld %lld %lld %lld", &rows, &vocab, &hidden, &cores, &sms, &smem) == 6) {
        const HeadPlan p = head_plan(rows, vocab, hidden, cores != 0, static_cast<int>(sms), static_cast<int>(smem));
        const HeadWorkspace w = head_workspace(rows, vocab, static_cast<int>(sms));
        int wrong = 0;
        if (cores) {
            std::vector<std::set<int>> users(p.tiles);
            for (int slot = 0; slot < p.slots; ++slot) {
                for (int s = slot * p.steps; s < (slot + 1) * p.steps && s < p.tiles * p.k_steps; ++s) users[s / p.k_steps].insert(slot);
            }
            for (int t = 0; t < p.tiles; ++t) {
                wrong += users[t].empty() || head_first_slot(p, t) != *users[t].begin() || head_last_slot(p, t) != *users[t].rbegin() ||
                         static_cast<int>(users[t].size()) != *users[t].rbegin() - *users[t].begin() + 1;
            }
        }
        std::printf("{\"tile\": %d, \"rows_tile\": %d, \"chunks\": %d, \"tiles\": %d, \"k_steps\": %d, \"steps\": %d, \"slots\": %d, \"blocks\": %d, "
                    "\"smem\": %d, \"bytes\": %lld, \"zeroed\": %lld, \"partials\": %lld, \"logits\": %lld, \"wrong\": %d}\n",
                    head_tile(p.rows_tile), p.rows_tile, p.chunks, p.tiles, p.k_steps, p.steps, p.slots, p.blocks, p.smem, static_cast<long long>(w.bytes),
                    static_cast<long long>(w.zeroed), static_cast<long long>(w.partials), static_cast<long long>(w.logits), wrong);
    }
}
