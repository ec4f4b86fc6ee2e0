// SPDX-License-Identifier: Apache-2.0
// Every op of fastverify in the order of a verify step. Read this file first: it is the whole API.
//
// Conventions of all ops
//   * inputs, then outputs, then workspace, then scalars; mutable arguments carry (a!); ops return ().
//   * R node rows are flat and fixed; cu_nodes int32 [B+1] is device data. Rows >= cu_nodes[B] are
//     padding: never read, outputs zero (fills: parents -1, slots -1), nothing else written.
//   * active int32 [B] (0/1): an inactive request has zero nodes in every op.
//   * structure is int32; token ids int32 or int64; mask words are int64 bit patterns [R, W],
//     bit j of row i set iff node i may see node j of its own request (self included).
//   * no op reads a device value on the host. Nothing allocates.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fastverify, m) {
    // ---- common -------------------------------------------------------------------------------
    // out[i] = x[i] + 1: the op to copy when adding one; doctor and plans call it to load the module.
    m.def("probe(Tensor x, Tensor(a!) out) -> ()");

    // ---- tree ---------------------------------------------------------------------------------
    // logits [R,Vd] any float dtype, row stride free; d2t int64 [Vd] offsets (target id = i + d2t[i])
    // -> values f32 [R,k] log-probabilities, descending, ties by lower draft id; tokens i32 [R,k].
    // Coupled (temperature f32, seed i64, prefix_len i32, active i32 [B]; R = B*m, the m rows of the r-th active request come
    // r-th): a row with temperature T > 0 is ranked by s = logit/T + verify_tree's noise of (seed, prefix_len + level + 1,
    // target id) and values = log_softmax(sharpness * s). T = 0: as without. Rows of no active request are padding.
    m.def(
        "draft_topk(Tensor logits, Tensor? d2t, Tensor? cu_nodes, Tensor? temperature, Tensor? seed, Tensor? prefix_len, "
        "Tensor? active, Tensor(a!) values, Tensor(b!) tokens, SymInt level=0, float sharpness=1.0) -> ()");
    // One draft level. Rows of a level: level 0 has one row per active request (its last true pair),
    // level >= 1 has k rows per active request (the beam). values/tokens [rows,k], hidden [rows,H].
    // State, flat by cu_nodes (k rows per active request): scores f32 [B*k] cumulative log-probs,
    // pool_index i32 [B*k], mask i64 [B*k,W]. Pool [B,M], M >= k + (levels-1)*k*k: scores f32, tokens
    // i32, parents i32 (pool index, -1 = child of the root). Level l writes its candidates at
    // 0 (l = 0) or k + (l-1)*k*k. Next beam = k best candidates (ties: lower pool index), its own
    // forest column is level*k + i; next_tokens i32, next_positions i32 (= prefix_len + level),
    // next_hidden [B*k,H] = the parent's hidden row. Level 0 writes cu_nodes and clears pool_scores to -inf.
    m.def(
        "grow_tree(Tensor values, Tensor tokens, Tensor hidden, Tensor prefix_len, Tensor active, "
        "Tensor(a!) cu_nodes, Tensor(b!) scores, Tensor(c!) pool_index, Tensor(d!) mask, "
        "Tensor(e!) pool_scores, Tensor(f!) pool_tokens, Tensor(g!) pool_parents, "
        "Tensor(h!) next_tokens, Tensor(i!) next_positions, Tensor(j!) next_hidden, SymInt level) -> ()");
    // Pool -> ancestor-closed tree of the root and the num_nodes-1 best pool entries, kept in pool
    // order (parents first, siblings ascending). Effective score = min(score, 0, parent's), NaN = -inf,
    // ties to the lower pool index; entries at -inf are never taken, so a request may get fewer nodes.
    m.def(
        "build_tree(Tensor pool_scores, Tensor pool_tokens, Tensor pool_parents, Tensor root_tokens, "
        "Tensor prefix_len, Tensor active, Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) mask, "
        "Tensor(d!) depth, Tensor(e!) positions, Tensor(f!) cu_nodes, Tensor(g!) flags, "
        "SymInt num_nodes, SymInt vocab_size) -> ()");
    // Once per step, for all layers. parents None = chain (node i's parent is i-1). Outputs that are
    // given are written: mask i64 [R,W], depth, positions (= prefix_len + depth) i32 [R], slots i64 [R]
    // (KV slot of column row_base+i through page_table; -1 for padding), first_child/next_sibling i32 [R]
    // (request-local, -1 none), schedule i32 [2+B+1] (chunk tokens, total units, unit prefix sums), flags i32 [B].
    m.def(
        "prepare_tree(Tensor? parents, Tensor cu_nodes, Tensor prefix_len, Tensor page_table, "
        "Tensor(a!)? mask, Tensor(b!)? depth, Tensor(c!)? positions, Tensor(d!)? slots, "
        "Tensor(e!)? first_child, Tensor(f!)? next_sibling, Tensor(g!)? schedule, Tensor(h!)? flags, "
        "SymInt page_size, SymInt row_base) -> ()");

    // ---- attention ----------------------------------------------------------------------------
    // q [R,Hq,D] in place, k, v [R,Hkv,D] -> optional per-head RMSNorm, RoPE at positions (cos_sin f32
    // [max_pos, rot] = cos half | sin half), k/v appended to k_cache/v_cache [pages,page,Hkv,D] at slots.
    // rotary_style 0 = neox (half split), 1 = gptj (interleaved). Row with slot -1: nothing is touched.
    m.def(
        "rope_append(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor slots, Tensor cos_sin, "
        "Tensor? q_norm, Tensor? k_norm, Tensor? k_scale, Tensor? v_scale, Tensor(b!) k_cache, "
        "Tensor(c!) v_cache, float eps, int rotary_style) -> ()");
    // Rows [row_base, row_base+n_b) of each request's forest against the paged prefix [0,prefix_len) and
    // forest columns j (cache position prefix_len+j) whose mask bit is set; mask None = chain (j <= row).
    // window > 0: a key is visible iff (query position - key position) < window, positions by depth.
    // softcap > 0: s = softcap*tanh(s/softcap) before the mask. sinks f32 [Hq]: one extra logit per head in
    // the denominator. lse f32 [R,Hq] natural log, sinks excluded. A row that sees nothing: out 0, lse -inf.
    // exact: a row's bits depend on its own keys alone, those of a plain decoding row at its position; slower, needs
    // the workspace of exact_workspace_for. The CPU op is always exact.
    m.def(
        "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? mask, Tensor cu_nodes, "
        "Tensor prefix_len, Tensor page_table, Tensor? schedule, Tensor? sinks, Tensor? k_scale, "
        "Tensor? v_scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, SymInt row_base, "
        "float scale, int window, float softcap, bool exact=False, bool settled=False) -> ()");
    // The same over one latent cache [pages,page,D] for all heads (DeepSeek, Kimi: absorbed form): q [R,H,D] against the
    // whole latent row, out [R,H,Dv] = weights x its first Dv dims. Tensor-core tiles for D = 512 + 64, Dv = 512.
    m.def(
        "mla_tree_attention(Tensor q, Tensor kv_cache, Tensor? mask, Tensor cu_nodes, Tensor prefix_len, "
        "Tensor page_table, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, SymInt row_base, float scale) -> ()");

    // ---- linear -------------------------------------------------------------------------------
    // Products of a few rows for models so small that launches cost more than weights. x [R,K] (norm [K]: RMSNorm of it,
    // rounded), weight [N,K], bias [N]. kind 0: out [R,N] = product; 1: out += product, rounded once; 2: out [R,N/2] =
    // silu(first half) * second half. copy: out's values once more (kinds 0 and 1). The result of a row does not depend on the rows beside it. CUDA: bf16.
    m.def(
        "skinny_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor(a!) out, float eps, int kind, "
        "Tensor(b!)? copy=None) -> ()");
    // The merged QKV product, rounded, then what rope_append (neox, no norm per head) does: q [R,Hq,D] rotated, K and V to
    // their slots. Rows with slot -1: nothing is touched.
    m.def(
        "skinny_qkv(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor positions, Tensor slots, Tensor cos_sin, "
        "Tensor(a!) q, Tensor(b!) k_cache, Tensor(c!) v_cache, float eps, bool settled=False) -> ()");

    // ---- comm ---------------------------------------------------------------------------------
    // comm: address of an fv_comm (csrc/comm/fv_comm.h), Communicator.handle. x of every rank, contiguous, same shape;
    // out = sum over ranks in rank order in fp32, rounded once: the same bits on every rank. Virtual communicators take
    // [world, ...] for x and out; on the CPU x is [world, ...] (gathered) and out one rank's.
    m.def("all_reduce(Tensor x, Tensor(a!) out, int comm) -> ()");
    // The same for x [pieces,rows,width], pieces of columns of out [rows, pieces * width]: written or, with add, grown. One launch sends
    // each piece once ready i32 [pieces] holds the number of the call for it (Communicator.mark); without ready all are there.
    m.def("all_reduce_columns(Tensor x, Tensor(a!) out, Tensor? ready, bool add, int comm) -> ()");
    // residual += sum over ranks of x [rows,H], rounded; out = RMSNorm(residual) * weight [H]. prefetch i64 [P,2]:
    // (address, bytes) of weights to pull into L2 meanwhile.
    m.def(
        "all_reduce_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, Tensor(b!) out, Tensor? prefetch, "
        "int comm, float eps) -> ()");
    // x of any dtype, at most 64 KiB a rank -> out [world, *x.shape].
    m.def("all_gather_small(Tensor x, Tensor(a!) out, int comm) -> ()");

    // ---- accept -------------------------------------------------------------------------------
    // logits [R,V] -> accepted path and emitted tokens, every processor fused. See accept/verify_tree.py.
    m.def(
        "verify_tree(Tensor logits, Tensor tokens, Tensor parents, Tensor cu_nodes, Tensor prefix_len, "
        "Tensor active, Tensor(a!) remaining, Tensor? stop_ids, Tensor temperature, Tensor top_k, "
        "Tensor top_p, Tensor min_p, Tensor seed, Tensor? bias, Tensor? bitmask, Tensor? penalties, "
        "Tensor(b!)? counts, Tensor(c!) out_tokens, Tensor(d!) num_tokens_out, Tensor(e!) path, "
        "Tensor(f!) next_root, Tensor(g!) flags, Tensor(h!)? logprobs, Tensor(i!)? workspace, "
        "SymInt vocab_size, int rule) -> ()");
    // The same from hidden [R,H] and the LM head's weight [V,H]; without filters no logit leaves a tile.
    m.def(
        "lm_head_verify_tree(Tensor hidden, Tensor weight, Tensor tokens, Tensor parents, "
        "Tensor cu_nodes, Tensor prefix_len, Tensor active, Tensor(a!) remaining, Tensor? stop_ids, "
        "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor? bias, "
        "Tensor? bitmask, Tensor? penalties, Tensor(b!)? counts, Tensor(c!) out_tokens, "
        "Tensor(d!) num_tokens_out, Tensor(e!) path, Tensor(f!) next_root, Tensor(g!) flags, "
        "Tensor(h!)? logprobs, Tensor(i!)? workspace, SymInt vocab_size, int rule) -> ()");
    // Vocabulary shards. partials writes this rank's i64 [R,K] words of one round from its logits shard
    // [R,Vs] (ids vocab_offset..) and the replicated state i64 [R,S]; combine folds the W ranks' words into
    // state, and in the last round walks. Rounds: 1 without filters, kFilterRounds with.
    m.def(
        "verify_tree_partials(Tensor logits, Tensor tokens, Tensor parents, Tensor cu_nodes, "
        "Tensor prefix_len, Tensor active, Tensor temperature, Tensor top_k, Tensor top_p, "
        "Tensor min_p, Tensor seed, Tensor? bias, Tensor? bitmask, Tensor? penalties, Tensor? counts, "
        "Tensor state, Tensor(a!) partials, SymInt vocab_offset, SymInt vocab_size, int round, "
        "int num_rounds, int rule) -> ()");
    m.def(
        "verify_tree_combine(Tensor partials, Tensor tokens, Tensor parents, Tensor cu_nodes, "
        "Tensor prefix_len, Tensor active, Tensor(a!) remaining, Tensor? stop_ids, Tensor temperature, "
        "Tensor top_k, Tensor top_p, Tensor min_p, Tensor(b!)? counts, Tensor(c!) state, "
        "Tensor(d!) out_tokens, Tensor(e!) num_tokens_out, Tensor(f!) path, Tensor(g!) next_root, "
        "Tensor(h!) flags, Tensor(i!)? logprobs, SymInt vocab_offset, SymInt vocab_size, int round, "
        "int num_rounds, int rule) -> ()");

    // ---- kv -----------------------------------------------------------------------------------
    // Moves rows path[b,0..num_tokens_out[b]) (node ids) of every layer to cache positions
    // prefix_len[b]+0.. in place; caches [L,pages,page,...] (v_cache None for latent caches). Also gathers
    // aux rows [R,A] of those nodes to aux_out [B*D,A], flat by cu_out i32 [B+1] (prefix sums of num_tokens_out).
    m.def(
        "compact_kv(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor path, Tensor num_tokens_out, "
        "Tensor prefix_len, Tensor page_table, Tensor? cu_nodes, Tensor? aux, Tensor(c!)? aux_out, "
        "Tensor(d!)? cu_out) -> ()");
    // The same over lists of per-layer caches [pages,page,...] (v_caches empty for latent caches).
    m.def(
        "compact_kv_layers(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor path, "
        "Tensor num_tokens_out, Tensor prefix_len, Tensor page_table, Tensor? cu_nodes, Tensor? aux, "
        "Tensor(c!)? aux_out, Tensor(d!)? cu_out) -> ()");

    // What one verify leaves for the next cycle, on the device: of every active request prefix_len += num_tokens_out, root =
    // next_root, active = 0 where flags say that it is done. next_tokens gets the emitted tokens flat, then zeros. Plain cycles:
    // pair_slots [R] i64 = where a row's features go in a table of P pairs per request (B*P: nowhere); pair_tokens i32 [B*P+1]
    // and pair_count i32 [B] gain the pair. ring i32 [slots, words] (pinned host memory on a GPU): record sequence % slots is
    // written (csrc/algo/next_inputs.h), its number last; sequence i64 [1] counts on the device. `first` is copied to the record.
    m.def(
        "next_inputs(Tensor out_tokens, Tensor num_tokens_out, Tensor path, Tensor next_root, Tensor flags, "
        "Tensor cu_nodes, Tensor depth, Tensor(a!) active, Tensor(b!) prefix_len, Tensor(c!) root, "
        "Tensor(d!)? next_tokens, Tensor(e!)? pair_slots, Tensor(f!)? pair_tokens, Tensor(g!)? pair_count, "
        "Tensor(h!)? sequence, Tensor(i!)? ring, SymInt first) -> ()");

    // ---- SGLang's ops (fastverify.integrations.sglang): its names, argument order, dtypes and fills -------------
    // Ids int64 or int32 [B,N]; links are local, -1 none; retrive_index holds flat ids b*N+i. predicts i32 [>=B*N] is written
    // at the slots of the accepted path, accept_index i32 [B,S] up to the accepted drafts, accept_token_num i32 [B] excludes the bonus.
    m.def(
        "sgl_verify_tree_greedy(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
        "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, "
        "Tensor target_predict) -> ()");
    // Coins f32 [B,N] and [B] in [0,1); target_probs, draft_probs f32 [B,N,V]. draft_probs (zeros, or None: then nothing of it is
    // read or written) receives the target's probability of every child that was refused.
    m.def(
        "sgl_tree_speculative_sampling_target_only(Tensor(a!) predicts, Tensor(b!) accept_index, "
        "Tensor(c!) accept_token_num, Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, "
        "Tensor retrive_next_sibling, Tensor uniform_samples, Tensor uniform_samples_for_final_sampling, "
        "Tensor target_probs, Tensor(d!)? draft_probs, float threshold_single, float threshold_acc) -> ()");
    // parent_list i64 [B, topk*(depth-1)+1], selected_index i64 [B,N-1]; mask bytes by mode: 0 bool rows of
    // seq_len + N columns (only the last N are written), 1 bool [B,N,N], 2 bits in 1, 2 or 4 bytes a row, 3 bits in 8.
    m.def(
        "sgl_build_tree_kernel_efficient(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
        "Tensor(a!) tree_mask, Tensor(b!) positions, Tensor(c!) retrive_index, Tensor(d!) retrive_next_token, "
        "Tensor(e!) retrive_next_sibling, SymInt topk, SymInt depth, SymInt draft_token_num, int tree_mask_mode) -> ()");
    // tree_mask bool [B*N*N], ones at ancestors and self -> positions i64 [B*N] and links i64 [B,N].
    m.def(
        "sgl_reconstruct_indices_from_tree_mask(Tensor tree_mask, Tensor verified_seq_len, Tensor(a!) positions, "
        "Tensor(b!) retrive_index, Tensor(c!) retrive_next_token, Tensor(d!) retrive_next_sibling, "
        "SymInt batch_size, SymInt draft_token_num) -> ()");
}
