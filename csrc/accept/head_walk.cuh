// SPDX-License-Identifier: Apache-2.0
// The walk of lm_head_verify_tree: over the keys that the product has left, or, for a request with filters or logprobs,
// over its rows of logits in the workspace, as verify_tree does.
#pragma once
#include "accept/head_score.cuh"

namespace fv {

// Grid (B * blocks). The keys of the request's rows are zero again afterwards.
template <bool kExtras>
__global__ void __launch_bounds__(kTeamThreads, kBlocksPerSm) head_walk_kernel(const __grid_constant__ HeadArgs a) {
    const VerifyTask& task = a.task;
    int64_t b;
    Team team = join_team(task, &b);
    if (!task.in.active[b]) {
        if (team.index == 0) write_inactive(team, task.out, b);
        if (team.index == 0 && team.tid() == kTagThread) count_team(task);
        return;
    }
    if (team.tid() == 0) {
        RequestValues values;
        values.ask(task, b);
        init_rows<kExtras, float>(task, b, team, values);
    }
    const bool in_order = ranges_in_order(a);  // has a barrier
    const bool from_logits = wants_logits(a, in_order, team.s->params);
    if (!from_logits && team.index > 0) return;
    if (!from_logits) {
        const NodeRange r = node_range(task.in.cu_nodes, b, task.in.rows);
        clear_hits(team, r.n);
        for (int i = team.tid(); i < r.n; i += kTeamThreads) {
            team.s->node_keys[i] = a.keys[r.begin + i] | (a.bad[r.begin + i] ? kKeyBad : 0);
            a.keys[r.begin + i] = 0;
            a.bad[r.begin + i] = 0;
        }
    }
    const WalkTree tree = open_tree(team, task.in, task.tokens, b);  // has a barrier
    if (from_logits) {
        const bool wide = team.s->params.filtered() || task.out.logprobs;
        if (wide && team.size > kTeamWide) {
            team.size = kTeamWide;
            if (team.index >= kTeamWide) return;
        }
        walk_rows<kExtras, float>(task, tree, team, b);
    } else {
        walk_keys(task, tree, team, b);
    }
}

}  // namespace fv
