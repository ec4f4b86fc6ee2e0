"""The peers of tree_attention on the same inputs. Each function returns one callable per buffer set, and the outputs
[B*N, Hq, D] that they write; it raises ImportError where the peer is not installed."""

import torch

from attention_inputs import PAGE, Inputs, dense, per_step


def sdpa(sets: list) -> tuple:
    """torch scaled_dot_product_attention over dense K and V (already gathered) with a boolean mask."""
    def mask_of(x):
        batch, nodes = x.tree.shape[:2]
        mask = torch.ones(batch, 1, nodes, int(x.prefix_len[0]) + nodes, dtype=torch.bool, device=x.q.device)
        mask[..., -nodes:] = x.tree[:, None]
        return mask

    calls, outs = [], []
    for x, mask in zip(sets, per_step(sets, mask_of)):
        batch, nodes = x.tree.shape[:2]
        keys, values = dense(x)
        q = x.q.view(batch, nodes, *x.q.shape[1:]).transpose(1, 2).contiguous()

        def call(q=q, keys=keys, values=values, mask=mask, out=x.out, shape=(batch, nodes)):
            y = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            out.view(*shape, *out.shape[1:]).copy_(y.transpose(1, 2))

        calls.append(call)
        outs.append(x.out)
    return calls, outs


def flex(sets: list) -> tuple:
    """torch flex_attention, compiled, over dense K and V; its BlockMask is made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def mask_of(prefix, tree):
        return lambda b, h, i, j: (j < prefix) | tree[b, i, (j - prefix).clamp(0, tree.shape[1] - 1)]

    def blocks_of(x):
        batch, nodes = x.tree.shape[:2]
        prefix = int(x.prefix_len[0])
        return create_block_mask(mask_of(prefix, x.tree), batch, None, nodes, prefix + nodes, device=x.q.device)

    calls, outs = [], []
    for x, blocks in zip(sets, per_step(sets, blocks_of)):
        batch, nodes = x.tree.shape[:2]
        keys, values = dense(x)
        q = x.q.view(batch, nodes, *x.q.shape[1:]).transpose(1, 2).contiguous()

        def call(q=q, keys=keys, values=values, blocks=blocks, out=x.out, shape=(batch, nodes)):
            y = compiled(q, keys, values, block_mask=blocks, enable_gqa=True)
            out.view(*shape, *out.shape[1:]).copy_(y.transpose(1, 2))

        calls.append(call)
        outs.append(x.out)
    return calls, outs


def xqa_mask(x: Inputs) -> torch.Tensor:
    """uint16 [B, N, 2 * ceil(N / 32)]: bit j of row i, little end first."""
    batch, nodes = x.tree.shape[:2]
    width = 2 * -(-nodes // 32)
    bits = torch.zeros(batch, nodes, width * 16, dtype=torch.int32, device=x.q.device)
    bits[..., :nodes] = x.tree.int()
    words = (bits.view(batch, nodes, width, 16) << torch.arange(16, device=x.q.device)).sum(-1)
    return torch.where(words < 2**15, words, words - 2**16).to(torch.int16).view(torch.uint16)


def xqa(sets: list) -> tuple:
    """flashinfer.xqa with its draft mask, pages of 64; one module is compiled per number of nodes."""
    import flashinfer.xqa  # noqa: F401
    from flashinfer import xqa as run

    run = getattr(run, "xqa", run)
    calls, outs = [], []
    for x, (mask, lengths) in zip(sets, per_step(sets, lambda x: (xqa_mask(x), (x.prefix_len + x.tree.shape[1]).view(-1, 1).view(torch.uint32)))):
        batch, nodes = x.tree.shape[:2]
        kv_heads = x.k.shape[2]
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=x.q.device) if not calls else workspace  # noqa: F821
        semaphores = torch.zeros(-(-kv_heads * batch * 64 // 4) * 4, dtype=torch.int32, device=x.q.device).view(torch.uint32)
        q, out = x.q.view(batch, 1, nodes, *x.q.shape[1:]), x.out.view(batch, 1, nodes, *x.out.shape[1:])

        def call(q=q, x=x, out=out, mask=mask, lengths=lengths, semaphores=semaphores, workspace=workspace):
            run(q, x.k, x.v, x.table, lengths, out, workspace, semaphores, x.k.shape[2], PAGE, q_seq_len=q.shape[2], mask=mask)

        calls.append(call)
        outs.append(x.out)
    return calls, outs


def fa2(sets: list, page_size: int = 16) -> tuple:
    """FlashInfer's fa2 prefill with a custom mask over the whole KV; planned beforehand (host work each step in use)."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def plan(x):
        batch, nodes = x.tree.shape[:2]
        table = x.paged(page_size)[2]
        length = int(x.prefix_len[0]) + nodes
        used = -(-length // page_size)
        mask = torch.ones(batch, nodes, length, dtype=torch.bool, device=x.q.device)
        mask[..., -nodes:] = x.tree
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=x.q.device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        indptr = torch.arange(batch + 1, dtype=torch.int32, device=x.q.device)
        wrapper.plan(x.cu_nodes, indptr * used, table[:, :used].flatten().contiguous(),
                     torch.full((batch,), (length - 1) % page_size + 1, dtype=torch.int32, device=x.q.device), x.q.shape[1],
                     x.k.shape[2], x.q.shape[2], page_size, custom_mask=mask.flatten(), q_data_type=x.q.dtype)
        return wrapper

    calls, outs = [], []
    for x, wrapper in zip(sets, per_step(sets, plan)):
        k, v, _ = x.paged(page_size)

        def call(wrapper=wrapper, q=x.q, k=k, v=v, out=x.out):
            wrapper.run(q, (k, v), out=out)

        calls.append(call)
        outs.append(x.out)
    return calls, outs
