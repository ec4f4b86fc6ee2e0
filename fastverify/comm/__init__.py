"""Tensor-parallel communication: communicators, their ops, and what the machine looks like."""
