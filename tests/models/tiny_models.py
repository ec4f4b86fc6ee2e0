"""Tiny random models of every family made by transformers, batches for them, and greedy helpers; shared by tests here."""

import torch
from cases import cumulative, mask_words, page_tables
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

from fastverify.models.batch import ForwardBatch

PAGE = 8
_BASE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, initializer_range=0.2, bos_token_id=1,
             eos_token_id=2, pad_token_id=None)
_LLAMA3 = dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=32)
_LLAMA, _QWEN2, _QWEN3 = (LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)

FAMILIES = {
    "llama2": (*_LLAMA, dict(num_key_value_heads=4)),
    "llama3": (*_LLAMA, dict(rope_parameters=_LLAMA3)),
    "smollm2": (*_LLAMA, dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)),
    "linear_rope": (*_LLAMA, dict(rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=3.0))),
    "biases": (*_LLAMA, dict(attention_bias=True, mlp_bias=True)),
    "wide_heads": (*_LLAMA, dict(head_dim=32)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=None, head_dim=16)),
    "qwen2": (*_QWEN2, dict(tie_word_embeddings=True)),
    "qwen2_yarn": (*_QWEN2, dict(rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0,
                                                      original_max_position_embeddings=32))),
    "qwen3": (*_QWEN3, dict(head_dim=32)),
    "qwen3_bias": (*_QWEN3, dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
}


def make_hf(family: str, **changes):
    """A transformers model of `family` in float32; norms and biases are random too, so that each of them matters."""
    config_class, model_class, kw = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, family)))
        model = model_class(config_class(**{**_BASE, **kw, **changes}, attn_implementation="eager")).eval()
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.data = 1 + 0.3 * torch.randn_like(p)
            elif name.endswith("bias"):
                p.data = 0.5 * torch.randn_like(p)
    return model


@torch.no_grad()
def hf_logits(model, tokens: list) -> torch.Tensor:
    """float32 [len(tokens), V] of one sequence."""
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def hf_streams(model, tokens: list) -> list:
    """The residual stream before layer 0..L-1 and after the last one, each [len(tokens), H]."""
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    return [h[0] for h in out.hidden_states[:-1]] + last


class Requests:
    """B requests over one paged cache: builds batches, remembers committed lengths."""

    def __init__(self, model, batch: int, rng, max_tokens: int = 128) -> None:
        self.table, num_pages = page_tables(batch, max_tokens, PAGE, rng)
        self.model, self.cache = model, model.make_cache(num_pages, PAGE)
        self.cache.k.fill_(float("nan"))  # a read of anything never written shows
        self.cache.v.fill_(float("nan"))
        self.lengths = [0] * batch

    def batch(self, tokens: list, depths: list, mask=None, padding: int = 0) -> ForwardBatch:
        """tokens[b], depths[b]: the rows of request b, node i in slot lengths[b] + i at position lengths[b] + depth."""
        flat, positions, slots = [], [], []
        for b, (ids, deep) in enumerate(zip(tokens, depths)):
            flat += ids
            positions += [self.lengths[b] + d for d in deep]
            for i in range(len(ids)):
                page, offset = divmod(self.lengths[b] + i, PAGE)
                slots.append(int(self.table[b, page]) * PAGE + offset)
        i32 = dict(dtype=torch.int32)
        return ForwardBatch(
            tokens=torch.tensor(flat + [0] * padding), positions=torch.tensor(positions + [0] * padding, **i32),
            slots=torch.tensor(slots + [-1] * padding), cu_nodes=cumulative([len(t) for t in tokens]),
            prefix_len=torch.tensor(self.lengths, **i32), page_table=self.table, mask=mask)

    def chain(self, tokens: list, aux_layers: tuple = (), padding: int = 0) -> tuple:
        """Appends tokens[b] to every request; returns (logits, aux), rows flat."""
        batch = self.batch(tokens, [list(range(len(t))) for t in tokens], padding=padding)
        hidden, aux = self.model.forward(batch, self.cache, aux_layers)
        self.lengths = [n + len(t) for n, t in zip(self.lengths, tokens)]
        return self.model.logits(hidden), aux

    def tree(self, tokens: list, parents: list) -> torch.Tensor:
        """Logits of one tree per request on top of the committed tokens; nothing is committed."""
        words = -(-max(map(len, parents)) // 64)
        mask = torch.cat([mask_words(p, words) for p in parents])
        depths = [[len(path_of(p, i)) - 1 for i in range(len(p))] for p in parents]
        hidden, _ = self.model.forward(self.batch(tokens, depths, mask), self.cache)
        return self.model.logits(hidden)


def path_of(parents: list, node: int) -> list:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_tokens(count: int, rng, vocab: int = 97) -> list:
    return torch.randint(0, vocab, (count,), generator=rng).tolist()
