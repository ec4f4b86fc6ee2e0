"""Oracle of the kv stage: compact_kv, compact_kv_layers and next_inputs, one row at a time."""

__all__ = ["compact_kv", "compact_kv_layers", "next_inputs"]


def accepted_nodes(path: list, count: int, nodes) -> list:
    """The usable head of one path: at most `count` entries, strictly increasing, in [0, nodes)."""
    kept = []
    for node in path[: max(count, 0)]:
        if node <= (kept[-1] if kept else -1) or (nodes is not None and node >= nodes):
            break
        kept.append(node)
    return kept


def compact_kv(k_cache, v_cache, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out) -> None:
    """Row path[b,i] -> i of every request, every layer; aux rows gathered flat. See csrc/ops.cpp."""
    compact_kv_layers(list(k_cache), [] if v_cache is None else list(v_cache), path, num_tokens_out, prefix_len, page_table,
                      cu_nodes, aux, aux_out, cu_out, k_cache.shape[2])


def compact_kv_layers(k_caches, v_caches, path, num_tokens_out, prefix_len, page_table, cu_nodes, aux, aux_out, cu_out,
                      page_size=None) -> None:
    """The same over lists of layers; page_size is that of the first layer unless given (a slab may have no layer)."""
    page_size = k_caches[0].shape[1] if page_size is None else page_size
    cu = None if cu_nodes is None else cu_nodes.tolist()
    paths = [
        accepted_nodes(p, n, None if cu is None else cu[b + 1] - cu[b])
        for b, (p, n) in enumerate(zip(path.tolist(), num_tokens_out.tolist()))
    ]
    for b, nodes in enumerate(paths):
        base = int(prefix_len[b])
        for i, node in enumerate(nodes):
            if node == i:
                continue
            src, dst = base + node, base + i
            src_page, dst_page = int(page_table[b, src // page_size]), int(page_table[b, dst // page_size])
            for cache in (*k_caches, *v_caches):
                cache[dst_page, dst % page_size] = cache[src_page, src % page_size]
    offset = 0
    if cu_out is not None:
        cu_out.zero_()
    if aux_out is not None:
        aux_out.zero_()
    for b, nodes in enumerate(paths):
        if aux is not None:
            for i, node in enumerate(nodes):
                aux_out[offset + i] = aux[cu[b] + node]
        offset += len(nodes)
        if cu_out is not None:
            cu_out[b + 1] = offset


def next_inputs(out_tokens, num_tokens_out, path, next_root, flags, cu_nodes, depth, active, prefix_len, root, next_tokens,
                pair_slots, pair_tokens, pair_count, sequence, ring, first) -> None:
    """Every active request moves on; its record goes to the ring. See csrc/ops.cpp and csrc/algo/next_inputs.h."""
    batch, width = out_tokens.shape
    cu, flat, record = cu_nodes.tolist(), [], []
    places = (len(pair_tokens) - 1) // batch if pair_tokens is not None and batch else 0
    if pair_slots is not None:
        pair_slots.fill_(batch * places)
    for b in range(batch):
        live, rows = bool(active[b]), depth[cu[b]:cu[b + 1]].tolist()
        emitted = out_tokens[b, :max(0, int(num_tokens_out[b]))].tolist() if live else []
        accepted = sum(p >= 0 for p in path[b].tolist()) - 1 if live else -1
        record += [len(emitted), int(flags[b]) if live else 0, accepted, len(rows), max(rows, default=0)]
        record += emitted + [-1] * (width - len(emitted))
        flat += emitted
        if pair_slots is not None and emitted and rows and 0 <= int(pair_count[b]) < places:
            pair_slots[cu[b]] = b * places + pair_count[b]
            pair_tokens[b * places + pair_count[b]] = emitted[0]
            pair_count[b] += 1
        prefix_len[b] += len(emitted)
        if emitted:
            root[b] = next_root[b]
        if live and int(flags[b]) & (1 | 2 | 16 | 32):  # STOP, BUDGET, BAD_ROW, EMPTY_ROW
            active[b] = 0
    if next_tokens is not None:
        next_tokens.zero_()
        next_tokens[:len(flat)] = next_tokens.new_tensor(flat)
    if ring is not None:
        slot = int(sequence) % ring.shape[0]
        sequence += 1
        words = [int(sequence), batch, width, first, *record]
        ring[slot, :len(words)] = ring.new_tensor(words)
