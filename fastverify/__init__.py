"""fastverify: the verify step of speculative decoding as fused torch ops. Importing it touches no CUDA."""

import importlib

from ._version import __version__

_WHERE = {  # public name -> module
    "draft_topk": "tree", "Coupling": "tree", "grow_tree": "tree", "build_tree": "tree", "prepare_tree": "tree", "Tree": "tree",
    "Prepared": "tree", "DraftState": "tree", "NgramDrafter": "tree",
    "rope_append": "attention.rope_append", "tree_attention": "attention.tree_attention",
    "mla_tree_attention": "attention.mla_tree_attention",
    "Rule": "accept.rule", "Flag": "accept.rule", "Sampling": "accept.verify_tree", "Verified": "accept.verify_tree",
    "verify_tree": "accept.verify_tree", "verify_tree_workspace": "accept.verify_tree",
    "skinny_linear": "linear.skinny_linear", "skinny_qkv": "linear.skinny_qkv",
    "verify_tree_workspace_bytes": "accept.verify_tree", "lm_head_verify_tree": "accept.lm_head_verify_tree",
    "verify_tree_partials": "accept.verify_tree_partials", "partial_words": "accept.verify_tree_partials",
    "verify_tree_combine": "accept.verify_tree_combine", "verify_tree_sharded": "accept.verify_tree_combine",
    "all_reduce": "comm.all_reduce", "all_reduce_rms_norm": "comm.all_reduce_rms_norm",
    "all_reduce_columns": "comm.all_reduce_columns",
    "all_gather_small": "comm.all_gather_small", "linear_all_reduce": "comm.linear_all_reduce", "Communicator": "comm.communicator",
    "CommunicatorError": "comm.communicator",
    "compact_kv": "kv.compact_kv", "compact_kv_layers": "kv.compact_kv_layers", "next_inputs": "kv.next_inputs",
    "Ring": "eagle3.ring", "VerifyPlan": "plan",
    "ForwardBatch": "models.batch", "KVCache": "models.batch",
    "load_target": "models.load", "load_tokenizer": "models.load", "load_draft": "eagle3.checkpoint",
    "Decoder": "eagle3.decode", "GraphDecoder": "eagle3.graph_decode", "GraphLoop": "eagle3.graph_loop",
    "SamplingParams": "eagle3.decode",
}
__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str):
    """Public names are imported when first used, so that `import fastverify` stays cheap."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fastverify' has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_WHERE[name]}", __name__)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ModuleNotFoundError(f"fastverify: torch must be installed for {name}; got none. Fix: pip install 'torch>=2.10'.",
                                  name="torch") from exc
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
