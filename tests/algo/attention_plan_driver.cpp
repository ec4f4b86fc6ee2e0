// SPDX-License-Identifier: Apache-2.0
// csrc/algo/attention_plan.h on the host, for tests/algo/test_attention_plan.py. Reads numbers, writes numbers.
#include "algo/mla_plan.h"
#include "algo/short_plan.h"

#include <cstdio>
#include <cstring>

using namespace fv;

// launch rows batch kv_heads group head_dim kv_bytes sms max_smem sm90 -> choice and workspace, per input line
static void launch() {
    long long a[9];
    while (std::scanf("%lld %lld %lld %lld %lld %lld %lld %lld %lld", a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6, a + 7, a + 8) == 9) {
        const AttentionLaunch c = attention_launch(a[0], a[1], a[2], a[3], a[4], static_cast<int>(a[5]), static_cast<int>(a[6]), a[7], a[8] != 0);
        std::printf("%d %d %d %d %lld %lld\n", c.tile_rows, c.stages, c.blocks, c.wgmma, static_cast<long long>(c.smem),
                    static_cast<long long>(attention_workspace(c, a[4])));
    }
}

// visible words.. : chain column columns prefix window start count words w0 w1 .. -> one bit text per line
static void visible() {
    int chain;
    long long column, columns, prefix, window, start, count, words;
    while (std::scanf("%d %lld %lld %lld %lld %lld %lld %lld", &chain, &column, &columns, &prefix, &window, &start, &count, &words) == 8) {
        int64_t mask[64] = {};
        for (long long i = 0; i < words; ++i) {
            unsigned long long w;
            if (std::scanf("%llu", &w) != 1) return;
            mask[i] = static_cast<int64_t>(w);
        }
        const RowSight s = row_sight(chain ? nullptr : mask, words, column, columns, prefix, window);
        for (long long at = start; at < start + count; at += 64) {
            const uint64_t seen = visible_positions(s, prefix, at);
            for (int j = 0; j < 64; ++j) std::putchar('0' + static_cast<int>(seen >> j & 1));
        }
        std::putchar('\n');
    }
}

// pieces total blocks least, then sequence ends -> checks that every position belongs to one piece and slots do not collide
static void pieces() {
    long long blocks, least, count;
    while (std::scanf("%lld %lld %lld", &blocks, &least, &count) == 3) {
        long long ends[4096], total = 0;
        for (long long i = 0; i < count; ++i) {
            long long n;
            if (std::scanf("%lld", &n) != 1) return;
            ends[i] = total += n;
        }
        const int64_t length = range_length(total, blocks, least);
        static int used[2 * 4096];
        std::memset(used, 0, sizeof(used));
        bool ok = length * blocks >= total;
        long long begin = 0;
        for (long long i = 0; i < count; begin = ends[i++]) {
            const Pieces p = pieces_of(begin, ends[i], length);
            ok = ok && p.count >= 1 && p.first * length <= begin && (p.first + p.count) * length >= ends[i];
            for (int j = 0; j < p.count && p.count > 1; ++j) {
                const int64_t slot = piece_slot(p.first + j, begin, length);
                ok = ok && slot < 2 * blocks && slot / 2 == p.first + j && used[slot]++ == 0 && (j == 0 || slot % 2 == 0);
            }
        }
        std::printf("%d\n", ok);
    }
}

// cut blocks kv_heads least count, then units of each request -> cluster per ok: whole clusters, all on the grid, every unit dealt once
static void cut() {
    long long blocks, heads, least, count;
    while (std::scanf("%lld %lld %lld %lld", &blocks, &heads, &least, &count) == 4) {
        long long longest = 0, work = 0, units[4096];
        for (long long i = 0; i < count; ++i) {
            if (std::scanf("%lld", &units[i]) != 1) return;
            work += units[i];
            longest = units[i] > longest ? units[i] : longest;
        }
        const int cluster = cluster_blocks(count * heads, static_cast<int>(blocks));
        const int grid = static_cast<int>(blocks) / cluster * cluster;
        const Cut c = cut_line(work * heads, count * heads, longest, grid, least, cluster);
        bool ok = c.per % cluster == 0 && c.per * count * heads <= grid && (c.per > 0 || c.length * grid >= work * heads);
        for (long long i = 0; i < count && c.per > 0; ++i) {
            int at = 0, most = 0;
            for (int j = 0; j < c.per; ++j) {
                const UnitRange r = dealt_units(units[i], c.per, j);
                ok = ok && r.begin == at && r.end >= at;
                at = r.end, most = r.end - r.begin > most ? r.end - r.begin : most;
            }
            ok = ok && at == units[i] && most == (units[i] + c.per - 1) / c.per;
        }
        std::printf("%d %d %d\n", cluster, c.per, ok);
    }
}

// clusters batch capacity major -> whether blocks form clusters
static void clusters() {
    long long batch, capacity, major;
    while (std::scanf("%lld %lld %lld", &batch, &capacity, &major) == 3) std::printf("%d %d\n", clusters_pay(batch, capacity, static_cast<int>(major)), mla_clusters_pay(batch, capacity, static_cast<int>(major)));
}

// block rows batch group -> whether one block per kv head takes a settled prefix
static void block() {
    long long rows, batch, group;
    while (std::scanf("%lld %lld %lld", &rows, &batch, &group) == 3) std::printf("%d\n", block_attention(rows, batch, group));
}

// mla rows batch heads capacity sms max_smem sm90 -> choice
static void mla() {
    long long a[7];
    while (std::scanf("%lld %lld %lld %lld %lld %lld %lld", a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6) == 7) {
        const MlaLaunch c = mla_launch(a[0], a[1], a[2], a[3], static_cast<int>(a[4]), a[5], a[6] != 0);
        std::printf("%d %d %d %d %d %lld\n", c.base.wgmma, c.base.tile_rows, c.tile_tokens, c.base.stages, c.base.blocks, static_cast<long long>(c.base.smem));
    }
}

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    if (!std::strcmp(argv[1], "launch")) launch();
    else if (!std::strcmp(argv[1], "visible")) visible();
    else if (!std::strcmp(argv[1], "pieces")) pieces();
    else if (!std::strcmp(argv[1], "cut")) cut();
    else if (!std::strcmp(argv[1], "clusters")) clusters();
    else if (!std::strcmp(argv[1], "block")) block();
    else if (!std::strcmp(argv[1], "mla")) mla();
    else return 2;
    return 0;
}
