"""Drafting and the verify tree: one file per op, and a drafter without a model."""

from .build_tree import Tree, build_tree
from .draft_topk import Coupling, draft_topk
from .grow_tree import DraftState, grow_tree
from .ngram import NgramDrafter
from .prepare_tree import Prepared, prepare_tree

__all__ = ["Coupling", "DraftState", "NgramDrafter", "Prepared", "Tree", "build_tree", "draft_topk", "grow_tree", "prepare_tree"]
