"""EAGLE-3 for a transformers model that is loaded already, and tree_attention as one of its attention functions.

    from fastverify.integrations.transformers import speculative
    out = model.generate(**inputs, max_new_tokens=128, custom_generate=speculative(model, "path/of/an/eagle3/draft"))

The model's weights are shared: query, key and value matrices (and gate and up) move into one tensor per layer, of which the model's own
parameters become views. The model works as before and no weight is held twice.

    from fastverify.integrations.transformers import register_attention
    register_attention()
    model.set_attn_implementation("fastverify")
"""

import threading
import weakref
from typing import Any, Optional

import torch

from ..attention.tree_attention import tree_attention
from ..eagle3.checkpoint import load_draft
from ..eagle3.decode import Decoder, Result, SamplingParams
from ..eagle3.graph_decode import GraphDecoder
from ..eagle3.stats import Stats
from ..models import hf
from ..models.config import ModelConfig
from ..models.llama import Layer, LlamaModel
from ..tree.ngram import NgramDrafter

__all__ = ["share_target", "speculative", "Speculative", "register_attention", "attention"]

# What transformers' own sampling is made of, and the value of each; the same steps in the same order are in verify_tree.
_WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
# Fields of GenerationConfig that change the output without a logits processor or a stopping criterion, and what is off. The others of
# that kind become processors or criteria, are honoured, or matter to beams only.
_OFF = {"output_scores": (None, False), "output_logits": (None, False), "output_attentions": (None, False),
        "output_hidden_states": (None, False), "num_beams": (None, 1), "num_beam_groups": (None, 1), "constraints": (None,),
        "force_words_ids": (None,), "penalty_alpha": (None, 0), "dola_layers": (None,), "assistant_ensemble_weight": (None, 1)}
# Arguments of the model's forward that a prompt and its mask say already, or that change no text.
_MODEL_ARGUMENTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}


def _refuse(what: str, must: str, got: str, fix: str) -> ValueError:
    return ValueError(f"{what}: {must}; got {got}. Fix: {fix}.")


# ---- sharing the weights ---------------------------------------------------------------------------------------------------


def share_target(model: Any) -> LlamaModel:
    """The LlamaModel of a transformers *ForCausalLM (Llama, Mistral, Qwen2, Qwen3) that lives on one device.

    Its weights are the model's storage, not copies: the parameters of the model become views of merged matrices (so do not cast or
    move the model afterwards; `speculative` notices and shares anew). Peak memory: the model and one layer's merged matrices.
    Errors: ValueError for quantised, adapted or scattered models and for architectures that load_target refuses.
    """
    config = _config(model)
    _check_modules(model)
    layers = [_share_layer(m, config) for m in model.model.layers]
    embed, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    return LlamaModel(config, embed, layers, model.model.norm.weight.data, embed if head.data_ptr() == embed.data_ptr() else head)


def _config(model: Any) -> ModelConfig:
    generation = getattr(model, "generation_config", None)
    return hf.parse_config(model.config.to_dict(), {} if generation is None else {"eos_token_id": generation.eos_token_id})


def _check_modules(model: Any) -> None:
    kinds = {(p.device, p.dtype) for p in model.parameters()}
    if len(kinds) != 1:
        raise _refuse("share_target", "all weights must be on one device in one dtype", f"{len(kinds)} kinds",
                      "load the model without device_map and with one dtype")
    (device, dtype), = kinds
    if device.type not in ("cpu", "cuda") or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _refuse("share_target", "weights must be float32, bfloat16 or float16 on a CPU or a CUDA GPU", f"{dtype} on {device}",
                      "load the model so")
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(module) is not torch.nn.Linear:
            raise _refuse("share_target", "every linear layer must be a torch.nn.Linear", f"{type(module).__name__} at {name}",
                          "merge adapters, load the model unquantised")


def _merge(*linears: torch.nn.Linear) -> tuple:
    """(weight, bias or None) of stacked linears, whose parameters become views of it. Merged before: the same tensors again."""
    merged = []
    for name in ("weight", "bias"):
        parts = [getattr(m, name) for m in linears]
        if parts[0] is None:
            merged.append(None)
            continue
        whole = _whole([p.data for p in parts])
        if whole is None:
            whole = torch.cat([p.data for p in parts])
            for p, view in zip(parts, whole.split([p.shape[0] for p in parts])):
                p.data = view
        merged.append(whole)
    return tuple(merged)


def _whole(parts: list) -> Optional[torch.Tensor]:
    """The tensor of which `parts` are consecutive rows, or None."""
    at = parts[0].storage_offset()
    for p in parts:
        if p.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() or p.storage_offset() != at or not p.is_contiguous():
            return None
        at += p.numel()
    rows = sum(p.shape[0] for p in parts)
    return parts[0].as_strided((rows, *parts[0].shape[1:]), parts[0].stride(), parts[0].storage_offset())


def _share_layer(m: Any, c: ModelConfig) -> Layer:
    a, mlp = m.self_attn, m.mlp
    qkv, qkv_bias = _merge(a.q_proj, a.k_proj, a.v_proj)
    gate_up, gate_up_bias = _merge(mlp.gate_proj, mlp.up_proj)
    bias = lambda linear: None if linear.bias is None else linear.bias.data  # noqa: E731
    return Layer(input_norm=m.input_layernorm.weight.data, qkv=qkv, qkv_bias=qkv_bias,
                 q_norm=a.q_norm.weight.data if c.qk_norm else None, k_norm=a.k_norm.weight.data if c.qk_norm else None,
                 o=a.o_proj.weight.data, o_bias=bias(a.o_proj), post_norm=m.post_attention_layernorm.weight.data, gate_up=gate_up,
                 gate_up_bias=gate_up_bias, down=mlp.down_proj.weight.data, down_bias=bias(mlp.down_proj))


def _storages(model: Any) -> tuple:
    """Where the weights are: changes when the model is moved, cast or loaded again."""
    return tuple(p.data_ptr() for p in model.parameters())


# ---- model.generate(custom_generate=...) -----------------------------------------------------------------------------------


def speculative(model: Any, draft: Any = "ngram", *, tree: str = "auto", captured: bool = False, **draft_options) -> "Speculative":
    """A `custom_generate` for `model`.

    draft  folder of an EAGLE-3 draft, "ngram", or a drafter that was made for share_target(model)
    tree   "auto", "off", "chain-K" or "tree-N"
    captured  cycles as CUDA graphs (eagle3/graph_decode.py), EAGLE-3 drafts only; the first run of a batch size captures
    draft_options  of load_draft (aux_convention, d2t_format)
    """
    return Speculative(model, draft, tree=tree, captured=captured, **draft_options)


class Speculative:
    """Callable for model.generate(custom_generate=...). `stats` holds accept length and times of the last call.

    Greedy and sampled (temperature, top_k, top_p, min_p) decoding of one or many prompts, left-padded with an attention mask; returns
    what generate returns: int64 [B, prompt + new], or a GenerateDecoderOnlyOutput of it. Greedy text is that of the model itself
    where both compute the same logits. Sampling uses noise of its own, seeded from torch's generator (torch.manual_seed): the
    same law, other draws. Stop ids, lengths and filters are those of the stopping criteria and warpers that generate hands over, so
    eos_token_id=None means no stop id, and a TemperatureLogitsWarper, MaxLengthCriteria or EosTokenCriteria of the caller counts.
    Whatever else changes logits, inputs or output or stops early is refused by name. Forward hooks of the model do not run: its
    weights are used, not its modules. transformers keeps `streamer` from callables: a streamer for one prompt is passed as
    model.generate(..., stream_to=streamer).
    """

    def __init__(self, model: Any, draft: Any = "ngram", *, tree: str = "auto", captured: bool = False, **draft_options) -> None:
        self._model, self._draft_given, self._tree, self._captured, self._options = model, draft, tree, captured, draft_options
        self.stats: Optional[Stats] = None
        self._share()

    def _share(self) -> None:
        self.target = share_target(self._model)
        draft = self._draft_given
        if draft == "ngram":
            draft = NgramDrafter()
        elif not hasattr(draft, "forward") and not isinstance(draft, NgramDrafter):
            draft = load_draft(draft, self.target, dtype=self.target.dtype, device=self.target.device, **self._options)
        self.decoder = (GraphDecoder if self._captured else Decoder)(self.target, draft, tree=self._tree)
        self._where = _storages(self._model)

    def __call__(self, model: Any, input_ids: torch.Tensor, logits_processor: Any = None, stopping_criteria: Any = None,
                 generation_config: Any = None, synced_gpus: bool = False, streamer: Any = None, stream_to: Any = None,
                 **model_kwargs) -> Any:
        if model is not self._model:
            raise _refuse("speculative", "the model must be the one it was made for", "another one", "speculative(model, draft)")
        if self._where != _storages(model):
            self._share()
        if generation_config is None or logits_processor is None or stopping_criteria is None:
            raise _refuse("speculative", "the call must come from model.generate, with its config, processors and criteria", "None",
                          "model.generate(..., custom_generate=speculative(model, draft))")
        _check_request(generation_config, logits_processor, stopping_criteria, model_kwargs, synced_gpus)
        _check_prompt(input_ids, model_kwargs)
        if (streamer is not None or stream_to is not None) and input_ids.shape[0] != 1:
            raise _refuse("speculative", "a streamer must have one prompt", str(input_ids.shape[0]), "leave the streamer out")
        if stream_to is not None:
            stream_to.put(input_ids.cpu())  # generate does it for its own
            streamer = stream_to
        mask = model_kwargs.get("attention_mask")
        prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask if mask is not None else torch.ones_like(input_ids))]
        room = max(1, _max_length(generation_config, stopping_criteria) - input_ids.shape[1])  # generate looks at the length behind a token
        run = self.decoder.stream(prompts, room, _params(generation_config, logits_processor), _stops(stopping_criteria))
        result = _finish(run, streamer)
        self.stats = result.stats
        sequences = _padded(input_ids, result.tokens, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput
        return GenerateDecoderOnlyOutput(sequences=sequences)


def _check_request(config: Any, processors: Any, criteria: Any, model_kwargs: dict, synced_gpus: bool) -> None:
    """Refuses what the decode loop would not do."""
    from transformers import generation
    names = [type(p).__name__ for p in processors]
    strange = [n for n, p in zip(names, processors) if n not in _WARPERS or type(p) is not getattr(generation, n)]
    strange += [n for c in criteria if (n := type(c).__name__) not in _CRITERIA or type(c) is not getattr(generation, n)]
    if strange:
        raise _refuse("speculative", "logits and stopping must be those of temperature, top_k, top_p, min_p, max length and eos",
                      strange[0], "leave it out, or generate without custom_generate")
    if config.do_sample and names != [n for n in _WARPERS if n in names]:
        raise _refuse("speculative", "warpers must come once each, in the order temperature, top_k, top_p, min_p", ", ".join(names),
                      "pass the values to generate instead of logits_processor")
    for p in processors:
        for name, must in (("min_tokens_to_keep", 1), ("filter_value", -float("inf"))):
            if getattr(p, name, must) != must:
                raise _refuse("speculative", f"{name} of {type(p).__name__} must be {must}", str(getattr(p, name)), "leave it out")
    for name, off in _OFF.items():
        if (value := getattr(config, name, None)) not in off:
            raise _refuse("speculative", f"{name} must be {'off' if off[-1] is False else off[-1]}", "on" if value is True else str(value),
                          "generate without custom_generate" if name.startswith("output_") else "leave it out")
    for name, value in model_kwargs.items():
        if value is not None and name not in _MODEL_ARGUMENTS:
            raise _refuse("speculative", f"{name} must be left out", type(value).__name__, "pass the text as input_ids alone")
    for cache in (model_kwargs.get("cache"), model_kwargs.get("past_key_values")):
        if getattr(cache, "get_seq_length", lambda: 0)():
            raise _refuse("speculative", "the cache must be empty", f"{cache.get_seq_length()} tokens", "pass the whole text as input_ids")
        if config.cache_implementation == "quantized" or any(c.__name__ == "QuantizedCache" for c in type(cache).__mro__):
            raise _refuse("speculative", "the cache must not be quantized", "a quantized one", "leave cache_implementation and cache out")
    if synced_gpus:
        raise _refuse("speculative", "synced_gpus must be off", "on", "generate on one process")


def _check_prompt(input_ids: torch.Tensor, model_kwargs: dict) -> None:
    """Refuses positions other than those that the loop gives a prompt: its visible tokens, counted from 0."""
    mask, given = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise _refuse("speculative", f"attention_mask must be {tuple(input_ids.shape)}", str(tuple(mask.shape)),
                      "one entry per prompt token")
    if given is None:
        return
    if given.shape not in (mask.shape, (1, mask.shape[1])):
        raise _refuse("speculative", f"position_ids must be {tuple(mask.shape)}", str(tuple(given.shape)), "leave them out")
    visible = mask.bool().to(given.device)
    if not bool(((given == visible.cumsum(-1) - 1) | ~visible).all()):
        raise _refuse("speculative", "position_ids must count the visible tokens from 0", "others", "leave them out")


def _params(config: Any, processors: Any) -> SamplingParams:
    """Of the warpers that generate made: one that is off is not among them."""
    if not config.do_sample:
        return SamplingParams()
    values = {name: getattr(p, name) for p in processors for name in [_WARPERS[type(p).__name__]]}
    return SamplingParams(**({"temperature": 1.0} | values), seed=int(torch.randint(2**62, (1,))))


def _max_length(config: Any, criteria: Any) -> int:
    """The caller's own MaxLengthCriteria stands instead of the config's length, as in generate."""
    lengths = [c.max_length for c in criteria if type(c).__name__ == "MaxLengthCriteria"]
    return min(lengths) if lengths else config.max_length


def _stops(criteria: Any) -> list:
    """Ids that end a text; none without an EosTokenCriteria, whatever the model's config says."""
    return [i for c in criteria if type(c).__name__ == "EosTokenCriteria" for i in c.eos_token_id.flatten().tolist()]


def _finish(run: Any, streamer: Any) -> Result:
    """Runs the loop to its end; the streamer gets every token by itself, as from generate."""
    while True:
        try:
            _, tokens = next(run)
        except StopIteration as end:
            if streamer is not None:
                streamer.end()
            return end.value
        for t in tokens if streamer is not None else ():
            streamer.put(torch.tensor([t], device="cpu"))


def _padded(input_ids: torch.Tensor, tokens: list, config: Any) -> torch.Tensor:
    """input_ids and the new tokens behind them, shorter texts filled with the padding token."""
    pad = getattr(config, "_pad_token_tensor", None)
    pad = int(pad) if pad is not None else config.pad_token_id or 0
    out = torch.full((len(tokens), max(map(len, tokens))), pad, dtype=input_ids.dtype, device="cpu")
    for row, ids in zip(out, tokens):
        row[:len(ids)] = torch.tensor(ids, dtype=out.dtype, device="cpu")
    return torch.cat([input_ids, out.to(input_ids.device)], 1)


# ---- AttentionInterface ----------------------------------------------------------------------------------------------------


def register_attention(name: str = "fastverify") -> str:
    """Makes tree_attention an attention implementation of transformers: model.set_attn_implementation(name). Returns `name`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # None or bool [B, 1, rows, keys]
    return name


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Optional[torch.Tensor],
              dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None, **kwargs) -> tuple:
    """transformers' attention function: query [B, Hq, N, D], key and value [B, Hkv, S, D] -> ([B, N, Hq, D], None).

    The keys are read where transformers' cache has them (a request is one page of S tokens). Without a mask it is what transformers
    means by that for its sdpa: one row sees all S keys; N > 1 rows are a causal chain over the FIRST N keys (the whole text, or the first
    rows of a static cache whose other slots are empty), unless is_causal is False. A chunk behind earlier tokens always has a mask.
    A mask [B, 1, N, S] may be any tree over the last N <= 128 columns: trees in transformers run on the kernel that our decode
    loop uses. It is bool (True is visible) or floating, added to the scores: 0 is visible, -10000 and less is hidden. Masks that hide
    earlier columns (left padding, free slots of a static cache), other finite values or rows that see nothing in a floating mask,
    position_bias, dropout, gradients, windows, and masks under torch.compile or CUDA graph capture go to transformers' own sdpa, which
    honours them. The mask is read on the host once per forward, at the first layer that has it, so it must not change between the
    layers of one forward; between forwards it may, in any way.
    Errors: ValueError for a mask that is neither bool nor floating, and for s_aux (attention sinks), which sdpa would leave out.
    """
    batch, heads, rows, width = query.shape
    keys = key.shape[2]
    if kwargs.get("s_aux") is not None:
        raise _refuse("attention", "s_aux (attention sinks) must be None", "a tensor", 'set_attn_implementation("eager")')
    words = None
    plain = dropout == 0.0 and not query.requires_grad and value.shape[-1] == width and key.shape[0] == batch
    plain = plain and not any(kwargs.get(name) for name in ("sliding_window", "softcap")) and kwargs.get("position_bias") is None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if plain and attention_mask is not None:
        words = _words(attention_mask, module, batch, rows, keys)
        plain = words is not None
    elif plain and rows > 1:
        plain = bool(causal) and keys >= rows
        key, value, keys = (key[:, :, :rows], value[:, :, :rows], rows) if plain else (key, value, keys)
    if not plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                                      **kwargs)
    device, i32 = query.device, torch.int32
    out = torch.empty(batch * rows, heads, width, dtype=query.dtype, device=device)
    tree_attention(query.transpose(1, 2).reshape(batch * rows, heads, width), key.transpose(1, 2), value.transpose(1, 2),
                   torch.arange(0, batch * rows + 1, rows, dtype=i32, device=device),
                   torch.full((batch,), keys - rows, dtype=i32, device=device),
                   torch.arange(batch, dtype=i32, device=device).view(batch, 1), mask=words, scale=scaling, out=out)
    return out.view(batch, rows, heads, width), None


class _Read(threading.local):
    """The mask that this thread's running forward has read: a model gives every layer the same tensor."""

    def __init__(self) -> None:
        self.mask, self.layer, self.rest, self.words = (lambda: None), 0, None, None


_read = _Read()


def _words(mask: torch.Tensor, module: Any, batch: int, rows: int, keys: int) -> Optional[torch.Tensor]:
    """Mask words int64 [B*N, W] of the last N columns, or None if the mask is no tree of at most 128 rows behind a visible prefix.

    Values are kept for later layers of the same forward only. Neither address nor version tells of writes through .data or numpy, and
    inference tensors have no version; a forward goes through its layers in rising order, so a layer that is not above the last starts anew.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise _refuse("attention", "attention_mask must be bool or floating (added to the scores)", str(mask.dtype), "mask.bool()")
    if torch.compiler.is_compiling() or mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # values cannot be read here
    layer = getattr(module, "layer_idx", None)
    rest = (getattr(module, "config", None), None if mask.is_inference() else mask._version, batch, rows, keys)
    known = layer is not None and _read.mask() is mask and layer > _read.layer and _same(rest, _read.rest)
    words = _read.words if known else _words_of(mask, batch, rows, keys)
    if layer is not None:
        _read.mask, _read.layer, _read.rest, _read.words = weakref.ref(mask), layer, rest, words
    return words


def _same(a: tuple, b: tuple) -> bool:
    return a[0] is b[0] and a[1:] == b[1:]  # configs compare by value otherwise, slowly


def _words_of(mask: torch.Tensor, batch: int, rows: int, keys: int) -> Optional[torch.Tensor]:
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] < keys or not 1 <= rows <= min(128, keys):
        return None
    mask = mask[:, 0, :, :keys]
    sees = (mask if mask.dtype == torch.bool else mask == 0).expand(batch, rows, keys)
    fits = sees[:, :, :keys - rows].all()
    if mask.dtype != torch.bool:  # nothing between hidden and visible; a row of one finite value throughout is an even mean to sdpa
        fits &= ((mask == 0) | (mask <= -1e4)).all() & sees.any(-1).all()
    if not bool(fits):
        return None
    tree = sees[:, :, keys - rows:]
    bits = torch.arange(64, dtype=torch.int64, device=mask.device)
    parts = [(part.long() << bits[: part.shape[-1]]).sum(-1) for part in tree.split(64, dim=-1)]
    return torch.stack(parts, -1).view(batch * rows, -1)
